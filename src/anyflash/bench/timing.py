"""Two functions on the same inputs, timed in turns.

A machine is never twice the same: clocks, neighbours and caches drift by tens of percent within
minutes. Both sides therefore run in every round, in random order, and what counts is the ratio of
their times within a round; of all rounds the median, with the least and the most beside it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyflash.bench.check import Check

WARM_UP = 2  # calls of each side before anything is measured


@dataclass(frozen=True)
class Timing:
    """`ours` and `peer`: the median time of a call in each round, in milliseconds, by round.

    `calls_ours` and `calls_peer`: how many calls that is the median of.
    """

    ours: tuple[float, ...]
    peer: tuple[float, ...]
    calls_ours: tuple[int, ...]
    calls_peer: tuple[int, ...]

    @property
    def ratios(self) -> list[float]:
        """The peer's time over ours, by round: above 1 anyflash is faster."""
        return [p / o for o, p in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def compare(
    check: Check,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    *,
    rounds: int,
    seconds: float,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time both in `rounds` rounds, after the check passed; raises CheckFailed if it did not.

    In a round each side is called until its calls have taken `seconds`, at least once. A call must
    return only when its work is done, as it does on a CPU.
    """
    check.require()
    sides = (ours, peer)
    collected = gc.isenabled()
    gc.disable()  # a collection in one side's time is not its cost
    try:
        for _ in range(WARM_UP):
            for side in sides:
                side()
        rows: tuple[list[list[float]], list[list[float]]] = ([], [])
        order = random.Random(seed)
        for _ in range(rounds):
            for n in order.sample((0, 1), 2):
                rows[n].append(_fill(sides[n], seconds, clock))
            on_round()
    finally:
        if collected:
            gc.enable()
    medians = [tuple(1000 * statistics.median(times) for times in side) for side in rows]
    calls = [tuple(map(len, side)) for side in rows]
    return Timing(medians[0], medians[1], calls[0], calls[1])


def milliseconds(function: Callable[[], Any]) -> float:
    """The time of a single call, for what happens only once."""
    return 1000 * _once(function, time.perf_counter)


def _once(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    result = function()
    stop = clock()
    del result  # freed outside of the time of either side
    return stop - start


def _fill(function: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> list[float]:
    """The times of as many calls as it takes to spend `seconds`."""
    times = [_once(function, clock)]
    while sum(times) < seconds:
        times.append(_once(function, clock))
    return times
