"""Forward of attention on Hopper.

A program takes blocks of 64 · CONSUMERS rows, queries of one head, one after the other, and for
each of them walks over the tiles of BLOCK_KV keys that its rows see, those that need a mask first:

    m, l, O = −∞, 0, 0
    for each tile:
        S = Q K^T                          [64, BLOCK_KV] in each consumer, and with it
        O += P V                           [64, Dv], of the tile before
        P = 2^(S − m)
        where sums of P say that m is too low:
            m, O, l = largest S so far, O and l rescaled; P once more
        l += sum of P
    O += P V
    out, lse = O / l, ln 2 · (m + log2 l)

One warp, the producer, starts all copies from global memory; each consumer is a warpgroup with 64
rows. The tensor cores multiply for one consumer while another one exponentiates.

Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), out (B, Hq, Sq, Dv), in any strides
that TMA takes, through descriptors of four axes: rows beyond a sequence are zeros in shared memory
and are not written; so are columns beyond D where the tile is wider. Packed: q (total_q, Hq, D) and
so on, through ragged descriptors, which do the same at the end of each sequence; v's is one also
under INTERVALS, where rows beyond the last key that a block sees are zeros. lse (B, Hq, Sq) or
(Hq, total_q), float32, contiguous. Columns are one box of TMA, or PANELS of them side by side
where their number is no power of two: 96 is 3 · 32, 192 is 3 · 64.

HEADS query heads that have one key head may stand in the rows of one consumer, 64 / HEADS positions
of each: a few queries then fill a tile, and keys are read once for all of them.

While a consumer exponentiates it has no product in flight: ptxas moves exponentials behind the wait
for P V in any case, consumers overlap each other instead, and held in front of it (algorithm 2 of
the source) they were 0.96 of the speed. So a branch costs nothing there, as it would while products
are in flight: ptxas then lets none overlap another (C7510).

Source: FlashAttention-3 (Shah et al., 2024), algorithms 1 and 2.
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

from anyflash.kernels.hopper.compat import async_store, barrier
from anyflash.kernels.hopper.dropout import Dropout, drop
from anyflash.kernels.hopper.masking import (
    GRANULE,
    Limits,
    Map,
    Tiles,
    granules,
    mapped_tile,
    mapped_tiles,
    mask_bits,
    mask_scores,
    needs_mask,
    nth_tile,
    numbers_of_granules,
    own_tiles,
    plan,
)
from anyflash.kernels.hopper.pipeline import channel, get, matrix, place, put, room_for_numbers
from anyflash.kernels.hopper.products import accumulate, finish, multiply
from anyflash.kernels.hopper.schedule import (
    END,
    Block,
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
from anyflash.kernels.hopper.softmax import (
    LN2,
    any_too_large,
    logits,
    pack,
    slope,
    unpack,
    weigh,
    weigh_anew,
    with_sink,
)

ROWS = gl.constexpr(64)  # of one consumer: as many as one wgmma has


class Descriptors(NamedTuple):
    """TMA descriptors over (B, H, S, D); the boxes are [1, 1, rows, columns]."""

    q: Any  # rows of one consumer
    k: Any  # BLOCK_KV rows
    v: Any
    out: Any  # rows of one consumer


class Numbers(NamedTuple):
    """What the softmax needs besides the scores."""

    scale_log2: Any  # what scores are multiplied by in the exponent
    scale: Any  # what they are multiplied by before, under SCALED and SOFTCAP
    softcap: Any
    power: Any  # the least power of two that is no smaller than scale_log2
    kept: Any  # under DROPOUT, what the output is multiplied by: 1 / (1 − dropout), 0 if all drop


class Flags(NamedTuple):
    """Compile-time constants: what a problem asks for, and how it is done."""

    LEFT: Any
    RIGHT: Any
    INTERVALS: Any  # of keys that each row has in memory, 0 to 2
    MAP: Any  # who sees whom is in a tile map
    SCALED: Any
    SOFTCAP: Any
    SINK: Any
    DROPOUT: Any
    PACKED: Any  # sequences of unequal length one behind the other
    HEADS: Any  # query heads that share the rows of a consumer: a power of two
    DYNAMIC: Any  # programs draw blocks from the counter; else each has one at most
    PANELS: Any  # boxes that make up a tile of Q or K, and of V or the output
    PINGPONG: Any  # consumers take turns at the tensor cores
    APART: Any  # tiles that need a mask have a loop of their own
    SHARED: Any  # the output takes the place of Q in shared memory
    Q_REGISTERS: Any  # Q is multiplied from registers instead of shared memory


class Job(NamedTuple):
    """What a consumer does with its block."""

    block: Any
    row: Any  # the first of mine, counted from the sequence's first
    rows: Any  # all of mine
    head: Any  # of all batch elements together
    limits: Any
    tile_map: Any
    numbers: Any
    dropout: Any


@gluon.jit
def take_turns(PINGPONG: gl.constexpr, KIND: gl.constexpr, WHO: gl.constexpr):
    """`bar.sync` or `bar.arrive` at the named barrier of a consumer, for it and the one before it.

    Who may issue products is announced by the one before, round and round, so that exponentials of
    different consumers fall into different times.
    """
    if PINGPONG:
        # The compiler has the barriers below 8.
        text: gl.constexpr = f"bar.{KIND} {8 + WHO}, 256; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(
            text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def scale_rows(o, factor):
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o[0].type.layout))[:, None]
    scaled = ()
    for n in gl.static_range(len(o)):
        scaled = scaled + (o[n] * factor,)  # noqa: RUF005
    return scaled


@gluon.jit
def producer(work, sources, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    descs, q, k, v, draw, notes, limits, tile_map = work
    schedule, packing, counter, total = sources
    POSITIONS: gl.constexpr = ROWS // FLAGS.HEADS  # of one consumer
    BLOCK_Q: gl.constexpr = CONSUMERS * POSITIONS
    SLOTS: gl.constexpr = k.full.type.shape[0]
    RANK: gl.constexpr = len(k.tiles.type.shape)
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[RANK - 2]
    GRANULES: gl.constexpr = BLOCK_KV // GRANULE
    NOTE: gl.constexpr = 1 + CONSUMERS * GRANULES
    total = number_of_blocks(total, schedule, packing, FLAGS)
    turn = 0
    step = 0
    number = gl.program_id(0)
    while number < total:
        block = numbered_block(number, total, schedule, packing, BLOCK_Q, FLAGS)
        if FLAGS.MAP:
            tiles, columns = mapped_tiles(block, block.head, tile_map, BLOCK_Q, BLOCK_KV)
        else:
            tiles, seen = plan(block, limits, BLOCK_Q, BLOCK_KV, FLAGS)
        draw.give(block_numbers(block, FLAGS) + tile_numbers(tiles, FLAGS), turn)
        for j in range(tiles.count):
            if FLAGS.MAP:
                tile = mapped_tile(columns, j)
            else:
                tile = nth_tile(j, tiles, FLAGS)
            slot, phase = place(step, SLOTS)
            head_kv = block.head // schedule.group
            place_k = corner(block, head_kv, tile * BLOCK_KV, FLAGS.PACKED, False)
            place_v = place_k
            if FLAGS.INTERVALS > 0:
                # What nobody sees behind them, padding for one, becomes zeros: 0 · NaN is NaN.
                start = block.k_start if FLAGS.PACKED else block.batch * limits.v_rows
                place_v = ragged(start, seen, head_kv, tile * BLOCK_KV)
            k.acquire(slot, phase)
            if FLAGS.MAP:
                note = numbers_of_granules(tile, block, block.head, tile_map, CONSUMERS, GRANULES)
                put(notes, slot * NOTE, (tile,) + note)  # noqa: RUF005
            k.commit(descs.k, place_k, slot)
            if j == 0:  # after K, whose slot is free before the block is done that has Q's place
                for w in gl.static_range(CONSUMERS):
                    row = block.row + w * POSITIONS
                    place_q = corner(block, block.head * FLAGS.HEADS, row, FLAGS.PACKED, True)
                    q.fill(descs.q, place_q, w, turn & 1)
            v.fill(descs.v, place_v, slot, phase)
            step += 1
        number = next_number(total, counter, FLAGS)
        turn += 1
    end = Block(0, 0, END, 0, 0, 0, 0)
    draw.give(block_numbers(end, FLAGS) + tile_numbers(Tiles(0, 0, 0, 0, 0, 0), FLAGS), turn)


@gluon.jit
def operand(p, tile, job, dtype: gl.constexpr, FLAGS: gl.constexpr):
    """A tile's weights as the product with V takes them."""
    if FLAGS.DROPOUT:  # of the weights only: sums are of all
        p = drop(p, job.head, job.row, tile * p.shape[1], job.dropout)
    return pack(p, dtype)


