"""`gl`: what a kernel finds in triton.experimental.gluon.language.

A trailing underscore keeps a name apart from Python's own; the kernel sees it without.
"""

from __future__ import annotations

import builtins
import linecache
import re
from collections.abc import Callable
from typing import Any

import torch
import triton.experimental.gluon.language as real
import triton.language as tl

from .assembly import inline_asm_elementwise
from .atomics import ATOMICS
from .clocks import Action
from .dtypes import HALVES, TORCH
from .errors import EmulatorError, NotEmulated, here
from .global_memory import Pointer, access, contents
from .machine import running, step
from .namespace import Namespace, identity
from .shared import View, allocate
from .values import (
    UNSIGNED,
    Layout,
    Scalar,
    Tensor,
    Value,
    elementwise,
    kind_of,
    sizes,
    together,
    wide,
)

# Programs and partitions.


def program_id(axis: int) -> Scalar:
    return Scalar(running().program.number[axis], torch.int32)


def num_programs(axis: int) -> Scalar:
    return Scalar(running().program.machine.grid[axis], torch.int32)


def num_warps() -> int:
    return running().warps


def barrier(cluster: bool = False) -> None:
    """The threads of the partition meet. It matters before what one of them does for all, such as a
    scalar atomic; their accesses to shared memory the compiler orders by itself."""
    if cluster:
        raise NotEmulated(f"{here()}: a barrier across a cluster")
    step().meet()


def warp_specialize(
    roles: list, worker_num_warps: list, worker_num_regs: list | None = None
) -> Any:
    registers = worker_num_warps if worker_num_regs is None else worker_num_regs
    if not len(roles) - 1 == len(worker_num_warps) == len(registers):
        raise EmulatorError(
            f"{here()}: {len(roles)} roles need {len(roles) - 1} worker warp and register counts,"
            f" not {len(worker_num_warps)} and {len(registers)}"
        )
    return running().program.specialise(list(roles), worker_num_warps)


def range_(*bounds: Any, **_: Any) -> Any:
    """A loop at run time: the counter is an int32 of the kernel, not a constant."""
    return (Scalar(i, torch.int32) for i in builtins.range(*(int(b) for b in bounds)))


