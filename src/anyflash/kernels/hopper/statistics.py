"""What backward has to know of each query row, made before it: lse in powers of two, and delta.

    lse = log2 e · lse, +inf for a row that sees nothing: its weights are then 0
    delta = rowsum(dO ∘ O) − dlse, 0 for such a row

They lie in tiles of 64 rows as (heads, tiles, 2, 64), float32, so that one copy fetches both of a
tile: of B · Hq heads and ⌈Sq / 64⌉ tiles, or, packed, of Hq heads and total // 64 + n tiles, where
sequence n has its own from `first_tile` on. Rows beyond a sequence have lse +inf and delta 0: what
a tile computes of them is 0, whatever the neighbour's numbers are.

Source: FlashAttention-2 (Dao, 2023), algorithm 2, line 4; dlse, which it has not, is what the
derivative of lse adds to each score, P · dlse.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anyflash.kernels.hopper.compat import async_load
from anyflash.kernels.hopper.pipeline import matrix
from anyflash.kernels.hopper.schedule import (
    Schedule,
    corner,
    number_of_blocks,
    numbered_block,
)
from anyflash.kernels.hopper.softmax import LOG2E

STATISTICS = gl.constexpr(64)  # rows of a tile


class Flags(NamedTuple):
    LEFT: Any  # blocks are in no order that would pay
    RIGHT: Any
    PACKED: Any
    DLSE: Any


@gluon.jit
def first_tile(start, number, PACKED: gl.constexpr):
    """Where the tiles of a sequence begin among those of a head. There is room for each sequence's
    last tile to reach beyond its rows."""
    return start // STATISTICS + number if PACKED else 0


@gluon.jit(do_not_specialize=["queries", "batch", "heads", "tiles"])
def statistics_kernel(
    out_desc, dout_desc, lse_ptr, dlse_ptr, statistics_ptr, packing, queries, batch, heads, tiles,
    FLAGS: gl.constexpr,
):  # fmt: skip
    """A program has 64 rows of one head."""
    WIDTH: gl.constexpr = out_desc.block_type.shape[len(out_desc.block_type.shape) - 1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0]
    )
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    shape: gl.constexpr = out_desc.block_type.shape
    out = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    dout = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()  # TMA will signal the barrier that an ordinary store has initialised
    number = gl.program_id(0)
    schedule = Schedule(batch, heads, 1, 1, queries, 0)
    rows_of_head = queries
    total = number_of_blocks(gl.num_programs(0), schedule, packing, FLAGS)
    if number < total:  # of a packed batch there are programs to spare
        block = numbered_block(number, total, schedule, packing, STATISTICS, FLAGS, 4)
        head = block.head if FLAGS.PACKED else block.batch * heads + block.head
        mbarrier.expect(full, 2 * out_desc.block_type.nbytes)
        at = corner(block, block.head, block.row, FLAGS.PACKED, True)
        async_load(out_desc, at + (0,), full, out)  # noqa: RUF005
        async_load(dout_desc, at + (0,), full, dout)  # noqa: RUF005
        mine = gl.arange(0, STATISTICS, layout=of_rows)
        inside = block.row + mine < block.queries
        at_rows = head.to(gl.int64) * rows_of_head + block.q_start + block.row + mine
        lse = gl.load(lse_ptr + at_rows, mask=inside, other=-float("inf"))
        lse = gl.where(lse == -float("inf"), float("inf"), lse * LOG2E)
        mbarrier.wait(full, 0)
        x = matrix(out).load(layout).to(gl.float32)
        y = matrix(dout).load(layout).to(gl.float32)
        delta = gl.sum(x * y, 1)
        if FLAGS.DLSE:
            delta -= gl.load(dlse_ptr + at_rows, mask=inside, other=0.0)
        first = first_tile(block.q_start, block.batch, FLAGS.PACKED)
        tile = head.to(gl.int64) * tiles + first + block.row // STATISTICS
        pointer = statistics_ptr + tile * (2 * STATISTICS) + mine
        gl.store(pointer, lse)
        # Of a row that sees nothing, dO and dlse are of no account, whatever they are.
        gl.store(pointer + STATISTICS, gl.where(lse == float("inf"), 0.0, delta))