@gluon.jit
def read_note(
    notes, slot, job, BLOCK_KV: gl.constexpr, WHO: gl.constexpr, CONSUMERS: gl.constexpr
):  # fmt: skip
    """Under MAP, of a tile whose K is there: (its number, bits of my rows, how many keys are left
    from its first one on, whether it needs a mask, unless it is the first one, which has the last
    keys). Before S is started, which takes as long as the bits do to come."""
    GRANULES: gl.constexpr = BLOCK_KV // GRANULE
    first = slot * (1 + CONSUMERS * GRANULES)
    tile = get(notes, first, 1)[0]
    numbers = get(notes, first + 1 + WHO * GRANULES, GRANULES)
    words, everything = granules(numbers, job.tile_map, job.rows - job.row)
    keys_left = job.block.keys - tile * BLOCK_KV
    return tile, words, keys_left, not everything


@gluon.jit
def walk(
    sources, job, tiles, state, begin, end, MASKED: gl.constexpr, WHO: gl.constexpr,
    CONSUMERS: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Go over the key tiles `begin` to `end` of a block: S of each in flight together with P V of
    the one before. MASKED: all of them need a mask, or none; without APART those do that say so."""
    q_tile, k, v, notes = sources
    p, o, shift, sums, step = state
    SLOTS: gl.constexpr = k.full.type.shape[0]
    RANK: gl.constexpr = len(k.tiles.type.shape)
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[RANK - 2]
    THEIRS: gl.constexpr = (WHO + 1) % CONSUMERS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o[0].type.layout, k_width=2)
    dtype: gl.constexpr = k.tiles.dtype
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    for j in range(begin, end):
        v_slot, v_phase = place(step, SLOTS)
        step += 1
        slot, phase = place(step, SLOTS)
        k.wait(slot, phase)
        if FLAGS.MAP:
            tile, words, keys_left, masked = read_note(notes, slot, job, BLOCK_KV, WHO, CONSUMERS)
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # waits until the consumer before me has issued
        s = multiply(q_tile, k, slot, s_zero)
        v.wait(v_slot, v_phase)
        started = accumulate(unpack(p, dtype, p_layout), v, v_slot, o)
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the consumer after me waits for this
        finished = finish((s,) + started)  # noqa: RUF005
        s = finished[0]
        o = finished[1:]
        s = logits(s, job.numbers, FLAGS)
        if FLAGS.MAP:
            if masked:
                s = mask_bits(s, words, keys_left)
        else:
            tile = nth_tile(j, tiles, FLAGS)
            if MASKED if FLAGS.APART else needs_mask(j, tiles, FLAGS):
                s = mask_scores(s, tile * BLOCK_KV, job.rows, job.block, job.limits, FLAGS)
        # Not before that branch: here their barriers hide among the exponentials.
        k.release(slot)
        v.release(v_slot)
        weights, part = weigh(s, shift, job.numbers)
        p = operand(weights, tile, job, dtype, FLAGS)
        if any_too_large(part):
            weights, part, shift, factor = weigh_anew(s, shift, job.numbers)
            p = operand(weights, tile, job, dtype, FLAGS)
            o = scale_rows(o, factor)
            sums *= gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None]
        sums += part
    return p, o, shift, sums, step


@gluon.jit
def skip(k, v, step, count):
    """Passes over tiles of the block of which none of my rows sees anything."""
    SLOTS: gl.constexpr = k.full.type.shape[0]
    for _ in range(count):
        slot, phase = place(step, SLOTS)
        k.wait(slot, phase)
        v.wait(slot, phase)
        k.release(slot)
        v.release(slot)
        step += 1
    return step


@gluon.jit
def consumer(work, results, WHO: gl.constexpr, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    descs, q, k, v, draw, notes, limits, tile_map = work
    outs, lse_ptr, sink_ptr, numbers, dropout, lengths = results
    POSITIONS: gl.constexpr = ROWS // FLAGS.HEADS
    SLOTS: gl.constexpr = k.full.type.shape[0]
    RANK: gl.constexpr = len(k.tiles.type.shape)
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[RANK - 2]
    WIDTH: gl.constexpr = v.tiles.type.shape[len(v.tiles.type.shape) - 1]
    COUNT: gl.constexpr = 7 + (2 if FLAGS.INTERVALS > 1 else 0) + (4 if FLAGS.PACKED else 0)
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    THEIRS: gl.constexpr = (WHO + 1) % CONSUMERS
    heads, queries, keys, lse_heads, lse_row = lengths
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    mine = gl.arange(0, ROWS, layout=s_rows)
    turn = 0
    step = 0
    if WHO == CONSUMERS - 1:
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the first consumer waits for it, to begin
    ticket = draw.take(turn, COUNT)
    block = read_block(ticket, queries, keys, FLAGS)
    while block.row != END:
        row = block.row + WHO * POSITIONS
        all_tiles = read_tiles(ticket, FLAGS)
        begin = 0
        tiles = all_tiles
        # Consumers that take turns stay side by side: apart by some tiles they were 0.95 of the
        # speed (D = 64, S = 16 K, causal).
        if not FLAGS.PINGPONG:
            tiles, begin = own_tiles(all_tiles, block, row, limits, POSITIONS, BLOCK_KV, FLAGS)
            step = skip(k, v, step, begin)
        rows = row + mine % POSITIONS
        row_heads = block.head * FLAGS.HEADS + mine // POSITIONS
        head = block.batch * heads + block.head  # without HEADS, as under DROPOUT
        job = Job(block, row, rows, head, limits, tile_map, numbers, dropout)

        q.wait(WHO, turn & 1)
        q_tile = ()
        for n in gl.static_range(q.PANELS):
            panel = q.panel(WHO, n)
            if FLAGS.Q_REGISTERS:
                panel = panel.load(gl.DotOperandLayout(0, s_layout, k_width=2))
            q_tile = q_tile + (panel,)  # noqa: RUF005
        sources = (q_tile, k, v, notes)
        slot, phase = place(step, SLOTS)
        k.wait(slot, phase)
        if FLAGS.MAP:
            first, words, keys_left, _ = read_note(notes, slot, job, BLOCK_KV, WHO, CONSUMERS)
        else:
            first = nth_tile(begin, tiles, FLAGS)
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # waits until the consumer before me has issued
        s = multiply(q_tile, k, slot, s_zero)
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the consumer after me waits for this
        s = warpgroup_mma_wait(0, [s])
        k.release(slot)
        nothing = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
        s = logits(s, numbers, FLAGS)
        if FLAGS.MAP:
            s = mask_bits(s, words, keys_left)
        else:
            s = mask_scores(s, first * BLOCK_KV, rows, block, limits, FLAGS)
        p, sums, shift, _ = weigh_anew(s, nothing, numbers)
        p = operand(p, first, job, dtype, FLAGS)
        o = ()
        for _n in gl.static_range(v.PANELS):
            o = o + (gl.zeros([ROWS, WIDTH], gl.float32, o_layout),)  # noqa: RUF005

        state = (p, o, shift, sums, step)
        begin += 1
        end = tiles.count
        if FLAGS.APART:
            end = tiles.clear_begin
            state = walk(sources, job, tiles, state, begin, end, True, WHO, CONSUMERS, FLAGS)
            begin = end
            end = tiles.clear_end
        state = walk(sources, job, tiles, state, begin, end, False, WHO, CONSUMERS, FLAGS)
        if FLAGS.APART and (FLAGS.LEFT or FLAGS.INTERVALS > 0):
            begin = end
            end = tiles.count
            state = walk(sources, job, tiles, state, begin, end, True, WHO, CONSUMERS, FLAGS)
        p, o, shift, sums, step = state
        if not FLAGS.SHARED:
            q.release(WHO)
        slot, phase = place(step, SLOTS)
        step += 1
        v.wait(slot, phase)
        o = finish(accumulate(unpack(p, dtype, p_layout), v, slot, o))
        v.release(slot)
        if FLAGS.LEFT and not FLAGS.PINGPONG:
            step = skip(k, v, step, all_tiles.count - end)

        row_max = shift * (numbers.scale_log2 / slope(shift, numbers))
        total_sum = gl.convert_layout(gl.sum(sums, 1), s_rows)
        if FLAGS.SINK:
            sink = gl.load(sink_ptr + row_heads)
            shrink, row_max, total_sum = with_sink(row_max, total_sum, sink)
            o = scale_rows(o, shrink)
        lse = (row_max + gl.log2(total_sum)) * LN2  # −inf where a row has nothing
        offset = (block.batch * lse_heads + row_heads).to(gl.int64) * lse_row + block.q_start
        gl.store(lse_ptr + offset + rows, lse, mask=rows < block.queries)
        divisor = gl.where(total_sum == 0.0, 1.0, total_sum)  # there O is 0, and stays so
        o = scale_rows(o, (numbers.kept if FLAGS.DROPOUT else 1.0) / divisor)
        tma.store_wait(0)  # my output of the block before has left its place
        # Only the thread that issued it has waited; and where the output takes Q's place, the
        # products of all warps have read Q.
        barrier()
        FIRST: gl.constexpr = WHO * FLAGS.PANELS[0 if FLAGS.SHARED else 1]
        for n in gl.static_range(v.PANELS):
            matrix(outs.index(FIRST + n)).store(o[n].to(dtype))
        fence_async_shared()  # TMA reads it, through another proxy
        barrier()  # all threads have stored what one of them hands to TMA
        place_out = corner(block, block.head * FLAGS.HEADS, row, FLAGS.PACKED, True)
        for n in gl.static_range(v.PANELS):
            async_store(descs.out, place_out + (n * WIDTH,), outs.index(FIRST + n))  # noqa: RUF005
        if FLAGS.SHARED:
            tma.store_wait(0)  # the output has left the place of Q
            q.release(WHO)
        turn += 1
        ticket = draw.take(turn, COUNT)
        block = read_block(ticket, queries, keys, FLAGS)
    tma.store_wait(0)  # shared memory is gone when the program ends
    if WHO == 0:
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # takes the last arrival: none may be left over


# Numbers stand one by one: in a tuple Triton would compile anew for a length of 1, or of 16.
RUNTIME_NUMBERS = [
    "queries",
    "keys",
    "left",
    "right",
    "bounds_rows",
    "v_rows",
    "map_batch",
    "map_head",
    "threshold",
    "batch",
    "heads",
    "group",
    "section",
    "total",
]


@gluon.jit(do_not_specialize=RUNTIME_NUMBERS)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sink_ptr, seed_ptr, bounds_ptr, counter, numbers,
    packing, tile_map, queries, keys, left, right, bounds_rows, v_rows, map_batch, map_head,
    threshold, batch, heads, group, section, total,
    CONSUMERS: gl.constexpr, KV_SLOTS: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    descs = Descriptors(q_desc, k_desc, v_desc, out_desc)
    q = channel(descs.q, CONSUMERS, 1, FLAGS.PANELS[0])
    k = channel(descs.k, KV_SLOTS, CONSUMERS, FLAGS.PANELS[0])
    v = channel(descs.v, KV_SLOTS, CONSUMERS, FLAGS.PANELS[1])
    if FLAGS.SHARED:
        outs = q.tiles
    else:
        out_shape: gl.constexpr = [CONSUMERS * FLAGS.PANELS[1]] + descs.out.block_type.shape  # noqa: RUF005
        outs = gl.allocate_shared_memory(descs.out.dtype, out_shape, descs.out.layout)
    draw = tickets(CONSUMERS)
    notes = draw.numbers  # any memory
    if FLAGS.MAP:
        GRANULES: gl.constexpr = descs.k.block_type.shape[2] // GRANULE
        notes = room_for_numbers(KV_SLOTS * (1 + CONSUMERS * GRANULES))
        tile_map = Map(*tile_map, 0, map_batch, map_head)
    fence_async_shared()  # TMA will signal the barriers that ordinary stores have initialised
    limits = Limits(left, right, bounds_ptr, bounds_rows, v_rows)
    work = (descs, q, k, v, draw, notes, limits, tile_map)
    sources = (Schedule(batch, heads, group, section, queries, keys), packing, counter, total)
    # Of a packed batch, sequences count as rows of one batch element.
    lengths = (heads, queries, keys, 0 if FLAGS.PACKED else heads * FLAGS.HEADS, queries)
    results = (outs, lse_ptr, sink_ptr, numbers, Dropout(seed_ptr, threshold), lengths)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (work, results, 0, CONSUMERS, FLAGS)),
            (consumer, (work, results, 1, CONSUMERS, FLAGS)),
            (producer, (work, sources, CONSUMERS, FLAGS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consumer, (work, results, 0, CONSUMERS, FLAGS)),
            (consumer, (work, results, 1, CONSUMERS, FLAGS)),
            (consumer, (work, results, 2, CONSUMERS, FLAGS)),
            (producer, (work, sources, CONSUMERS, FLAGS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on
