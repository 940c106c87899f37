"""Shared memory: allocations, views that know exactly what they overlap, and mbarriers."""

from __future__ import annotations

from typing import Any

import torch

from .clocks import Access, Action, Clock, Log, Moment
from .dtypes import GLUON, TORCH
from .errors import EmulatorError, Place, Poison, Race, here
from .values import LAYOUT, Layout, Scalar, Tensor, sizes

# What one CTA can have on Hopper: 227 KiB.
SHARED_BYTES = 232448


def poison(kind: torch.dtype) -> torch.Tensor:
    """All bits set: NaN in every floating-point format."""
    return torch.full((kind.itemsize,), 255, dtype=torch.uint8).view(kind)


class Allocation:
    """One `allocate_shared_memory`: its data, which of it is valid, and who accessed it."""

    def __init__(self, name: str, kind: torch.dtype, shape: list[int]) -> None:
        self.name = name
        self.data = poison(kind).expand(shape).clone()
        self.valid = torch.zeros(shape, dtype=torch.bool)
        self.scratch = torch.zeros(shape, dtype=torch.bool)
        self.nbytes = self.data.numel() * kind.itemsize
        self.log = Log()
        self.barriers: dict[int, MBarrier] = {}
        self.loads: dict[Any, tuple[Moment, Action]] = {}  # the last TMA load into each region

    def view(self) -> View:
        box = tuple((0, n) for n in self.data.shape)
        return View(self, self.data, box, tuple(range(self.data.dim())))


