"""`mbarrier`, `tma` and wgmma: what a kernel finds in triton...language.nvidia.hopper.

What the compiler adds is taken for granted here and tested in test_gluon_compiler.py: the threads
of a partition meet before an arrive, after `store_wait`, after `init`, and before a TMA store of a
tile that they have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .clocks import Access, Action, Moment, join
from .dtypes import FLOAT8, HALVES
from .errors import EmulatorError, NotEmulated, Place, Race, here
from .global_memory import Descriptor, Pointer, Span
from .language import allocate_shared_memory
from .language import gl as language
from .machine import Operation, Partition, step
from .namespace import Namespace, identity
from .shared import MBarrier, View
from .values import Layout, Scalar, Tensor

# mbarriers.


def allocate_mbarrier(batch: Any = None, two_ctas: bool = False) -> View:
    if two_ctas:
        raise NotEmulated(f"{here()}: a barrier of two CTAs")
    shape = [1] if batch is None else [int(batch), 1]
    return allocate_shared_memory(language.int64, shape)


def init(barrier: View, count: Any) -> None:
    me = step()
    if int(count) < 1:
        raise EmulatorError(f"{here()}: {barrier} with a count of {int(count)}")
    barriers, index = barrier.allocation.barriers, barrier.box[0][0]
    if index in barriers:
        raise EmulatorError(f"{here()}: {barrier} is initialised twice")
    now = me.now()
    me.meet()
    barriers[index] = MBarrier(str(barrier), int(count), now, me.clock)


def invalidate(barrier: View) -> None:
    me, place = step(), here()
    found = barrier.barrier()
    if any(not Moment(*use).known(me.clock) for use in found.users.items()):
        raise Race(f"{place}: {found} is invalidated while somebody may still use it")
    del barrier.allocation.barriers[barrier.box[0][0]]


def _use(me: Partition, barrier: View, place: Place) -> MBarrier:
    found = barrier.barrier()
    found.require_born(me.clock, place)
    found.users[me.actor] = me.clock[me.actor]
    return found


def arrive(barrier: View, *, count: Any = 1, pred: Any = True) -> None:
    if int(count) < 1:
        raise EmulatorError(f"{here()}: {int(count)} arrivals at {barrier}")
    if pred:
        _arrive(barrier, int(count), 0)


def expect(barrier: View, bytes: Any = None, pred: Any = True, bytes_per_cta: Any = None) -> None:
    """Arrive once, and expect so many bytes more. Triton 3.8 calls the bytes `bytes_per_cta`.

    In Triton 3.6 the threads of the partition do not meet before it as they do before `arrive`.
    """
    if pred:
        due = bytes_per_cta if bytes is None else bytes
        _arrive(barrier, 1, int(due), Partition.release_by_one_thread)


def _arrive(
    barrier: View, count: int, bytes_due: int, release: Callable = Partition.release
) -> None:
    me, place = step(), here()
    found = _use(me, barrier, place)
    release(me, found.arrived)
    found.arrive(count, bytes_due, place)
    me.program.machine.progress()


def wait(barrier: View, phase: Any, pred: Any = True, deps: Sequence = ()) -> None:
    if not pred:
        return
    found, parity, place = barrier.barrier(), int(phase), here()
    if parity not in (0, 1):
        raise EmulatorError(
            f"{place}: a wait for phase {parity}: the hardware has parities 0 and 1"
        )
    me = step(lambda: found.passed(parity), lambda: f"parity {parity} of {found} at {place}")
    _use(me, barrier, place)
    me.acquire(found.done)


mbarrier = Namespace("mbarrier", {
    "MBarrierLayout": Layout, "allocate_mbarrier": allocate_mbarrier, "init": init,
    "invalidate": invalidate, "arrive": arrive, "expect": expect, "wait": wait,
})  # fmt: skip

# TMA.


def _coordinates(at: Any) -> list[int]:
    if any(isinstance(c, Scalar) and c.kind is not torch.int32 for c in at):
        raise EmulatorError(f"{here()}: coordinates of TMA are int32, not {at}")
    return [int(c) for c in at]


def async_load(
    tensor_desc: Descriptor, coord: Any, barrier: View, result: View, pred: Any = True,
    multicast: bool = False,
) -> None:  # fmt: skip
    if not pred:
        return
    if multicast:
        raise NotEmulated(f"{here()}: multicast, which needs a cluster")
    at = _coordinates(coord)
    tensor_desc.check(at, result)
    me, place = step(), here()
    bar, machine, alloc = _use(me, barrier, place), me.program.machine, result.allocation
    # Loads into one region are one actor; what orders them is what orders any two writes.
    d = result.data
    key = (d.storage_offset(), d.shape, d.stride())
    last = alloc.loads[key][0] if key in alloc.loads else Moment(machine.actor(), 0)
    moment = Moment(last.actor, last.epoch + 1)
    action = Action("TMA load into", result, place, me)
    alloc.loads[key] = (moment, action)
    me.log(alloc.log, Access(result, moment, action, write=True, asynchronous=True))
    span = Span(tensor_desc.window(at)[0])
    reading = Action("read of global memory by the TMA load into", result, place, me)
    access = Access(span, moment, reading, write=False, asynchronous=True)
    me.log(span.memory.log, access, by_one_thread=True)
    result.clear()

    def act() -> None:
        result.fill(tensor_desc.read(at))
        join(bar.arrived, dict([moment]))
        bar.due -= tensor_desc.nbytes_per_cta
        bar.check()

    machine.launch(Operation(action, act, me.program))


def _async_store(verb: str, tensor_desc: Descriptor, coord: Any, source: View, add: bool) -> None:
    at = _coordinates(coord)
    tensor_desc.check(at, source)
    me, place = step(), here()
    action = Action(verb, source, place, me)
    reading = Access(source, me.stores.next(), action, write=False, asynchronous=True)
    me.log(source.allocation.log, reading)
    span = Span(tensor_desc.window(at)[0])
    writing = Action(f"write to global memory by the {verb}", source, place, me)
    written = Access(span, me.written.next(), writing, write=True, asynchronous=True, atomic=add)
    me.log(span.memory.log, written, by_one_thread=True)
    data: list[torch.Tensor] = []

    def write() -> None:
        tensor, inner = tensor_desc.window(at)
        if add:
            tensor += data[0][inner]
        else:
            tensor.copy_(data[0][inner])

    later = Operation(writing, write, me.program, outlives=True)

    def read() -> None:
        data.append(source.read(action).clone())
        me.program.machine.launch(later)

    me.written.operations.append(later)
    me.issue(me.stores, Operation(action, read, me.program))


def async_store(tensor_desc: Descriptor, coord: Any, src: View) -> None:
    _async_store("TMA store from", tensor_desc, coord, src, add=False)


def async_atomic_add(tensor_desc: Descriptor, coord: Any, src: View) -> None:
    _async_store("TMA reduce-add from", tensor_desc, coord, src, add=True)


def store_wait(pendings: Any, read_only: Any = True) -> None:
    """Sources are read; only with `read_only=False` (Triton 3.8) are the writes visible too."""
    me = step()
    me.meet()
    me.retire(me.stores, int(pendings))
    if not read_only:
        me.retire(me.written, int(pendings))


def make_tensor_descriptor(
    base: Pointer, shape: Any, strides: Any, block_shape: Any, layout: Any,
    padding_option: str = "zero",
) -> Descriptor:  # fmt: skip
    memory = base.base
    start = memory.as_strided((1,), (1,), memory.storage_offset() + int(base.offset))
    return Descriptor(start, shape, strides, block_shape, padding_option)


tma = Namespace("tma", {
    "async_load": async_load, "async_copy_global_to_shared": async_load,
    "async_store": async_store, "async_copy_shared_to_global": async_store,
    "async_atomic_add": async_atomic_add, "store_wait": store_wait,
    "make_tensor_descriptor": make_tensor_descriptor,
})  # fmt: skip

# wgmma.


class Accumulator(Tensor):
    """The result of an asynchronous wgmma: unusable until waited for, except as the accumulator of
    the next one."""

    __slots__ = ("_shape", "operation", "result")

    def __init__(self, shape: list[int], operation: Operation) -> None:
        self._shape, self.operation = shape, operation
        self.result: torch.Tensor | None = None

    @property
    def shape(self) -> list[int]:
        return self._shape

    @property
    def kind(self) -> torch.dtype:
        return torch.float32

    @property
    def v(self) -> torch.Tensor:
        raise EmulatorError(
            f"{here()}: the result of the {self.operation.action} is used before"
            " warpgroup_mma_wait has returned it"
        )


# Types that may be multiplied with each other.
OPERANDS = ({HALVES[0]}, {HALVES[1]}, set(FLOAT8))


def warpgroup_mma(
    a: Any, b: View, acc: Any, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Any:  # fmt: skip
    me, place = step(), here()
    _check_product(a, b, acc, me, place)
    sources = [x for x in (a, b) if isinstance(x, View)]
    names = " x ".join(str(x) if isinstance(x, View) else "registers" for x in (a, b))
    action = Action("wgmma", f"({names})", place, me)
    moment = me.products.next()
    for x in sources:
        reading = Action(f"read by the wgmma ({names}) of", x, place, me)
        access = Access(x, moment, reading, write=False, asynchronous=True)
        me.log(x.allocation.log, access)
    machine = me.program.machine
    # The products of a warpgroup take effect in order.
    before = me.products.operations[-1] if me.products.operations else None
    registers = None if isinstance(a, View) else a.v.float()
    keep = bool(use_acc)

    def act() -> None:
        if before is not None:
            machine.fire(before)
        left = a.read(action).float() if registers is None else registers
        product = left @ b.read(action).float()
        out.result = product + _sum_so_far(acc) if keep else product

    operation = Operation(action, act, me.program)
    out = Accumulator([a.shape[0], b.shape[1]], operation)
    me.issue(me.products, operation)
    return out if is_async else warpgroup_mma_wait(0, [out])


def _sum_so_far(acc: Any) -> torch.Tensor:
    if isinstance(acc, Accumulator):
        assert acc.result is not None
        return acc.result
    return acc.v


def _check_product(a: Any, b: Any, acc: Any, me: Partition, place: Place) -> None:
    rows, inner = a.shape
    if a.kind is torch.float32 or a.kind in (torch.int8, torch.uint8):
        raise NotEmulated(f"{place}: wgmma of {a.dtype}")
    if (
        not isinstance(b, View)
        or not any({a.kind, b.kind} <= kinds for kinds in OPERANDS)
        or acc.kind is not torch.float32
        or b.shape[0] != inner
        or acc.shape != [rows, b.shape[1]]
        or rows % 64
        or b.shape[1] % 8
        or inner * a.kind.itemsize % 32
        or me.warps % 4
    ):
        raise EmulatorError(
            f"{place}: no wgmma of {a.shape} {a.dtype} by {b.shape} {b.dtype} into {acc.shape}"
            f" {acc.dtype} by {me.warps} warps"
        )
    if a.kind.itemsize == 1:
        along = [b.data.stride(0), a.data.stride(1) if isinstance(a, View) else 1]
        if along != [1, 1]:
            raise EmulatorError(f"{place}: 8-bit operands of wgmma must be contiguous along K")


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    if deps is None:
        raise EmulatorError(f"{here()}: warpgroup_mma_wait needs deps")
    me = step()
    me.retire(me.products, int(num_outstanding))
    out = [
        Tensor(x.result)
        if isinstance(x, Accumulator) and x.operation not in me.products.operations
        else x
        for x in deps
    ]
    return out[0] if len(out) == 1 else tuple(out)


def fence_async_shared(cluster: bool = False) -> None:
    """Ordinary stores to shared memory known to this partition may be read by TMA and wgmma, by
    whoever comes after it."""
    if cluster:
        raise NotEmulated(f"{here()}: a fence across a cluster")
    me = step()
    now = me.now()
    for allocation in me.program.allocations:
        allocation.log.fence(me.clock, now)


hopper = Namespace("hopper", {
    "mbarrier": mbarrier, "tma": tma, "fence_async_shared": fence_async_shared,
    "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
    "warpgroup_mma_init": identity,
})  # fmt: skip