# Making and reshaping tensors.


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    x = torch.full(sizes((shape,)), contents(value, TORCH[dtype]).item(), dtype=TORCH[dtype])
    return Tensor(x) if x.dim() else Scalar(x.item(), x.dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
    return full(shape, 0, dtype)


def full_like(x: Tensor, value: Any, shape: Any = None, dtype: Any = None, **_: Any) -> Any:
    return full(x.shape if shape is None else shape, value, dtype or x.dtype)


def zeros_like(x: Tensor, **options: Any) -> Any:
    return full_like(x, 0, **options)


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    if (n := end - start) < 1 or n & (n - 1):
        raise EmulatorError(f"{here()}: arange({start}, {end}): its length is no power of two")
    return Tensor(torch.arange(start, end, dtype=torch.int32))


def to_tensor(x: Any) -> Any:
    return x if isinstance(x, (Value, Pointer)) else Scalar(x, kind_of(x))


def expand_dims(x: Tensor, axis: int) -> Tensor:
    return Tensor(x.v.unsqueeze(axis))


def broadcast(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    a, b = torch.broadcast_tensors(contents(x, kind_of(x)), contents(y, kind_of(y)))
    return Tensor(a), Tensor(b)


def join(x: Tensor, y: Tensor) -> Tensor:
    return Tensor(torch.stack((x.v, y.v), -1))


def where(condition: Any, x: Any, y: Any) -> Any:
    (a, b), kind = together(x, y)
    tensors = any(isinstance(z, Tensor) for z in (condition, x, y))
    if not tensors:
        return Scalar(a if condition else b, kind)
    chosen = contents(condition, torch.bool)
    return Tensor(
        torch.where(chosen, torch.as_tensor(a, dtype=kind), torch.as_tensor(b, dtype=kind))
    )


# Arithmetic.


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def fma(x: Any, y: Any, z: Any) -> Any:
    """In float64 a product of two float32 is exact, so the sum is rounded once, or almost."""
    (a, b, c), kind = together(x, y, z)
    a, b, c = (torch.as_tensor(t, dtype=kind).double() for t in (a, b, c))
    out = Tensor((a * b + c).to(kind))
    return out if any(isinstance(t, Tensor) for t in (x, y, z)) else out.item()


def umulhi(x: Any, y: Any) -> Any:
    """The upper half of the product of two uint32."""
    (a, b), kind = together(x, y)
    if kind is not torch.uint32:
        raise NotEmulated(f"{here()}: umulhi of {kind}")
    a, b = (torch.as_tensor(t, dtype=kind).long() & 0xFFFFFFFF for t in (a, b))
    out = Tensor(((a * b >> 32) & 0xFFFFFFFF).to(kind))
    return out if any(isinstance(t, Tensor) for t in (x, y)) else out.item()


def _extremum(floats: Callable, integers: Callable) -> Callable:
    """As max.f32 and min.f32: of a NaN and a number, the number."""

    def f(x: Any, y: Any, propagate_nan: Any = None) -> Any:
        def of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            nan = propagate_nan is not None and propagate_nan != tl.PropagateNan.NONE
            return integers(a, b) if nan or not a.is_floating_point() else floats(a, b)

        return elementwise(of, x, y)

    return f


maximum = _extremum(torch.fmax, torch.maximum)
minimum = _extremum(torch.fmin, torch.minimum)


# Reductions.


def _widened(x: Tensor) -> torch.Tensor:
    """Reductions of Triton widen bfloat16 to float32, and integers to 32 bits."""
    if x.kind is torch.bfloat16:
        return x.v.float()
    if x.kind in UNSIGNED:
        return wide(x.v)
    small = not x.kind.is_floating_point and x.kind.itemsize < 4
    return x.v.to(torch.int32) if small else x.v


def _reduced(x: torch.Tensor, axis: Any, keep_dims: bool, f: Callable) -> Any:
    out = f(x.flatten(), 0, False) if axis is None else f(x, int(axis), bool(keep_dims))
    return Tensor(out) if out.dim() else Tensor(out).item()


def sum_(x: Tensor, axis: Any = None, keep_dims: bool = False, dtype: Any = None) -> Any:
    v = _widened(x) if dtype is None else x.v.to(TORCH[dtype])
    out = _reduced(v, axis, keep_dims, lambda v, a, k: v.sum(a, keepdim=k, dtype=v.dtype))
    return out.to(x.dtype) if x.kind in UNSIGNED and dtype is None else out


def _extreme(reduce: Callable, identity_of: Callable) -> Callable:
    def f(x: Tensor, axis: Any = None, keep_dims: bool = False) -> Any:
        v = x.v.float() if x.kind in HALVES else _widened(x)

        def of(v: torch.Tensor, a: int, k: bool) -> torch.Tensor:
            out = reduce(v, a, k)
            if v.is_floating_point() and out.isnan().any():  # NaN is dropped, unless all are
                kept = reduce(torch.where(v.isnan(), identity_of(v), v), a, k)
                out = torch.where(v.isnan().all(a, keepdim=k), out, kept)
            return out

        out = _reduced(v, axis, keep_dims, of)
        return out.to(x.dtype) if x.kind in UNSIGNED else out

    return f


max_ = _extreme(torch.amax, lambda v: -torch.inf)
min_ = _extreme(torch.amin, lambda v: torch.inf)


def reduce(x: Any, axis: Any, combine_fn: Callable, keep_dims: bool = False) -> Any:
    """By halves, as threads do it: the order is not that of the elements."""
    several = isinstance(x, (tuple, list))
    parts = list(x) if several else [x]
    if axis is None:
        parts, axis = [Tensor(p.v.flatten()) for p in parts], 0
    axis = int(axis) % parts[0].v.dim()
    while (n := parts[0].v.shape[axis]) > 1:
        halves = [p.v.split(n // 2, axis) for p in parts]
        out = combine_fn(*(Tensor(h[0]) for h in halves), *(Tensor(h[1]) for h in halves))
        parts = list(out) if several else [out]
    if not keep_dims:
        parts = [Tensor(p.v.squeeze(axis)) for p in parts]
    parts = [p if p.v.dim() else p.item() for p in parts]
    return tuple(parts) if several else parts[0]


# Memory.


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any = None, value: Any = None) -> View:
    program = running().program
    name = ".".join(filter(None, map(_assigned, reversed(here().frames))))
    name = name or f"shared memory {len(program.allocations)}"
    view = allocate(program, name, dtype, sizes((shape,)))
    if value is not None:
        view.store(value)
    return view


def _assigned(frame: tuple[Any, int]) -> str:
    """The name to which a line of a kernel assigns. Of `k = channel()` and, in there, `tiles =
    allocate_shared_memory()` the report makes k.tiles."""
    line = linecache.getline(frame[0].co_filename, frame[1])
    named = re.match(r"\s*(\w+)\s*(:[^=]*)?=[^=]", line)
    return named.group(1) if named else ""


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    partition = step()
    offset, keep = pointer.elements(mask, "a load")
    span = pointer.span(offset, keep)
    access(partition, span, Action("load of", "global memory", here(), partition), write=False)
    if partition.last_load != (span.memory, span.lo, span.hi):  # not a spin on one place
        partition.last_load = (span.memory, span.lo, span.hi)
        partition.program.machine.progress()
    base = pointer.base if keep.any() else pointer.base.new_zeros(1)  # there may be nothing
    v = torch.where(keep, base[offset], contents(other, base.dtype))
    return Tensor(v) if v.dim() else Scalar(v.item(), v.dtype)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    partition = step()
    offset, keep = pointer.elements(mask, "a store")
    span = pointer.span(offset, keep)
    access(partition, span, Action("store to", "global memory", here(), partition), write=True)
    values = torch.broadcast_to(contents(value, pointer.base.dtype), offset.shape)
    pointer.base[offset[keep]] = values[keep]
    partition.program.machine.progress()


# Checks.


def static_assert(condition: Any, message: str = "") -> None:
    if not (bool(condition.v.all()) if isinstance(condition, Tensor) else condition):
        raise EmulatorError(f"{here()}: assertion failed: {message}")


device_assert = static_assert


def nothing(*_: Any, **__: Any) -> None:
    return None


def _unary(f: Callable) -> Callable:
    return lambda x, **_: elementwise(f, x)


UNARY = {
    name: _unary(getattr(torch, name))
    for name in (
        "exp2",
        "exp",
        "log2",
        "log",
        "sqrt",
        "rsqrt",
        "abs",
        "floor",
        "ceil",
        "sin",
        "cos",
    )
} | {"sqrt_rn": _unary(torch.sqrt), "erf": _unary(torch.erf)}
LAYOUTS = dict.fromkeys(
    ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "NVMMASharedLayout",
     "BlockedLayout", "AutoLayout", "CoalescedLayout", "DistributedLinearLayout",
     "SwizzledSharedLayout", "PaddedSharedLayout"), Layout)  # fmt: skip
TYPES = {name: t for name, t in vars(real).items() if isinstance(t, real.dtype) and t in TORCH} | {
    "tensor": Value,
    "shared_memory_descriptor": View,
    "pointer_type": real.pointer_type,
}

gl = Namespace("gl", {
    **TYPES, **LAYOUTS, **UNARY, **ATOMICS,
    **{f.__name__.rstrip("_"): f for f in (
        program_id, num_programs, num_warps, barrier, warp_specialize, full, zeros, full_like,
        zeros_like, arange, to_tensor, expand_dims, broadcast, join, where, cdiv, fma, umulhi,
        reduce, allocate_shared_memory, load, store, static_assert, inline_asm_elementwise)},
    "thread_barrier": barrier, "range": range_, "static_range": builtins.range,
    "sum": sum_, "max": max_, "min": min_, "maximum": maximum, "minimum": minimum,
    "device_assert": device_assert, "device_print": print,
    "assume": nothing, "static_print": nothing,
    "constexpr": identity, "convert_layout": identity, "set_auto_layout": identity,
    "multiple_of": identity, "max_contiguous": identity, "max_constancy": identity,
    "num_ctas": lambda: 1, "tuple": tuple,
    "split": Tensor.split, "reshape": Tensor.reshape, "permute": Tensor.permute,
    "cast": lambda x, dtype, bitcast=False: to_tensor(x).to(dtype, bitcast=bitcast),
    "PropagateNan": tl.PropagateNan,
    "fdiv": lambda x, y: x / y, "div_rn": lambda x, y: x / y,
    "clamp": lambda x, low, high: minimum(maximum(x, low), high),
})  # fmt: skip

# What a tensor has as a method too.
METHODS = ("sum", "max", "min", "reduce", "expand_dims", "cast", *UNARY)


def _method(f: Callable) -> Callable:
    return lambda self, *args, **kwargs: f(self, *args, **kwargs)


for _name in METHODS:
    setattr(Value, _name, _method(getattr(gl, _name)))
