"""The mask of a batch of pieces, from either form, as booleans or as 0 and −inf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anyflash.kernels.cpu.pieces import Batch, Piece
from anyflash.masks.compiled import Form
from anyflash.masks.intervals import RowIntervals
from anyflash.masks.tiles import FULL, GRANULE, PARTIAL, TileMap, byte_table, unpack


def hidden(form: Form, batch: Batch) -> Tensor:
    """Which scores of a masked batch are not attended: bool (pieces or 1, rows, keys)."""
    if isinstance(form, RowIntervals):
        return _outside(form, batch)
    return _unpack(form, batch, byte_table(True, False, torch.bool, form.bits.device))


def additive(form: Form, batch: Batch, dtype: torch.dtype) -> Tensor:
    """The same as 0 where attended and −inf where not."""
    if isinstance(form, RowIntervals):
        # One pass, where a tensor of zeros filled with a mask would be three.
        values = torch.tensor([0.0, -torch.inf], dtype=dtype, device=form.bounds.device)
        return torch.where(_outside(form, batch), values[1], values[0])
    return _unpack(form, batch, byte_table(-torch.inf, 0.0, dtype, form.bits.device))


class Edges(NamedTuple):
    """What of the row intervals of a batch has to be tested at all; kept per batch."""

    keys: Tensor  # int32 (keys,), counted from each piece's first, or (pieces, 1, keys)
    shape: tuple[int, int]  # masks (1 if all pieces have the same), rows
    slots: tuple[tuple[Tensor | None, Tensor | None], ...]  # lo and hi, (masks, rows, 1)


_edges: WeakKeyDictionary[Batch, Edges] = WeakKeyDictionary()


def _edges_of(form: RowIntervals, batch: Batch) -> Edges:
    if batch in _edges:
        return _edges[batch]
    pieces = batch.pieces
    shared = form.bounds.shape[0] == 1
    bounds = torch.stack([form.bounds[0 if shared else p.batch[0], slice(*p.rows)] for p in pieces])
    if all(len(p.keys) == 1 for p in pieces):
        starts = torch.tensor(
            [p.keys[0][0] for p in pieces], dtype=torch.int32, device=form.bounds.device
        )
        bounds = bounds - starts.view(-1, 1, 1, 1)
        if (bounds == bounds[:1]).all():  # as in the middle of a window: one mask for all
            bounds = bounds[:1].clone()
        keys, last = (
            torch.arange(pieces[0].width, dtype=torch.int32, device=form.bounds.device),
            pieces[0].width,
        )
    else:
        listed = [[j for start, stop in p.keys for j in range(start, stop)] for p in pieces]
        keys, last = (
            torch.tensor(listed, dtype=torch.int32, device=form.bounds.device).unsqueeze(1),
            form.extent.keys,
        )
    slots: list[tuple[Tensor | None, Tensor | None]] = []
    for slot in range(bounds.shape[2]):
        lo, hi = bounds[:, :, slot, :1], bounds[:, :, slot, 1:]
        if slot == 0 or bool((lo < hi).any()):
            # Only the edges that some row has: each is a pass over all scores.
            edges = lo if bool((lo > 0).any()) else None, hi if bool((hi < last).any()) else None
            slots.append(edges)
    _edges[batch] = Edges(keys, (len(bounds), bounds.shape[1]), tuple(slots))
    return _edges[batch]


def _outside(form: RowIntervals, batch: Batch) -> Tensor:
    """Scores in none of the intervals of their row."""
    keys, shape, slots = _edges_of(form, batch)
    outside = None
    for lo, hi in slots:
        parts = ([] if lo is None else [keys < lo]) + ([] if hi is None else [keys >= hi])
        if not parts:  # an interval that has every key: nothing is outside
            return torch.zeros((1, 1, 1), dtype=torch.bool, device=keys.device).expand(
                *shape, keys.shape[-1]
            )
        beside = parts[0] if len(parts) == 1 else parts[0].logical_or_(parts[1])
        outside = beside if outside is None else outside.logical_and_(beside)
    if outside is None:
        raise ValueError("row intervals without a slot")
    return outside


def _unpack(form: TileMap, batch: Batch, table: Tensor) -> Tensor:
    words = torch.stack([torch.cat(list(_words(form, p)), -1) for p in batch.pieces])
    # Only the last span may end inside a tile: the others are whole tiles.
    return unpack(words, table)[..., : batch.pieces[0].width]


def _words(form: TileMap, piece: Piece) -> Iterator[Tensor]:
    """The words of each span of a piece's keys: int64 (rows, key tiles)."""
    b = 0 if form.kinds.shape[0] == 1 else piece.batch[0]
    tile_rows = slice(piece.rows[0] // GRANULE, -(-piece.rows[1] // GRANULE))
    for start, stop in piece.keys:
        place = b, piece.mask_head, tile_rows, slice(start // GRANULE, -(-stop // GRANULE))
        kinds = form.kinds[place].unsqueeze(-1)
        words = torch.where(kinds == FULL, -1, 0)
        if len(form.bits):
            bits = form.bits.index_select(0, form.numbers[place].clamp(min=0).flatten())
            words = torch.where(kinds == PARTIAL, bits.view(*kinds.shape[:2], GRANULE), words)
        words = words.expand(*kinds.shape[:2], GRANULE).transpose(1, 2).flatten(0, 1)
        yield words[: piece.rows[1] - piece.rows[0]]
