"""How masks are asked: which scores, which rows, of which problem."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

Ints = Tensor | int


class Coordinates(NamedTuple):
    """Which scores are asked for: int64 tensors that broadcast to (B, H, rows, keys)."""

    batch: Tensor
    head: Tensor
    row: Tensor
    key: Tensor
    offset: Ints  # Sk − Sq
    box: tuple[slice, slice, slice, slice] | None = None  # the same indices, where they are ranges


class Rows(NamedTuple):
    """Which query rows are asked for: int64 tensors that broadcast to (B, rows)."""

    batch: Tensor
    row: Tensor
    offset: Ints  # Sk − Sq
    keys: Ints  # Sk


class Extent(NamedTuple):
    """The problem that a mask is applied to."""

    batch: int
    heads: int
    queries: int
    keys: int


def readable(tensor: Tensor) -> bool:
    """Whether checks may read a tensor's contents: always on the CPU, on accelerators under
    ANYFLASH_CHECK=1 (it synchronises), never where there are none."""
    if is_fake(tensor) or tensor.device.type == "meta":
        return False
    return tensor.device.type == "cpu" or os.environ.get("ANYFLASH_CHECK") == "1"


def grid(extent: Extent, rows: slice, keys: slice, device: torch.device) -> Coordinates:
    """The coordinates of a rectangle of scores for all batches and heads."""

    def along(dim: int, start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=device)
        return index.view([-1 if d == dim else 1 for d in range(4)])

    offset = extent.keys - extent.queries
    batch, head = along(0, 0, extent.batch), along(1, 0, extent.heads)
    box = (slice(0, extent.batch), slice(0, extent.heads), rows, keys)
    row, key = along(2, rows.start, rows.stop), along(3, keys.start, keys.stop)
    return Coordinates(batch, head, row, key, offset, box)


class Expression(Protocol):
    """What the builders of forms need of a mask; `masks/algebra.py` has the masks."""

    text: str
    leaves: tuple[Tensor, ...]

    def visible(self, at: Coordinates) -> Tensor: ...

    def interval_bound(self) -> int | None: ...

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]: ...
