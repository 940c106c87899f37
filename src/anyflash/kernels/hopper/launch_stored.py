"""From tensors to launches: what `stored` has besides a walk from the keys.

A call is done in parts, one behind the other, as many heads at a time as the scratch memory has
room for (`algorithms.shares`). Each part is a call of its own, on slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash.kernels.hopper import launch
from anyflash.kernels.hopper.algorithms import (
    Call,
    Options,
    bytes_of,
    is_triangle,
    layout_of,
    shares,
)
from anyflash.kernels.hopper.launch import Heads, Lengths
from anyflash.kernels.hopper.launcher import Kernel
from anyflash.kernels.hopper.operands import (
    KEPT,
    describe,
    describe_ragged,
    describe_tiles,
    granules_of,
)
from anyflash.kernels.hopper.stored import BLOCK, ROWS, Flags, Layout, stored_kernel
from anyflash.kernels.hopper.tiles_backward import Stored

STORED = Kernel(stored_kernel)


class Part(NamedTuple):
    """Some batch elements, or some key heads of one of them with the query heads that are theirs,
    as a call of its own."""

    call: Call
    scores: Tensor  # dS^T
    layout: Layout
    batch: slice
    heads: slice  # of queries
    heads_kv: slice

    def of_queries(self, *tensors: Tensor) -> Iterator[Tensor]:
        """What it has of tensors with the heads of queries."""
        return (self._of(x, self.heads) for x in tensors)

    def of_keys(self, *tensors: Tensor) -> Iterator[Tensor]:
        return (self._of(x, self.heads_kv) for x in tensors)

    def _of(self, x: Tensor, heads: slice) -> Tensor:
        return x[:, heads] if self.call.lengths.packed else x[self.batch, heads]


def parts(call: Call, dtype: torch.dtype) -> Iterator[Part]:
    """In order; all use the same memory for dS^T."""
    lengths, o, heads_kv = call.lengths, call.options, call.heads_kv
    elements, most = shares(lengths, call.heads, heads_kv, o)
    size = elements * bytes_of(lengths, o, most * (call.heads // heads_kv))
    shape = (size // (2 * ROWS.value), ROWS.value)
    scores = torch.empty(shape, dtype=dtype, device=call.statistics.device)
    for of_batch in _even(1 if lengths.packed else lengths.batch, elements):
        for of_heads in _even(heads_kv, most):
            yield _part(call, scores, of_batch, of_heads)


def _even(count: int, most: int) -> Iterator[slice]:
    """In as few parts as there can be, of which none is much larger than the others."""
    n = -(-count // most)
    return (slice(i * count // n, (i + 1) * count // n) for i in range(n))


def _part(call: Call, scores: Tensor, batch: slice, heads_kv: slice) -> Part:
    lengths, o, group = call.lengths, call.options, call.heads // call.heads_kv
    heads = slice(heads_kv.start * group, heads_kv.stop * group)
    elements = batch.stop - batch.start
    of_heads = call.statistics.unflatten(
        0, (1 if lengths.packed else lengths.batch, call.heads, -1)
    )
    o = o._replace(part=(batch.start, heads.start))
    if not lengths.packed:
        lengths = lengths._replace(batch=elements)
        bounds, tiles = (_of_elements(x, batch) for x in (o.bounds, o.query_tiles))
        o = o._replace(bounds=bounds, query_tiles=tiles)
    own = call._replace(
        lengths=lengths, options=o, statistics=of_heads[batch, heads].flatten(0, 2),
        ends=call.ends if lengths.packed or call.ends is None else call.ends[batch],
        heads=heads.stop - heads.start, heads_kv=heads_kv.stop - heads_kv.start,
    )  # fmt: skip
    layout = layout_of(lengths, own.heads, o.left, o.right)
    return Part(own, scores, layout, batch, heads, heads_kv)


def _of_elements(x: Tensor | None, batch: slice) -> Tensor | None:
    """Of a mask: (1 or B, …)."""
    return x if x is None or x.shape[0] == 1 else x[batch]


class Plan(NamedTuple):
    """What follows from a call's sizes and options."""

    section: int
    total: int
    programs: int
    flags: Flags
    left: int
    right: int
    constants: dict[str, Any]


@lru_cache(maxsize=KEPT)
def _plan(lengths: Lengths, heads: Heads, o: Options, stored: Stored) -> Plan:
    """`o` is without tensors, but for how many `bounds` there are of a row."""
    rows = ROWS.value * stored.consumers
    total = launch.blocks_of(lengths, lengths.queries, rows) * heads.heads
    programs = launch.programs_of(o.programs, heads.device)
    flags = Flags(
        LEFT=o.left is not None, RIGHT=o.right is not None, INTERVALS=o.bounds or 0,
        MAP=o.tile_map is not None, PACKED=lengths.packed, DYNAMIC=total > programs,
        TRIANGLE=is_triangle(lengths, o.left, o.right), PANELS=stored.keys.qk.boxes,
    )  # fmt: skip
    left, right = launch.within(lengths, o.left, o.right)
    _, consumer, producer = stored.registers
    constants = {
        "CONSUMERS": stored.consumers, "SLOTS": stored.slots, "FLAGS": flags,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
    }  # fmt: skip
    group = heads.heads // heads.heads_kv
    together = launch.SECTION_BYTES // (2 * max(lengths.longest_k, 1) * heads.columns)
    all_heads = heads.heads * (1 if lengths.packed else lengths.batch)
    section = o.section or min(max(1, together) * group, all_heads)
    return Plan(section, total, min(programs, total), flags, left, right, constants)


def query_gradient(part: Part, stored: Stored, k: Tensor, dq: Tensor) -> None:
    """dq = dS K · scale."""
    call = part.call
    lengths, bounds, starts = call.lengths, call.options.bounds, call.starts
    heads = Heads(call.heads, call.heads_kv, k.shape[-1], 0, k.device)
    o = call.options._replace(
        bounds=None if bounds is None else bounds.shape[2], query_tiles=None, seed=None, sink=None,
        tile_map=call.options.tile_map is not None or None, part=(0, 0),
    )  # fmt: skip
    plan, width = _plan(lengths, heads, o, stored), stored.keys.qk.width
    rows, asked = ROWS.value * stored.consumers, call.options
    packing = None
    if starts is not None:
        packing = launch.packing_of(starts, rows, False)
    tile_map, *map_numbers = granules_of(asked.tile_map, rows, BLOCK.value, asked.part)
    counter = call.statistics  # where FLAGS do not ask for a tensor, any serves
    if plan.flags.DYNAMIC:
        counter = torch.zeros(1, dtype=torch.int32, device=k.device)
    operand, k_rows = describe(k, BLOCK.value, width), 0
    if bounds is not None and starts is None:  # of K, wherever it is
        operand, k_rows = describe_ragged(k, BLOCK.value, width)
    args = (
        describe_tiles(part.scores, BLOCK.value), operand, describe(dq, ROWS.value, width),
        call.statistics if bounds is None else bounds, counter, packing, tile_map,
        float(o.scale),
        lengths.queries, lengths.keys, plan.left, plan.right,
        0 if bounds is None or bounds.shape[0] == 1 else lengths.queries, k_rows,
        *map_numbers, *part.layout[1:],
        lengths.batch, call.heads, call.heads // call.heads_kv, plan.section, plan.total,
    )  # fmt: skip
    STORED(plan.programs, args, plan.constants, maxnreg=stored.registers[0])
