"""Global memory: pointers, TMA descriptors, and who may touch what."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton.experimental.gluon.language as gl

from .clocks import Access, Action, Clock, Log
from .dtypes import GLUON
from .errors import EmulatorError, here
from .machine import Machine, Partition
from .shared import View
from .values import LAYOUT, Scalar, Tensor, kind_of


class Memory:
    """One storage: the log of accesses to it, and what atomics on its elements have released."""

    def __init__(self, base: torch.Tensor) -> None:
        self.log = Log()
        self.released: dict[Any, Clock] = {}  # by program, or None for all, and element
        self.scratch = torch.zeros(base.untyped_storage().nbytes(), dtype=torch.bool)

    @staticmethod
    def of(base: torch.Tensor) -> Memory:
        memories = Machine.current.memories  # type: ignore[union-attr]
        key = base.untyped_storage().data_ptr()
        if key not in memories:
            memories[key] = Memory(base)
        return memories[key]


def reach(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """How many elements a strided tensor spans in memory, from its first to its last."""
    sizes = list(sizes)
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


class Span:
    """Some elements of one storage: a strided view of it, or a list of offsets."""

    def __init__(self, base: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        """`base` itself, or the elements of its storage at `offsets`."""
        self.base, self.offsets = base, offsets
        self.memory = Memory.of(base)
        if base.numel() == 0 or (offsets is not None and offsets.numel() == 0):
            lo, hi = 0, 0
        elif offsets is None:
            lo = base.storage_offset()
            hi = lo + reach(base.shape, base.stride())
        elif offsets.numel() == 1:
            lo = int(offsets)
            hi = lo + 1
        else:
            lo, hi = int(offsets.min()), int(offsets.max()) + 1
        self.lo, self.hi = lo * base.itemsize, hi * base.itemsize
        # Whether it is all that lies between its bounds.
        if offsets is None:
            self.whole = hi - lo == base.numel()
        else:
            self.whole = bool((offsets.flatten().diff() == 1).all())

    def meets(self, other: Span) -> bool:
        if self.hi <= other.lo or other.hi <= self.lo:
            return False
        if self.whole and other.whole:
            return True
        self._fill(True)
        met = bool(other._marked().any())
        self._fill(False)
        return met

    def inside(self, other: Span) -> bool:
        return other.whole and other.lo <= self.lo and self.hi <= other.hi

    def _marked(self) -> torch.Tensor:
        """The bytes of the span, in a copy of the storage that holds marks."""
        scratch, b, n = self.memory.scratch, self.base, self.base.itemsize
        if self.offsets is not None:
            return scratch[self._bytes()]
        strides = (*(n * s for s in b.stride()), 1)
        return scratch.as_strided((*b.shape, n), strides, n * b.storage_offset())

    def _bytes(self) -> torch.Tensor:
        n = self.base.itemsize
        return self.offsets.flatten()[:, None] * n + torch.arange(n)  # type: ignore[union-attr]

    def _fill(self, value: bool) -> None:
        if self.offsets is not None:
            self.memory.scratch[self._bytes()] = value
        else:
            self._marked().fill_(value)


class Pointer:
    """A global pointer or a tensor of them: a storage and offsets in elements."""

    __hash__ = None  # type: ignore[assignment]
    layout = LAYOUT

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset  # `base` is one-dimensional

    @property
    def dtype(self) -> Any:
        return gl.pointer_type(GLUON[self.base.dtype])

    @property
    def type(self) -> Pointer:
        return self

    @property
    def shape(self) -> list[int]:
        return self.offset.shape if isinstance(self.offset, Tensor) else []

    def __add__(self, x: Any) -> Pointer:
        if kind_of(x).is_floating_point:
            raise EmulatorError(f"{here()}: a pointer moved by {x}")
        return Pointer(self.base, self.offset + x)

    __radd__ = __add__

    def __sub__(self, x: Any) -> Pointer:
        return self + -x

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.base, self.offset[key])

    def elements(self, mask: Any, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets (0 where masked) and mask, checked against the bounds of the tensor."""
        offset = (
            self.offset.v if isinstance(self.offset, Tensor) else torch.tensor(int(self.offset))
        )
        if mask is None:
            keep = torch.ones_like(offset, dtype=torch.bool)
        else:
            keep = mask.v if isinstance(mask, Tensor) else torch.tensor(bool(mask))
            offset, keep = torch.broadcast_tensors(offset.long(), keep)
        bad = keep & ((offset < 0) | (offset >= self.base.numel()))
        if bad.any():
            raise EmulatorError(
                f"{here()}: {what} out of bounds: offset {int(offset[bad].flatten()[0])} of"
                f" {self.base.numel()} elements"
            )
        return torch.where(keep, offset, 0).long(), keep

    def span(self, offset: torch.Tensor, keep: torch.Tensor) -> Span:
        return Span(self.base, offset[keep] + self.base.storage_offset())


