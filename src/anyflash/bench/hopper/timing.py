"""Times on a card: in short bursts, and under load for seconds.

A card that computes is bound by power: within a second its clock falls to what the energy allows.
So there are two figures. In a **burst**, samples of about 20 ms of all sides alternate in random
order, and what counts is the ratio within a round. **Sustained**, each side keeps the card busy for
a second and more at a time, in the order a b b a, and clock and energy are read meanwhile.

What is timed is enqueued as CUDA graphs of several calls, so that the host costs nothing; times are
those of the card's own events.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from anyflash.bench.check import Check
from anyflash.bench.hopper.power import Power

MOST_CALLS = 32  # in a graph
WARM_UP = 3  # calls before anything is measured
ESTIMATE = 3  # calls by which their number in a sample is chosen
SETTLE = 0.25  # seconds under load before a span counts: the clock follows the side before


class Event(Protocol):
    """As `torch.cuda.Event(enable_timing=True)`: a mark in the work that is enqueued."""

    def record(self) -> Any: ...

    def synchronize(self) -> Any: ...

    def elapsed_time(self, end_event: Any) -> float: ...  # in milliseconds


@dataclass(frozen=True)
class Side:
    """Something to time: `replay` enqueues `calls` calls."""

    name: str
    replay: Callable[[], Any]
    calls: int


@dataclass(frozen=True)
class Burst:
    """By side: the milliseconds of a call in each round, and how many calls that is the mean of."""

    times: dict[str, tuple[float, ...]]
    calls: dict[str, int]

    def milliseconds(self, side: str) -> float:
        return statistics.median(self.times[side])

    def ratios(self, side: str, other: str) -> list[float]:
        """The other side's time over this one's, by round: above 1 this one is faster."""
        return [b / a for a, b in zip(self.times[side], self.times[other], strict=True)]


@dataclass(frozen=True)
class Span:
    """Some time under load: `calls` took `seconds`, and the power was read meanwhile."""

    calls: int
    seconds: float
    power: Power


@dataclass(frozen=True)
class Load:
    """One side under load, in spans between those of the other side."""

    spans: tuple[Span, ...]

    @property
    def milliseconds(self) -> float:
        """Of a call."""
        return 1000 * sum(s.seconds for s in self.spans) / sum(s.calls for s in self.spans)

    @property
    def watts(self) -> float | None:
        """None if the energy of a span is not known."""
        known = [(s.seconds, s.power.watts) for s in self.spans if s.power.watts is not None]
        if len(known) != len(self.spans):
            return None
        return sum(t * w for t, w in known) / sum(t for t, _ in known)

    @property
    def mhz(self) -> float | None:
        """The multiprocessors' clock: the mean of the medians of all spans."""
        known = [s.power.mhz for s in self.spans if s.power.mhz is not None]
        return statistics.mean(known) if known else None


def capture(name: str, run: Callable[[], Any], seconds: float) -> Side:
    """A side whose samples take about `seconds`, as CUDA graphs on the current card.

    Raises RuntimeError if `run` waits for the card, which nothing in a graph can do. That is found
    out before: a capture that fails leaves the allocator in the middle of it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(ESTIMATE):
            run()
        stop.record()
        with _no_waiting():
            run()
    stop.synchronize()
    calls, replays = plan(start.elapsed_time(stop) / 1000 / ESTIMATE, seconds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()

    def replay() -> None:
        for _ in range(replays):
            graph.replay()

    return Side(name, replay, calls * replays)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """What waits for the card is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def plan(call: float, seconds: float) -> tuple[int, int]:
    """How many calls of about `call` seconds go into a graph, and how often it is replayed, for a
    sample of about `seconds`."""
    wanted = max(1, round(seconds / call))
    calls = min(wanted, MOST_CALLS)
    return calls, max(1, round(wanted / calls))


def burst(
    check: Check,
    sides: Sequence[Side],
    *,
    rounds: int,
    event: Callable[[], Event],
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> Burst:
    """A sample of each side in every round, after the check passed; raises CheckFailed if not."""
    check.require()
    for side in sides:
        side.replay()
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    order = random.Random(seed)
    for _ in range(rounds):
        for side in order.sample(sides, len(sides)):
            start, stop = event(), event()
            start.record()
            side.replay()
            stop.record()
            stop.synchronize()
            times[side.name].append(start.elapsed_time(stop) / side.calls)
        on_round()
    calls = {side.name: side.calls for side in sides}
    return Burst({name: tuple(found) for name, found in times.items()}, calls)


def sustain(
    check: Check,
    sides: Sequence[Side],
    *,
    seconds: float,
    event: Callable[[], Event],
    power: Callable[[float, float], Power],
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[str, Load]:
    """Each side under load for `seconds` and more, in two spans; raises CheckFailed if the check
    did not pass.

    `power` tells what was read between two times of `clock`. After the first span of a side comes
    the other's, and then all again in reverse: what drifts evenly is the same for both.
    """
    check.require()
    spans: dict[str, list[Span]] = {side.name: [] for side in sides}
    for side in (*sides, *reversed(sides)):
        spans[side.name].append(_span(side, seconds / 2, event, power, clock))
    return {name: Load(tuple(found)) for name, found in spans.items()}


def _span(
    side: Side,
    seconds: float,
    event: Callable[[], Event],
    power: Callable[[float, float], Power],
    clock: Callable[[], float],
) -> Span:
    """Keep the card busy with one side until `seconds` after it settled."""

    def enqueue() -> Event:
        side.replay()
        mark = event()
        mark.record()
        return mark

    begin = clock()
    mark, following = enqueue(), enqueue()  # one sample ahead: the card never waits for the host
    mark.synchronize()
    while (start := clock()) - begin < SETTLE:
        mark, following = following, enqueue()
        mark.synchronize()
    first, samples = mark, 0
    while (stop := clock()) - start < seconds or not samples:
        mark, following = following, enqueue()
        mark.synchronize()
        samples += 1
    following.synchronize()
    elapsed = first.elapsed_time(mark) / 1000
    return Span(samples * side.calls, elapsed, power(start, stop))
