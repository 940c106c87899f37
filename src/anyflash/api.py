"""The public functions: docstring → operator. `ops` builds the Problem and dispatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad

from anyflash import ops
from anyflash.calls import Arguments, differentiated, remember, replay, replayable
from anyflash.dispatch import NAMES
from anyflash.errors import InvalidInput, Unsupported
from anyflash.explanation import Explanation
from anyflash.masks import Mask, as_mask
from anyflash.masks import causal as causal_mask
from anyflash.problem import (
    Inputs,
    Problem,
    check,
    check_choice,
    check_devices,
    check_kind,
    check_number,
    check_packing,
)
from anyflash.rng import draw_seed

CAUSAL = causal_mask()


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
    if slopes.requires_grad:
        advice = "pass slopes.detach(), or learn a bias tensor"
        raise InvalidInput("alibi(slopes)", "slopes that require a gradient", "constants", advice)
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
        deterministic: bitwise repeatable gradients (forward always is), as they are as well under
            torch.use_deterministic_algorithms(True).
        precision: None, or "fp8" to quantise first.
        backend: a name to insist on; None takes the first that serves.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and dimension order; (out, lse) with `return_lse`.

    Precision: scores, softmax and sums in float32 (float64 for float64 inputs). A row that attends
    nothing gives 0 and lse −inf (the sink's logit with a sink), and zero gradients. Masked slots
    never change a result, whatever they hold. Gradients: q, k, v, bias, sink and lse, twice
    differentiable. Backward has the weights as exp(score − lse) from the saved lse, so where |lse|
    is so large that its last digit counts (1e6 for float32: a whole row of biases near finfo.min),
    gradients of that row lose digits; forward does not.

    Raises:
        InvalidInput: a malformed argument, named; before any work.
        Unsupported: no backend serves the problem; carries every backend's sentence.

    The same in PyTorch, without fusion:
        `s = (q @ k.mT * scale).masked_fill(~mask, -inf); out = s.softmax(-1) @ v`

    Source: FlashAttention-2 (Dao 2023); FlashAttention-3 (Shah et al. 2024).
    """
    key = replayable(
        q, k, v, mask, causal, scale, softcap, bias, sink, dropout, deterministic, precision,
        backend,
    )  # fmt: skip
    found = replay(key, q, k, v)
    if found is None:
        call = _arguments(
            (q, k, v), mask, causal, bias, sink, (scale, softcap, dropout),
            (deterministic, precision, backend),
        )  # fmt: skip
        found = _run(call)
        remember(key, call, *found)
    out, lse = found
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
    call = _arguments(
        (q, k, v), mask, causal, bias, sink, (scale, softcap, dropout),
        (deterministic, precision, backend), (cu_seqlens_q, cu_seqlens_k, seqused_k),
        (max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    out, lse = _run(call)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
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
    device: str | None = None,
) -> Explanation:
    """Which backend `attention` would use for this call, why not the others, and the mask's form.

    Nothing is computed but the compiled mask, where that is cheap, and no random number is drawn.
    No tensor's contents matter but those of masks and offsets: `torch.empty(()).expand(...)` asks
    about a call of any size without its memory.

    Args: those of `attention`, or with cu_seqlens_q and cu_seqlens_k those of `attention_varlen`,
        in the same shapes; and
        device: the one to ask about ("cpu", "cuda", "cuda:1", "mps"), present here or not; None is
            that of the tensors.

    Returns:
        An `Explanation`: `problem`, `chosen` (a name or None), `refusals` (name → sentence, or None
        for those that serve) and `mask_form`. It prints as text, and as a table under rich.

    Raises:
        InvalidInput: as the call would. What nothing serves is an answer, not an error.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    packed = any(x is not None for x in (*packing, max_seqlen_q, max_seqlen_k))
    call = _arguments(
        (q, k, v), mask, causal, bias, sink, (scale, softcap, dropout),
        (deterministic, precision, backend), packing if packed else None,
        (max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    inputs, options = call.parse()
    problem = Problem.of(inputs, options, differentiated(call))
    return Explanation.of(problem, inputs, backend, device)


def _arguments(
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Mask | Tensor | None,
    causal: bool,
    bias: Tensor | Alibi | None,
    sink: Tensor | None,
    numbers: tuple[float | None, float | None, float],
    choices: tuple[bool, str | None, str | None],
    packing: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    longest: tuple[int | None, int | None] = (None, None),
) -> Arguments:
    """What the operators take, from what the public functions take; no seed yet.

    Checks what may enter an operator at all; `Problem.of`, inside it, checks the rest.
    """
    q, k, v = _autocast(*qkv)
    slopes, added = (bias.slopes, None) if isinstance(bias, Alibi) else (None, bias)
    for name, tensor in (("bias", added), ("sink", sink)):
        if tensor is not None:
            check_kind(name, tensor)
    scale, softcap, dropout = numbers
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            check_number(name, number)
    check_number("dropout", dropout, "a probability in [0, 1]")
    deterministic, precision, backend = choices
    check_choice("causal", causal, bool, "a bool")
    check_choice("deterministic", deterministic, bool, "a bool")
    if precision is not None:
        check_choice("precision", precision, str, "None or 'fp8'")
    if backend is not None:
        check_choice("backend", backend, str, NAMES)
    if packing is not None:
        offsets = "int32 offsets of shape (n + 1,)"
        check_packing("cu_seqlens_q", packing[0], offsets)
        check_packing("cu_seqlens_k", packing[1], offsets)
        if packing[2] is not None:
            check_packing("seqused_k", packing[2], "int32 of shape (n,)")
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        if length is not None:
            check_choice(name, length, (int, torch.SymInt), "an integer ≥ 0, or None")
    given = as_mask(mask)
    if causal:
        given = CAUSAL if given is None else given & CAUSAL
    packed = packing or (None, None, None)
    check_devices(Inputs(q, k, v, added, slopes, sink, None, *packed, given))
    text, leaves = ("", ()) if given is None else (given.text, given.leaves)
    return Arguments(
        q, k, v, added, slopes, sink, None, *packed, list(leaves), text,
        scale, softcap or 0.0, dropout, *longest, *choices,
    )  # fmt: skip


def _run(call: Arguments) -> tuple[Tensor, ...]:
    _refuse_transforms(call.q, call.k, call.v, call.bias, call.sink)
    if call.dropout:
        if not torch.compiler.is_compiling():
            check(*call.parse())  # a call that is refused must not move the generator
        call = call._replace(seed=draw_seed(call.q.device))
    return ops.attention_forward(*call)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check what enters, and cast it where autocast is on, as PyTorch's own attention does."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_kind(name, tensor)
    kind = q.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _refuse_transforms(*tensors: Tensor | None) -> None:
    """Forward-mode derivatives would silently be zero under a registered formula: say no."""
    if torch.compiler.is_compiling():
        return
    levels = functorch.get_interpreter_stack() or []
    functorch_jvp = any(level.key() == functorch.TransformType.Jvp for level in levels)
    dual = (
        not levels
        and forward_ad._current_level >= 0
        and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )
    if functorch_jvp or dual:
        advice = "use reverse mode: backward(), torch.func.grad or torch.func.vjp"
        raise Unsupported("forward-mode differentiation (torch.func.jvp, forward AD)", {}, advice)