class BlockType(NamedTuple):
    """What a kernel can ask of the box that a descriptor moves."""

    shape: list[int]
    element_ty: Any
    nbytes: int


class Descriptor:
    """A TMA descriptor over a CPU tensor."""

    layout = LAYOUT

    def __init__(
        self, base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, padding: str
    ) -> None:
        self.base = base
        self.extents, self.steps = [int(n) for n in shape], [int(s) for s in strides]
        self.block_shape = [int(n) for n in block_shape]
        self.fill = math.nan if padding == "nan" else 0.0
        nbytes = math.prod(self.block_shape) * base.itemsize
        self.nbytes_per_cta = nbytes
        self.block_type = BlockType(self.block_shape, GLUON[base.dtype], nbytes)
        if max(self.block_shape) > 256:
            raise EmulatorError(f"a TMA box of {self.block_shape} has a side above 256")

    @property
    def type(self) -> Descriptor:
        return self

    @property
    def dtype(self) -> Any:
        return GLUON[self.base.dtype]

    @property
    def shape(self) -> tuple[Scalar, ...]:
        return tuple(Scalar(n, torch.int32) for n in self.extents)

    @property
    def strides(self) -> tuple[Scalar, ...]:
        return tuple(Scalar(n, torch.int64) for n in self.steps)

    def check(self, coordinates: list[int], view: View) -> None:
        if (
            self.block_shape != view.shape
            or self.base.dtype is not view.kind
            or len(coordinates) != len(self.block_shape)
        ):
            raise EmulatorError(
                f"{here()}: a TMA box {self.block_shape} {self.dtype} at {coordinates} against"
                f" {view}, which is {view.shape} {view.dtype}"
            )
        strides = view.data.stride()
        if any(a < b for a, b in pairwise(strides)):
            raise EmulatorError(f"{here()}: TMA cannot write to {view} transposed")

    def window(self, at: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of the tensor that lies under the box, and where it lies in the box.

        Addresses have 64 bits and wrap, on which descriptors of ragged tensors rely.
        """
        inner, sizes, offset = [], [], 0
        for c, size, n, step in zip(at, self.block_shape, self.extents, self.steps, strict=True):
            lo = min(max(c, 0), n)
            hi = max(min(c + size, n), lo)
            inner.append(slice(lo - c, hi - c) if hi > lo else slice(0, 0))
            sizes.append(hi - lo)
            offset += lo * step
        if 0 in sizes:
            return self.base.new_empty(sizes), tuple(inner)
        n = self.base.itemsize
        offset = ((offset * n + 2**63) % 2**64 - 2**63) // n + self.base.storage_offset()
        end = offset + reach(sizes, self.steps)
        if offset < 0 or end > self.base.untyped_storage().nbytes() // n:
            raise EmulatorError(f"{here()}: a TMA box at {at} lies outside of its tensor's memory")
        strides = [s if n > 1 else 0 for n, s in zip(sizes, self.steps, strict=True)]
        return self.base.as_strided(sizes, strides, offset), tuple(inner)

    def read(self, at: list[int]) -> torch.Tensor:
        tensor, inner = self.window(at)
        if list(tensor.shape) == self.block_shape:
            return tensor
        out = torch.full(self.block_shape, self.fill).to(self.base.dtype)
        out[inner] = tensor
        return out


def access(
    partition: Partition, span: Span, action: Action, *, write: bool, atomic: bool = False
) -> None:
    new = Access(span, partition.now(), action, write, asynchronous=False, atomic=atomic)
    partition.log(span.memory.log, new)


def contents(x: Any, kind: torch.dtype) -> torch.Tensor:
    """A value as it is stored in memory of type `kind`."""
    v = x.v if isinstance(x, Tensor) else x.value if isinstance(x, Scalar) else x
    return torch.as_tensor(v).to(kind)
