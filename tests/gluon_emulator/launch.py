"""Running a kernel: `emulate` takes over every launch inside it, `run` is one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from .errors import EmulatorError, NotEmulated
from .global_memory import Descriptor, Pointer, reach
from .machine import Machine
from .translate import translate
from .values import Scalar


@dataclass(frozen=True)
class Launch:
    """What one launch did."""

    kernel: str
    programs: int
    steps: int  # points at which the scheduler chose
    schedule: int  # a digest of what it chose
    shared_bytes: int  # the most that a program allocated


def argument(x: Any) -> Any:
    """A kernel's argument as the kernel sees it."""
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu":
            raise EmulatorError(f"the emulator runs on CPU tensors, not on {x.device}")
        return Pointer(x.as_strided((reach(x.shape, x.stride()),), (1,), x.storage_offset()))
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, x.shape, x.strides, x.block_shape, x.padding)
    if isinstance(x, bool):
        return Scalar(x, torch.bool)
    if isinstance(x, int):
        return Scalar(x, torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    if isinstance(x, float):
        return Scalar(x, torch.float32)
    if isinstance(x, tuple):
        parts = [argument(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


# Options of a launch. Those that change only how fast it is are not looked at.
OPTIONS = {"num_warps", "num_ctas", "num_stages", "maxnreg", "debug"}


def bind(kernel: JITFunction, args: Sequence, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; options of the launch such as num_warps drop out if the kernel does not
    ask for them."""
    parameters = {p.name: p for p in kernel.params}
    if unknown := kwargs.keys() - parameters.keys() - OPTIONS or len(args) > len(parameters):
        raise TypeError(f"{kernel.__name__}: too many arguments, or unknown ones: {unknown}")
    if kwargs.get("num_ctas", 1) != 1:
        raise NotEmulated(f"{kernel.__name__}: a cluster of {kwargs['num_ctas']} programs")
    given = {n: p.default for n, p in parameters.items() if p.has_default}
    given |= dict(zip(parameters, args, strict=False))
    given |= {name: x for name, x in kwargs.items() if name in parameters}
    return {n: x if parameters[n].is_constexpr else argument(x) for n, x in given.items()}


def run(
    kernel: JITFunction,
    grid: Any,
    args: Sequence = (),
    kwargs: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    races: bool = True,
    resident: int = 4,
) -> Launch:
    """Run `kernel` over `grid`.

    Args:
        kernel: a @gluon.jit function.
        grid: one to three sizes, or a function of the arguments that gives them.
        args, kwargs: as for `kernel[grid](...)`; tensors on the CPU.
        seed: fixes the order of programs, partitions and asynchronous operations.
        races: whether accesses are checked by vector clocks. Without, only wrong values, poison
            and deadlocks are found.
        resident: how many programs run side by side. A kernel whose programs wait for each other
            needs all of them.

    Raises:
        EmulatorError: `Race`, `Poison`, `Deadlock`, `NotEmulated`, or itself for anything else
            that the hardware or the compiler does not allow.
    """
    kwargs = kwargs or {}
    given = bind(kernel, args, kwargs)
    sizes = tuple(grid(given) if callable(grid) else grid)
    sizes += (1,) * (3 - len(sizes))
    function: Callable = translate(kernel)
    machine = Machine(sizes, seed, races, resident)
    x, y, z = (range(n) for n in sizes)
    numbers = [(i, j, k) for i in x for j in y for k in z]
    if Machine.current is not None:
        raise EmulatorError("a launch inside a launch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Machine.current = machine
    try:
        with torch.no_grad():
            machine.run(numbers[:], kwargs.get("num_warps", 4), lambda: function(**given))
    finally:
        Machine.current = None
        torch.set_num_threads(threads)
    return Launch(
        function.__name__, len(numbers), machine.steps, machine.schedule, machine.shared_bytes
    )


@contextlib.contextmanager
def emulate(**options: Any) -> Iterator[list[Launch]]:
    """Inside, `kernel[grid](...)` runs in the emulator, with the options of `run`.

    Yields the list of launches, which fills as they are made.
    """
    real, launches = JITFunction.run, []

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kw: Any) -> None:
        if not warmup:
            launches.append(run(self, grid, args, kw, **options))

    JITFunction.run = launch
    try:
        yield launches
    finally:
        JITFunction.run = real
