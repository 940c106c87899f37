"""The mask of a batch of pieces, from either form, as booleans or as 0 and −inf."""

from __future__ import annotations

from collections.abc import Iterator

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
        outside = _outside(form, batch)
        return torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, -torch.inf)
    return _unpack(form, batch, byte_table(-torch.inf, 0.0, dtype, form.bits.device))


def _outside(form: RowIntervals, batch: Batch) -> Tensor:
    pieces = batch.pieces
    shared = form.bounds.shape[0] == 1
    bounds = torch.stack([form.bounds[0 if shared else p.batch[0], slice(*p.rows)] for p in pieces])
    if all(len(p.keys) == 1 for p in pieces):
        starts = torch.tensor([p.keys[0][0] for p in pieces], dtype=torch.int32)
        bounds = bounds - starts.view(-1, 1, 1, 1)
        if (bounds == bounds[:1]).all():  # as in the middle of a window: one mask for all
            bounds = bounds[:1]
        key = torch.arange(pieces[0].width, dtype=torch.int32)
    else:
        keys = [[j for start, stop in p.keys for j in range(start, stop)] for p in pieces]
        key = torch.tensor(keys, dtype=torch.int32).unsqueeze(1)
    outside = torch.ones((), dtype=torch.bool)
    for slot in range(bounds.shape[2]):
        lo, hi = bounds[:, :, slot, :1], bounds[:, :, slot, 1:]
        outside = outside & ((key < lo) | (key >= hi))
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
