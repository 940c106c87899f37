"""The second form that kernels read: a byte per tile and, for partial tiles, a bit per score.

This is the programmable block mask of Metal FlashAttention, held in memory: skip, full or partial
per 64×64 tile, with equal bit tiles stored once and compressed lists of the tiles to visit in both
directions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.masks.index import Coordinates, Expression, Extent, grid

GRANULE = 64  # rows and keys of a tile; kernel tiles are multiples of it
SKIP, FULL, PARTIAL = 0, 1, 2

# Scores evaluated at a time while building: bounds memory beyond the result to some 100 MB.
EVALUATE = 1 << 24


class Blocks(NamedTuple):
    """A tile map for kernels whose blocks of queries go over tiles of keys, both several of its
    tiles high or wide; or, seen from the keys, with the two exchanged.

    numbers  int32 (1|B, 1|Hq, Tq, Tk)         `TileMap.numbers`
    bits     int32 (N, 64, 2)                  `TileMap.bits`
    columns  int32 (1|B, 1|Hq, blocks, tiles)  what a block needs of the tiles, the last one first,
                                               then −1
    counts   int32 (1|B, 1|Hq, blocks)         how many it needs
    """

    numbers: Tensor
    bits: Tensor
    columns: Tensor
    counts: Tensor


@dataclass(frozen=True, eq=False)
class TileMap:
    """Which tiles exist, and which scores of the partial ones.

    kinds          uint8 (1|B, 1|Hq, Tq, Tk)   SKIP, FULL or PARTIAL; Tq = ⌈Sq/64⌉, Tk = ⌈Sk/64⌉
    numbers        int32 (1|B, 1|Hq, Tq, Tk)   which bit tile a PARTIAL tile has; −1 FULL, −2 SKIP
    bits           int64 (N, 64)               a word per query row, bit j = key j of the tile
    bits_by_key    int64 (N, 64)               a word per key, bit i = query row i (for S^T)
    query_offsets  int32 (lists of Tq·B·H + 1) where query tile t's list of key tiles starts
    query_list     int32                       key tiles to visit, PARTIAL ones as they are
    key_offsets    int32, key_list int32       the same from key tiles to query tiles
    filled         bool (1|B, 1|Hq, Sq)        False for rows that attend nothing

    Beyond Sq and Sk bits are 0, and a tile is FULL if all of its scores that exist are attended.
    """

    extent: Extent
    kinds: Tensor
    numbers: Tensor
    bits: Tensor
    bits_by_key: Tensor
    query_offsets: Tensor
    query_list: Tensor
    key_offsets: Tensor
    key_list: Tensor
    filled: Tensor
    made: dict[tuple[int, int, bool], Blocks] = field(default_factory=dict)  # by `blocks`

    def blocks(self, rows: int, columns: int, by_key: bool = False) -> Blocks:
        """For blocks of `rows` queries and tiles of `columns` keys, or the other way round, both
        multiples of 64. Made once, on the device, without waiting for it; while a CUDA graph is
        captured anew, within the graph."""
        found = self.made.get((rows, columns, by_key))
        if found is None:
            if rows % GRANULE or columns % GRANULE:
                raise ValueError(
                    f"blocks of {rows} and tiles of {columns}: no multiples of {GRANULE}"
                )
            kinds, numbers, bits = self.kinds, self.numbers, self.bits
            if by_key:
                kinds, numbers, bits = kinds.mT, numbers.mT.contiguous(), self.bits_by_key
            lists = _blocks(kinds, rows // GRANULE, columns // GRANULE)
            found = Blocks(numbers, bits.view(torch.int32).unflatten(1, (GRANULE, 2)), *lists)
            if not (numbers.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.made[rows, columns, by_key] = found
        return found

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.kinds,
            self.numbers,
            self.bits,
            self.bits_by_key,
            self.query_offsets,
            self.query_list,
            self.key_offsets,
            self.key_list,
            self.filled,
        )

    def visible(self, at: Coordinates) -> Tensor:
        device = at.row.device
        batch = at.batch if self.kinds.shape[0] > 1 else torch.zeros_like(at.batch[:1])
        head = at.head if self.kinds.shape[1] > 1 else torch.zeros_like(at.head[:, :1])
        place = (batch, head, at.row // GRANULE, at.key // GRANULE)
        kind, number = self.kinds.to(device)[place], self.numbers.to(device)[place]
        if not len(self.bits):
            return kind == FULL
        word = self.bits.to(device)[number.clamp(min=0), at.row % GRANULE]
        return torch.where(kind == PARTIAL, (word >> (at.key % GRANULE)) & 1 == 1, kind == FULL)


def _blocks(kinds: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """`Blocks.columns` and `.counts`, for so many tiles of the map each."""
    padding = (0, -kinds.shape[-1] % columns, 0, -kinds.shape[-2] % rows)
    needed = F.pad(kinds != SKIP, padding).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    needed = needed.any(-1).any(-2)  # (B, H, blocks, tiles)
    column = torch.arange(needed.shape[-1], device=kinds.device, dtype=torch.int32)
    found = torch.where(needed, column, -1).sort(-1, descending=True).values
    return found, needed.sum(-1, dtype=torch.int32)


def tiles_in(length: int) -> int:
    return -(-length // GRANULE)


def build(mask: Expression, extent: Extent, device: torch.device) -> TileMap:
    """Evaluate a mask a few tile rows at a time; never more than EVALUATE scores at once."""
    tiles_q, tiles_k = tiles_in(extent.queries), tiles_in(extent.keys)
    corner = grid(extent, slice(0, min(1, extent.queries)), slice(0, min(1, extent.keys)), device)
    batches, heads = (
        mask.visible(corner).shape if corner.row.numel() and corner.key.numel() else (1, 1, 1, 1)
    )[:2]
    per_tile_row = max(1, batches * heads * tiles_k * GRANULE * GRANULE)
    step = max(1, EVALUATE // per_tile_row)
    kinds = torch.zeros((batches, heads, tiles_q, tiles_k), dtype=torch.uint8, device=device)
    filled = torch.zeros((batches, heads, extent.queries), dtype=torch.bool, device=device)
    numbers = torch.full(kinds.shape, -1, dtype=torch.int32, device=device)
    tiles = torch.zeros((0, GRANULE), dtype=torch.int64, device=device)
    for t in range(0, tiles_q, step) if tiles_k else ():
        rows = slice(t * GRANULE, min((t + step) * GRANULE, extent.queries))
        words = _words(mask, extent, rows, (batches, heads), device)  # (B, H, rows, Tk)
        filled[:, :, rows] = (words != 0).any(-1)
        kinds[:, :, t : t + step], words = _classify(words, extent.keys)
        partial = kinds[:, :, t : t + step] == PARTIAL
        found = words[partial]
        tiles, which = _distinct(torch.cat([tiles, found]))
        # Earlier tiles may have been renumbered by the merge: `which` starts with them.
        before = len(which) - len(found)
        renumber = torch.cat([which[:before], which.new_full((1,), -1)]).int()
        numbers = renumber[numbers.long()]
        numbers[:, :, t : t + step][partial] = which[before:].int()
    numbers = torch.where(kinds == SKIP, -2, numbers)
    return TileMap(
        extent, kinds, numbers, tiles, _transpose(tiles), *_lists(kinds), *_lists(kinds.mT), filled
    )


def _words(
    mask: Expression, extent: Extent, rows: slice, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """The mask of some rows as int64 words of 64 keys: (B, H, rows, Tk), zero beyond Sk."""
    height, tiles_k = rows.stop - rows.start, tiles_in(extent.keys)
    fit = max(1, EVALUATE // (height * GRANULE))  # key tiles, over all batches and heads
    count_h = max(1, min(shape[1], fit))
    count_b = max(1, min(shape[0], fit // count_h))
    step = max(1, fit // (count_h * count_b))
    words = torch.empty((*shape, height, tiles_k), dtype=torch.int64, device=device)
    for b, h, t in itertools.product(
        range(0, shape[0], count_b), range(0, shape[1], count_h), range(0, tiles_k, step)
    ):
        keys = slice(t * GRANULE, min((t + step) * GRANULE, extent.keys))
        at = grid(extent, rows, keys, device)
        # Where the mask does not differ, all batches or heads at once cost nothing.
        some_b = slice(b, b + count_b) if shape[0] > 1 else slice(0, extent.batch)
        some_h = slice(h, h + count_h) if shape[1] > 1 else slice(0, extent.heads)
        batch, head = at.batch[some_b], at.head[:, some_h]
        seen = mask.visible(at._replace(batch=batch, head=head, box=(some_b, some_h, rows, keys)))
        part = words[b : b + count_b, h : h + count_h, :, t : t + step]
        width = keys.stop - keys.start
        seen = seen.expand(*part.shape[:2], height, width)
        part.copy_(pack(F.pad(seen, (0, -width % GRANULE))))
    return words


def pack(seen: Tensor) -> Tensor:
    """bool (..., 64·n) → int64 (..., n), bit j of a word = element j.

    Eight bytes that hold 0 or 1 are a number whose product with the constant below has them as its
    top byte, bit for bit: a tenth of the work of shifting every element.
    """
    if not seen.numel():
        return torch.zeros(
            (*seen.shape[:-1], seen.shape[-1] // GRANULE), dtype=torch.int64, device=seen.device
        )
    eight = seen.contiguous().view(torch.uint8).view(torch.int64)
    byte = (eight * 0x0102040810204080) >> 56
    return byte.to(torch.uint8).view(torch.int64)


def unpack(words: Tensor, table: Tensor | None = None) -> Tensor:
    """int64 (..., n) → (..., 64·n), the inverse of `pack`; bool, or what `table` has for bytes.

    A look-up of eight elements at a time in a table (256, 8), see `byte_table`.
    """
    table = byte_table(False, True, torch.bool, words.device) if table is None else table
    index = words.contiguous().view(torch.uint8).int().flatten()
    return table.index_select(0, index).view(*words.shape[:-1], GRANULE * words.shape[-1])


@lru_cache(maxsize=32)
def byte_table(zero: float, one: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(256, 8): the bits of each byte, spelled as two values."""
    byte, bit = torch.arange(256, device=device), torch.arange(8, device=device)
    ones = (byte.unsqueeze(-1) >> bit) & 1 == 1
    values = torch.tensor([zero, one], dtype=dtype, device=device)
    return values[ones.long()]


