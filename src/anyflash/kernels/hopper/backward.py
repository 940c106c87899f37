"""Backward of attention on Hopper: one walk, which is taken from either side.

A program has blocks of 64 · CONSUMERS rows of its own side, and for each of them walks over the
tiles of BLOCK rows of the other side that they see, those that need a mask first. Seen from the
queries it makes dQ; seen from the keys, with KEYS, S, dP and dS are transposed, and it makes dK
(FIRST) and dV (SECOND), one of them or both:

    side     X, X'     Y, Y'     A      A'
    queries  Q, dO     K, V      dQ
    keys     K, V      Q, dO     dK     dV

    A, A' = 0, 0
    for each tile:
        S  = X Y^T                         [64, BLOCK] in each consumer
        dP = X' Y'^T                       under the exponentials
        P  = 2^(S · scale · log2 e − lse)  0 where the mask forbids
        A' += P Y'                         [64, Dv]
        dS = P ∘ (dP − delta)
        A  += dS Y                         [64, D]
    A · scale, A'

with delta = rowsum(dO ∘ O) − dlse and lse in powers of two, both made by `statistics`. A walk from
the queries and one from the keys are `split`, the backward in seven products: nothing is added up
in memory, so that it is deterministic. Under DS the walk from the keys gives dS^T away as well, so
that five products suffice: to whoever adds dQ up in memory, which is `fused`, or into memory, where
another kernel finds it, which is `stored`; see query_gradient.py and stored.py. S of a tile is
started behind dS of the one before, so that exponentials need not wait for it.

One warp, the producer, starts all copies from global memory and says of each tile where it lies,
whether it needs a mask and whether it is the last one; each consumer is a warpgroup with 64 rows.
The heads of queries that have one key head are walked over one after the other, and their dK and dV
are added up in registers.

Block, Limits and Tiles are those of forward: from the keys, "queries" are its own side, the keys,
and "keys" are the queries. Where they are not multiples, rows beyond a sequence are zeros in shared
memory; results of rows beyond it are not written.

Shapes: q, dq (B, Hq, Sq, D), k, dk (B, Hkv, Sk, D), v, dv (B, Hkv, Sk, Dv), do (B, Hq, Sq, Dv), in
strides that TMA takes, through descriptors of four axes; packed (total, H, ·), through ragged ones.
Columns are one box of TMA, or PANELS of them side by side. statistics: see there.

Source: FlashAttention-2 (Dao, 2023, algorithm 2), and for the two walks Metal FlashAttention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from anyflash.kernels.hopper.compat import async_load, async_store, barrier
from anyflash.kernels.hopper.dropout import Dropout, drop, drop_turned
from anyflash.kernels.hopper.masking import (
    ALL,
    Block,
    Limits,
    Map,
    Ranges,
    Tiles,
    granules,
    mapped_tile,
    mapped_tiles,
    mask_bits,
    mask_columns,
    mask_scores,
    needs_mask,
    nth_tile,
    numbers_of_granules,
    plan,
    query_range,
    sight,
    turned,
)
from anyflash.kernels.hopper.pipeline import (
    channel,
    get,
    matrix,
    place,
    put,
    ring,
    room_for_numbers,
)
from anyflash.kernels.hopper.products import accumulate, finish, multiply
from anyflash.kernels.hopper.query_gradient import (
    NOTE,
    PLACES,
    Adding,
    add,
    adder,
    give,
    gradient_of_queries,
    where_queries_are,
)
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
    tickets,
)
from anyflash.kernels.hopper.softmax import logits
from anyflash.kernels.hopper.statistics import STATISTICS, first_tile
from anyflash.kernels.hopper.stored import TILE_KEYS, Layout, keep, tile_of

ROWS = gl.constexpr(64)  # of one consumer: as many as one wgmma has


class Descriptors(NamedTuple):
    """TMA descriptors over (B, H, S, D); the boxes are [1, 1, rows, columns]."""

    own: Any  # X: q or k, rows of one consumer
    own_2: Any  # X': do or v
    other: Any  # Y: k or q, BLOCK rows
    other_2: Any  # Y': v or do
    out: Any  # A: dq or dk, rows of one consumer
    out_2: Any  # A': dv
    statistics: Any  # of queries, (heads · tiles, 2 · 64), the box is one of them


class Channels(NamedTuple):
    own: Any
    own_2: Any
    other: Any
    other_2: Any
    statistics: Any  # in shared memory: of the queries in `other`'s slots, lse and delta of each
    ds: Any  # only with DS: dS^T of all consumers


class Numbers(NamedTuple):
    """What makes weights of scores, as in forward."""

    scale_log2: Any
    scale: Any
    softcap: Any
    kept: Any


class Apart(NamedTuple):
    """Rows from one batch element to the next, under INTERVALS but not of a packed batch."""

    k: Any
    v: Any


class Heads(NamedTuple):
    """How statistics are found: their row is a head of queries, of all batch elements."""

    heads: Any  # of queries
    tiles: Any  # of statistics in a head


class Flags(NamedTuple):
    """Compile-time constants: what a problem asks for, and how it is done."""

    KEYS: Any  # seen from the keys
    FIRST: Any  # A is asked for
    SECOND: Any  # A' is asked for
    LEFT: Any
    RIGHT: Any
    INTERVALS: Any
    MAP: Any
    SCALED: Any
    SOFTCAP: Any
    DROPOUT: Any
    PACKED: Any
    DYNAMIC: Any  # programs draw blocks from the counter; else each has one at most
    PANELS: Any  # boxes that make up a tile of Q or K, and of V or dO
    SHARED: Any  # results take the place of X and X' in shared memory
    REGISTERS: Any  # X and X' are multiplied from registers
    EARLY: Any  # S of the next tile is started before dP is waited for
    TRIANGLE: Any  # of dS^T that is stored: see stored.py
    DS: Any  # dS K is added to dQ by the "consumers" or a "role", or dS is "stored"; else ""


@gluon.jit
def head_of_statistics(block, head, heads, PACKED: gl.constexpr):
    """Of a head of queries: its number among all batch elements, but for packed ones."""
    return head if PACKED else block.batch * heads.heads + head


@gluon.jit
def candidates(block, limits, ranges, BLOCK_OWN: gl.constexpr, BLOCK: gl.constexpr,
               FLAGS: gl.constexpr):  # fmt: skip
    """Tiles that a block may need: the first, and how many; from the queries, and under windows,
    the plan that says which; one past the last key that any of the block's queries see, or, from
    the keys, that any query sees."""
    if FLAGS.MAP:  # which are another for each head
        return 0, 0, Tiles(0, 0, 0, 0, 0, 0), block.keys
    elif FLAGS.KEYS and FLAGS.INTERVALS > 0:
        first, count = query_range(block, ranges, BLOCK_OWN, BLOCK)
        seen = gl.minimum(gl.load(ranges.ends + block.batch), block.queries)
        return first, count, Tiles(0, 0, 0, 0, 0, 0), seen
    else:
        tiles, seen = plan(block, limits, BLOCK_OWN, BLOCK, FLAGS)
        return 0, tiles.count, tiles, seen


@gluon.jit
def seek(j, first, count, tiles, block, limits, BLOCK_OWN: gl.constexpr, BLOCK: gl.constexpr,
         FLAGS: gl.constexpr):  # fmt: skip
    """The next candidate from the j-th on that sees the block, or `count`; and, of intervals seen
    from the keys, whether it needs a mask, of which others are asked when they are loaded: one
    register less from tile to tile, of the producer's 24."""
    if FLAGS.KEYS and FLAGS.INTERVALS > 0:
        seen = sight(block, first + j, limits, BLOCK_OWN, BLOCK, FLAGS)
        while (j < count) & (seen == 0):
            j += 1
            seen = sight(block, first + j, limits, BLOCK_OWN, BLOCK, FLAGS)
        return j, (seen < 2).to(gl.int32)
    else:
        return j, gl.to_tensor(0)


