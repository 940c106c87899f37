"""Forward attention on Hopper, small enough to be read in one sitting.

For each block of block_q = 64 * consumers query rows of each head:

    m, l, O = -inf, 0, 0
    for each tile of block_kv keys, from the last one that any row sees down to the first:
        S = Q K^T                                [64, block_kv] in each consumer
        m_new = max(m, rowmax(S))
        P, alpha = exp(S - m_new), exp(m - m_new)
        m, l, O = m_new, alpha l + rowsum(P), alpha O + P V
    out, lse = O / l, m + log(l)

One producer warp copies tiles to shared memory by TMA; each consumer, a warpgroup, owns 64 rows. It
has S of one tile in flight together with P V of the tile before, so that the tensor cores work
while exponentials are computed. Tiles that need a mask come first, through the same code.

Shapes: q, out (B, H, Sq, D); k, v (B, H, Sk, D); lse (B, H, Sq). TMA sees (B * H, S, D), so a copy
beyond a sequence meets the tensor's edge and not the next head, and reads zero. A mask on P could
not keep V's tail out: 0 * NaN is NaN.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflash.kernels.hopper.compat import async_load, async_store, barrier

ROWS = gl.constexpr(64)  # of one consumer, as many as one wgmma has
LN2 = gl.constexpr(math.log(2))
PAIR_BARRIER = gl.constexpr(8)  # the first named barrier left over; the compiler has those below

# Registers per thread by number of consumers: all at launch, consumer, producer. A multiprocessor
# has 64 K, and the producer's warp counts as four. One configuration spills, 8 to 20 registers by
# type and version: three consumers, persistent, D = 64, not causal.
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 24)}
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def place(step, STAGES: gl.constexpr):
    """Stage and phase of the step-th tile that goes round through STAGES buffers."""
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def locate(tile, sizes, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr):
    """Head, first row and number of key tiles of a work tile: one block of queries of one head."""
    heads, sq, sk, _ = sizes
    first_row = tile // heads * BLOCK_Q
    end = gl.minimum(sk, first_row + BLOCK_Q + sk - sq) if CAUSAL else sk
    # Where no row sees a key, one masked tile saves a path of its own.
    return tile % heads, first_row, gl.maximum(gl.cdiv(end, BLOCK_KV), 1)


@gluon.jit
def mask_keys(s, first_row, first_key, sq, sk, CAUSAL: gl.constexpr):
    """Scores that a row may not see become -inf, also where they are NaN."""
    layout: gl.constexpr = s.type.layout
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    key = first_key + gl.arange(0, s.type.shape[1], gl.SliceLayout(0, layout))
    end = gl.minimum(sk, row + sk - sq + 1) if CAUSAL else gl.full_like(row, sk)
    return gl.where(key[None, :] < end[:, None], s, -float("inf"))


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """The maximum is of scaled scores, in units of log2; the scale has to be positive."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    # A row that has seen no key has maximum -inf, and -inf - -inf is NaN: subtract 0 instead.
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    shrink = gl.exp2(row_max - shift)
    return p, shrink, new_max, row_sum * shrink + gl.sum(p, 1)


