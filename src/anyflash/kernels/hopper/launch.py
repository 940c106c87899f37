"""From tensors to a launch of the forward kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflash.kernels.hopper.forward import Flags, Numbers, forward_kernel
from anyflash.kernels.hopper.tiles import THREE, Tile

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
L2_BYTES = 32 << 20


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor over (B, H, S, D) with boxes of rows × columns."""
    box = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, left: int | None = None,
    right: int | None = None, softcap: float = 0.0, sink: Tensor | None = None, tile: Tile,
    programs: int, section: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, queries, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[3]
    columns, columns_v = (max(64, 1 << (n - 1).bit_length()) for n in (dim, dim_v))
    out = torch.empty_like(q) if dim == dim_v else q.new_empty(batch, heads, queries, dim_v)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    scaled = scale <= 0 or softcap != 0
    flags = Flags(left is not None, right is not None, scaled, softcap != 0, sink is not None,
                  tile.pingpong, tile.shared_out)  # fmt: skip
    numbers = Numbers(math.log2(math.e) * (1.0 if scaled else scale), float(scale), float(softcap))
    descs = (
        describe(q, 64, columns), describe(k, tile.block_kv, columns),
        describe(v, tile.block_kv, columns_v), describe(out, 64, columns_v),
    )  # fmt: skip
    total = batch * heads * -(-queries // tile.block_q)
    if section is None:
        section = max(1, L2_BYTES // (keys * (columns + columns_v) * 2))
        section = min(section * (heads // heads_kv), batch * heads)
    _, consumer_registers, producer_registers = tile.registers
    forward_kernel[(min(programs, total),)](
        *descs, lse, lse if sink is None else sink, numbers, queries, keys, left or 0, right or 0,
        batch, heads, heads // heads_kv, section, total, CONSUMERS=tile.consumers,
        KV_SLOTS=tile.kv_slots, FLAGS=flags, CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers, num_warps=4, maxnreg=tile.registers[0],
    )  # fmt: skip
    return out, lse


__all__ = ["THREE", "Any", "Tile", "describe", "forward"]
