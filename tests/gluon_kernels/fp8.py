"""Forward attention on Hopper in e4m3: what 8-bit operands change against forward.py.

    m, l, O = -inf, 0, 0
    for each tile of block_kv keys:
        S = Q K^T                                [64, block_kv] in each of two consumers
        m_new = max(m, rowmax(S))
        P, alpha = 256 exp(S - m_new), exp(m - m_new)
        m, l, O = m_new, alpha l + rowsum(P), alpha O + e4m3(P) V
    out = O / l

Shapes: q, out (B, H, Sq, D); k (B, H, Sk, D); v (B, H, D, Sk) as `prepare_values` makes it. Sq is a
multiple of 128, Sk of block_kv. Three things differ from 16 bits:

- The tensor cores want both operands contiguous along the axis that is summed over. For P V that
  is the axis of keys, so V comes transposed.
- A thread has S at columns 2c, 2c + 1, 8 + 2c, 9 + 2c of every 16 (c is its number modulo 4), and
  the product reads its operand P at 4c ... 4c + 3. Summing over keys in another order is as good:
  V's keys are permuted instead, once, and P stays where it is.
- e4m3 ends at 448 and has three bits below the leading one. The factor 256 uses its range; l has
  it as well.
"""

import math

import torch
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
CONSUMERS = gl.constexpr(2)
P_EXPONENT = gl.constexpr(8.0)
# Registers per thread: all at launch, consumer, producer, as in forward.py.
REGISTERS = (168, 240, 24)
DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}
PACK = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
)


