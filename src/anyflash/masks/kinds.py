"""What a mask becomes for kernels, known before it is built: backends decide by it."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from anyflash.masks.algebra import Window
from anyflash.masks.expression import Mask
from anyflash.masks.intervals import MOST

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
    # A weak reference keeps the storage's address from being used again, not its memory.
    storages = [StorageWeakRef(leaf.untyped_storage()) for leaf in mask.leaves]
    places = tuple(
        (ref.cdata, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype, leaf._version)
        for ref, leaf in zip(storages, mask.leaves, strict=True)
    )
    key = (mask.text, places)
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= KEEP:
            _kept.clear()
        found = _kept[key] = _read(mask), storages
    return found[0]


def _read(mask: Mask) -> str:
    bound = mask.interval_bound()
    return "intervals" if bound is not None and bound <= MOST else "tiles"
