"""The first form that kernels read: each query row attends at most two intervals of keys.

O(S) memory. Causal, window, prefix, padding, contiguous documents and most of their combinations
are of this form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anyflash.masks.index import Coordinates, Expression, Extent, Ints, Rows
from anyflash.masks.tiles import GRANULE, tiles_in

MOST = 2  # intervals per row that a kernel reads


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
    touched = _touched(lo, hi, extent)
    ranges = [_range(touched, dim=2), _range(touched, dim=1)]
    return RowIntervals(extent, torch.stack([lo, hi], -1).int(), *ranges)


def _touched(lo: Tensor, hi: Tensor, extent: Extent) -> Tensor:
    """(B, query tiles, key tiles): whether some row of the tile has an interval in the key tile.

    Between the first and the last key that a query tile sees in one interval slot, key tiles that
    no row needs are touched too: ranges are hulls.
    """
    tiles_q, tiles_k = tiles_in(extent.queries), tiles_in(extent.keys)
    pad = (0, 0, 0, tiles_q * GRANULE - extent.queries)
    empty = lo >= hi
    lo = torch.nn.functional.pad(torch.where(empty, extent.keys, lo), pad, value=extent.keys)
    hi = torch.nn.functional.pad(torch.where(empty, 0, hi), pad, value=0)
    shape = (lo.shape[0], tiles_q, GRANULE, lo.shape[2])
    first = (
        lo.view(shape).amin(2, keepdim=True) // GRANULE
        if tiles_q
        else lo.new_zeros(shape[0], 0, 1, shape[3])
    )
    last = -(-hi.view(shape).amax(2, keepdim=True) // GRANULE) if tiles_q else first
    tile = torch.arange(tiles_k, device=lo.device).view(1, 1, -1, 1)
    return ((tile >= first) & (tile < last)).any(-1)


def _range(touched: Tensor, dim: int) -> Tensor:
    """First and one-past-last True along `dim`, int32 (B, tiles, 2); (0, 0) if there is none."""
    size = touched.shape[dim]
    shape = [s for d, s in enumerate(touched.shape) if d != dim]
    if size == 0:
        return torch.zeros([*shape, 2], dtype=torch.int32, device=touched.device)
    some = touched.any(dim)
    first = touched.int().argmax(dim)
    last = size - touched.flip(dim).int().argmax(dim)
    return torch.stack([first * some, last * some], -1).int()


# Interval arithmetic. Lists are sorted, disjoint, and padded with empty intervals at `keys`.


def _per_interval(keys: Ints) -> Ints:
    return keys.unsqueeze(-1) if isinstance(keys, Tensor) else keys


def one_interval(rows: Rows, lo: Ints, hi: Ints) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(
        rows.row.shape, *(x.shape for x in (lo, hi, rows.keys) if isinstance(x, Tensor))
    )
    lo, hi = (
        torch.as_tensor(x, device=rows.row.device).expand(shape).unsqueeze(-1) for x in (lo, hi)
    )
    return compact(lo, hi, rows.keys)


def compact(lo: Tensor, hi: Tensor, keys: Ints) -> tuple[Tensor, Tensor]:
    """Clip to [0, keys), turn empty intervals into [keys, keys) and sort."""
    end = torch.as_tensor(_per_interval(keys), device=lo.device).expand(lo.shape)
    lo, hi = torch.minimum(lo.clamp(min=0), end), torch.minimum(hi.clamp(min=0), end)
    empty = lo >= hi
    lo, order = torch.sort(torch.where(empty, end, lo), dim=-1, stable=True)
    return lo, torch.where(empty, end, hi).gather(-1, order)


def complement(lo: Tensor, hi: Tensor, keys: Ints) -> tuple[Tensor, Tensor]:
    end = torch.as_tensor(_per_interval(keys), device=lo.device).expand([*lo.shape[:-1], 1])
    return compact(torch.cat([torch.zeros_like(end), hi], -1), torch.cat([lo, end], -1), keys)


def intersection(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], keys: Ints
) -> tuple[Tensor, Tensor]:
    bound = first[0].shape[-1] + second[0].shape[-1] - 1
    lo = torch.maximum(first[0].unsqueeze(-1), second[0].unsqueeze(-2)).flatten(-2)
    hi = torch.minimum(first[1].unsqueeze(-1), second[1].unsqueeze(-2)).flatten(-2)
    lo, hi = compact(lo, hi, keys)
    return lo[..., :bound], hi[..., :bound]
