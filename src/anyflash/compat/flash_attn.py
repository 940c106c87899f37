"""FlashAttention-2's functions by their own names, arguments, order and defaults.

    from anyflash.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

Axes: B batch, S sequence, H heads, D head dimension; tensors are (B, S, H, D), or (total, H, D)
where sequences are packed. They are read in place, through views.

What differs from the original: every dtype, device, head dimension and stride that
`anyflash.attention` takes; V may have another head dimension than Q and K; softcap and dropout go
together; gradients also flow through softmax_lse; a window side below −1 is refused, not unbounded.

Source: the public interface of flash-attn 2.8, https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyflash.api import Alibi, alibi, attention, attention_varlen
from anyflash.errors import InvalidInput, Unsupported
from anyflash.masks import Mask, window
from anyflash.problem import check_kind

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

DENSE = "(batch, seqlen, nheads, headdim)"
PACKED = "(total, nheads, headdim)"
ADVICE = {
    DENSE: f"these functions take {DENSE}; if yours are (batch, nheads, seqlen, headdim), "
    "use .transpose(1, 2) or anyflash.attention",
    PACKED: f"packed sequences are {PACKED}; if yours are (nheads, total, headdim), "
    "use .transpose(0, 1)",
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """softmax(q·kᵀ·scale)·v.

    Args:
        q: (B, Sq, H, D), float16, bfloat16, float32 or float64, any strides.
        k: (B, Sk, Hk, D), q's dtype; H is a multiple of Hk, and query head h reads key head
            h // (H / Hk).
        v: (B, Sk, Hk, Dv). A tensor (B, H, S, D) with H = S cannot be told from (B, S, H, D).
        dropout_p: probability of dropping a weight, always applied: pass 0.0 in evaluation.
        softmax_scale: factor on q·k; None is 1/√D.
        causal: query i sees keys j ≤ i + Sk − Sq, bottom-right aligned; window_size's right side
            is then 0, whatever was given.
        window_size: (left, right): query i sees keys i + Sk − Sq − left … i + Sk − Sq + right, both
            included; −1 (or None) is unbounded. A row whose window lies outside the keys gives 0.
        softcap: c > 0 turns scores s into c·tanh(s/c); 0 is none.
        alibi_slopes: (H,) or (B, H), any float dtype: −slope·|i + Sk − Sq − j| is added to scores,
            as arithmetic inside the kernel. Slopes get no gradient.
        deterministic: bitwise repeatable gradients (forward always is).
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (B, Sq, H, Dv) in q's dtype; with return_attn_probs (out, softmax_lse, S_dmask).
        softmax_lse (B, H, Sq), float32 (float64 for float64), natural logarithm of Σ exp(score),
        −inf for a row that sees nothing; differentiable. S_dmask is empty, (0,) in q's dtype, as
        flash-attn's is without dropout: weights (B, H, Sq, Sk) are never in memory.

    Raises:
        InvalidInput: a malformed argument, named; before any work.
        Unsupported: return_attn_probs with dropout (flash-attn then returns the weights); no
            backend serves the call.

    The same:
        `anyflash.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        mask=anyflash.window(left, right), causal=causal).transpose(1, 2)`
    """
    _check_tensors(DENSE, q, k, v)
    _check_probabilities(return_attn_probs, dropout_p)
    out, lse = attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        mask=_mask(window_size, causal), scale=softmax_scale, softcap=softcap,
        bias=_bias(alibi_slopes), dropout=dropout_p, return_lse=True, deterministic=deterministic,
    )  # fmt: skip
    return _result(out.transpose(1, 2), lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], ...)`: kv (B, Sk, 2, Hk, D), read in place.

    Arguments, results and errors are those of `flash_attn_func`.
    """
    k, v = _unpack("kv", kv, "(batch, seqlen, 2, nheads_k, headdim)", 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], ...)`: qkv (B, S, 3, H, D), read
    in place.

    Arguments, results and errors are those of `flash_attn_func`.
    """
    q, k, v = _unpack("qkv", qkv, "(batch, seqlen, 3, nheads, headdim)", 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn_func` for sequences of different lengths, packed without padding.

    Sequence b has query rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] and keys
    cu_seqlens_k[b] : cu_seqlens_k[b + 1]; causal, window and alibi align bottom-right within it.

    Args:
        q: (total_q, H, D); k: (total_k, Hk, D); v: (total_k, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), from 0 to the totals, never decreasing; a
            sequence may be empty.
        max_seqlen_q, max_seqlen_k: longest sequences, or more.
        block_table: None; key/value caches in pages are not served by this function.
        Others: as in `flash_attn_func`; alibi_slopes (H,) or (B, H).

    Returns:
        out (total_q, H, Dv); with return_attn_probs (out, softmax_lse (H, total_q), S_dmask).

    Raises: as `flash_attn_func`; Unsupported also for a block_table.

    The same: `anyflash.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)`.
    """
    if block_table is not None:
        advice = "gather each sequence's keys and values into k and v, and leave it None"
        raise Unsupported(
            "flash_attn_varlen_func with a block_table (a key/value cache in pages)", {}, advice
        )
    _check_tensors(PACKED, q, k, v)
    _check_probabilities(return_attn_probs, dropout_p)
    out, lse = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        mask=_mask(window_size, causal), scale=softmax_scale, softcap=softcap,
        bias=_bias(alibi_slopes), dropout=dropout_p, return_lse=True, deterministic=deterministic,
    )  # fmt: skip
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], ...)`: kv (total_k, 2, Hk, D), read in place.

    Arguments, results and errors are those of `flash_attn_varlen_func`.
    """
    k, v = _unpack("kv", kv, "(total, 2, nheads_k, headdim)", 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], ...)`: qkv (total, 3, H, D), read in
    place; cu_seqlens and max_seqlen serve queries and keys.

    Arguments, results and errors are those of `flash_attn_varlen_func`.
    """
    q, k, v = _unpack("qkv", qkv, "(total, 3, nheads, headdim)", 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _unpack(name: str, packed: Tensor, form: str, count: int) -> tuple[Tensor, ...]:
    """The tensors stacked before the last two dimensions, as views."""
    check_kind(name, packed)
    if packed.ndim != form.count(",") + 1 or packed.shape[-3] != count:
        raise InvalidInput(name, f"shape {tuple(packed.shape)}", form)
    return packed.unbind(-3)


def _check_tensors(form: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """What a wrong layout reveals, in this module's terms; `Problem` checks everything else."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_kind(name, tensor)
        if tensor.ndim != form.count(",") + 1:
            raise InvalidInput(name, f"shape {tuple(tensor.shape)}", form, ADVICE[form])
    if k.shape[:-1] != v.shape[:-1]:
        expected = f"k's {tuple(k.shape[:-1])} with any last dimension"
        raise InvalidInput("v", f"shape {tuple(v.shape)}", expected, ADVICE[form])
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads != heads_k and (heads_k == 0 or heads % heads_k):
        got = f"{heads} query heads and {heads_k} key heads"
        raise InvalidInput("q, k", got, "query heads a multiple of key heads", ADVICE[form])


def _check_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p:
        advice = (
            "for out and softmax_lse alone call anyflash.attention or anyflash.attention_varlen "
            "with return_lse=True"
        )
        request = (
            "return_attn_probs=True with dropout: it asks for all weights (B, H, Sq, Sk), which "
            "are never in memory"
        )
        raise Unsupported(request, {}, advice)


def _mask(window_size: tuple[int | None, int | None], causal: bool) -> Mask | None:
    expected = "(left, right), integers ≥ 0, each −1 or None for no bound"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidInput("window_size", repr(window_size), expected)
    sides: list[int | None] = []
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < -1):
            raise InvalidInput("window_size", f"{tuple(window_size)}", expected)
        sides.append(None if side == -1 else side)
    left, right = sides[0], 0 if causal else sides[1]
    return None if left is None and right is None else window(left, right)


def _bias(alibi_slopes: Tensor | None) -> Alibi | None:
    return None if alibi_slopes is None else alibi(alibi_slopes)


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Any:
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
