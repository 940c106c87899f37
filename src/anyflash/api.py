"""The public functions: docstring → operator. `ops` builds the Problem and dispatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyflash import ops
from anyflash.errors import InvalidInput, Unsupported
from anyflash.masks import Mask, as_mask
from anyflash.masks import causal as causal_mask
from anyflash.problem import check_kind
from anyflash.rng import draw_seed


class Alibi:
    """A bias as arithmetic: −slope·|i + Sk − Sq − j|; see `alibi`."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes


def alibi(slopes: Tensor) -> Alibi:
    """Attention with linear biases (Press et al. 2022), for `bias=`: no S×S tensor exists.

    slopes (Hq,) or (B, Hq), any float dtype; the bias of query i and key j is
    −slope·|i + Sk − Sq − j|. Slopes get no gradient.
    """
    check_kind("alibi(slopes)", slopes)
    return Alibi(slopes)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | Alibi | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """softmax(scores) · V without ever holding the scores.

    Args:
        q: (B, Hq, Sq, D), float16, bfloat16, float32 or float64, any strides.
        k: (B, Hkv, Sk, D), q's dtype; Hq is a multiple of Hkv, and query head h reads key head
            h // (Hq / Hkv).
        v: (B, Hkv, Sk, Dv).
        mask: a mask of the algebra (`causal()`, `window()`, …) or a boolean tensor broadcastable to
            (B, Hq, Sq, Sk), True = attend.
        causal: intersect with `causal()`: query i sees keys j ≤ i + Sk − Sq (bottom-right).
        scale: factor on q·k; None is 1/√D. 0 and negative values are legal.
        softcap: c > 0 turns scores s into c·tanh(s/c).
        bias: broadcastable to (B, Hq, Sq, Sk), any float dtype, added in float32; or `alibi(...)`.
        sink: (Hq,), one more logit per row that has no value.
        dropout: probability of dropping a weight; the seed follows `torch.manual_seed`.
        return_lse: also return lse (B, Hq, Sq), float32 (float64 for float64), natural logarithm
            of Σ exp(score), sink included; differentiable.
        deterministic: bitwise repeatable gradients (forward always is).
        precision: None, or "fp8" to quantise first.
        backend: a name to insist on; None takes the first that serves.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and dimension order; (out, lse) with `return_lse`.

    Precision: scores, softmax and sums in float32 (float64 for float64 inputs). A row that attends
    nothing gives 0 and lse −inf (the sink's logit with a sink), and zero gradients. Masked slots
    never change a result, whatever they hold. Gradients: q, k, v, bias, sink and lse, twice
    differentiable.

    Raises:
        InvalidInput: a malformed argument, named; before any work.
        Unsupported: no backend serves the problem; carries every backend's sentence.

    The same in PyTorch, without fusion:
        `s = (q @ k.mT * scale).masked_fill(~mask, -inf); out = s.softmax(-1) @ v`

    Source: FlashAttention-2 (Dao 2023); FlashAttention-3 (Shah et al. 2024).
    """
    q, k, v = _autocast(q, k, v)
    mask = _mask(mask, causal)
    out, lse = _call(
        (q, k, v), mask, bias, sink, (None, None, None), scale, softcap, dropout,
        (None, None), deterministic, precision, backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | Alibi | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """`attention` for sequences of different lengths, packed without padding.

    Sequence b has query rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] and keys
    cu_seqlens_k[b] : cu_seqlens_k[b + 1], of which the first seqused_k[b] count; it sees nothing
    of its neighbours. Masks and biases are those of `attention` for batch element b with the
    sequence's own rows and keys: causal aligns bottom-right within each sequence, and tensors
    broadcast to (n, Hq, max_seqlen_q, max_seqlen_k).

    Args:
        q: (total_q, Hq, D); k: (total_k, Hkv, D); v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,) offsets from 0 to the totals, never decreasing.
        max_seqlen_q, max_seqlen_k: longest sequences; None reads them (on the CPU) or takes totals.
        seqused_k: int32 (n,), keys in use; None is all.
        Others: as in `attention`.

    Returns:
        out (total_q, Hq, Dv); with `return_lse` also lse (Hq, total_q).

    Raises: as `attention`. Offsets are read, and malformed ones refused, on the CPU always and on
    accelerators under ANYFLASH_CHECK=1.
    """
    q, k, v = _autocast(q, k, v)
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(value, Tensor):
            raise InvalidInput(name, type(value).__name__, "int32 offsets (n + 1,)")
    out, lse = _call(
        (q, k, v), _mask(mask, causal), bias, sink, (cu_seqlens_q, cu_seqlens_k, seqused_k), scale, softcap,
        dropout, (max_seqlen_q, max_seqlen_k), deterministic, precision, backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _call(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Mask | None, bias: Tensor | Alibi | None, sink: Tensor | None,
    packing: tuple[Tensor | None, ...], scale: float | None, softcap: float | None, dropout: float,
    longest: tuple[int | None, ...], deterministic: bool, precision: str | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    added = None if isinstance(bias, Alibi) else bias
    for name, tensor in (("bias", added), ("sink", sink)):
        if tensor is not None:
            check_kind(name, tensor)
    _refuse_transforms(*qkv, added, sink)
    seed = draw_seed(qkv[0].device) if dropout else None
    text, leaves = ("", ()) if mask is None else (mask.text, mask.leaves)
    return ops.attention_forward(
        *qkv, added, slopes, sink, seed, *packing, list(leaves), text, scale, softcap or 0.0, dropout,
        *longest, deterministic, precision, backend,
    )  # fmt: skip


def _mask(mask: Mask | Tensor | None, causal: bool) -> Mask | None:
    given = as_mask(mask)
    if not causal:
        return given
    return causal_mask() if given is None else given & causal_mask()


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check what enters, and cast it where autocast is on, as PyTorch's own attention does."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_kind(name, tensor)
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _refuse_transforms(*tensors: Tensor | None) -> None:
    """Forward-mode derivatives would silently be zero under a registered formula: say no instead."""
    if torch.compiler.is_compiling():
        return
    level = torch._C._functorch.peek_interpreter_stack()
    functorch_jvp = level is not None and level.key() == torch._C._functorch.TransformType.Jvp
    dual = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )
    if functorch_jvp or dual:
        advice = "use reverse mode: backward(), torch.func.grad or torch.func.vjp"
        raise Unsupported("forward-mode differentiation (torch.func.jvp, forward AD)", {}, advice)
