"""From a mask to the form that kernels read, built once and kept."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from anyflash.errors import InvalidInput
from anyflash.masks import intervals, tiles
from anyflash.masks.index import Expression, Extent
from anyflash.masks.intervals import RowIntervals
from anyflash.masks.tiles import TileMap

Form = RowIntervals | TileMap

KEEP = 64  # compiled masks kept; each also goes when a tensor that it was built from goes

_cache: OrderedDict[Any, tuple[Form, list[StorageWeakRef]]] = OrderedDict()
_lock = threading.RLock()  # reentrant: a collected mask may call `forget` while it is held


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may hold it while this one forks
    os.register_at_fork(after_in_child=_new_lock)


def forget(number: int) -> None:
    """Drop what was built from the mask that `text` calls "#number", which is gone."""
    name = re.compile(rf"#{number}(?!\d)")
    with _lock:
        for key in [k for k in _cache if name.search(k[0])]:
            _cache.pop(key, None)


def compile_mask(mask: Expression, extent: Extent, device: torch.device) -> Form:
    """Row intervals where every row has at most two, else a tile map; not cached."""
    return (intervals if has_few_intervals(mask) else tiles).build(mask, extent, device)


def has_few_intervals(mask: Expression) -> bool:
    """Whether kernels read a mask as row intervals. It may read the contents of its tensors."""
    bound = mask.interval_bound()
    return bound is not None and bound <= intervals.MOST


def identity(leaves: Sequence[Tensor]) -> tuple[tuple[Any, ...], list[StorageWeakRef]]:
    """What tells these tensors, contents included, from others, and weak references that keep their
    storages' addresses from being used again, but not their memory. Not for inference tensors,
    which count no versions."""
    storages = [StorageWeakRef(leaf.untyped_storage()) for leaf in leaves]
    places = tuple(
        (ref.cdata, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype, leaf._version)
        for ref, leaf in zip(storages, leaves, strict=True)
    )
    return places, storages


def compiled(mask: Expression, extent: Extent, device: torch.device) -> Form:
    """The compiled form of a mask, from the cache if expression, tensors and sizes are the same.

    A tensor is the same if its storage, place in it and version counter are: its contents are
    never read. Changes through `.data`, numpy or DLPack go unseen, as they do for autograd. What
    was built on one stream is not used on another, which need not wait for it. While a CUDA graph
    is captured the form is built anew, within the graph: a replay follows the tensors.
    """
    form = getattr(mask, "form", None)  # of a mask compiled ahead
    if form is not None:
        if form.tensors[0].device != device:
            got, expected = f"compiled on {form.tensors[0].device}", f"compiled on {device}"
            raise InvalidInput("mask", got, expected, "pass the device to mask.compile(...)")
        return form
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return compile_mask(mask, extent, device)
        stream = torch.cuda.current_stream(device).cuda_stream
    if any(leaf.is_inference() for leaf in mask.leaves):  # no version counter: nothing to go by
        return compile_mask(mask, extent, device)
    places, storages = identity(mask.leaves)
    key = (mask.text, places, extent, device, stream)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key][0]
    form = compile_mask(mask, extent, device)
    with _lock:
        _cache[key] = form, storages
        gone = [k for k, (_, refs) in _cache.items() if any(ref.expired() for ref in refs)]
        for k in [*gone, *list(_cache)[: max(0, len(_cache) - len(gone) - KEEP)]]:
            _cache.pop(k, None)
    return form