def _classify(words: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Words (B, H, rows, Tk) → kinds (B, H, tile rows, Tk) and tiles (B, H, tile rows, Tk, 64)."""
    whole = torch.full((words.shape[-1],), -1, dtype=torch.int64, device=words.device)
    if keys % GRANULE:
        whole[-1] = (1 << (keys % GRANULE)) - 1
    pad = (0, 0, 0, -words.shape[2] % GRANULE)
    tiles = F.pad(words, pad).unflatten(2, (-1, GRANULE)).transpose(3, 4)
    complete = F.pad(words == whole, pad, value=True).unflatten(2, (-1, GRANULE)).all(3)
    kinds = torch.where(complete, FULL, torch.where((tiles == 0).all(-1), SKIP, PARTIAL))
    return kinds.to(torch.uint8), tiles


def _distinct(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Equal tiles once: (distinct tiles, the number of each tile).

    By a 64-bit hash, checked: sorting whole tiles is fifty times slower and only needed if two
    different tiles share a hash.
    """
    if not len(tiles):
        return tiles, torch.zeros(0, dtype=torch.int64, device=tiles.device)
    odd = torch.arange(GRANULE, device=tiles.device) * 2 + 1
    factors = odd * odd * -0x61C8864680B583EB + odd  # fixed odd-ish multipliers, mixed by 2^64/φ
    mixed = tiles ^ ((tiles >> 29) & (1 << 35) - 1)  # logical: else ~x mixes to what x does
    _, number = torch.unique((mixed * factors).sum(-1), return_inverse=True)
    count = int(number.max()) + 1
    distinct = tiles.new_empty(count, GRANULE)
    distinct[number] = tiles
    if not torch.equal(distinct[number], tiles):
        return torch.unique(tiles, dim=0, return_inverse=True)  # type: ignore[return-value]
    return distinct, number


def _transpose(tiles: Tensor) -> Tensor:
    parts = [pack(unpack(part.unsqueeze(-1)).mT).squeeze(-1) for part in tiles.split(4096)]
    return torch.cat(parts) if parts else tiles


def _lists(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of tiles the columns to visit: int32 offsets (rows + 1) and columns."""
    rows = kinds.flatten(0, 2)
    counts = (rows != SKIP).sum(-1)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    return offsets, (rows != SKIP).nonzero()[:, 1].int()
