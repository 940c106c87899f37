"""dQ of the backward pass that is called stored: dS K, of a dS^T that lies in memory.

The walk from the keys (backward.py) puts dS^T there, 16 bits each, tile by tile (`keep`); this
kernel reads it and multiplies. Both are deterministic, and dS is made once: five products.

dS^T lies in tiles of TILE_KEYS × 64, what a block of keys and a tile of statistics have in common,
one behind the other: (tiles · TILE_KEYS, 64). Each block of keys has a row of them, as long as the
mask asks for (`tile_of`). Only tiles in which somebody sees something are sure to have been
written: others are not read, but come from beyond the edge of the tensor, where TMA finds zeros.

Source: Metal FlashAttention's README, which stores dS instead of adding dQ up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
)

from anyflash.kernels.hopper.compat import async_load, async_store, barrier
from anyflash.kernels.hopper.masking import (
    NOTHING,
    Block,
    Limits,
    Map,
    Tiles,
    mapped_tile,
    mapped_tiles,
    nth_tile,
    numbers_of_granules,
    plan,
    sight,
    turned,
    with_row,
)
from anyflash.kernels.hopper.pipeline import channel, matrix, place
from anyflash.kernels.hopper.products import finish
from anyflash.kernels.hopper.schedule import (
    END,
    Schedule,
    block_numbers,
    corner,
    next_number,
    number_of_blocks,
    numbered_block,
    ragged,
    read_block,
    read_tiles,
    tickets,
    tile_numbers,
)

ROWS = gl.constexpr(64)  # queries of a consumer, and of a tile of dS^T
TILE_KEYS = gl.constexpr(128)  # of a tile as it is written: of a block in the walk from the keys
BLOCK = gl.constexpr(64)  # keys of a tile as it is read
BEYOND = gl.constexpr(1 << 30)  # a row that no dS^T has


class Flags(NamedTuple):
    LEFT: Any
    RIGHT: Any
    INTERVALS: Any
    MAP: Any
    PACKED: Any
    DYNAMIC: Any
    TRIANGLE: Any  # each row of tiles is shorter by two than the one before
    PANELS: Any  # boxes that make up a tile of K


class Layout(NamedTuple):
    """How the tiles of dS^T are numbered."""

    heads: Any  # of queries
    of_head: Any  # tiles of a head
    row: Any  # tiles of a block of keys; in a triangle those of the first one
    first: Any  # a row begins with the tile of the query whose number is this less than its key's


@gluon.jit
def tile_of(block, head, key, query, layout, FLAGS: gl.constexpr):
    """The number of a tile, for a block of queries, or one that is `turned`."""
    row = key // TILE_KEYS
    column = query // ROWS
    batch = block.batch
    column -= gl.maximum(row * TILE_KEYS - layout.first, 0) // ROWS
    # Of keys that nobody sees a tile is written all the same: it stays within their row.
    column = gl.minimum(gl.maximum(column, 0), layout.row - 1)
    if FLAGS.PACKED:  # no tile belongs to two sequences, wherever they begin
        row += block.k_start // TILE_KEYS + block.batch
        batch = 0
    before = row * layout.row
    if FLAGS.TRIANGLE:
        before -= row * (row - 1)
    return (batch * layout.heads + head) * layout.of_head + before + column


@gluon.jit
def keep(ds, tiles, slot, desc, at, WHO: gl.constexpr, CONSUMERS: gl.constexpr,
         SLOTS: gl.constexpr):  # fmt: skip
    """A consumer's part of dS^T into memory, by way of its place in a slot, which the one before
    has left once no more than SLOTS − 1 are on their way."""
    part = tiles.index(slot * CONSUMERS + WHO)
    tma.store_wait(SLOTS - 1)
    barrier()  # only threads that have issued one have waited
    part.store(ds)
    fence_async_shared()  # TMA reads it, through another proxy
    barrier()  # all threads have stored what some of them hand to TMA
    async_store(desc, at, part.reshape(desc.block_type.shape))


@gluon.jit
def sees(block, row, key, limits, FLAGS: gl.constexpr):
    """Whether one of ROWS queries sees one of TILE_KEYS keys: the walk from the keys met them."""
    key = key // TILE_KEYS * TILE_KEYS
    if FLAGS.INTERVALS > 0:
        keys = with_row(turned(block), key)
        return sight(keys, row // ROWS, limits, TILE_KEYS, ROWS, FLAGS) > 0
    else:
        seen = (row < block.queries) & (key < block.keys)
        first = row + block.keys - block.queries
        last = gl.minimum(row + ROWS, block.queries) - 1 + block.keys - block.queries
        if FLAGS.RIGHT:
            seen = seen & (key <= last + limits.right)
        if FLAGS.LEFT:
            seen = seen & (gl.minimum(key + TILE_KEYS, block.keys) > first - limits.left)
        return seen


@gluon.jit
def read_scores(work, sources, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    """The producer: tiles of dS^T and K."""
    descs, channels, draw, limits, tile_map = work
    ds_desc, k_desc = descs
    ds, k = channels
    schedule, packing, counter, total, k_rows, layout = sources
    SLOTS: gl.constexpr = k.full.type.shape[0]
    total = number_of_blocks(total, schedule, packing, FLAGS)
    turn = 0
    step = 0
    number = gl.program_id(0)
    while number < total:
        block = numbered_block(number, total, schedule, packing, CONSUMERS * ROWS, FLAGS)
        if FLAGS.MAP:
            tiles, columns = mapped_tiles(block, block.head, tile_map, CONSUMERS * ROWS, BLOCK)
        else:
            tiles, seen = plan(block, limits, CONSUMERS * ROWS, BLOCK, FLAGS)
        draw.give(block_numbers(block, FLAGS) + tile_numbers(tiles, FLAGS), turn)
        head = block.head // schedule.group
        for j in range(tiles.count):
            if FLAGS.MAP:
                tile = mapped_tile(columns, j)
                told = numbers_of_granules(tile, block, block.head, tile_map, CONSUMERS, 1)
            else:
                tile = nth_tile(j, tiles, FLAGS)
            key = tile * BLOCK
            slot, phase = place(step, SLOTS)
            k.acquire(slot, phase)
            k_at = corner(block, head, key, FLAGS.PACKED, False)
            if FLAGS.INTERVALS > 0:  # padding behind all that is seen: times 0, NaN is NaN
                start = block.k_start
                if not FLAGS.PACKED:
                    start = block.batch * k_rows
                k_at = ragged(start, seen, head, key)
            k.commit(k_desc, k_at, slot, CONSUMERS * ds_desc.block_type.nbytes)
            for w in gl.static_range(CONSUMERS):
                query = block.row + w * ROWS
                row = tile_of(block, block.head, key, query, layout, FLAGS) * TILE_KEYS
                row += key % TILE_KEYS
                if FLAGS.MAP:
                    row = gl.where(told[w] != NOTHING, row, BEYOND)
                else:
                    row = gl.where(sees(block, query, key, limits, FLAGS), row, BEYOND)
                part = ds.index(slot * CONSUMERS + w)
                async_load(ds_desc, (row, 0), k.full.index(slot), part)
            step += 1
        number = next_number(total, counter, FLAGS)
        turn += 1
    end = Block(0, 0, END, 0, 0, 0, 0)
    draw.give(block_numbers(end, FLAGS) + tile_numbers(Tiles(0, 0, 0, 0, 0, 0), FLAGS), turn)


@gluon.jit
def multiply_scores(work, results, WHO: gl.constexpr, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    """A consumer: dQ of 64 queries."""
    _, channels, draw, _, _ = work
    ds, k = channels
    dq_desc, outs, scale, lengths = results
    SLOTS: gl.constexpr = k.full.type.shape[0]
    WIDTH: gl.constexpr = k.tiles.type.shape[len(k.tiles.type.shape) - 1]
    PANELS: gl.constexpr = FLAGS.PANELS
    COUNT: gl.constexpr = (7 if FLAGS.PACKED else 3) + (6 if FLAGS.INTERVALS > 1 else 4)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    queries, keys = lengths
    turn = 0
    step = 0
    numbers = draw.take(turn, COUNT)
    block = read_block(numbers, queries, keys, FLAGS)
    while block.row != END:
        dq = ()
        for _n in gl.static_range(PANELS):
            dq = dq + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)  # noqa: RUF005
        tiles = read_tiles(numbers, FLAGS)
        for _j in range(tiles.count):
            slot, phase = place(step, SLOTS)
            k.wait(slot, phase)  # for K and dS
            of_keys = ds.index(slot * CONSUMERS + WHO).permute((1, 0))
            started = ()
            for n in gl.static_range(PANELS):
                started = started + (  # noqa: RUF005
                    warpgroup_mma(of_keys, k.panel(slot, n), dq[n], is_async=True),
                )
            dq = finish(started)
            k.release(slot)
            step += 1
        tma.store_wait(0)  # my results of the block before have left their places
        barrier()  # only threads that have issued one have waited
        for n in gl.static_range(PANELS):
            part = matrix(outs.index(WHO * PANELS + n))
            part.store((dq[n] * scale).to(dq_desc.dtype))
        fence_async_shared()  # TMA reads it, through another proxy
        barrier()  # all threads have stored what some of them hand to TMA
        at = corner(block, block.head, block.row + WHO * ROWS, FLAGS.PACKED, True)
        for n in gl.static_range(PANELS):
            async_store(dq_desc, at + (n * WIDTH,), outs.index(WHO * PANELS + n))  # noqa: RUF005
        turn += 1
        numbers = draw.take(turn, COUNT)
        block = read_block(numbers, queries, keys, FLAGS)
    tma.store_wait(0)  # shared memory is gone when the program ends


RUNTIME_NUMBERS = [
    *("queries", "keys", "left", "right", "bounds_rows", "k_rows", "map_first", "map_batch"),
    *("map_head", "head_tiles", "row_tiles"),
    *("row_first", "batch", "heads", "group", "section", "total"),
]


@gluon.jit(
    do_not_specialize=RUNTIME_NUMBERS, do_not_specialize_on_alignment=["bounds_ptr"]
)  # fmt: skip
def stored_kernel(
    ds_desc, k_desc, dq_desc, bounds_ptr, counter, packing, tile_map, scale,
    queries, keys, left, right, bounds_rows, k_rows, map_first, map_batch, map_head, head_tiles,
    row_tiles, row_first, batch, heads, group, section, total,
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of CONSUMERS · 64 queries by each program and block; descriptors over dS^T, K and dQ."""
    k = channel(k_desc, SLOTS, CONSUMERS, FLAGS.PANELS)
    ds_shape: gl.constexpr = [SLOTS * CONSUMERS] + ds_desc.block_type.shape  # noqa: RUF005
    ds = gl.allocate_shared_memory(ds_desc.dtype, ds_shape, ds_desc.layout)
    shape: gl.constexpr = [CONSUMERS * FLAGS.PANELS] + dq_desc.block_type.shape  # noqa: RUF005
    outs = gl.allocate_shared_memory(dq_desc.dtype, shape, dq_desc.layout)
    draw = tickets(CONSUMERS)
    fence_async_shared()  # TMA will signal the barriers that ordinary stores have initialised
    limits = Limits(left, right, bounds_ptr, bounds_rows, 0)
    if FLAGS.MAP:
        tile_map = Map(*tile_map, map_first, map_batch, map_head)
    work = ((ds_desc, k_desc), (ds, k), draw, limits, tile_map)
    schedule = Schedule(batch, heads, group, section, queries, keys)
    layout = Layout(heads, head_tiles, row_tiles, row_first)
    sources = (schedule, packing, counter, total, k_rows, layout)
    results = (dq_desc, outs, scale, (queries, keys))
    # fmt: off
    if CONSUMERS == 4:
        gl.warp_specialize([
            (multiply_scores, (work, results, 0, CONSUMERS, FLAGS)),
            (multiply_scores, (work, results, 1, CONSUMERS, FLAGS)),
            (multiply_scores, (work, results, 2, CONSUMERS, FLAGS)),
            (multiply_scores, (work, results, 3, CONSUMERS, FLAGS)),
            (read_scores, (work, sources, CONSUMERS, FLAGS)),
        ], [4, 4, 4, 1], [
            CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS
        ])
    else:
        gl.warp_specialize([
            (multiply_scores, (work, results, 0, CONSUMERS, FLAGS)),
            (multiply_scores, (work, results, 1, CONSUMERS, FLAGS)),
            (read_scores, (work, sources, CONSUMERS, FLAGS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on
