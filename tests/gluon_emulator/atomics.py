"""Atomic operations on global memory: values, and the order that they make between programs.

An atomic with release lets whoever later acquires the same element come after what its thread has
done, and after what the whole partition had done when its threads last met: the compiler lets one
thread make a scalar atomic and puts no barrier before it (test_gluon_compiler.py). So between the
stores of a tensor and the flag that says so there must be a `barrier()`. Atomics do not race with
each other; with ordinary accesses they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .clocks import Action
from .errors import EmulatorError, here
from .global_memory import Pointer, access, contents
from .machine import Partition, step
from .values import Scalar, Tensor

SEMANTICS = ("relaxed", "acquire", "release", "acq_rel")
SCOPES = ("cta", "gpu", "sys")


def _atomic(name: str, new: Callable[..., torch.Tensor]) -> Callable:
    """`new(old, *operands)` is what the element holds afterwards."""

    def f(
        pointer: Pointer, *operands: Any, mask: Any = None, sem: str | None = None,
        scope: str | None = None,
    ) -> Any:  # fmt: skip
        sem, scope = sem or "acq_rel", scope or "gpu"
        if sem not in SEMANTICS or scope not in SCOPES:
            raise EmulatorError(
                f"{here()}: {name} with semantics {sem!r} and scope {scope!r}, not of {SEMANTICS}"
                f" and {SCOPES}"
            )
        if name != "atomic_cas" and len(operands) == 2:
            operands, mask = operands[:1], operands[1]
        partition = step()
        offset, keep = pointer.elements(mask, name)
        span = pointer.span(offset, keep)
        action = Action(name, "global memory", here(), partition)
        _order(partition, span, offset[keep], sem, scope)
        access(partition, span, action, write=True, atomic=True)
        base = pointer.base
        values = [torch.broadcast_to(contents(x, base.dtype), offset.shape) for x in operands]
        old = torch.zeros_like(offset, dtype=base.dtype)
        # One by one, in a random order: two lanes may name the same element.
        places = keep.flatten().nonzero().flatten().tolist()
        partition.program.machine.random.shuffle(places)
        flat, changed = offset.flatten(), False
        for i in places:
            element = base[flat[i]].clone()
            after = new(element, *(v.flatten()[i] for v in values))
            changed |= bool(after != element)
            old.view(-1)[i] = element
            base[flat[i]] = after
        if changed:
            partition.program.machine.progress()
        return Tensor(old) if old.dim() else Scalar(old.item(), old.dtype)

    return f


def _order(partition: Partition, span: Any, offsets: torch.Tensor, sem: str, scope: str) -> None:
    if sem == "relaxed":
        return
    within = partition.program.number if scope == "cta" else None
    for offset in offsets.flatten().tolist():
        released = span.memory.released.setdefault((within, offset), {})
        if sem in ("acquire", "acq_rel"):
            partition.acquire(released)
        if sem in ("release", "acq_rel"):
            partition.release_by_one_thread(released)


ATOMICS = {
    f"atomic_{name}": _atomic(f"atomic_{name}", f)
    for name, f in {
        "add": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "xchg": lambda old, x: x,
        "cas": lambda old, expected, x: torch.where(old == expected, x, old),
    }.items()
}
