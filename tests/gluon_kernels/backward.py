"""Fused backward of attention on Hopper: a test subject of the emulator and an example to read.

A program owns BLOCK_KV = 128 keys of one head and walks over the tiles of BLOCK_Q = 64 queries
that see them. Scores are held transposed, keys × queries, so that P^T and dS^T are register
operands of the products that make dV and dK:

    K, V [128, D]                        once; then for each tile of queries Q, dO [64, D]:
    S^T  = K Q^T           [128, 64]     consumers, 64 keys each
    dP^T = V dO^T          [128, 64]
    P^T  = exp(scale · S^T − lse)        0 where the mask forbids
    dV  += P^T dO          [128, D]      in registers
    dS^T = P^T ∘ (dP^T − delta)          to the dQ role, through shared memory
    dK  += dS^T Q          [128, D]      in registers; times scale at the end
    dQ  += (dS^T)^T K      [64, D]       dQ role: added to float32 in global memory by TMA

Lengths are free. Descriptors have three axes (B·H, S, D), so that TMA reads zeros beyond a
sequence and drops what is stored there; with two (B·H·S, D) a tail would read and overwrite the
next head. Zero rows of Q and dO meet lse = +inf, hence P = 0. Keys beyond the end are masked:
exp(0 − lse) may be infinite, and infinity times a zero row of K is NaN.

This is about synchronisation, not speed: at D = 128 the consumers spill, and ptxas serialises
their products.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
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

from anyflash.kernels.hopper.compat import async_atomic_add, async_load, async_store, barrier

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK_Q = gl.constexpr(64)
BLOCK_KV = gl.constexpr(128)
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # keys of one consumer
DQ_COLUMNS = gl.constexpr(64)  # dQ is made in pieces: 128 columns are 64 registers, of 72
DQ_STAGES = gl.constexpr(2)


class Barriers(NamedTuple):
    kv_ready: Any  # consumers wait for the producer's K and V, once
    q_ready: Any  # [STAGES] consumers wait for the producer's Q
    do_ready: Any  # [STAGES] consumers wait for the producer's dO
    tile_empty: Any  # [STAGES] producer waits until both consumers are done with Q and dO
    ds_full: Any  # [DS_STAGES] dQ role waits for both consumers' rows of dS^T
    ds_empty: Any  # [DS_STAGES] consumers wait until the dQ role is done with dS^T and K


class Buffers(NamedTuple):
    k: Any  # [1, BLOCK_KV, D], in the end dK
    v: Any  # [1, BLOCK_KV, D], in the end dV
    q: Any  # [STAGES, 1, BLOCK_Q, D]
    do: Any  # [STAGES, 1, BLOCK_Q, D]
    ds: Any  # [DS_STAGES, BLOCK_KV, BLOCK_Q], dS^T
    dq: Any  # [DQ_STAGES, 1, BLOCK_Q, DQ_COLUMNS], float32


class Work(NamedTuple):
    head: Any  # batch · H + head
    kv_start: Any  # first key
    q_start: Any  # first query of the first tile
    tiles: Any  # at least 1: the last query sees every key
    q_len: Any
    kv_len: Any
    scale: Any
    lses: Any  # float32, base 2, from the head's first query on
    deltas: Any  # float32, likewise


@gluon.jit
def matrix(buffer):
    """[1, rows, columns], as TMA fills it → [rows, columns], as a product reads it."""
    return buffer.reshape([buffer.shape[1], buffer.shape[2]])


@gluon.jit
def probabilities(s, lse, q_start, work, GROUP: gl.constexpr, CAUSAL: gl.constexpr):
    """P^T of one consumer's keys and the queries from `q_start` on; `lse` is in base 2."""
    p = gl.exp2(s * (work.scale * LOG2E) - lse[None, :])
    # The tile's first query sees the keys below `seen`; under CAUSAL each query sees one more.
    seen = q_start + work.kv_len - work.q_len + 1 if CAUSAL else work.kv_len
    if seen < work.kv_start + BLOCK_KV:
        keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
        keys = keys + work.kv_start + GROUP * ROWS
        ends = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, s.type.layout))
        ends = seen + ends * (1 if CAUSAL else 0)
        p = gl.where(keys[:, None] < ends[None, :], p, 0.0)
    return p


