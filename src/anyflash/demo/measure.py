"""Time and memory of alternatives that compute the same."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Measured(NamedTuple):
    """One alternative."""

    result: Tensor
    seconds: float  # median
    bytes: int


class Alternatives:
    """Runs of the same thing in different ways: each once for its result and memory, then timed.

    Rounds are interleaved, so that a slow moment of the machine meets all of them. There are at
    least two, and no more that would go beyond `budget` seconds.
    """

    def __init__(self, runs: dict[str, Callable[[], Tensor]], step: Callable[[str], None]) -> None:
        self.runs, self.step = runs, step
        self.results: dict[str, Tensor] = {}
        self.memory: dict[str, int] = {}
        self.times: dict[str, list[float]] = {name: [] for name in runs}

    def measure(self, rounds: int, budget: float) -> dict[str, Measured]:
        for name, run in self.runs.items():
            self.step(name)
            self.results[name], self.memory[name] = peak_memory(run)
        start = time.perf_counter()
        for done in range(rounds):
            spent = time.perf_counter() - start
            if done >= 2 and spent * (done + 1) / done > budget:
                break
            for name, run in self.runs.items():
                self.step(name)
                before = time.perf_counter()
                run()
                self.times[name].append(time.perf_counter() - before)
        return {
            name: Measured(
                self.results[name], statistics.median(self.times[name]), self.memory[name]
            )
            for name in self.runs
        }


def peak_memory(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result, and the most bytes allocated at once on the way to it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        _without_noise(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        result = run()
    events: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return result, most


NOISE = (
    b"USDT:",  # the profiler's library, at its start and stop
    b"Memory block of unknown size was allocated before the profiling",  # so it is not counted
)


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Takes the profiler's own lines out of what is written to stderr; the rest comes after."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if not any(noise in line for noise in NOISE):
                    os.write(2, line)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
