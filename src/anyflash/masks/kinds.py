"""What a mask becomes for kernels, known before it is built: backends decide by it."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from anyflash.masks.algebra import Window
from anyflash.masks.compiled import has_few_intervals, identity
from anyflash.masks.expression import Mask

KEEP = 256  # masks whose kind is kept

_kept: dict[Any, tuple[str, list[StorageWeakRef]]] = {}


def kind_of(mask: Mask | None) -> str:
    """One of "none", "window" (arithmetic, without memory), "intervals" and "tiles".

    Whether documents are contiguous, say, only their tensor tells. It is read once, as long as
    storage, place in it and version counter stay the same: reading waits for an accelerator.
    """
    if mask is None:
        return "none"
    if isinstance(mask, Window):
        return "window"
    if not mask.leaves or any(leaf.is_inference() for leaf in mask.leaves):
        return _read(mask)
    places, storages = identity(mask.leaves)
    key = (mask.text, places)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= KEEP:
            _kept.clear()
        found = _kept[key] = _read(mask), storages
    return found[0]


def _read(mask: Mask) -> str:
    return "intervals" if has_few_intervals(mask) else "tiles"
