"""Inline assembly, by a table of the strings that are understood."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .clocks import Clock
from .errors import EmulatorError, NotEmulated, here
from .machine import running, step
from .values import Scalar, Tensor, elementwise

# Barriers that the compiler may use for itself: 0, and one a partition.
RESERVED_BARRIERS = 8


@dataclass
class NamedBarrier:
    threads: int = 0  # arrived so far
    size: int = 0
    generation: int = 0
    arrived: Clock = field(default_factory=dict)
    done: dict[int, Clock] = field(default_factory=dict)  # by generation


def named_barrier(kind: str, number: int, size: int) -> None:
    """`bar.sync` or `bar.arrive`: threads of any partitions of the program, counted."""
    me = step()
    if not RESERVED_BARRIERS <= number < 16:
        raise EmulatorError(
            f"{here()}: named barrier {number} is not the kernel's: {RESERVED_BARRIERS} to 15 are"
        )
    b = me.program.named_barriers.setdefault(number, NamedBarrier())
    if b.threads and b.size != size:
        raise EmulatorError(
            f"{here()}: named barrier {number} is used with {size} and with {b.size} threads"
        )
    b.size, b.threads = size, b.threads + 32 * me.warps
    if b.threads > size:
        raise EmulatorError(f"{here()}: {b.threads} threads at named barrier {number} of {size}")
    mine, place = b.generation, here()
    me.release(b.arrived)
    if b.threads == size:
        b.generation, b.threads, b.done[mine] = mine + 1, 0, dict(b.arrived)
        me.program.machine.progress()
    if kind == "sync":
        step(
            lambda: b.generation > mine,
            lambda: f"named barrier {number} ({b.threads} of {size} threads) at {place}",
        )
        me.acquire(b.done[mine])


def proxy_fence() -> None:
    """`fence.proxy.async` without a state space: shared and global memory."""
    me = step()
    now = me.now()
    logs = [a.log for a in me.program.allocations]
    logs += [m.log for m in me.program.machine.memories.values()]
    for log in logs:
        log.fence(me.clock, now)


def e4m3x4(*xs: Any) -> Tensor:
    bytes_ = torch.stack([x.v for x in xs], -1).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Tensor(bytes_.view(torch.int32)[..., 0])


def halves(kind: str, low: Tensor, high: Tensor) -> Tensor:
    t = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    return Tensor(torch.stack([low.v.to(t), high.v.to(t)], -1).view(torch.int32)[..., 0])


# A pattern for the text, white space and an output that only satisfies the compiler apart, and
# what it does with the match and the arguments.
TABLE: list[tuple[str, Callable[[re.Match, list], Any]]] = [
    (
        r"(?:bar|barrier\.cta)\.(sync|arrive) (\d+), (\d+);",
        lambda m, _: named_barrier(m[1], int(m[2]), int(m[3])),
    ),
    (r"fence\.proxy\.async;", lambda *_: proxy_fence()),
    # Programmatic dependent launch, with nothing before or after this launch.
    (r"griddepcontrol\.(wait|launch_dependents);", lambda *_: step() and None),
    (
        r"\{ \.reg \.b16 lo, hi; cvt\.rn\.satfinite\.e4m3x2\.f32 lo, \$2, \$1;"
        r" cvt\.rn\.satfinite\.e4m3x2\.f32 hi, \$4, \$3; mov\.b32 \$0, \{lo, hi\}; \}",
        lambda _, xs: e4m3x4(*xs),
    ),
    (r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$2, \$1;", lambda m, xs: halves(m[1], *xs)),
]
TABLE += [
    (rf"{name} \$0, \$1;", lambda _, xs, f=f: elementwise(f, *xs))
    for name, f in (
        (r"tanh\.approx\.f32", torch.tanh),
        (r"ex2\.approx(?:\.ftz)?\.f32", torch.exp2),
        (r"rcp\.approx(?:\.ftz)?\.f32", torch.reciprocal),
    )
]
EMPTY_OUTPUT = re.compile(r"\s*mov\.u32 \$0, 0;$")


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Any:
    running()
    text = EMPTY_OUTPUT.sub("", " ".join(asm.split()))
    for pattern, f in TABLE:
        if m := re.fullmatch(pattern, text):
            out = f(m, list(args))
            if out is not None:
                return out
            if is_pure or any(isinstance(x, Tensor) for x in args):
                raise EmulatorError(
                    f"{here()}: {text!r} has an effect: it needs is_pure=False, or the compiler"
                    " drops it, and scalars only, or each element of a tensor repeats it"
                )
            return Scalar(0, torch.int32)
    raise NotEmulated(f"{here()}: no emulation of the inline assembly {asm!r}")
