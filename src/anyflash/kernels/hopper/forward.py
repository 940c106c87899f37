"""Forward of attention on Hopper.

A program takes blocks of BLOCK_Q = 64 · CONSUMERS query rows of one head, one after the other, and
for each of them walks over the tiles of BLOCK_KV keys that its rows see, from the last to the
first:

    m, l, O = −∞, 0, 0
    S = Q K^T                              [64, BLOCK_KV] in each consumer
    for each tile:
        P, m', l' = softmax of S over what came before
        S' = Q K'^T                        of the next tile, in flight together with
        O += P V                           [64, Dv], of this one
        O *= 2^(m − m')
    out, lse = O / l, ln 2 · (m + log2 l)

One warp, the producer, starts all copies from global memory; each consumer is a warpgroup with 64
rows. The tensor cores compute S of the next tile while a consumer exponentiates this one.

Shapes: q, out (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), in any strides that TMA takes
(16-byte multiples, last one 1), through descriptors of four axes: rows beyond a sequence are zeros
in shared memory and are not written; so are columns beyond D where the tile is wider. lse (B, Hq,
Sq) float32, contiguous.

Source: FlashAttention-3 (Shah et al., 2024), algorithms 1 and 2, for the roles and the overlap
inside a warpgroup.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflash.kernels.hopper.compat import async_store, barrier
from anyflash.kernels.hopper.masking import Window, clear_tiles, key_tiles, mask_scores
from anyflash.kernels.hopper.pipeline import channel, place, tickets
from anyflash.kernels.hopper.softmax import (
    LN2,
    LOG2E,
    logits,
    online_softmax,
    pack,
    sum_in_thread,
    unpack,
    with_sink,
)
from anyflash.kernels.hopper.tiles import Tile, choose

TICKETS = gl.constexpr(2)  # so that the next number can be drawn before all have taken the last
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


class Schedule(NamedTuple):
    """The blocks of all heads in the order in which programs take them.

    Heads come in sections. In a section the head runs fastest and blocks go from the last, which
    under a causal mask is the longest, to the first. The smaller a section, the more of its keys
    and values are in L2; the larger, the better long and short blocks even out.
    """

    batch: Any
    heads: Any
    group: Any  # query heads of one key head
    section: Any  # batch · heads of one section


class Flags(NamedTuple):
    """Compile-time constants: what a problem asks for, and how it is done."""

    LEFT: Any
    RIGHT: Any
    SCALED: Any
    SOFTCAP: Any
    SINK: Any
    PINGPONG: Any
    DYNAMIC: Any  # programs draw their blocks from a counter; else each has one block at most
    SHARED: Any  # the output takes the place of Q in shared memory
    Q_COLUMNS: Any  # columns of Q that are multiplied from registers


@gluon.jit
def block_of(number, schedule, queries, BLOCK_Q: gl.constexpr):
    """(batch element, head, first row) of the number-th block."""
    blocks = gl.cdiv(queries, BLOCK_Q)
    heads = schedule.batch * schedule.heads
    before = number // (schedule.section * blocks) * schedule.section
    width = gl.minimum(schedule.section, heads - before)
    inside = number - before * blocks
    head = before + inside % width
    row = (blocks - 1 - inside // width) * BLOCK_Q
    return head // schedule.heads, head % schedule.heads, row


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
def to_registers(q_tile, layout: gl.constexpr, COLUMNS: gl.constexpr):
    """The first columns of Q as an operand in registers, or nothing."""
    if COLUMNS == 0:
        return 0
    else:
        operand: gl.constexpr = gl.DotOperandLayout(0, layout, k_width=2)
        return q_tile.slice(0, COLUMNS, dim=1).load(operand)


@gluon.jit
def scores(q_registers, q_tile, k_tile, zero, COLUMNS: gl.constexpr):
    """Q K^T in flight. From shared memory a product of 64 rows by N columns reads (64 + N) · 32
    bytes in N / 2 clocks, at N = 64 all that there is; from registers it reads half of it."""
    D: gl.constexpr = q_tile.shape[1]
    if COLUMNS == 0:
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    elif COLUMNS == D:
        s = warpgroup_mma(q_registers, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        k_left = k_tile.slice(0, COLUMNS, dim=1).permute((1, 0))
        k_right = k_tile.slice(COLUMNS, D - COLUMNS, dim=1).permute((1, 0))
        s = warpgroup_mma(q_registers, k_left, zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q_tile.slice(COLUMNS, D - COLUMNS, dim=1), k_right, s, is_async=True)
    return s


@gluon.jit
def producer(work, counter, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    descs, q, k, v, draw, window, schedule, total = work
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    SLOTS: gl.constexpr = k.tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[3]
    turn = 0
    step = 0
    number = gl.program_id(0)
    while number < total:
        b, h, row = block_of(number, schedule, window.queries, BLOCK_Q)
        number = total
        if FLAGS.DYNAMIC:
            # Early: consumers want it when they are done with this block.
            number = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
            slot, phase = place(turn, TICKETS)
            draw.give(number, slot, phase)
        first, last = key_tiles(row, window, BLOCK_Q, BLOCK_KV, FLAGS)
        h_kv = h // schedule.group
        for w in gl.static_range(CONSUMERS):
            q.fill(descs.q, [b, h, row + w * ROWS, 0], w, turn & 1)
        for j in range(last - first):
            slot, phase = place(step, SLOTS)
            key = (last - 1 - j) * BLOCK_KV
            k.fill(descs.k, [b, h_kv, key, 0], slot, phase)
            v.fill(descs.v, [b, h_kv, key, 0], slot, phase)
            step += 1
        turn += 1


@gluon.jit
def walk(
    job, state, above, below, MASKED: gl.constexpr, WHO: gl.constexpr, CONSUMERS: gl.constexpr,
    FLAGS: gl.constexpr,
):  # fmt: skip
    """Go over the key tiles below `above` down to `below`: S of each in flight together with P V
    of the one before. One body, compiled with and without a mask: a branch inside it would cut the
    exponentials off from the products (4 % at D = 128, S = 16k)."""
    k, v, q_registers, q_tile, row, window, numbers = job
    p, o, row_max, row_sum, step = state
    SLOTS: gl.constexpr = k.tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[3]
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
        s = scores(q_registers, q_tile, k_tile, s_zero, FLAGS.Q_COLUMNS)
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
    descs, q, k, v, draw, window, schedule, total = work
    outs, lse_ptr, sink_ptr, numbers = results
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    SLOTS: gl.constexpr = k.tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k.tiles.type.shape[3]
    DV: gl.constexpr = v.tiles.type.shape[4]
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
    number = gl.program_id(0)
    if WHO == CONSUMERS - 1:
        take_turns(FLAGS.PINGPONG, "arrive", THEIRS)  # the first consumer waits for it, to begin
    while number < total:
        b, h, block_row = block_of(number, schedule, window.queries, BLOCK_Q)
        first, last = key_tiles(block_row, window, BLOCK_Q, BLOCK_KV, FLAGS)
        row = block_row + WHO * ROWS
        row_max = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
        row_sum = sum_in_thread(s_zero)
        o = gl.zeros([ROWS, DV], gl.float32, o_layout)

        q_tile = q.wait(WHO, turn & 1)
        q_registers = to_registers(q_tile, s_layout, FLAGS.Q_COLUMNS)
        slot, phase = place(step, SLOTS)
        k_tile = k.wait(slot, phase)
        take_turns(FLAGS.PINGPONG, "sync", WHO)  # waits until the consumer before me has issued
        s = scores(q_registers, q_tile, k_tile, s_zero, FLAGS.Q_COLUMNS)
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
        job = (k, v, q_registers, q_tile, row, window, numbers)
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
            shrink, row_max, total_sum = with_sink(row_max, total_sum, gl.load(sink_ptr + h))
            o = o * gl.convert_layout(shrink, o_rows)[:, None]
        rows = row + gl.arange(0, ROWS, layout=s_rows)
        lse = (row_max + gl.log2(total_sum)) * LN2  # −inf where a row has nothing
        lse_row = lse_ptr + (b * schedule.heads + h).to(gl.int64) * window.queries
        gl.store(lse_row + rows, lse, mask=rows < window.queries)
        divisor = gl.where(total_sum == 0.0, 1.0, total_sum)  # there O is 0, and stays so
        o = o * gl.convert_layout(1.0 / divisor, o_rows)[:, None]
        tma.store_wait(0)  # my output of the block before has left its place
        barrier()  # only the thread that issued it has waited
        out_tile = outs.index(WHO)
        out_tile.reshape([ROWS, DV]).store(o.to(dtype))
        fence_async_shared()  # TMA reads it, through another proxy
        barrier()  # all threads have stored what one of them hands to TMA
        async_store(descs.out, [b, h, row, 0], out_tile)
        if FLAGS.SHARED:
            tma.store_wait(0)  # the output has left the place of Q
            q.release(WHO)
        number = total
        if FLAGS.DYNAMIC:
            slot, phase = place(turn, TICKETS)
            number = draw.take(slot, phase)
        turn += 1
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
    q_desc, k_desc, v_desc, out_desc, lse_ptr, sink_ptr, counter, numbers,
    queries, keys, left, right, batch, heads, group, section, total,
    CONSUMERS: gl.constexpr, KV_SLOTS: gl.constexpr, FLAGS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    descs = Descriptors(q_desc, k_desc, v_desc, out_desc)
    window = Window(queries, keys, left, right)
    schedule = Schedule(batch, heads, group, section)
    q = channel(descs.q, CONSUMERS, 1)
    k = channel(descs.k, KV_SLOTS, CONSUMERS)
    v = channel(descs.v, KV_SLOTS, CONSUMERS)
    if FLAGS.SHARED:
        outs = q.tiles
    else:
        out_shape: gl.constexpr = [CONSUMERS] + descs.out.block_type.shape  # noqa: RUF005
        outs = gl.allocate_shared_memory(descs.out.dtype, out_shape, descs.out.layout)
    draw = tickets(TICKETS, CONSUMERS)
    work = (descs, q, k, v, draw, window, schedule, total)
    results = (outs, lse_ptr, sink_ptr, numbers)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (work, results, 0, CONSUMERS, FLAGS)),
            (consumer, (work, results, 1, CONSUMERS, FLAGS)),
            (producer, (work, counter, CONSUMERS, FLAGS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consumer, (work, results, 0, CONSUMERS, FLAGS)),
            (consumer, (work, results, 1, CONSUMERS, FLAGS)),
            (consumer, (work, results, 2, CONSUMERS, FLAGS)),
            (producer, (work, counter, CONSUMERS, FLAGS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on


# The launcher.

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Of 1, 2, 4, 8, 16 and all heads, the best or close to it for every D and length of the table in
# tiles.py: at D = 128, S = 1024 dense 1.00 (1: 0.97, all: 0.87), causal 16 K 1.23 (1: 1.12).
SECTION = 16


def addressable(x: Tensor) -> bool:
    """Whether TMA can read a tensor (B, H, S, D) where it is."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.itemsize % 16 == 0 for s in steps)
    )


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor over an addressable (B, H, S, D) with boxes of rows × columns."""
    box = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype])
    # The stride of an axis of length 1 is never used, but has to be lawful.
    strides = [s if n > 1 else columns for n, s in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], box, layout)


def empty_addressable(like: Tensor, columns: int) -> Tensor:
    """(B, H, S, columns) in the order in which `like` has its axes in memory, rows aligned."""
    order = sorted(range(3), key=lambda axis: -like.stride(axis))
    shape = [like.shape[axis] for axis in order]
    room = like.new_empty(*shape, -(-columns // 8) * 8)[..., :columns]
    return room.permute(*(order.index(axis) for axis in range(3)), 3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a query head with the keys of its window.

    Args:
        q: (B, Hq, Sq, D), float16 or bfloat16, any strides; D at most 256.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) of the same dtype; Hq a multiple of Hkv, Sk at
            least 1, Dv at most 256. Tensors that TMA cannot address (base or strides that are no
            multiples of 16 bytes, a last stride other than 1) are copied.
        scale: of the scores; may be 0 or negative.
        left, right: keys that a query sees before and after its own position i + Sk − Sq; None is
            all of them. Causal is right=0.
        softcap: scores become softcap · tanh(score / softcap), by tanh.approx; 0 is none.
        sink: float32 (Hq,), one more logit per row without a value.
        tile: None chooses from the table.
        programs: how many run side by side; None is one for each multiprocessor.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and q's order of axes, and lse (B, Hq, Sq), float32,
        natural logarithm. Products are accumulated in float32, weights rounded to q's dtype.
        A row that sees nothing has out 0 and lse −inf, or the sink.
    """
    (batch, heads, queries, dim), (_, heads_kv, keys, dim_v) = q.shape, v.shape
    if tile is None:
        masked = left is not None or right is not None
        # What a row sees on average of a long sequence: half of the keys if causal.
        seen = min(keys if left is None else left + 1, keys // 2 if masked else keys)
        tile = choose(max(dim, dim_v), seen, masked)
    if programs is None:
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    q, k, v = (
        x if addressable(x) else empty_addressable(x, x.shape[3]).copy_(x) for x in (q, k, v)
    )
    out = empty_addressable(q, dim_v)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    total = batch * heads * -(-queries // tile.block_q)
    if total == 0:
        return out, lse

    dynamic = total > programs
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else lse
    scaled = scale <= 0 or softcap != 0
    flags = Flags(
        LEFT=left is not None, RIGHT=right is not None, SCALED=scaled, SOFTCAP=softcap != 0,
        SINK=sink is not None, PINGPONG=tile.pingpong, DYNAMIC=dynamic, SHARED=tile.shared_out,
        Q_COLUMNS=tile.q_columns,
    )  # fmt: skip
    numbers = Numbers(LOG2E.value * (1.0 if scaled else scale), float(scale), float(softcap))
    registers, consumer_registers, producer_registers = tile.registers
    forward_kernel[(min(programs, total),)](
        describe(q, ROWS.value, tile.columns), describe(k, tile.block_kv, tile.columns),
        describe(v, tile.block_kv, tile.columns), describe(out, ROWS.value, tile.columns),
        lse, lse if sink is None else sink, counter, numbers,
        queries, keys, left or 0, right or 0, batch, heads, heads // heads_kv, SECTION, total,
        CONSUMERS=tile.consumers, KV_SLOTS=tile.kv_slots, FLAGS=flags,
        CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=registers,
    )  # fmt: skip
    return out, lse