@gluon.jit
def pair_barrier(PINGPONG: gl.constexpr, KIND: gl.constexpr, INDEX: gl.constexpr):
    """`bar.sync` or `bar.arrive` at a named barrier of two consumers, 128 threads each.

    Consumers that take turns to issue products compute their exponentials at different times.
    """
    if PINGPONG:
        asm: gl.constexpr = f"bar.{KIND} {INDEX}, 256; mov.u32 $0, 0;"
        nothing = [gl.to_tensor(0)]
        gl.inline_asm_elementwise(asm, "=r,r", nothing, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def producer(work, counter, CAUSAL: gl.constexpr, PERSISTENT: gl.constexpr):
    tile, descs, tiles, bars, sizes = work
    q_desc, k_desc, v_desc, _ = descs
    q_tiles, k_tiles, v_tiles, next_tile = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = bars
    CONSUMERS: gl.constexpr = q_tiles.type.shape[0]
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k_tiles.type.shape[2]
    done = 0  # work tiles so far
    step = 0  # key tiles so far, those of earlier work tiles included
    while tile >= 0:
        head, first_row, count = locate(tile, sizes, CONSUMERS * ROWS, BLOCK_KV, CAUSAL)
        for w in gl.static_range(CONSUMERS):
            # Waits for consumer w to be done with its last Q and the output put in its place. The
            # phase before a barrier's first one counts as complete, so that the first wait passes.
            mbarrier.wait(q_empty.index(w), (done & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
            coord = [head, first_row + w * ROWS, 0]
            async_load(q_desc, coord, q_full.index(w), q_tiles.index(w))
        for j in range(count):
            stage, phase = place(step, STAGES)
            coord = [head, (count - 1 - j) * BLOCK_KV, 0]
            # Waits for all consumers to have multiplied by the K that was in this stage.
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            async_load(k_desc, coord, k_full.index(stage), k_tiles.index(stage))
            # The same for V, which consumers need for one key tile longer.
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            async_load(v_desc, coord, v_full.index(stage), v_tiles.index(stage))
            step += 1
        if PERSISTENT:
            tile = gl.atomic_add(counter, -1) - 1
            # Waits for all consumers to have read the number before this one.
            mbarrier.wait(next_empty, (done & 1) ^ 1)
            lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            next_tile.store(gl.full([32], tile, gl.int32, lanes))
            barrier()  # one lane arrives, after all lanes have stored
            mbarrier.arrive(next_full, count=1)  # all consumers wait for the number
        else:
            tile = -1
        done += 1


@gluon.jit
def consumer(
    work, out_ptr, lse_ptr,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr, PINGPONG: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    tile, descs, tiles, bars, sizes = work
    q_tiles, k_tiles, v_tiles, next_tile = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = bars
    _, sq, sk, scale_log2 = sizes
    CONSUMERS: gl.constexpr = q_tiles.type.shape[0]
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k_tiles.type.shape[2]
    D: gl.constexpr = k_tiles.type.shape[3]
    MINE: gl.constexpr = PAIR_BARRIER + WHICH
    THEIRS: gl.constexpr = PAIR_BARRIER + (WHICH + 1) % CONSUMERS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q = q_tiles.index(WHICH).reshape([ROWS, D])
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    done = 0
    step = 0
    if WHICH == CONSUMERS - 1:
        pair_barrier(PINGPONG, "arrive", THEIRS)  # the first consumer waits for it, to begin
    while tile >= 0:
        head, block_row, count = locate(tile, sizes, CONSUMERS * ROWS, BLOCK_KV, CAUSAL)
        first_row = block_row + WHICH * ROWS
        # Every row of mine sees the keys before `clear`: a tile that ends there needs no mask.
        clear = gl.minimum(sk, first_row + sk - sq + 1) if CAUSAL else sk
        key = (count - 1) * BLOCK_KV
        row_max = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
        row_sum = gl.full([ROWS], 0.0, gl.float32, s_rows)
        o = gl.zeros([ROWS, D], gl.float32, o_layout)

        stage, phase = place(step, STAGES)
        mbarrier.wait(q_full.index(WHICH), done & 1)  # waits for the producer's Q
        mbarrier.wait(k_full.index(stage), phase)  # waits for the producer's K
        pair_barrier(PINGPONG, "sync", MINE)  # waits until the consumer before me has issued
        k = k_tiles.index(stage).reshape([BLOCK_KV, D]).permute((1, 0))
        s = warpgroup_mma(q, k, s_zero, use_acc=False, is_async=True)
        pair_barrier(PINGPONG, "arrive", THEIRS)  # the consumer after me waits for this
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage), count=1)  # the producer waits to overwrite K
        if key + BLOCK_KV > clear:
            s = mask_keys(s, first_row, key, sq, sk, CAUSAL)
        p, shrink, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
        p = gl.convert_layout(p.to(q.dtype), p_layout)
        for _ in range(1, count):
            v_stage, v_phase = place(step, STAGES)
            step += 1
            stage, phase = place(step, STAGES)
            key -= BLOCK_KV
            mbarrier.wait(k_full.index(stage), phase)  # waits for the producer's K
            pair_barrier(PINGPONG, "sync", MINE)  # waits until the consumer before me has issued
            k = k_tiles.index(stage).reshape([BLOCK_KV, D]).permute((1, 0))
            s_next = warpgroup_mma(q, k, s_zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)  # waits for the producer's V
            v = v_tiles.index(v_stage).reshape([BLOCK_KV, D])
            o_next = warpgroup_mma(p, v, o, is_async=True)
            pair_barrier(PINGPONG, "arrive", THEIRS)  # the consumer after me waits for this
            s = warpgroup_mma_wait(1, [s_next])
            mbarrier.arrive(k_empty.index(stage), count=1)  # the producer waits to overwrite K
            if key + BLOCK_KV > clear:
                s = mask_keys(s, first_row, key, sq, sk, CAUSAL)
            p, shrink, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
            o = warpgroup_mma_wait(0, [o_next])
            mbarrier.arrive(v_empty.index(v_stage), count=1)  # the producer waits to overwrite V
            # Not before: ptxas lets no product overlap another while registers that one reads are
            # written.
            p = gl.convert_layout(p.to(q.dtype), p_layout)
            o = o * gl.convert_layout(shrink, o_rows)[:, None]
        stage, phase = place(step, STAGES)
        step += 1
        mbarrier.wait(v_full.index(stage), phase)  # waits for the producer's V
        o = warpgroup_mma(p, v_tiles.index(stage).reshape([BLOCK_KV, D]), o, is_async=True)
        o = warpgroup_mma_wait(0, [o])
        mbarrier.arrive(v_empty.index(stage), count=1)  # the producer waits to overwrite V

        row = first_row + gl.arange(0, ROWS, s_rows)
        lse = (row_max + gl.log2(row_sum)) * LN2  # -inf where no key was seen
        gl.store(lse_ptr + head * sq + row, lse, mask=row < sq)
        divisor = gl.where(row_sum == 0.0, 1.0, row_sum)  # there O is 0, and stays so
        o = (o / gl.convert_layout(divisor, o_rows)[:, None]).to(q.dtype)
        if first_row + ROWS <= sq:
            q.store(o)  # my Q has been read: its place serves the output
            fence_async_shared()  # TMA, another proxy, sees the stores before it
            barrier()  # one thread issues the copy, after all threads have stored
            async_store(descs[3], [head, first_row, 0], q_tiles.index(WHICH))
            tma.store_wait(0)
        else:
            # TMA would clip at Sq too. In packed sequences, where the rows beyond are another
            # sequence's, it cannot, so the last rows go out one by one.
            o_row = first_row + gl.arange(0, ROWS, o_rows)
            offset = (head * sq + o_row).to(gl.int64)[:, None] * D
            column = gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
            gl.store(out_ptr + offset + column, o, mask=(o_row < sq)[:, None])
        mbarrier.arrive(q_empty.index(WHICH), count=1)  # the producer waits to load my next Q
        if PERSISTENT:
            mbarrier.wait(next_full, done & 1)  # waits for the producer's number
            lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            tile = gl.max(next_tile.load(lanes), 0)
            barrier()  # one thread arrives, after all threads have loaded
            mbarrier.arrive(next_empty, count=1)  # the producer waits to overwrite the number
        else:
            tile = -1
        done += 1
    if WHICH == 0:
        pair_barrier(PINGPONG, "sync", MINE)  # waits for the last arrival: none may be left over


@gluon.jit(do_not_specialize=["tiles_left", "heads", "sq", "sk"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr,
    counter, tiles_left, heads, sq, sk, scale_log2,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, PINGPONG: gl.constexpr,
    PERSISTENT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_KV: gl.constexpr = k_desc.block_type.shape[1]
    D: gl.constexpr = k_desc.block_type.shape[2]
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_KV, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_KV, D], v_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    next_tile = gl.allocate_shared_memory(gl.int32, [32], flat)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    next_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    next_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    mbarrier.init(next_full, count=1)
    mbarrier.init(next_empty, count=CONSUMERS)

    descs = (q_desc, k_desc, v_desc, out_desc)
    tiles = (q_tiles, k_tiles, v_tiles, next_tile)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty)
    sizes = (heads, sq, sk, scale_log2)
    # From the last work tile to the first: causal blocks get shorter, and short ones end best.
    tile = tiles_left + gl.num_programs(0) - 1 - gl.program_id(0)
    work = (tile, descs, tiles, bars, sizes)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (work, out_ptr, lse_ptr, 0, CAUSAL, PINGPONG, PERSISTENT)),
            (consumer, (work, out_ptr, lse_ptr, 1, CAUSAL, PINGPONG, PERSISTENT)),
            (producer, (work, counter, CAUSAL, PERSISTENT)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consumer, (work, out_ptr, lse_ptr, 0, CAUSAL, PINGPONG, PERSISTENT)),
            (consumer, (work, out_ptr, lse_ptr, 1, CAUSAL, PINGPONG, PERSISTENT)),
            (consumer, (work, out_ptr, lse_ptr, 2, CAUSAL, PINGPONG, PERSISTENT)),
            (producer, (work, counter, CAUSAL, PERSISTENT)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on


def forward(
    q, k, v, causal=False, *, block_kv=128, stages=2, consumers=2, pingpong=False, programs=None
):
    """Attention and its lse of contiguous float16 or bfloat16 tensors, D = 64 or 128.

    `programs` is a number of programs that share the work tiles; None starts one for each.
    """
    batch, heads, sq, d = q.shape
    sk = k.shape[2]
    out, lse = torch.empty_like(q), q.new_empty((batch, heads, sq), dtype=torch.float32)
    work_tiles = batch * heads * triton.cdiv(sq, consumers * ROWS.value)
    programs = min(programs or work_tiles, work_tiles)
    # Each program has a work tile to begin with; the counter gives out those that are left.
    tiles_left = work_tiles - programs
    counter = torch.full((1,), tiles_left, dtype=torch.int32, device=q.device)

    def describe(x, rows):
        shape = [1, rows, d]
        layout = gl.NVMMASharedLayout.get_default_for(shape, DTYPES[x.dtype])
        return TensorDescriptor.from_tensor(x.flatten(0, 1), shape, layout)

    all_registers, consumer_registers, producer_registers = REGISTERS[consumers]
    forward_kernel[(programs,)](
        describe(q, ROWS.value), describe(k, block_kv), describe(v, block_kv),
        describe(out, ROWS.value), out, lse,
        counter, tiles_left, batch * heads, sq, sk, math.log2(math.e) / math.sqrt(d),
        CONSUMERS=consumers, STAGES=stages, CAUSAL=causal, PINGPONG=pingpong,
        PERSISTENT=tiles_left > 0,
        CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=all_registers,
    )  # fmt: skip
    return out, lse
