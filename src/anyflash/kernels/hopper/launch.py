"""From tensors to launches: descriptors, tiles, flags."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflash.kernels.hopper.forward import ROWS, Flags, Numbers, forward_kernel
from anyflash.kernels.hopper.schedule import Packing
from anyflash.kernels.hopper.softmax import LOG2E
from anyflash.kernels.hopper.tiles import Tile, choose

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Of 1, 4, 8, 16 and all heads, the best or close to it for every D and length of the table in
# tiles.py: at D = 128, S = 1 K dense 1.00 (1: 0.97, all: 0.87), causal 16 K 1.23 (1: 1.12).
SECTION = 16


# A ragged descriptor: see corner() in schedule.py. Strides count elements; 2^30 · 2^34 of any size
# are a multiple of 2^64 bytes.
RAGGED_ROWS = 1 << 30
RAGGED_EXTENT = 0x7FFF0000
RAGGED_STRIDE = 1 << 34


def addressable(x: Tensor) -> bool:
    """Whether TMA can read a tensor (B, H, S, D) or (total, H, D) where it is."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.itemsize % 16 == 0 for s in steps)
    )


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor with boxes of rows × columns over an addressable tensor (B, H, S, D) or, ragged,
    (total, H, D)."""
    # The stride of an axis of length 1 is never used, but has to be lawful.
    strides = [s if n > 1 else columns for n, s in zip(x.shape, x.stride(), strict=True)]
    shape, strides = list(x.shape), [*strides[:-1], 1]
    if x.ndim == 3:
        row, head, _ = strides
        shape = [RAGGED_EXTENT, RAGGED_EXTENT, shape[1], RAGGED_ROWS, shape[2]]
        strides = [RAGGED_STRIDE - row, row, head, row, 1]
    box = [1] * (len(shape) - 2) + [rows, columns]
    default = gl.NVMMASharedLayout.get_default_for
    layout = default(box, DTYPES[x.dtype])  # pyright: ignore[reportCallIssue]
    return TensorDescriptor(x, shape, strides, box, layout)


def empty_addressable(like: Tensor, columns: int) -> Tensor:
    """`like` with other columns: its axes in the same order in memory, rows aligned."""
    axes = range(like.ndim - 1)
    # An expanded axis, whose stride is 0, comes first.
    order = sorted(axes, key=lambda axis: (like.stride(axis) > 0, -like.stride(axis)))
    room = like.new_empty(*(like.shape[axis] for axis in order), -(-columns // 8) * 8)
    return room[..., :columns].permute(*(order.index(axis) for axis in axes), like.ndim - 1)


class Options(NamedTuple):
    """What a call asks for besides its tensors; see `forward`."""

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    tile: Tile | None = None
    programs: int | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention of each query head with the keys of its window.

    Args:
        q: (B, Hq, Sq, D), float16 or bfloat16, any strides; D at most 256.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) of the same dtype; Hq a multiple of Hkv, Sk at
            least 1, Dv at most 256. Tensors that TMA cannot address (base or strides that are no
            multiples of 16 bytes, a last stride other than 1) are copied.
        scale: of the scores; may be 0 or negative.
        left, right: keys that a query sees before and after its own position i + Sk − Sq; None is
            all of them. Causal is right=0.
        softcap: scores become softcap · tanh(score / softcap), by tanh.approx; 0 is none.
        sink: float32 (Hq,), contiguous, one more logit per row without a value.
        tile: None chooses from the table.
        programs: how many run side by side; None is one for each multiprocessor.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and q's order of axes, and lse (B, Hq, Sq), float32,
        natural logarithm. Products are accumulated in float32, weights rounded to q's dtype.
        A row that sees nothing has out 0 and lse −inf, or the sink.

    A value that a row does not see is multiplied by zero where the row's tiles of keys cover it: if
    it is NaN or infinite, the row becomes NaN. What lies beyond the keys of a sequence has no
    effect, whatever it is.
    """
    o = Options(**options)
    batch, heads, queries, _ = q.shape
    tile = o.tile or _tile(q, k, v, o, k.shape[2])
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    blocks = batch * -(-queries // tile.block_q)
    return _launch(q, k, v, lse, None, batch, queries, k.shape[2], blocks, tile, o), lse


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None, max_seqlen_k: int | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`forward` of sequences that lie one behind the other.

    Args:
        q, k, v: (total_q, Hq, D), (total_k, Hkv, D), (total_k, Hkv, Dv), as for `forward`.
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,), where the sequences begin.
        seqused_k: int32 (n,), how many keys of each count; None is all of them.
        max_seqlen_k: the longest sequence of keys, by which the tile is chosen.

    Returns:
        out (total_q, Hq, Dv) and lse (Hq, total_q). Neither another sequence nor an unused key
        changes them, whatever it holds.
    """
    o = Options(**options)
    total_q, heads, _ = q.shape
    n = cu_seqlens_q.shape[0] - 1
    tile = o.tile or _tile(q, k, v, o, k.shape[0] if max_seqlen_k is None else max_seqlen_k)
    blocks = (cu_seqlens_q.diff() + (tile.block_q - 1)) // tile.block_q
    first_block = torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))
    used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    packing = Packing(first_block, cu_seqlens_q, cu_seqlens_k, used)
    lse = torch.empty(heads, total_q, dtype=torch.float32, device=q.device)
    # How many blocks there are only the device knows; at most these.
    most = total_q // tile.block_q + n
    return _launch(q, k, v, lse, packing, n, total_q, 0, most, tile, o), lse


def _tile(q: Tensor, k: Tensor, v: Tensor, o: Options, keys: int) -> Tile:
    # What a row sees on average of a long sequence: half of the keys if causal.
    seen = keys if o.right is None else keys // 2
    if o.left is not None and o.right is not None:
        seen = min(seen, max(o.left + o.right + 1, 1))
    return choose(max(q.shape[-1], v.shape[-1]), seen)


# What the scale may be without being applied to the scores first: beyond, scale · log2 e or a
# product with it leaves float32.
SCALES = (2.0**-64, 2.0**64)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, packing: Packing | None, batch: int, queries: int,
    keys: int, blocks: int, tile: Tile, o: Options,
) -> Tensor:  # fmt: skip
    """Run the kernel for `blocks` blocks of each head; the output."""
    q, k, v = (
        x if addressable(x) else empty_addressable(x, x.shape[-1]).copy_(x) for x in (q, k, v)
    )
    out = empty_addressable(q, v.shape[-1])
    heads, heads_kv = q.shape[1], k.shape[1]
    total = blocks * heads
    if lse.numel() == 0:
        return out
    programs = o.programs
    if programs is None:
        programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    dynamic = total > programs
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if dynamic else lse
    scaled = o.softcap != 0 or not SCALES[0] < o.scale < SCALES[1]
    flags = Flags(
        LEFT=o.left is not None, RIGHT=o.right is not None, SCALED=scaled, SOFTCAP=o.softcap != 0,
        SINK=o.sink is not None, PINGPONG=tile.pingpong, DYNAMIC=dynamic,
        PACKED=packing is not None, SHARED=tile.shared_out, Q_REGISTERS=tile.q_registers,
    )  # fmt: skip
    # Any window reaches no further than all rows and keys: positions stay within 32 bits.
    reach = q.shape[-2 if packing is None else 0] + k.shape[-2 if packing is None else 0]
    left, right = (max(-reach, min(n or 0, reach)) for n in (o.left, o.right))
    numbers = Numbers(LOG2E.value * (1.0 if scaled else o.scale), float(o.scale), float(o.softcap))
    registers, consumer_registers, producer_registers = tile.registers
    forward_kernel[(min(programs, total),)](
        describe(q, ROWS.value, tile.columns), describe(k, tile.block_kv, tile.columns),
        describe(v, tile.block_kv, tile.columns), describe(out, ROWS.value, tile.columns),
        # Where nothing is drawn from a counter or there is no sink, any tensor serves.
        lse, lse if o.sink is None else o.sink, counter, numbers, packing,
        queries, keys, left, right, batch, heads, heads // heads_kv, SECTION, total,
        CONSUMERS=tile.consumers, KV_SLOTS=tile.kv_slots, FLAGS=flags,
        CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=registers,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out