@gluon.jit
def place(step, STAGES: gl.constexpr):
    """Stage and phase of the step-th tile that goes round through STAGES buffers."""
    return step % STAGES, (step // STAGES) & 1


@gluon.jit
def pack(p):
    """Four neighbours in the permuted order of keys become one int32.

    Carried round the loop as e4m3, P is taken apart into bytes by the compiler, hundreds of PRMT.
    """
    KEYS: gl.constexpr = p.type.shape[1]
    p = p.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = p.reshape([ROWS, KEYS // 4, 2, 2]).split()
    a, c = even.split()
    b, d = odd.split()
    return gl.inline_asm_elementwise(
        PACK, "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(x, layout: gl.constexpr):
    """P as the first operand of a product; compiled, it takes no instruction."""
    KEYS: gl.constexpr = x.type.shape[1] * 4
    a, b = x.to(gl.int8), (x >> 8).to(gl.int8)
    c, d = (x >> 16).to(gl.int8), (x >> 24).to(gl.int8)
    p = gl.join(gl.join(a, c), gl.join(b, d)).reshape([ROWS, KEYS])
    return gl.convert_layout(p.to(gl.float8e4nv, bitcast=True), layout)


@gluon.jit
def exp2_polynomial(x):
    """2^x to 1e-4, far below a unit of e4m3, without the special-function unit."""
    x = gl.maximum(x, -126.0)
    magic = x + 12582912.0  # 1.5 * 2^23: round(x) is in its low bits
    f = x - (magic - 12582912.0)
    y = ((0.05550411 * f + 0.24022651) * f + 0.69314718) * f + 1.0
    exponent = magic.to(gl.int32, bitcast=True) << 23
    return (y.to(gl.int32, bitcast=True) + exponent).to(gl.float32, bitcast=True)


@gluon.jit
def exp2(x, POLYNOMIAL: gl.constexpr):
    """POLYNOMIAL percent of the columns, 0, 25, 50 or 100, go to the FMA units."""
    if POLYNOMIAL == 0:
        return gl.exp2(x)
    elif POLYNOMIAL == 100:
        return exp2_polynomial(x)
    else:
        COLUMNS: gl.constexpr = x.type.shape[1]
        left, right = x.reshape([ROWS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        right = gl.convert_layout(exp2(right, 2 * POLYNOMIAL), left.type.layout)
        y = gl.join(gl.exp2(left), right).permute([0, 2, 1]).reshape([ROWS, COLUMNS])
        return gl.convert_layout(y, x.type.layout)


@gluon.jit
def sum_in_thread(p):
    """Partial sums over the columns that one thread has: [64, 4]. The rest waits for the end."""
    return gl.sum(gl.sum(p.reshape([ROWS, p.type.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, POLYNOMIAL: gl.constexpr):
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    p = exp2(s * scale_log2 - (new_max[:, None] - P_EXPONENT), POLYNOMIAL)
    shrink = gl.exp2(row_max - new_max)
    part = sum_in_thread(p)
    shrink_sum = gl.convert_layout(shrink, gl.SliceLayout(1, part.type.layout))
    return p, shrink, new_max, row_sum * shrink_sum[:, None] + part


@gluon.jit
def producer(descs, tiles, bars, head, block, sizes):
    q_desc, k_desc, v_desc, _ = descs
    q_tiles, k_tiles, v_tiles, _ = tiles
    q_full, k_full, k_empty, v_full, v_empty = bars
    sq, sk, _ = sizes
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k_tiles.type.shape[1]
    D: gl.constexpr = k_tiles.type.shape[2]
    for w in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        row = head * sq + (block * CONSUMERS + w) * ROWS
        async_load(q_desc, [row, 0], q_full.index(w), q_tiles.index(w))
    for j in range(sk // BLOCK_KV):
        stage, phase = place(j, STAGES)
        key = j * BLOCK_KV
        # Waits for both consumers to have multiplied by the K that was in this stage. The phase
        # before a barrier's first one counts as complete, so that the first round passes.
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        async_load(k_desc, [head * sk + key, 0], k_full.index(stage), k_tiles.index(stage))
        # The same for V, which consumers need for one key tile longer.
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        async_load(v_desc, [head * D, key], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def consumer(descs, tiles, bars, head, block, sizes, WHICH: gl.constexpr, POLYNOMIAL: gl.constexpr):
    q_tiles, k_tiles, v_tiles, out_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = bars
    sq, sk, scale_log2 = sizes
    STAGES: gl.constexpr = k_tiles.type.shape[0]
    BLOCK_KV: gl.constexpr = k_tiles.type.shape[1]
    D: gl.constexpr = k_tiles.type.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=4)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q = q_tiles.index(WHICH)
    s_zero = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = sum_in_thread(s_zero)
    o = gl.zeros([ROWS, D], gl.float32, o_layout)

    mbarrier.wait(q_full.index(WHICH), 0)  # waits for the producer's Q
    mbarrier.wait(k_full.index(0), 0)  # waits for the producer's K
    k = k_tiles.index(0).permute((1, 0))
    s = warpgroup_mma(q, k, s_zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(0), count=1)  # the producer waits to overwrite K
    p, shrink, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, POLYNOMIAL)
    p = pack(p)
    for j in range(1, sk // BLOCK_KV):
        stage, phase = place(j, STAGES)
        v_stage, v_phase = place(j - 1, STAGES)
        mbarrier.wait(k_full.index(stage), phase)  # waits for the producer's K
        k = k_tiles.index(stage).permute((1, 0))
        s_next = warpgroup_mma(q, k, s_zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)  # waits for the producer's V
        v = v_tiles.index(v_stage).permute((1, 0))
        o_next = warpgroup_mma(unpack(p, p_layout), v, o, is_async=True)
        s = warpgroup_mma_wait(1, [s_next])
        mbarrier.arrive(k_empty.index(stage), count=1)  # the producer waits to overwrite K
        p, shrink, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2, POLYNOMIAL)
        o = warpgroup_mma_wait(0, [o_next])
        mbarrier.arrive(v_empty.index(v_stage), count=1)  # the producer waits to overwrite V
        # Not before: ptxas lets no product overlap another while registers that one reads are
        # written.
        p = pack(p)
        o = o * gl.convert_layout(shrink, o_rows)[:, None]
    stage, phase = place(sk // BLOCK_KV - 1, STAGES)
    mbarrier.wait(v_full.index(stage), phase)  # waits for the producer's V
    v = v_tiles.index(stage).permute((1, 0))
    o = warpgroup_mma(unpack(p, p_layout), v, o, is_async=True)
    o = warpgroup_mma_wait(0, [o])  # nobody waits for this V: no tile comes after it

    o = o / gl.convert_layout(gl.sum(row_sum, 1), o_rows)[:, None]
    out = out_tiles.index(WHICH)
    out.store(o.to(out.dtype))
    fence_async_shared()  # TMA, another proxy, sees the stores before it
    barrier()  # one thread issues the copy, after all threads have stored
    async_store(descs[3], [head * sq + (block * CONSUMERS + WHICH) * ROWS, 0], out)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sq, sk, scale_log2,
    STAGES: gl.constexpr, POLYNOMIAL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_KV: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_KV, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, D, BLOCK_KV], v_desc.layout)
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, ROWS, D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(w), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    descs = (q_desc, k_desc, v_desc, out_desc)
    tiles = (q_tiles, k_tiles, v_tiles, out_tiles)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    sizes = (sq, sk, scale_log2)
    head, block = gl.program_id(0), gl.program_id(1)
    gl.warp_specialize(
        [
            (consumer, (descs, tiles, bars, head, block, sizes, 0, POLYNOMIAL)),
            (consumer, (descs, tiles, bars, head, block, sizes, 1, POLYNOMIAL)),
            (producer, (descs, tiles, bars, head, block, sizes)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def prepare_values(v):
    """(B, H, S, D) to (B, H, D, S), where keys 2c, 2c + 1, 8 + 2c, 9 + 2c of 16 come together."""
    b, h, s, d = v.shape
    keys = v.mT.reshape(b, h, d, s // 16, 2, 4, 2).transpose(-3, -2)
    return keys.reshape(b, h, d, s)


def forward(q, k, v, *, block_kv=128, stages=2, polynomial=0, out_dtype=torch.bfloat16):
    """Attention of contiguous float8_e4m3fn q, k and prepared v, D = 64 or 128.

    `polynomial` is the percentage of exponentials, 0, 25, 50 or 100, left to the FMA units.
    """
    batch, heads, sq, d = q.shape
    sk = k.shape[2]
    out = torch.empty_like(q, dtype=out_dtype)

    def describe(x, block):
        layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
        return TensorDescriptor.from_tensor(x.flatten(0, 2), block, layout)

    rows = ROWS.value
    all_registers, consumer_registers, producer_registers = REGISTERS
    forward_kernel[(batch * heads, sq // (CONSUMERS.value * rows))](
        describe(q, [rows, d]), describe(k, [block_kv, d]), describe(v, [d, block_kv]),
        describe(out, [rows, d]), sq, sk, math.log2(math.e) / math.sqrt(d),
        STAGES=stages, POLYNOMIAL=polynomial,
        CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=all_registers,
    )  # fmt: skip
    return out
