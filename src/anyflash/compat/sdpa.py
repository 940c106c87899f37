"""PyTorch's scaled_dot_product_attention by its own name, arguments and meaning.

    from anyflash.compat.sdpa import scaled_dot_product_attention

Source: torch.nn.functional.scaled_dot_product_attention, PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anyflash.api import attention
from anyflash.errors import InvalidInput
from anyflash.problem import check_kind

__all__ = ["scaled_dot_product_attention"]

ADVICE = "tensors are (..., heads, length, width); for (B, S, H, D) use .transpose(1, 2)"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query·keyᵀ·scale + attn_mask)·value.

    Axes: N… any batch dimensions, H heads, L queries, S keys, E and Ev widths. H and N… may be
    absent; they broadcast, expanded as views (more than one N that cannot be one in memory is
    copied).

    Args:
        query: (N…, Hq, L, E), float16, bfloat16, float32 or float64, any strides.
        key: (N…, H, S, E), query's dtype.
        value: (N…, H, S, Ev).
        attn_mask: broadcastable to (N…, Hq, L, S). Boolean: True takes part (the opposite of
            torch.nn.MultiheadAttention's key_padding_mask). Any float dtype: added to the scores in
            float32, with a gradient; −inf there removes a finite score. Or a CausalBias of
            torch.nn.attention.bias. Not together with is_causal.
        dropout_p: probability of dropping a weight, always applied: pass 0.0 in evaluation.
        is_causal: query i sees keys j ≤ i: aligned top-left, where L ≠ S too (`anyflash.attention`
            aligns bottom-right).
        scale: factor on query·key; None is 1/√E. 0 and negative values are legal.
        enable_gqa: Hq may be a multiple of H; query head h reads key head h // (Hq / H). Without
            it head counts are equal or 1.

    Returns:
        (N…, Hq, L, Ev) in query's dtype. A row that takes part in nothing gives 0. Gradients are
        bitwise repeatable under torch.use_deterministic_algorithms(True).

    Raises:
        InvalidInput: a malformed argument, named; before any work.
        Unsupported: no backend serves the call.

    The same: `torch.nn.functional.scaled_dot_product_attention(...)`, which may take an unfused
    path in silence.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_kind(name, tensor)
        if tensor.ndim < 2:
            raise InvalidInput(name, f"shape {tuple(tensor.shape)}", "at least 2 dimensions")
    if is_causal and attn_mask is not None:
        advice = "put both into one boolean attn_mask, or use anyflash.attention(mask=..., ...)"
        raise InvalidInput("is_causal", "True with an attn_mask", "only one of them", advice)
    corner = "top-left" if is_causal else None
    if attn_mask is not None and type(attn_mask) not in (Tensor, torch.nn.Parameter):
        corner = _corner(attn_mask, query.shape[-2], key.shape[-2])
        attn_mask = attn_mask if corner is None else None
    shape, query, key, value = _four_dimensions(query, key, value, enable_gqa)
    mask = bias = None
    if attn_mask is not None:
        attn_mask = _four_dimensional_mask(attn_mask, (*shape[:-1], key.shape[2]))
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return attention(
            q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout_p,
            deterministic=deterministic,
        )  # fmt: skip

    rows, keys = query.shape[2], key.shape[2]
    if corner != "top-left" or rows == keys:
        out = attend(query, key, value, corner is not None)
    elif rows < keys:  # no query sees the keys beyond the leading square
        out = attend(query, key[:, :, :rows], value[:, :, :rows], True)
    else:  # every query beyond the leading square sees all keys
        square = attend(query[:, :, :keys], key, value, True)
        out = torch.cat([square, attend(query[:, :, keys:], key, value, False)], 2)
    return out if out.ndim == len(shape) else out.reshape(shape)


def _corner(attn_mask: Tensor, queries: int, keys: int) -> str | None:
    """Where a CausalBias is aligned; None for any other tensor. Its elements are uninitialised
    memory: read as an ordinary mask it would be noise."""
    if not isinstance(attn_mask, Tensor):
        advice = "a mask of the algebra goes into anyflash.attention(mask=...)"
        raise InvalidInput("attn_mask", type(attn_mask).__name__, "a torch.Tensor", advice)
    # Here, because it costs two seconds, and whoever holds a CausalBias has paid them.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    made_for = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if made_for != (queries, keys):
        expected = f"({queries}, {keys}), the lengths of query and key"
        raise InvalidInput("attn_mask", f"a CausalBias for lengths {made_for}", expected)
    return "top-left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom-right"


def _four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Sequence[int], Tensor, Tensor, Tensor]:
    """The result's shape, and the inputs as (N, heads, length, width)."""
    tensors = query, key, value
    if all(x.ndim == 4 and x.shape[0] == query.shape[0] for x in tensors) and (
        enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]
    ):
        return (*query.shape[:3], value.shape[3]), query, key, value
    rank = max(x.ndim for x in tensors)
    q, k, v = (x if x.ndim > 2 else x.unsqueeze(0) for x in tensors)
    heads = q.shape[-3], k.shape[-3], v.shape[-3]
    if not enable_gqa and not heads[0] == heads[1] == heads[2]:
        advice = f"enable_gqa=True shares key heads; {ADVICE}"
        common = _broadcast("head counts", [(h,) for h in heads], advice)[0]
        # One key head serves all query heads as it is; `attention` reads it once.
        heads = (common, 1, 1) if heads[1] == heads[2] == 1 else (common,) * 3
    batch = _broadcast("batch dimensions", [x.shape[:-3] for x in (q, k, v)], ADVICE)
    shape = (*batch, heads[0], q.shape[-2], v.shape[-1])[-rank:]
    count = math.prod(batch)
    q, k, v = (
        x.expand(*batch, h, -1, -1).reshape(count, h, *x.shape[-2:])
        for x, h in zip((q, k, v), heads, strict=True)
    )
    return shape, q, k, v


def _broadcast(what: str, shapes: Sequence[Sequence[int]], advice: str) -> list[int]:
    """One shape for query's, key's and value's leading dimensions, which are equal or 1."""
    result = []
    for place in range(-max(map(len, shapes)), 0):
        sizes = [s[place] for s in shapes if -place <= len(s)]
        size = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, size) for n in sizes):
            got = f"{what} {', '.join(str(tuple(s)) for s in shapes)}"
            raise InvalidInput("query, key, value", got, "equal ones, or 1", advice)
        result.append(size)
    return result


def _four_dimensional_mask(mask: Tensor, full: Sequence[int]) -> Tensor:
    """The mask for the inputs of `_four_dimensions`; `full` is (N…, Hq, L, S).

    A view, unless some but not all of several batch dimensions are broadcast: those are copied.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InvalidInput("attn_mask", mask.dtype, "a boolean tensor, or a float to be added")
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.ndim > len(full) or any(size not in (1, whole) for size, whole in pairs):
        expected = f"broadcastable to (..., Hq, L, S) = {tuple(full)}"
        raise InvalidInput("attn_mask", f"shape {tuple(mask.shape)}", expected)
    if mask.ndim <= 3 or len(full) <= 4:
        return mask
    inner = mask.shape[-3:]
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(inner)
    return mask.expand(*full[:-3], *inner).flatten(0, -4)
