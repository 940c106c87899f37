"""Tensors as TMA takes them: where they are if it can address them, and in which boxes."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from anyflash.kernels.hopper.launcher import Operand, View, box
from anyflash.masks.tiles import TileMap

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}

# A ragged descriptor: see ragged() in schedule.py. Strides count elements; 2^30 · 2^34 of any size
# are a multiple of 2^64 bytes.
RAGGED_ROWS = 1 << 30
RAGGED_EXTENT = 0x7FFF0000
RAGGED_STRIDE = 1 << 34

# What follows from shapes and strides alone is kept for so many of them, about 1 KiB each.
KEPT = 1024

Sizes = tuple[int, ...]


def addressable(x: Tensor) -> bool:
    """Whether TMA can read a tensor (B, H, S, D) or (total, H, D) where it is."""
    return x.data_ptr() % 16 == 0 and lawful(x)


def lawful(x: Tensor) -> bool:
    """Whether it could at another address."""
    return _lawful(x.shape, x.stride(), x.itemsize)


def in_place(x: Tensor) -> Tensor:
    """A tensor that TMA can read: itself, or a copy."""
    return x if addressable(x) else empty_addressable(x, x.shape[-1]).copy_(x)


def empty_addressable(like: Tensor, columns: int) -> Tensor:
    """`like` with other columns: its axes in the same order in memory, rows aligned."""
    shape = (*like.shape[:-1], columns)
    strides = _strides(shape, like.stride())
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def describe(x: Tensor, rows: int, columns: int, heads: int = 1) -> Operand:
    """An addressable tensor (B, H, S, D) or, ragged, (total, H, D), in boxes of `rows` rows of
    `heads` heads × columns."""
    return Operand(x, _view(x.shape, x.stride(), x.dtype, (heads, rows, columns)))


def describe_ragged(x: Tensor, rows: int, columns: int) -> tuple[Operand, int]:
    """An addressable tensor (B, H, S, D) as (total, H, D), ragged: batch elements begin every so
    many rows, which is the second result. It is copied where they cannot."""
    batch, heads, length, width = x.shape
    step = x.stride(2) if length > 1 else x.stride(0)
    if batch > 1 and (x.stride(0) % step or x.stride(0) // step * batch > RAGGED_EXTENT):
        room = x.new_empty((batch, length, heads, -(-width // 8) * 8))[..., :width]
        x = room.copy_(x.transpose(1, 2)).transpose(1, 2)
        step = x.stride(2) if length > 1 else x.stride(0)
    apart = x.stride(0) // step if batch > 1 else 0
    strides = (step, x.stride(1), 1)
    view = _view((apart * (batch - 1) + length, heads, width), strides, x.dtype, (1, rows, columns))
    return Operand(x, view), apart


def granules_of(
    tile_map: TileMap | bool | None, rows: int, columns: int, part: tuple[int, int] = (0, 0),
    by_key: bool = False,
) -> tuple[tuple[Tensor, ...] | None, int, int, int]:  # fmt: skip
    """The tensors of `masking.Map`, see `TileMap.blocks`, the number of the matrix with whose batch
    element and head a part begins, and how many matrices lie from one batch element, and from one
    head, to the next. Of no map, what a kernel takes without one."""
    if not isinstance(tile_map, TileMap):
        return None, 0, 0, 0
    blocks = tile_map.blocks(rows, columns, by_key)
    batches, heads = blocks.numbers.shape[:2]
    of_batch, of_head = 0 if batches == 1 else heads, 0 if heads == 1 else 1
    return tuple(blocks), part[0] * of_batch + part[1] * of_head, of_batch, of_head


def describe_rows(x: Tensor, columns: int) -> Operand:
    """A contiguous tensor of float32 (rows, n), in boxes of one row × columns."""
    return Operand(x, _rows(x.shape, columns))


def describe_tiles(x: Tensor, rows: int) -> Operand:
    """A contiguous tensor of 16 bits (n, columns), in boxes of `rows` whole rows."""
    return Operand(x, _tiles(x.shape, x.dtype, rows))


@lru_cache(maxsize=KEPT)
def _tiles(shape: Sizes, dtype: torch.dtype, rows: int) -> View:
    boxed = [rows, shape[1]]
    layout = gl.NVMMASharedLayout.get_default_for(boxed, DTYPES[dtype])  # pyright: ignore[reportCallIssue]
    return View(tuple(shape), (shape[1], 1), box(dtype, tuple(boxed), layout))


@lru_cache(maxsize=KEPT)
def _rows(shape: Sizes, columns: int) -> View:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return View(tuple(shape), (shape[1], 1), box(torch.float32, (1, columns), layout))


@lru_cache(maxsize=KEPT)
def _lawful(shape: Sizes, strides: Sizes, itemsize: int) -> bool:
    steps = [s for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
    return strides[-1] == 1 and all(s > 0 and s * itemsize % 16 == 0 for s in steps)


@lru_cache(maxsize=KEPT)
def _strides(shape: Sizes, order: Sizes) -> Sizes:
    found, step = [1] * len(shape), -(-shape[-1] // 8) * 8
    # An expanded axis, whose stride is 0, comes first.
    for axis in sorted(range(len(shape) - 1), key=lambda axis: (order[axis] == 0, order[axis])):
        found[axis] = step
        step *= max(shape[axis], 1)
    return tuple(found)


@lru_cache(maxsize=KEPT)
def _view(shape: Sizes, strides: Sizes, dtype: torch.dtype, boxed: Sizes) -> View:
    # The stride of an axis of length 1 is never used, but has to be lawful.
    lawful = [s if n > 1 else boxed[-1] for n, s in zip(shape, strides, strict=True)]
    shape, strides = tuple(shape), (*lawful[:-1], 1)
    if len(shape) == 3:
        row, head, _ = strides
        shape = (RAGGED_EXTENT, RAGGED_EXTENT, shape[1], RAGGED_ROWS, shape[2])
        strides = (RAGGED_STRIDE - row, row, head, row, 1)
    boxed = (*[1] * (len(shape) - 3), *boxed)
    default = gl.NVMMASharedLayout.get_default_for
    layout = default(list(boxed), DTYPES[dtype])  # pyright: ignore[reportCallIssue]
    return View(shape, strides, box(dtype, boxed, layout))
