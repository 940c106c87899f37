"""Which blocks the forward kernel takes in which order, and which tiles of keys: where planted
faults cost time and change no result."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_mutants import Result


class MaskFlags(NamedTuple):
    LEFT: bool
    RIGHT: bool
    INTERVALS: int


@dataclass(frozen=True)
class Plan:
    """Which key tiles blocks of rows take, in which order, and how many of them with a mask. A tile
    too many, or one with a mask that needs none, costs time and changes no result.

    It says what `masking.plan` says by other means: by sets of tiles.
    """

    queries: int
    keys: int
    left: int | None = None
    right: int | None = None
    intervals: int = 0  # if not 0, so many of each row, at random
    rows: int = 128  # of a block
    block_kv: int = 64
    whole: int | None = None  # if given, blocks are of so many rows, and the tiles those of a part

    def __call__(self, module: ModuleType) -> list[Result]:
        bounds, exact = self.bounds, self.exact
        found = torch.full_like(exact, -1, dtype=torch.int32)
        plan_kernel()[(self.blocks,)](
            found, found if bounds is None else bounds, found.shape[1], self.queries, self.keys,
            self.left or 0, self.right or 0, ROWS=self.whole or self.rows, PART=self.rows,
            BLOCK_KV=self.block_kv,
            FLAGS=MaskFlags(self.left is not None, self.right is not None, self.intervals),
            num_warps=1,
        )  # fmt: skip
        return [Result("tiles", *(x.double() for x in (found, exact, exact)))]

    @property
    def blocks(self) -> int:
        return -(-self.queries // self.rows)

    @cached_property
    def bounds(self) -> Tensor | None:
        """(queries, intervals, 2): rows of a block see much the same, tiles begin and end with
        them, or nearly so; some see nothing, or not two intervals."""
        if not self.intervals:
            return None
        g = torch.Generator().manual_seed(self.intervals)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=g)

        ends, tiles = 2 * self.intervals, self.keys // self.block_kv + 2
        of_block = draw(0, tiles, self.blocks, 1, ends).sort(-1).values * self.block_kv
        of_block = of_block + draw(-1, 2, self.blocks, 1, ends)
        same = draw(0, 3, self.blocks, 1, 1) == 0
        of_row = torch.where(same, 0, draw(-1, 2, self.blocks, self.rows, ends))
        wild = draw(0, 8, self.blocks, self.rows, 1) == 0
        of_row = torch.where(wild, draw(-90, 90, self.blocks, self.rows, ends), of_row)
        bounds = (of_block + of_row).clamp(0, self.keys).sort(-1).values
        bounds = bounds.flatten(0, 1)[: self.queries].unflatten(-1, (self.intervals, 2))
        # What is empty lies before all keys or behind them.
        block = torch.arange(self.queries)[:, None] // self.rows
        none = torch.where(draw(0, 2, self.blocks) == 0, 0, self.keys)[block]
        nobody = block % 8 == 3
        empty = nobody | (draw(0, 8, self.queries, self.intervals) == 0)
        empty = empty | (bounds[..., 0] >= bounds[..., 1])
        bounds = torch.where(empty[..., None], none[..., None], bounds)
        order = empty.int().argsort(dim=1, stable=True)[..., None].expand_as(bounds)
        return bounds.gather(1, order).int()

    @cached_property
    def exact(self) -> Tensor:
        return torch.tensor([self.numbers(block) for block in range(self.blocks)])

    def of_rows(self, block: int) -> list[list[tuple[int, int]]]:
        """By interval and row. A window goes on for rows beyond the end."""
        first = block * self.rows
        if self.bounds is not None:
            of_intervals = self.bounds[first : first + self.rows].transpose(0, 1).tolist()
            return [[(lo, hi) for lo, hi in pairs] for pairs in of_intervals]
        position = first + self.keys - self.queries
        every = self.queries + self.keys  # keys before or after any row
        left, right = (every if x is None else x for x in (self.left, self.right))
        at = range(position, position + self.rows)
        return [[(max(p - left, 0), min(p + right + 1, self.keys)) for p in at]]

    def numbers(self, block: int) -> list[int]:
        """One past the last key that any row sees, but for a part −1; how many tiles there are;
        then they, from the last one down, doubled and one more where a mask is needed; then −1."""
        end, clear_keys = 0, range(0)
        taken: set[int] = set()
        for pairs in self.of_rows(block):
            ends = [pair for pair in pairs if pair[0] < pair[1]]
            if ends:
                low, high = min(lo for lo, _ in ends), max(hi for _, hi in ends)
                taken |= {key // self.block_kv for key in range(low, high)}
                end = max(end, high)
            common = range(max(lo for lo, _ in pairs), min(hi for _, hi in pairs))
            clear_keys = max(clear_keys, common, key=len)
        taken = taken or {(self.keys - 1) // self.block_kv}
        clear = {tile for tile in taken if self.keys_of(tile) <= set(clear_keys)}
        clear.discard(max(taken))
        order = [2 * tile + (tile not in clear) for tile in sorted(taken, reverse=True)]
        room = 2 * (-(-self.keys // self.block_kv) + 1)
        end = end if self.whole is None else -1
        return [end, len(order), *order, *[-1] * (room - len(order))]

    def keys_of(self, tile: int) -> set[int]:
        return set(range(tile * self.block_kv, (tile + 1) * self.block_kv))


def plan_kernel() -> Any:
    """Made anew for each call: what it calls may be under attack."""
    masking = importlib.import_module("anyflash.kernels.hopper.masking")
    schedule = importlib.import_module("anyflash.kernels.hopper.schedule")
    Block, Limits = schedule.Block, masking.Limits
    plan, own_tiles, nth_tile = masking.plan, masking.own_tiles, masking.nth_tile
    needs_mask = masking.needs_mask

    @gluon.jit
    def kernel(
        out, bounds, width, queries, keys, left, right, ROWS: gl.constexpr, PART: gl.constexpr,
        BLOCK_KV: gl.constexpr, FLAGS: gl.constexpr,
    ):  # fmt: skip
        zero = queries * 0
        row = gl.program_id(0) * PART
        block = Block(zero, zero, row // ROWS * ROWS, queries, keys, zero, zero)
        limits = Limits(left, right, bounds, zero, zero)
        tiles, end = plan(block, limits, ROWS, BLOCK_KV, FLAGS)
        begin = 0
        if PART != ROWS:
            tiles, begin = own_tiles(tiles, block, row, limits, PART, BLOCK_KV, FLAGS)
            end = -1
        out += gl.program_id(0) * width
        gl.store(out, end)
        gl.store(out + 1, tiles.count - begin)
        for j in range(begin, tiles.count):
            masked = needs_mask(j, tiles, FLAGS)
            gl.store(out + 2 + j - begin, 2 * nth_tile(j, tiles, FLAGS) + masked.to(gl.int32))

    return kernel


@dataclass(frozen=True)
class Order:
    """In which order blocks are taken: all heads do the later half of their blocks, in sections of
    heads, the last blocks first; then the later half of what is left, in sections twice as large.
    Without a causal mask they do all their blocks at once."""

    batch: int
    heads: int
    section: int
    blocks: int
    flags: MaskFlags

    def __call__(self, module: ModuleType) -> list[Result]:
        exact = torch.tensor(self.expected)
        found = torch.full_like(exact, -1, dtype=torch.int32)
        order_kernel()[(1,)](
            found, self.batch, self.heads, self.section, 128 * self.blocks - 127, len(exact),
            FLAGS=self.flags, num_warps=1,
        )  # fmt: skip
        return [Result("blocks", *(x.double() for x in (found, exact, exact)))]

    @property
    def expected(self) -> list[tuple[int, int, int]]:
        """(batch element, head, first row) of each block."""
        found = []
        heads = [(b, h) for b in range(self.batch) for h in range(self.heads)]
        end, section = self.blocks, self.section
        while end > 0:
            begin = end // 2 if self.flags.RIGHT and not self.flags.LEFT else 0
            for first in range(0, len(heads), section):
                for block in reversed(range(begin, end)):
                    found += [(b, h, 128 * block) for b, h in heads[first : first + section]]
            end, section = begin, 2 * section
        return found


def order_kernel() -> Any:
    """Made anew for each call: what it calls may be under attack."""
    schedule = importlib.import_module("anyflash.kernels.hopper.schedule")
    Schedule, dense_block = schedule.Schedule, schedule.dense_block

    @gluon.jit
    def kernel(out, batch, heads, section, queries, total, FLAGS: gl.constexpr):
        places = Schedule(batch, heads, 1, section, queries, queries)
        for number in range(total):
            block = dense_block(number, places, 128, FLAGS)
            gl.store(out + 3 * number, block.batch)
            gl.store(out + 3 * number + 1, block.head)
            gl.store(out + 3 * number + 2, block.row)

    return kernel
