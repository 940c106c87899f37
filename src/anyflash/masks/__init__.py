"""Masks are data: what users write. `algebra` has the expressions, `intervals` and `tiles` the two
forms that kernels read, `compiled` the way from one to the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyflash.errors import InvalidInput
from anyflash.masks import places as places  # its masks are known by name from here on
from anyflash.masks.algebra import Dense, Documents, Function, Padding, Prefix, Window
from anyflash.masks.expression import Mask, integers

__all__ = [
    "Mask",
    "as_mask",
    "causal",
    "documents",
    "from_function",
    "from_tensor",
    "padding",
    "prefix",
    "window",
]

FARTHEST = 2**31 - 1


def causal() -> Mask:
    """Query i sees keys j ≤ i + Sk − Sq (bottom-right aligned)."""
    return Window(None, 0)


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Query i sees keys from `left` before to `right` after its own position i + Sk − Sq.

    Both ends count, and the position itself does too: left=W keeps W earlier keys and the key
    itself. None is unbounded. Raises InvalidInput for anything negative or not an integer.
    """
    for name, value in (("left", left), ("right", right)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            raise InvalidInput(
                f"window({name})", repr(value), "an integer ≥ 0, or None for no bound"
            )
    # Beyond any length is unbounded, and 64-bit positions must not overflow.
    bounds = (None if b is None or b > FARTHEST else b for b in (left, right))
    return Window(*bounds)


def prefix(n: int) -> Mask:
    """Every query sees keys j < n and nothing more; prefix-LM is `causal() | prefix(n)`."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise InvalidInput("prefix(n)", repr(n), "an integer ≥ 0")
    return Prefix(min(n, FARTHEST))


def documents(ids_q: Tensor, ids_k: Tensor | None = None) -> Mask:
    """Query and key see each other iff their ids are equal.

    ids_q (Sq,) or (B, Sq), ids_k (Sk,) or (B, Sk), integers; ids_k=None takes ids_q for both and
    needs Sq = Sk. Ids that form contiguous runs cost O(S) memory (row intervals).
    """
    ids = [
        integers(f"documents({n})", i, (1, 2))
        for n, i in (("ids_q", ids_q), ("ids_k", ids_k))
        if i is not None
    ]
    ids = [i.unsqueeze(0) if i.ndim == 1 else i for i in ids]
    return Documents(ids[0], ids[1] if ids_k is not None else None)


def padding(lengths_k: Tensor) -> Mask:
    """Batch element b sees keys j < lengths_k[b]; lengths_k (B,) integers."""
    return Padding(integers("padding(lengths_k)", lengths_k, (1,)))


def from_tensor(mask: Tensor) -> Mask:
    """A boolean tensor broadcastable to (B, Hq, Sq, Sk), True = attend; read once, held as bits."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        advice = (
            "an additive mask goes into bias="
            if isinstance(mask, Tensor) and mask.is_floating_point()
            else ""
        )
        raise InvalidInput("mask", got, "a boolean tensor or a mask of the algebra", advice)
    if mask.ndim > 4:
        raise InvalidInput("mask", tuple(mask.shape), "at most 4 dimensions (B, Hq, Sq, Sk)")
    if mask.is_nested or mask.layout != torch.strided:
        raise InvalidInput("mask", f"layout {mask.layout}", "a strided (dense) boolean tensor")
    return Dense(mask[(None,) * (4 - mask.ndim)])


def from_function(f: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """f(b, h, i, j) → bool on broadcastable int64 index tensors, evaluated tile by tile.

    `f` must be pure: it is called when the mask is first used at a size, and the result is kept.
    A result that does not depend on b or h may leave that dimension at size 1, and is then stored
    once. Pickling needs an `f` defined at module level.
    """
    if not callable(f):
        raise InvalidInput("from_function(f)", type(f).__name__, "a callable f(b, h, i, j)")
    return Function(f)


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """What `attention(mask=...)` takes: a mask, a boolean tensor or None."""
    return mask if mask is None or isinstance(mask, Mask) else from_tensor(mask)