@gluon.jit
def seen_only(start, block, apart, seen, head, row, FLAGS: gl.constexpr):
    """Where K or V are, with zeros for what lies behind all that is seen, padding for one: times a
    weight of 0, NaN is NaN."""
    if not FLAGS.PACKED:
        start = block.batch * apart
    return ragged(start, seen, head, row)


@gluon.jit
def producer(work, sources, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    descs, channels, notes, draw, limits, heads, tile_map = work
    own, own_2, other, other_2, statistics, _ = channels
    schedule, packing, counter, total, ranges, apart = sources
    BLOCK_OWN: gl.constexpr = CONSUMERS * ROWS
    SLOTS: gl.constexpr = other.full.type.shape[0]
    SLOTS_2: gl.constexpr = other_2.full.type.shape[0]
    RANK: gl.constexpr = len(other.tiles.type.shape)
    BLOCK: gl.constexpr = other.tiles.type.shape[RANK - 2]
    SIZE: gl.constexpr = NOTE + (CONSUMERS if FLAGS.MAP else 0)
    total = number_of_blocks(total, schedule, packing, FLAGS)
    turn = 0
    step = 0
    number = gl.program_id(0)
    while number < total:
        block = numbered_block(number, total, schedule, packing, BLOCK_OWN, FLAGS)
        draw.give(block_numbers(block, FLAGS), turn)
        first, count, tiles, seen = candidates(block, limits, ranges, BLOCK_OWN, BLOCK, FLAGS)
        # Of the other side: all heads that have this key head, or the key head that this one has.
        head = block.head * schedule.group if FLAGS.KEYS else block.head // schedule.group
        end = head + schedule.group if FLAGS.KEYS else head + 1
        fresh = 1
        while head < end:
            queries_head = head if FLAGS.KEYS else block.head
            if FLAGS.MAP:
                tiles, columns = mapped_tiles(block, queries_head, tile_map, BLOCK_OWN, BLOCK)
                count = tiles.count
            j, masked = seek(
                gl.to_tensor(0), first, count, tiles, block, limits, BLOCK_OWN, BLOCK, FLAGS
            )
            # If none does, one all the same: its mask hides it, and no path of its own is needed.
            j = gl.where(j == count, 0, j)
            while j < count:
                after, its = seek(
                    j + 1, first, count, tiles, block, limits, BLOCK_OWN, BLOCK, FLAGS
                )
                told = ()
                if FLAGS.MAP:
                    tile = mapped_tile(columns, j)
                    told = numbers_of_granules(tile, block, queries_head, tile_map, CONSUMERS, 1)
                    masked = (tile * BLOCK + BLOCK > block.keys).to(gl.int32)
                    for w in gl.static_range(CONSUMERS):
                        masked = gl.where(told[w] == ALL, masked, 1)
                elif FLAGS.KEYS and FLAGS.INTERVALS > 0:
                    tile = first + j
                else:
                    tile = nth_tile(j, tiles, FLAGS)
                    masked = needs_mask(j, tiles, FLAGS).to(gl.int32)
                slot, phase = place(step, SLOTS)
                slot_2, phase_2 = place(step, SLOTS_2)
                last = ((head == end - 1) & (after >= count)).to(gl.int32)
                if FLAGS.DS != "":  # keys beyond the last one must not reach dQ: see `hide`
                    masked = gl.where(block.row + BLOCK_OWN > block.queries, 1, masked)
                at = corner(block, head, tile * BLOCK, FLAGS.PACKED, False)
                at_2 = at
                if FLAGS.INTERVALS > 0 and not FLAGS.KEYS:
                    at = seen_only(block.k_start, block, apart.k, seen, head, tile * BLOCK, FLAGS)
                    at_2 = seen_only(block.k_start, block, apart.v, seen, head, tile * BLOCK, FLAGS)
                other.acquire(slot, phase)
                note = (tile * 4 + masked * 2 + last, block.batch * heads.heads + queries_head)
                put(notes, slot * SIZE, note + told)
                if FLAGS.KEYS:
                    other.commit(descs.other, at, slot, 2 * descs.statistics.block_type.nbytes)
                    row = head_of_statistics(block, head, heads, FLAGS.PACKED) * heads.tiles
                    row += first_tile(block.k_start, block.batch, FLAGS.PACKED) + tile
                    full = other.full.index(slot)
                    for n in gl.static_range(2):
                        places = statistics.index(slot * 2 + n)
                        async_load(descs.statistics, (row, n * STATISTICS), full, places)
                else:
                    other.commit(descs.other, at, slot)
                if fresh != 0:  # not sooner: the block before may still have these places
                    for w in gl.static_range(CONSUMERS):
                        row = block.row + w * ROWS
                        at_own = corner(block, block.head, row, FLAGS.PACKED, True)
                        at_own_2 = at_own
                        if FLAGS.INTERVALS > 0 and FLAGS.KEYS:
                            start = block.q_start
                            at_own = seen_only(start, block, apart.k, seen, block.head, row, FLAGS)
                            at_own_2 = seen_only(
                                start, block, apart.v, seen, block.head, row, FLAGS
                            )
                        own.fill(descs.own, at_own, w, turn & 1)
                        if FLAGS.FIRST:
                            own_2.fill(descs.own_2, at_own_2, w, turn & 1)
                fresh = 0
                other_2.fill(descs.other_2, at_2, slot_2, phase_2)
                step += 1
                j = after
                masked = its
            head += 1
        number = next_number(total, counter, FLAGS)
        turn += 1
    draw.give(block_numbers(Block(0, 0, END, 0, 0, 0, 0), FLAGS), turn)


@gluon.jit
def hide(s, tile, rows, block, limits, tile_map, notes, number, FLAGS: gl.constexpr):
    """−inf where a score of a tile does not exist. Under MAP the number of my rows' granule is
    among the notes."""
    BLOCK: gl.constexpr = s.shape[1]
    if FLAGS.DS != "":  # 2^(0 − lse) may be infinite, and times a zero row of K it is NaN in dQ
        s = gl.where(rows[:, None] < block.queries, s, -float("inf"))
    if FLAGS.MAP:
        words, _ = granules(get(notes, number, 1), tile_map, rows % ROWS)
        return mask_bits(s, words, block.keys - tile * BLOCK)
    elif FLAGS.KEYS and FLAGS.INTERVALS > 0:
        return mask_columns(s, tile * BLOCK, rows, block, limits, FLAGS)
    else:
        return mask_scores(s, tile * BLOCK, rows, block, limits, FLAGS)


@gluon.jit
def kept_of(p, head, row, tile, dropout, FLAGS: gl.constexpr):
    """The weights, with 0 where one is dropped; `row` is the first of the own side."""
    BLOCK: gl.constexpr = p.shape[1]
    if not FLAGS.DROPOUT:
        return p
    elif FLAGS.KEYS:
        return drop_turned(p, head, tile * BLOCK, row, dropout)
    else:
        return drop(p, head, row, tile * BLOCK, dropout)


@gluon.jit
def gradient_of_scores(p, kept, dp, delta, s, numbers, FLAGS: gl.constexpr):
    """dS of weights, those that were kept, and the gradient of the latter."""
    if FLAGS.DROPOUT:
        ds = kept * (dp * numbers.kept) - p * delta
    else:
        ds = p * (dp - delta)
    if FLAGS.SOFTCAP:
        t = gl.maximum(s, -numbers.softcap) / numbers.softcap  # what is hidden is −inf
        ds = ds * (1.0 - t * t)
    return ds


@gluon.jit
def operands(x, WHO: gl.constexpr, FLAGS: gl.constexpr, layout: gl.constexpr):
    """The panels of a consumer's X or X', as products take them."""
    found = ()
    for n in gl.static_range(x.PANELS):
        panel = x.panel(WHO, n)
        if FLAGS.REGISTERS:
            panel = panel.load(gl.DotOperandLayout(0, layout, k_width=2))
        found = found + (panel,)  # noqa: RUF005
    return found


@gluon.jit
def zeros(COUNT: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    found = ()
    for _n in gl.static_range(COUNT):
        found = found + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)  # noqa: RUF005
    return found


@gluon.jit
def release_own(own, own_2, WHO: gl.constexpr, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    """X and X' are read: my rows, and of K, where consumers make dQ, all of them."""
    if FLAGS.DS == "consumers":
        for w in gl.static_range(CONSUMERS):
            own.release(w)
    else:
        own.release(WHO)
    if FLAGS.FIRST:
        own_2.release(WHO)


@gluon.jit
def consumer(
    work, results, adding, WHO: gl.constexpr, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr
):  # fmt: skip
    descs, channels, notes, draw, limits, heads, tile_map = work
    own, own_2, other, other_2, statistics, shared_ds = channels
    outs, outs_2, statistics_ptr, numbers, dropout, lengths = results
    SLOTS: gl.constexpr = other.full.type.shape[0]
    SLOTS_2: gl.constexpr = other_2.full.type.shape[0]
    DS_SLOTS: gl.constexpr = shared_ds.full.type.shape[0]
    RANK: gl.constexpr = len(other.tiles.type.shape)
    BLOCK: gl.constexpr = other.tiles.type.shape[RANK - 2]
    WIDTH: gl.constexpr = other.tiles.type.shape[RANK - 1]
    WIDTH_2: gl.constexpr = other_2.tiles.type.shape[RANK - 1]
    PANELS: gl.constexpr = FLAGS.PANELS[0] if FLAGS.FIRST else 0
    PANELS_2: gl.constexpr = FLAGS.PANELS[1] if FLAGS.SECOND else 0
    # Panels from one consumer's A' to the next one's: alone, it takes the place of X.
    APART: gl.constexpr = FLAGS.PANELS[0 if FLAGS.SHARED and not FLAGS.FIRST else 1]
    EARLIER: gl.constexpr = FLAGS.PANELS[0] if FLAGS.EARLY else 0  # products of S before dP's wait
    COUNT: gl.constexpr = 7 if FLAGS.PACKED else 3
    SIZE: gl.constexpr = NOTE + (CONSUMERS if FLAGS.MAP else 0)
    dtype: gl.constexpr = other.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    a_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    a_layout_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, a_layout, k_width=2)
    operand_2: gl.constexpr = gl.DotOperandLayout(0, a_layout_2, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    s_columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    own_length, other_length = lengths
    s_zero = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    mine = gl.arange(0, ROWS, layout=s_rows)
    turn = 0
    step = 0
    block = read_block(draw.take(turn, COUNT), own_length, other_length, FLAGS)
    while block.row != END:
        row = block.row + WHO * ROWS
        rows = row + mine
        own.wait(WHO, turn & 1)
        x = operands(own, WHO, FLAGS, s_layout)
        x_2 = x
        if FLAGS.FIRST:
            own_2.wait(WHO, turn & 1)
            x_2 = operands(own_2, WHO, FLAGS, s_layout)
        if not FLAGS.KEYS:
            at = head_of_statistics(block, block.head, heads, FLAGS.PACKED) * heads.tiles
            at += first_tile(block.q_start, block.batch, FLAGS.PACKED) + row // ROWS
            pointer = statistics_ptr + at.to(gl.int64) * (2 * ROWS) + mine
            lse = gl.load(pointer, mask=rows < block.queries, other=float("inf"))[:, None]
            delta = gl.load(pointer + ROWS, mask=rows < block.queries, other=0.0)[:, None]
        a = zeros(PANELS, WIDTH, a_layout)
        a_2 = zeros(PANELS_2, WIDTH_2, a_layout_2)
        slot, phase = place(step, SLOTS)
        other.wait(slot, phase)
        s = warpgroup_mma_wait(0, [multiply(x, other, slot, s_zero)])
        last = 0
        while last == 0:
            slot, phase = place(step, SLOTS)
            slot_2, phase_2 = place(step, SLOTS_2)
            note, head = get(notes, slot * SIZE, NOTE)
            tile = note >> 2
            last = note & 1
            s = logits(s, numbers, FLAGS)
            if (note & 2) != 0:  # here, since a branch under a product makes all of them wait
                number = slot * SIZE + NOTE + WHO
                s = hide(s, tile, rows, block, limits, tile_map, notes, number, FLAGS)
            other_2.wait(slot_2, phase_2)
            if FLAGS.FIRST:
                dp = multiply(x_2, other_2, slot_2, s_zero)
            if FLAGS.KEYS:
                lse = statistics.index(slot * 2).reshape([BLOCK]).load(s_columns)[None, :]
            p = gl.exp2(s * numbers.scale_log2 - lse)
            kept = kept_of(p, head, row, tile, dropout, FLAGS)
            if FLAGS.SECOND:
                weights = gl.convert_layout(kept.to(dtype), operand_2)
                a_2 = accumulate(weights, other_2, slot_2, a_2)
            # S of the next tile; behind the last one that of the same once more, for nothing.
            ahead, ahead_phase = place(step + 1 - last, SLOTS)
            if FLAGS.EARLY:
                other.wait(ahead, ahead_phase)
                s_next = multiply(x, other, ahead, s_zero)
            if FLAGS.FIRST:
                dp = warpgroup_mma_wait(PANELS_2 + EARLIER, [dp])
                if not FLAGS.SECOND:
                    other_2.release(slot_2)
                if FLAGS.KEYS:  # no sooner, since registers are scarce
                    delta = statistics.index(slot * 2 + 1).reshape([BLOCK]).load(s_columns)[None, :]
                ds = gradient_of_scores(p, kept, dp, delta, s, numbers, FLAGS).to(dtype)
                if FLAGS.DS == "consumers":
                    ds_slot, ds_phase = place(step, DS_SLOTS)
                    shared_ds.acquire(ds_slot, ds_phase)  # waits until all consumers have read it
                    give(ds, shared_ds, ds_slot, WHO, CONSUMERS)
                    shared_ds.wait(ds_slot, ds_phase)  # for the other consumer's
                    dq = gradient_of_queries(shared_ds, ds_slot, own, WHO, CONSUMERS, a_layout)
                a = accumulate(gl.convert_layout(ds, operand), other, slot, a)
            if FLAGS.DS == "consumers":
                dq = warpgroup_mma_wait(PANELS, [dq])
                shared_ds.release(ds_slot)
                at = where_queries_are(note, head, block, heads, BLOCK, FLAGS)
                add(dq, adding, WHO, at, WHO * WIDTH, 1)
            if not FLAGS.EARLY:
                other.wait(ahead, ahead_phase)
                s_next = multiply(x, other, ahead, s_zero)
            if FLAGS.DS == "stored":  # under the products
                head -= block.batch * heads.heads
                number = tile_of(turned(block), head, row, tile * BLOCK, adding.layout, FLAGS)
                at = (number * TILE_KEYS + WHO * ROWS, 0)
                ds_slot = step % DS_SLOTS
                keep(ds, shared_ds.tiles, ds_slot, adding.desc, at, WHO, CONSUMERS, DS_SLOTS)
            if FLAGS.DS == "role":  # under the products
                ds_slot, ds_phase = place(step, DS_SLOTS)
                shared_ds.acquire(ds_slot, ds_phase)  # waits until the adder has read it
                if WHO == 0:
                    put(adding.notes, ds_slot * NOTE, (note, head), 4)
                give(ds, shared_ds, ds_slot, WHO, CONSUMERS)
            done = finish((s_next,) + a + a_2)  # noqa: RUF005
            s = done[0]
            a = done[1 : 1 + PANELS]
            a_2 = done[1 + PANELS :]
            other.release(slot)
            if FLAGS.SECOND:
                other_2.release(slot_2)
            step += 1
        if (FLAGS.DS == "role" or FLAGS.DS == "consumers") and FLAGS.SHARED:
            # Whoever makes dQ of my last dS has read K, which dK is about to overwrite.
            ds_slot, ds_phase = place(step - 1, DS_SLOTS)
            shared_ds.acquire(ds_slot, ds_phase ^ 1)
        if not FLAGS.SHARED:
            release_own(own, own_2, WHO, CONSUMERS, FLAGS)
        tma.store_wait(0)  # my results of the block before have left their places
        # Only threads that have issued one have waited; and where results take the place of X and
        # X', the products of all warps have read them.
        barrier()
        for n in gl.static_range(PANELS):
            matrix(outs.index(WHO * PANELS + n)).store((a[n] * numbers.scale).to(dtype))
        for n in gl.static_range(PANELS_2):
            if FLAGS.DROPOUT:
                result = a_2[n] * numbers.kept
            else:
                result = a_2[n]
            matrix(outs_2.index(WHO * APART + n)).store(result.to(dtype))
        fence_async_shared()  # TMA reads it, through another proxy
        barrier()  # all threads have stored what some of them hand to TMA
        at_out = corner(block, block.head, row, FLAGS.PACKED, True)
        for n in gl.static_range(PANELS):
            panel = outs.index(WHO * PANELS + n).reshape(descs.out.block_type.shape)
            async_store(descs.out, at_out + (n * WIDTH,), panel)  # noqa: RUF005
        for n in gl.static_range(PANELS_2):
            panel = outs_2.index(WHO * APART + n).reshape(descs.out_2.block_type.shape)
            async_store(descs.out_2, at_out + (n * WIDTH_2,), panel)  # noqa: RUF005
        if FLAGS.SHARED:
            tma.store_wait(0)  # the results have left the places of X and X'
            release_own(own, own_2, WHO, CONSUMERS, FLAGS)
        turn += 1
        block = read_block(draw.take(turn, COUNT), own_length, other_length, FLAGS)
    tma.store_wait(0)  # shared memory is gone when the program ends


# Numbers stand one by one: in a tuple Triton would compile anew for a length of 1, or of 16.
RUNTIME_NUMBERS = [
    "own_length",
    "other_length",
    "left",
    "right",
    "bounds_rows",
    "ranges_rows",
    "k_rows",
    "v_rows",
    "map_first",
    "map_batch",
    "map_head",
    "threshold",
    "head_tiles",
    "row_tiles",
    "row_first",
    "batch",
    "heads",
    "group",
    "query_heads",
    "query_tiles",
    "section",
    "total",
]


# Of a part of a batch, see launch_stored.py, masks begin anywhere.
POINTERS = ["bounds_ptr", "ranges_ptr", "ends_ptr"]


@gluon.jit(do_not_specialize=RUNTIME_NUMBERS, do_not_specialize_on_alignment=POINTERS)
def backward_kernel(
    own_desc, own_2_desc, other_desc, other_2_desc, out_desc, out_2_desc, statistics_desc,
    away_desc, statistics_ptr, seed_ptr, bounds_ptr, ranges_ptr, ends_ptr, counter, numbers,
    packing, tile_map,
    own_length, other_length, left, right, bounds_rows, ranges_rows, k_rows, v_rows, map_first,
    map_batch, map_head, threshold, head_tiles, row_tiles, row_first, batch, heads, group,
    query_heads, query_tiles, section, total,
    CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, SLOTS_2: gl.constexpr, DS_SLOTS: gl.constexpr,
    FLAGS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, ADDER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    descs = Descriptors(
        own_desc, own_2_desc, other_desc, other_2_desc, out_desc, out_2_desc, statistics_desc
    )
    # K is read by its consumer, and by whoever makes dQ.
    WHOLE: gl.constexpr = FLAGS.DS == "consumers"
    READERS: gl.constexpr = CONSUMERS if WHOLE else (2 if FLAGS.DS == "role" else 1)
    BLOCK: gl.constexpr = other_desc.block_type.shape[len(other_desc.block_type.shape) - 2]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], own_desc.dtype)
    own = channel(descs.own, CONSUMERS, READERS, FLAGS.PANELS[0])
    own_2 = own  # is not read unless dP is made of it
    if FLAGS.FIRST:
        own_2 = channel(descs.own_2, CONSUMERS, 1, FLAGS.PANELS[1])
    other = channel(descs.other, SLOTS, CONSUMERS, FLAGS.PANELS[0])
    other_2 = channel(descs.other_2, SLOTS_2, CONSUMERS, FLAGS.PANELS[1])
    statistics = own.tiles
    if FLAGS.KEYS:
        room: gl.constexpr = [2 * SLOTS] + descs.statistics.block_type.shape  # noqa: RUF005
        layout: gl.constexpr = descs.statistics.layout
        statistics = gl.allocate_shared_memory(gl.float32, room, layout)
    ds = own
    layout_of_ds = Layout(query_heads, head_tiles, row_tiles, row_first)
    adding = Adding(away_desc, own.tiles, own.tiles, layout_of_ds, numbers.scale)
    if FLAGS.DS != "":
        tiles = gl.allocate_shared_memory(
            own_desc.dtype, [DS_SLOTS * CONSUMERS, ROWS, BLOCK], ds_layout
        )
        ds = ring(tiles, DS_SLOTS, CONSUMERS, CONSUMERS if WHOLE else 1, 1)
    if FLAGS.DS == "role" or FLAGS.DS == "consumers":
        shape: gl.constexpr = [CONSUMERS if WHOLE else PLACES] + away_desc.block_type.shape  # noqa: RUF005
        places = gl.allocate_shared_memory(gl.float32, shape, away_desc.layout)
        notes_of_ds = room_for_numbers(DS_SLOTS * NOTE)
        adding = Adding(away_desc, places, notes_of_ds, layout_of_ds, numbers.scale)
    channels = Channels(own, own_2, other, other_2, statistics, ds)
    outs = own.tiles
    outs_2 = own_2.tiles
    if not FLAGS.SHARED:
        if FLAGS.FIRST:
            outs = gl.allocate_shared_memory(
                descs.out.dtype,
                [CONSUMERS * FLAGS.PANELS[0]] + descs.out.block_type.shape,  # noqa: RUF005
                descs.out.layout,
            )
        if FLAGS.SECOND:
            outs_2 = gl.allocate_shared_memory(
                descs.out_2.dtype,
                [CONSUMERS * FLAGS.PANELS[1]] + descs.out_2.block_type.shape,  # noqa: RUF005
                descs.out_2.layout,
            )
    notes = room_for_numbers(SLOTS * (NOTE + (CONSUMERS if FLAGS.MAP else 0)))
    if FLAGS.MAP:
        tile_map = Map(*tile_map, map_first, map_batch, map_head)
    draw = tickets(CONSUMERS + 1 if FLAGS.DS == "role" else CONSUMERS)
    fence_async_shared()  # TMA will signal the barriers that ordinary stores have initialised
    limits = Limits(left, right, bounds_ptr, bounds_rows, 0)
    work = (descs, channels, notes, draw, limits, Heads(query_heads, query_tiles), tile_map)
    schedule = Schedule(batch, heads, group, section, own_length, other_length)
    ranges, apart = Ranges(ranges_ptr, ranges_rows, ends_ptr), Apart(k_rows, v_rows)
    sources = (schedule, packing, counter, total, ranges, apart)
    lengths = (own_length, other_length)
    dropout = Dropout(seed_ptr, threshold)
    results = (outs, outs_2, statistics_ptr, numbers, dropout, lengths)
    # fmt: off
    if FLAGS.DS == "role":
        gl.warp_specialize([
            (consumer, (work, results, adding, 0, CONSUMERS, FLAGS)),
            (consumer, (work, results, adding, 1, CONSUMERS, FLAGS)),
            (adder, (work, adding, lengths, CONSUMERS, FLAGS)),
            (producer, (work, sources, CONSUMERS, FLAGS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, ADDER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consumer, (work, results, adding, 0, CONSUMERS, FLAGS)),
            (consumer, (work, results, adding, 1, CONSUMERS, FLAGS)),
            (producer, (work, sources, CONSUMERS, FLAGS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on
