"""The first form that kernels read: each query row attends at most two intervals of keys.

O(S) memory. Causal, window, prefix, padding, contiguous documents and most of their combinations
are of this form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.masks.index import Coordinates, Expression, Extent, Ints, Rows
from anyflash.masks.tiles import GRANULE, tiles_in

MOST = 2  # intervals per row that a kernel reads
TILES = 256  # key tiles looked at at a time while building


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """Row i of batch b attends keys [lo, hi) of each of its intervals; the same for all heads.

    bounds       int32 (1 or B, Sq, n ≤ 2, 2)    lo, hi: sorted, disjoint, empty ones last at Sk
    key_tiles    int32 (1 or B, ⌈Sq/64⌉, 2)      key tiles [first, last) that a query tile needs
    query_tiles  int32 (1 or B, ⌈Sk/64⌉, 2)      query tiles [first, last) that need a key tile
    """

    extent: Extent
    bounds: Tensor
    key_tiles: Tensor
    query_tiles: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.bounds, self.key_tiles, self.query_tiles

    def of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        batch = rows.batch if self.bounds.shape[0] > 1 else torch.zeros_like(rows.batch[:1])
        found = self.bounds.to(rows.row.device).long()[batch, rows.row]
        return found[..., 0], found[..., 1]

    def visible(self, at: Coordinates) -> Tensor:
        rows = Rows(at.batch[..., 0], at.row[..., 0], 0, 0)
        lo, hi = self.of(rows)  # (B, 1, rows, n)
        key = at.key.unsqueeze(-2)
        return ((key >= lo.unsqueeze(-1)) & (key < hi.unsqueeze(-1))).any(-2)


def build(mask: Expression, extent: Extent, device: torch.device) -> RowIntervals:
    """Evaluate the interval expression for every row of the problem."""
    batch = torch.arange(extent.batch, device=device).unsqueeze(-1)
    row = torch.arange(extent.queries, device=device).unsqueeze(0)
    lo, hi = mask.intervals(Rows(batch, row, extent.keys - extent.queries, extent.keys))
    lo, hi = (x.expand(x.shape[0], extent.queries, x.shape[2]) for x in (lo, hi))
    first, last = _hulls(lo, hi, extent)
    steps = torch.arange(tiles_in(extent.keys), device=device).split(TILES)
    touched = (((t >= first) & (t < last)).any(-1) for t in (s.view(1, 1, -1, 1) for s in steps))
    by_key = [_range(part) for part in touched]  # a few key tiles at a time: O(S) memory
    query_tiles = torch.cat(by_key, 1) if by_key else lo.new_zeros((lo.shape[0], 0, 2)).int()
    some = (first < last).any(-1).squeeze(2)
    lowest = torch.where(first < last, first, tiles_in(extent.keys)).amin(-1).squeeze(2)
    key_tiles = torch.stack([lowest * some, last.amax(-1).squeeze(2) * some], -1).int()
    return RowIntervals(extent, torch.stack([lo, hi], -1).int(), key_tiles, query_tiles)


def _hulls(lo: Tensor, hi: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """Key tiles [first, last) from the first to the last key that the rows of a query tile see, for
    each interval slot: (B, query tiles, 1, n). Tiles between them that no row needs count too."""
    tiles = tiles_in(extent.queries)
    if lo.shape[2] == 0 or tiles == 0:
        nothing = lo.new_zeros((lo.shape[0], tiles, 1, 1))
        return nothing, nothing
    pad = (0, 0, 0, tiles * GRANULE - extent.queries)
    empty = lo >= hi
    lo = F.pad(torch.where(empty, extent.keys, lo), pad, value=extent.keys)
    hi = F.pad(torch.where(empty, 0, hi), pad, value=0)
    shape = (lo.shape[0], tiles, GRANULE, lo.shape[2])
    first = lo.view(shape).amin(2, keepdim=True) // GRANULE
    return first, -(-hi.view(shape).amax(2, keepdim=True) // GRANULE)


def _range(touched: Tensor) -> Tensor:
    """First and one-past-last True of (B, query tiles, key tiles) for each key tile: int32 (B, key
    tiles, 2); (0, 0) if there is none."""
    size = touched.shape[1]
    if size == 0:
        return torch.zeros(
            (touched.shape[0], touched.shape[2], 2), dtype=torch.int32, device=touched.device
        )
    some = touched.any(1)
    first = touched.int().argmax(1)
    last = size - touched.flip(1).int().argmax(1)
    return torch.stack([first * some, last * some], -1).int()


# Interval arithmetic. Lists are sorted, disjoint, and padded with empty intervals at `keys`.


def _per_interval(keys: Ints) -> Ints:
    return keys.unsqueeze(-1) if isinstance(keys, Tensor) else keys


def _as_tensor(x: Ints, device: torch.device) -> Tensor:
    """An integer by a fill: a copy from the host waits, and may not stand in a CUDA graph."""
    return x if isinstance(x, Tensor) else torch.full((), x, device=device)


def one_interval(rows: Rows, lo: Ints, hi: Ints) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(
        rows.row.shape, *(x.shape for x in (lo, hi, rows.keys) if isinstance(x, Tensor))
    )
    lo, hi = (_as_tensor(x, rows.row.device).expand(shape).unsqueeze(-1) for x in (lo, hi))
    return compact(lo, hi, rows.keys)


def compact(lo: Tensor, hi: Tensor, keys: Ints) -> tuple[Tensor, Tensor]:
    """Clip to [0, keys), turn empty intervals into [keys, keys) and sort."""
    end = _as_tensor(_per_interval(keys), lo.device).expand(lo.shape)
    lo, hi = torch.minimum(lo.clamp(min=0), end), torch.minimum(hi.clamp(min=0), end)
    empty = lo >= hi
    lo, order = torch.sort(torch.where(empty, end, lo), dim=-1, stable=True)
    return lo, torch.where(empty, end, hi).gather(-1, order)


def complement(lo: Tensor, hi: Tensor, keys: Ints) -> tuple[Tensor, Tensor]:
    end = _as_tensor(_per_interval(keys), lo.device).expand([*lo.shape[:-1], 1])
    return compact(torch.cat([torch.zeros_like(end), hi], -1), torch.cat([lo, end], -1), keys)


def intersection(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], keys: Ints
) -> tuple[Tensor, Tensor]:
    bound = first[0].shape[-1] + second[0].shape[-1] - 1
    lo = torch.maximum(first[0].unsqueeze(-1), second[0].unsqueeze(-2)).flatten(-2)
    hi = torch.minimum(first[1].unsqueeze(-1), second[1].unsqueeze(-2)).flatten(-2)
    lo, hi = compact(lo, hi, keys)
    return lo[..., :bound], hi[..., :bound]