class View:
    """A part of an allocation, perhaps sliced, permuted or reshaped.

    `box` bounds it in the axes of the allocation and `axes` names the axis behind each of its own,
    None for an axis of length one that a reshape put in. A reshape that merges or splits axes
    keeps the box of the whole; from then on `axes` is None, parts of it have the same box, and
    overlap is decided by the elements instead.
    """

    layout = LAYOUT

    def __init__(
        self, allocation: Allocation, data: torch.Tensor,
        box: tuple[tuple[int, int], ...], axes: tuple[int | None, ...] | None,
    ) -> None:  # fmt: skip
        self.allocation, self.data = allocation, data
        self.box, self.axes = box, axes

    @property
    def type(self) -> View:
        return self

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def kind(self) -> torch.dtype:
        return self.data.dtype

    @property
    def dtype(self) -> Any:
        return GLUON[self.kind]

    element_ty = dtype

    @property
    def nbytes_per_cta(self) -> int:
        return self.data.numel() * self.kind.itemsize

    nbytes = nbytes_per_cta

    def __str__(self) -> str:
        name = self.allocation.name
        for (lo, hi), n in zip(self.box, self.allocation.data.shape, strict=True):
            if hi == lo + 1:
                name += f"[{lo}]"
            elif (lo, hi) != (0, n):
                name += f"[{lo}:{hi}]"
        return name

    # Views of views.

    def slice(self, start: Any, length: Any, dim: Any = 0) -> View:
        if isinstance(start, Scalar):
            raise EmulatorError(f"{here()}: the start of a slice of {self} must be a constexpr")
        return self._part(start, length, dim)

    def _part(self, start: int, length: int, dim: int) -> View:
        if start < 0 or start + length > self.shape[dim]:
            raise EmulatorError(
                f"{here()}: slice {start}:{start + length} of {self} leaves axis {dim} of"
                f" {self.shape}"
            )
        box, axes = self.box, self.axes
        if axes is not None and axes[dim] is not None:
            axis = axes[dim]
            lo = box[axis][0] + start
            box = (*box[:axis], (lo, lo + length), *box[axis + 1 :])
        return View(self.allocation, self.data.narrow(dim, start, length), box, axes)

    def index(self, i: Any) -> View:
        s = self._part(int(i), 1, 0)
        return View(s.allocation, s.data[0], s.box, s.axes and s.axes[1:])

    def permute(self, order: Any) -> View:
        order = sizes((order,))
        axes = self.axes and tuple(self.axes[o] for o in order)
        return View(self.allocation, self.data.permute(order), self.box, axes)

    def reshape(self, shape: Any) -> View:
        shape = sizes((shape,))
        try:
            data = self.data.view(shape)
        except RuntimeError as error:
            raise EmulatorError(f"{here()}: {self} {self.shape} as {shape}: {error}") from error
        axes: tuple | None = None
        if self.axes is not None and [n for n in shape if n > 1] == [
            n for n in self.shape if n > 1
        ]:
            long = iter([a for a, n in zip(self.axes, self.shape, strict=True) if n > 1])
            axes = tuple(next(long) if n > 1 else None for n in shape)
        return View(self.allocation, data, self.box, axes)

    # As a region.

    def meets(self, other: View) -> bool:
        if not all(
            lo < hi2 and lo2 < hi for (lo, hi), (lo2, hi2) in zip(self.box, other.box, strict=True)
        ):
            return False
        if self.axes is not None and other.axes is not None:
            return True
        self._mark().fill_(True)
        met = bool(other._mark().any())
        self._mark().fill_(False)
        return met

    def inside(self, other: View) -> bool:
        return (
            self.axes is not None
            and other.axes is not None
            and all(
                lo2 <= lo and hi <= hi2
                for (lo, hi), (lo2, hi2) in zip(self.box, other.box, strict=True)
            )
        )

    @property
    def valid(self) -> torch.Tensor:
        return self._same_of(self.allocation.valid)

    def _mark(self) -> torch.Tensor:
        return self._same_of(self.allocation.scratch)

    def _same_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor like the allocation that this view has of the data."""
        d = self.data
        return whole.as_strided(d.shape, d.stride(), d.storage_offset())

    # Contents.

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape or value.kind is not self.kind:
            raise EmulatorError(
                f"{here()}: a store of {value.shape} {value.dtype} to {self}, which is"
                f" {self.shape} {self.dtype}"
            )
        self._access("store to", True)
        self.fill(value.v)

    def load(self, layout: Layout | None = None) -> Tensor:
        return Tensor(self.read(self._access("load of", False)).clone())

    def _access(self, verb: str, write: bool) -> Action:
        from .machine import step  # the machine imports this module

        partition = step()
        action = Action(verb, self, here(), partition)
        access = Access(self, partition.now(), action, write, asynchronous=False)
        partition.log(self.allocation.log, access)
        if write:
            partition.program.machine.progress()
        return action

    def fill(self, values: torch.Tensor) -> None:
        self.data.copy_(values)
        self.valid.fill_(True)

    def clear(self) -> None:
        self.data.copy_(poison(self.kind))
        self.valid.fill_(False)

    def read(self, action: Any) -> torch.Tensor:
        if not self.valid.all():
            missing = int((~self.valid).sum())
            raise Poison(
                f"{action}: {missing} of {self.valid.numel()} elements of {self} were never written"
                " or are still in flight"
            )
        return self.data

    def barrier(self) -> MBarrier:
        index = self.box[0][0]
        if index not in self.allocation.barriers or self.box[0][1] != index + 1:
            raise EmulatorError(f"{here()}: {self} is not an initialised mbarrier")
        return self.allocation.barriers[index]


class MBarrier:
    """An mbarrier: a phase is over when all have arrived and all expected bytes have come."""

    def __init__(self, name: str, count: int, born: Moment, clock: Clock) -> None:
        self.name, self.count, self.born = name, count, born
        self.pending, self.due, self.phase = count, 0, 0
        self.arrived: Clock = {}  # what the arrivals so far have seen
        self.users: Clock = {}  # when each partition last waited or arrived
        self.done: Clock = dict(clock)  # what a wait for the phase before may rely on

    def arrive(self, count: int, bytes_due: int, place: Place) -> None:
        if count > self.pending:
            raise EmulatorError(f"{place}: {count} arrivals at {self}: more than its count")
        self.pending -= count
        self.due += bytes_due
        self.check()

    def check(self) -> None:
        if self.pending == 0 and self.due == 0:
            self.phase, self.pending, self.done = self.phase + 1, self.count, dict(self.arrived)

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def require_born(self, clock: Clock, place: Place) -> None:
        if not self.born.known(clock):
            raise Race(f"{place}: {self} is used by one who is not ordered after its `init`")

    def __str__(self) -> str:
        arrived = self.count - self.pending
        return (
            f"{self.name} (phase {self.phase}, {arrived} of {self.count} arrived,"
            f" {self.due} bytes due)"
        )


def allocate(program: Any, name: str, dtype: Any, shape: list[int]) -> View:
    new = Allocation(name, TORCH[dtype], shape)
    program.allocations.append(new)
    total = sum(a.nbytes for a in program.allocations)
    if total > SHARED_BYTES:
        parts = ", ".join(f"{a.name} {a.nbytes}" for a in program.allocations)
        raise EmulatorError(
            f"{here()}: {total} bytes of shared memory, {SHARED_BYTES} exist: {parts}"
        )
    return new.view()
