"""Forward of attention on Hopper.

A program takes blocks of BLOCK_Q = 64 · CONSUMERS query rows of one head, one after the other, and
for each of them walks over the tiles of BLOCK_KV keys that its rows see, from the last to the
first:

    m, l, O = −∞, 0, 0
    S = Q K^T                              [64, BLOCK_KV] in each consumer
    for each tile:
        P, m', l' = softmax of S over what came before
        O *= 2^(m − m')
        S' = Q K'^T                        of the next tile, in flight together with
        O += P V                           [64, Dv], of this one
    out, lse = O / l, ln 2 · (m + log2 l)

One warp, the producer, starts all copies from global memory; each consumer is a warpgroup with 64
rows. The tensor cores compute S of the next tile while a consumer exponentiates this one.

Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), out (B, Hq, Sq, Dv), in any strides
that TMA takes, through descriptors of four axes: rows beyond a sequence are zeros in shared memory
and are not written; so are columns beyond D where the tile is wider. Packed: q (total_q, Hq, D) and
so on, through ragged descriptors, which do the same at the end of each sequence. lse (B, Hq, Sq) or
(Hq, total_q), float32, contiguous.

Limits: a weight is 2^(s · c − m · c) by one fused multiply-add, m · c rounded before. That shifts
all weights of a row by up to 2^−24 of its largest score, in units of log2, which cancels out of the
result until it leaves the range of P: below scores of about 1e8 it does not.

Source: FlashAttention-3 (Shah et al., 2024), algorithms 1 and 2, for the roles and the overlap
inside a warpgroup.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflash.kernels.hopper.compat import async_store, barrier
from anyflash.kernels.hopper.masking import Window, clear_tiles, key_tiles, mask_scores
from anyflash.kernels.hopper.pipeline import channel, matrix, place
from anyflash.kernels.hopper.schedule import (
    END,
    Block,
    Schedule,
    corner,
    dense_block,
    packed_block,
    tickets,
)
from anyflash.kernels.hopper.softmax import (
    LN2,
    logits,
    online_softmax,
    pack,
    sum_in_thread,
    unpack,
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


class Flags(NamedTuple):
    """Compile-time constants: what a problem asks for, and how it is done."""

    LEFT: Any
    RIGHT: Any
    SCALED: Any
    SOFTCAP: Any
    SINK: Any
    PINGPONG: Any
    DYNAMIC: Any  # programs draw blocks from the counter; else each has one at most
    PACKED: Any  # sequences of unequal length one behind the other
    SHARED: Any  # the output takes the place of Q in shared memory
    Q_REGISTERS: Any  # Q is multiplied from registers instead of shared memory


@gluon.jit
def take_turns(PINGPONG: gl.constexpr, KIND: gl.constexpr, WHO: gl.constexpr):
    """`bar.sync` or `bar.arrive` at the named barrier of a consumer, for two of them.

    Who may issue products is announced by the other one, so that their exponentials fall into
    different times.
    """
    if PINGPONG:
        # The compiler has the barriers below 8.
        text: gl.constexpr = f"bar.{KIND} {8 + WHO}, 256; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(
            text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def producer(work, sources, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    descs, q, k, v, draw, limits = work
    schedule, packing, counter, total = sources
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    SLOTS: gl.constexpr = k.tiles.type.shape[0]
    RANK: gl.constexpr = len(k.tiles.type.shape)
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[RANK - 2]
    if FLAGS.PACKED:
        total = gl.load(packing.first_block + schedule.batch) * schedule.heads
    turn = 0
    step = 0
    number = gl.program_id(0)
    while number < total:
        if FLAGS.PACKED:
            block = packed_block(number, schedule, packing, BLOCK_Q)
        else:
            block = dense_block(number, schedule, BLOCK_Q)
        draw.give(block, turn)
        number = total
        if FLAGS.DYNAMIC:
            number = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        window = window_of(block, limits)
        first, last = key_tiles(block.row, window, BLOCK_Q, BLOCK_KV, FLAGS)
        head_kv = block.head // schedule.group
        for w in gl.static_range(CONSUMERS):
            place_q = corner(block, block.head, block.row + w * ROWS, FLAGS.PACKED, True)
            q.fill(descs.q, place_q, w, turn & 1)
        for j in range(last - first):
            slot, phase = place(step, SLOTS)
            place_kv = corner(block, head_kv, (last - 1 - j) * BLOCK_KV, FLAGS.PACKED, False)
            k.fill(descs.k, place_kv, slot, phase)
            v.fill(descs.v, place_kv, slot, phase)
            step += 1
        turn += 1
    draw.give(Block(0, 0, END, 0, 0, 0, 0), turn)


@gluon.jit
def window_of(block, limits):
    left, right = limits
    return Window(block.queries, block.keys, left, right)


@gluon.jit
def walk(
    job, state, above, below, MASKED: gl.constexpr, WHO: gl.constexpr, CONSUMERS: gl.constexpr,
    FLAGS: gl.constexpr,
):  # fmt: skip
    """Go over the key tiles below `above` down to `below`: S of each in flight together with P V
    of the one before. One body, compiled with and without a mask: a branch inside it would cut the
    exponentials off from the products (7 % at D = 128, S = 16 K dense)."""
    k, v, q_tile, row, window, numbers = job
    p, o, row_max, row_sum, step = state
    SLOTS: gl.constexpr = k.tiles.type.shape[0]
    RANK: gl.constexpr = len(k.tiles.type.shape)
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[RANK - 2]
    THEIRS: gl.constexpr = (WHO + 1) % CONSUMERS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, k_width=2)
    dtype: gl.constexpr = k.tiles.dtype
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    for j in range(above - below):
        v_slot, v_phase = place(step, SLOTS)
        step += 1
        slot, phase = place(step, SLOTS)
        k_tile = k.wait(slot, phase)
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # waits until the consumer before me has issued
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s_zero, use_acc=False, is_async=True)
        v_tile = v.wait(v_slot, v_phase)
        o_next = warpgroup_mma(unpack(p, dtype, p_layout), v_tile, o, is_async=True)
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the consumer after me waits for this
        s = warpgroup_mma_wait(1, [s])  # P V goes on under the exponentials
        k.release(slot)
        s = logits(s, numbers, FLAGS)
        if MASKED:
            s = mask_scores(s, (above - 1 - j) * BLOCK_KV, row, window, FLAGS)
        weights, shrink, row_max, row_sum = online_softmax(s, row_max, row_sum, numbers.scale_log2)
        o = warpgroup_mma_wait(0, [o_next])
        v.release(v_slot)
        # Not before: while registers are written that a product in flight reads, ptxas lets no
        # product overlap another (C7513).
        p = pack(weights, dtype)
        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o.type.layout))[:, None]
    return p, o, row_max, row_sum, step


@gluon.jit
def consumer(work, results, WHO: gl.constexpr, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    descs, q, k, v, draw, limits = work
    outs, lse_ptr, sink_ptr, numbers, lse_row = results
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    SLOTS: gl.constexpr = k.tiles.type.shape[0]
    RANK: gl.constexpr = len(k.tiles.type.shape)
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[RANK - 2]
    DV: gl.constexpr = v.tiles.type.shape[RANK - 1]
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    THEIRS: gl.constexpr = (WHO + 1) % CONSUMERS
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    turn = 0
    step = 0
    if WHO == CONSUMERS - 1:
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the first consumer waits for it, to begin
    block = draw.take(turn)
    while block.row != END:
        window = window_of(block, limits)
        first, last = key_tiles(block.row, window, BLOCK_Q, BLOCK_KV, FLAGS)
        row = block.row + WHO * ROWS
        row_max = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
        row_sum = sum_in_thread(s_zero)
        o = gl.zeros([ROWS, DV], gl.float32, o_layout)

        q_tile = q.wait(WHO, turn & 1)
        if FLAGS.Q_REGISTERS:
            q_tile = q_tile.load(gl.DotOperandLayout(0, s_layout, k_width=2))
        slot, phase = place(step, SLOTS)
        k_tile = k.wait(slot, phase)
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # waits until the consumer before me has issued
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s_zero, use_acc=False, is_async=True)
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the consumer after me waits for this
        s = warpgroup_mma_wait(0, [s])
        k.release(slot)
        s = logits(s, numbers, FLAGS)
        s = mask_scores(s, (last - 1) * BLOCK_KV, row, window, FLAGS)
        p, shrink, row_max, row_sum = online_softmax(s, row_max, row_sum, numbers.scale_log2)
        p = pack(p, dtype)

        # Tiles with a mask, tiles without, and, left of a window, tiles with one again.
        begin, end = clear_tiles(row, window, ROWS, BLOCK_KV, FLAGS)
        end = gl.minimum(gl.maximum(end, first), last - 1)
        begin = gl.minimum(gl.maximum(begin, first), end)
        job = (k, v, q_tile, row, window, numbers)
        state = (p, o, row_max, row_sum, step)
        state = walk(job, state, last - 1, end, True, WHO, CONSUMERS, FLAGS)
        state = walk(job, state, end, begin, False, WHO, CONSUMERS, FLAGS)
        if FLAGS.LEFT:
            state = walk(job, state, begin, first, True, WHO, CONSUMERS, FLAGS)
        p, o, row_max, row_sum, step = state
        if not FLAGS.SHARED:
            q.release(WHO)
        slot, phase = place(step, SLOTS)
        step += 1
        p = unpack(p, dtype, p_layout)
        o = warpgroup_mma(p, v.wait(slot, phase), o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        v.release(slot)

        total_sum = gl.convert_layout(gl.sum(row_sum, 1), s_rows)
        if FLAGS.SINK:
            shrink, row_max, total_sum = with_sink(
                row_max, total_sum, gl.load(sink_ptr + block.head)
            )
            o = o * gl.convert_layout(shrink, o_rows)[:, None]
        rows = row + gl.arange(0, ROWS, layout=s_rows)
        lse = (row_max + gl.log2(total_sum)) * LN2  # −inf where a row has nothing
        # (B, Hq, Sq), or (Hq, total) of a packed batch, where `lse_row` is the total.
        heads, length = lse_row
        offset = (block.batch * heads + block.head).to(gl.int64) * length + block.q_start
        gl.store(lse_ptr + offset + rows, lse, mask=rows < window.queries)
        divisor = gl.where(total_sum == 0.0, 1.0, total_sum)  # there O is 0, and stays so
        o = o * gl.convert_layout(1.0 / divisor, o_rows)[:, None]
        tma.store_wait(0)  # my output of the block before has left its place
        # Only the thread that issued it has waited; and where the output takes Q's place, the
        # products of all warps have read Q.
        barrier()
        out_tile = outs.index(WHO)
        matrix(out_tile).store(o.to(dtype))
        fence_async_shared()  # TMA reads it, through another proxy
        barrier()  # all threads have stored what one of them hands to TMA
        async_store(descs.out, corner(block, block.head, row, FLAGS.PACKED, True), out_tile)
        if FLAGS.SHARED:
            tma.store_wait(0)  # the output has left the place of Q
            q.release(WHO)
        turn += 1
        block = draw.take(turn)
    tma.store_wait(0)  # shared memory is gone when the program ends
    if WHO == 0:
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # takes the last arrival: none may be left over


# Numbers stand one by one: in a tuple Triton would compile anew for a length of 1, or of 16.
RUNTIME_NUMBERS = [
    "queries",
    "keys",
    "left",
    "right",
    "batch",
    "heads",
    "group",
    "section",
    "total",
]


@gluon.jit(do_not_specialize=RUNTIME_NUMBERS)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sink_ptr, counter, numbers, packing,
    queries, keys, left, right, batch, heads, group, section, total,
    CONSUMERS: gl.constexpr, KV_SLOTS: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    descs = Descriptors(q_desc, k_desc, v_desc, out_desc)
    q = channel(descs.q, CONSUMERS, 1)
    k = channel(descs.k, KV_SLOTS, CONSUMERS)
    v = channel(descs.v, KV_SLOTS, CONSUMERS)
    if FLAGS.SHARED:
        outs = q.tiles
    else:
        out_shape: gl.constexpr = [CONSUMERS] + descs.out.block_type.shape  # noqa: RUF005
        outs = gl.allocate_shared_memory(descs.out.dtype, out_shape, descs.out.layout)
    draw = tickets(CONSUMERS)
    fence_async_shared()  # TMA will signal the barriers that ordinary stores have initialised
    work = (descs, q, k, v, draw, (left, right))
    sources = (Schedule(batch, heads, group, section, queries, keys), packing, counter, total)
    # Of a packed batch, sequences count as rows of one batch element.
    lse_row = (0 if FLAGS.PACKED else heads, queries)
    results = (outs, lse_ptr, sink_ptr, numbers, lse_row)
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