@gluon.jit
def consumer(barriers, buffers, work, dk_desc, dv_desc, GROUP: gl.constexpr, CAUSAL: gl.constexpr):
    STAGES: gl.constexpr = buffers.q.shape[0]
    DS_STAGES: gl.constexpr = buffers.ds.shape[0]
    D: gl.constexpr = buffers.q.shape[3]
    dtype: gl.constexpr = buffers.q.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    k = matrix(buffers.k).slice(GROUP * ROWS, ROWS)
    v = matrix(buffers.v).slice(GROUP * ROWS, ROWS)
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, s_layout)
    dk = gl.zeros([ROWS, D], gl.float32, d_layout)
    dv = gl.zeros([ROWS, D], gl.float32, d_layout)
    queries = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, s_layout))
    # Consumers wait for the producer: K and V are there.
    mbarrier.wait(barriers.kv_ready, 0)
    for j in range(work.tiles):
        stage, phase = j % STAGES, (j // STAGES) & 1
        ds_stage, ds_phase = j % DS_STAGES, (j // DS_STAGES) & 1
        q_start = work.q_start + j * BLOCK_Q
        q = matrix(buffers.q.index(stage))
        do = matrix(buffers.do.index(stage))
        lse = gl.load(work.lses + q_start + queries)
        # Consumers wait for the producer: Q is there.
        mbarrier.wait(barriers.q_ready.index(stage), phase)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        # Consumers wait for the producer: dO is there.
        mbarrier.wait(barriers.do_ready.index(stage), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [s])  # dP^T goes on under the exponentials
        p = probabilities(s, lse, q_start, work, GROUP, CAUSAL)
        delta = gl.load(work.deltas + q_start + queries)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])  # dV goes on
        ds = (p * (dp - delta[None, :])).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        # Consumers wait for the dQ role: the dS^T of DS_STAGES tiles ago is read.
        mbarrier.wait(barriers.ds_empty.index(ds_stage), ds_phase ^ 1)
        buffers.ds.index(ds_stage).slice(GROUP * ROWS, ROWS).store(ds)
        fence_async_shared()  # a product will read it, through the asynchronous proxy
        # The dQ role waits for this: these rows of dS^T are written.
        mbarrier.arrive(barriers.ds_full.index(ds_stage), count=1)
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        # The producer waits for this: Q and dO are read.
        mbarrier.arrive(barriers.tile_empty.index(stage), count=1)

    # Consumers wait for the dQ role: its last product has read K, which dK will overwrite.
    last = work.tiles - 1
    mbarrier.wait(barriers.ds_empty.index(last % DS_STAGES), (last // DS_STAGES) & 1)
    k.store((dk * work.scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()  # TMA will read it, through the asynchronous proxy
    barrier()  # all four warps have written what one thread hands to TMA
    place = [work.head, work.kv_start + GROUP * ROWS, 0]
    async_store(dk_desc, place, buffers.k.slice(GROUP * ROWS, ROWS, dim=1))
    async_store(dv_desc, place, buffers.v.slice(GROUP * ROWS, ROWS, dim=1))
    tma.store_wait(0)  # shared memory is gone when the program ends


@gluon.jit
def query_gradient(barriers, buffers, work, dq_desc):
    DS_STAGES: gl.constexpr = buffers.ds.shape[0]
    PIECES: gl.constexpr = buffers.q.shape[3] // DQ_COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    zero = gl.zeros([BLOCK_Q, DQ_COLUMNS], gl.float32, layout)
    for j in range(work.tiles):
        stage = j % DS_STAGES
        # The dQ role waits for both consumers: dS^T is written. So K is there: they have read it.
        mbarrier.wait(barriers.ds_full.index(stage), (j // DS_STAGES) & 1)
        for piece in gl.static_range(PIECES):
            k = matrix(buffers.k).slice(piece * DQ_COLUMNS, DQ_COLUMNS, dim=1)
            ds = buffers.ds.index(stage).permute((1, 0))
            dq = warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            if piece == PIECES - 1:
                # Consumers wait for this: dS^T is read and, after the last tile, K.
                mbarrier.arrive(barriers.ds_empty.index(stage), count=1)
            slot = buffers.dq.index((j * PIECES + piece) % DQ_STAGES)
            tma.store_wait(DQ_STAGES - 1)  # the addition of DQ_STAGES pieces ago has read the slot
            barrier()  # only the thread that issued it has waited
            matrix(slot).store(dq)
            fence_async_shared()  # TMA will read it, through the asynchronous proxy
            barrier()  # all four warps have written what one thread hands to TMA
            place = [work.head, work.q_start + j * BLOCK_Q, piece * DQ_COLUMNS]
            async_atomic_add(dq_desc, place, slot)
    tma.store_wait(0)  # shared memory is gone when the program ends


@gluon.jit
def producer(barriers, buffers, work, q_desc, k_desc, v_desc, do_desc):
    STAGES: gl.constexpr = buffers.q.shape[0]
    mbarrier.expect(barriers.kv_ready, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    async_load(k_desc, [work.head, work.kv_start, 0], barriers.kv_ready, buffers.k)
    async_load(v_desc, [work.head, work.kv_start, 0], barriers.kv_ready, buffers.v)
    for j in range(work.tiles):
        stage = j % STAGES
        place = [work.head, work.q_start + j * BLOCK_Q, 0]
        # The producer waits for both consumers: the tile of STAGES ago is read.
        mbarrier.wait(barriers.tile_empty.index(stage), ((j // STAGES) & 1) ^ 1)
        mbarrier.expect(barriers.q_ready.index(stage), q_desc.block_type.nbytes)
        async_load(q_desc, place, barriers.q_ready.index(stage), buffers.q.index(stage))
        mbarrier.expect(barriers.do_ready.index(stage), do_desc.block_type.nbytes)
        async_load(do_desc, place, barriers.do_ready.index(stage), buffers.do.index(stage))


@gluon.jit
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, lses, deltas, q_len, kv_len, scale,
    CAUSAL: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, BLOCK_Q], dtype)
    k = gl.allocate_shared_memory(dtype, [1, BLOCK_KV, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, BLOCK_KV, D], v_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_Q, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_Q, D], do_desc.layout)
    ds = gl.allocate_shared_memory(dtype, [DS_STAGES, BLOCK_KV, BLOCK_Q], ds_layout)
    dq = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, 1, BLOCK_Q, DQ_COLUMNS], dq_desc.layout)
    buffers = Buffers(k, v, q, do, ds, dq)

    layout: gl.constexpr = mbarrier.MBarrierLayout()
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    tile_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], layout)
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], layout)
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(i), count=CONSUMERS)
        mbarrier.init(ds_empty.index(i), count=1)
    barriers = Barriers(kv_ready, q_ready, do_ready, tile_empty, ds_full, ds_empty)

    kv_start = gl.program_id(0) * BLOCK_KV  # key blocks fastest: a head's dQ stays in L2
    head = gl.program_id(1)
    # The first query to see the first key, rounded down to a tile.
    q_start = gl.maximum(kv_start + q_len - kv_len, 0) // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    tiles = gl.cdiv(q_len - q_start, BLOCK_Q)
    row = head * gl.cdiv(q_len, BLOCK_Q) * BLOCK_Q  # lses and deltas are padded to whole tiles
    work = Work(head, kv_start, q_start, tiles, q_len, kv_len, scale, lses + row, deltas + row)
    gl.warp_specialize(
        [
            (consumer, (barriers, buffers, work, dk_desc, dv_desc, 0, CAUSAL)),
            (consumer, (barriers, buffers, work, dk_desc, dv_desc, 1, CAUSAL)),
            (query_gradient, (barriers, buffers, work, dq_desc)),
            (producer, (barriers, buffers, work, q_desc, k_desc, v_desc, do_desc)),
        ],
        [4, 4, 1],  # warps of all roles but the first, which has num_warps
        [208, 72, 24],  # registers of the same; the first has what they leave, 208
    )


def backward(q, k, v, out, lse, dout, *, causal=False, scale=None, stages=2, ds_stages=2):
    """Gradients (dq, dk, dv) of attention, in the shapes and dtypes of q, k and v.

    q, out, dout (B, H, Sq, D), k, v (B, H, Sk, D): contiguous, float16 or bfloat16, D 64 or 128.
    lse (B, H, Sq): float32, natural logarithm; −inf where a row sees no key, and gets zeros.
    `causal` aligns bottom-right; `scale` is 1/√D by default.
    """
    (batch, heads, q_len, dim), kv_len = q.shape, k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    if 0 in (batch, heads, q_len, kv_len):  # TMA cannot describe an empty tensor
        return dq.to(q.dtype), dk, dv

    block_q, block_kv = BLOCK_Q.value, BLOCK_KV.value
    tail = (0, -q_len % block_q)
    delta = pad((dout.float() * out.float()).sum(-1), tail)
    # An infinite lse makes P = 0: for rows that see no key, and for those beyond the end.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf) * LOG2E.value
    lse = pad(lse, tail, value=torch.inf)

    def describe(x, rows, columns=dim):
        dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}.get(x.dtype, gl.float32)
        layout = gl.NVMMASharedLayout.get_default_for([1, rows, columns], dtype)
        x = x.view(batch * heads, -1, dim)
        return TensorDescriptor.from_tensor(x, [1, rows, columns], layout)

    backward_kernel[(-(-kv_len // block_kv), batch * heads)](
        describe(q, block_q), describe(k, block_kv), describe(v, block_kv), describe(dout, block_q),
        describe(dq, block_q, DQ_COLUMNS.value), describe(dk, ROWS.value), describe(dv, ROWS.value),
        lse, delta, q_len, kv_len, scale, causal, stages, ds_stages, num_warps=4, maxnreg=128,
    )  # fmt: skip
    return (dq * scale).to(q.dtype), dk, dv
