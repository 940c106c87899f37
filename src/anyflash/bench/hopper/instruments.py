"""How long things are measured, and by what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from anyflash.bench.hopper import timing
from anyflash.bench.hopper.first import FirstCall, in_new_processes
from anyflash.bench.hopper.peers import Refused, attempt
from anyflash.bench.hopper.power import Meter, Reading
from anyflash.bench.hopper.rows import Row
from anyflash.bench.hopper.timing import Event, Side


@dataclass(frozen=True)
class Settings:
    """`rounds` of a burst, in which each side has a sample of about `seconds`; each side is under
    load for `sustained_seconds` and more, 0 for not at all; `quick` takes small rows, for tests."""

    rounds: int = 9
    seconds: float = 0.02
    sustained_seconds: float = 2.0
    quick: bool = False


def _event() -> Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class Instruments:
    """What measures on `device`. By default it is the current CUDA device; tests put others in."""

    read: Callable[[], Reading]
    device: str = "cuda"
    capture: Callable[[str, Callable[[], Any], float], Side] = field(default=timing.capture)
    event: Callable[[], Event] = field(default=_event)
    synchronize: Callable[[], None] = field(default=torch.cuda.synchronize)
    clock: Callable[[], float] = field(default=time.perf_counter)
    first: Callable[[Row], dict[str, FirstCall]] = field(default=in_new_processes)

    @classmethod
    def of_card(cls, meter: Meter) -> Instruments:
        return cls(meter.read, clock=meter.clock)

    def sides(
        self, own: Mapping[str, Callable[[], Any]], others: Mapping[str, Callable[[], Any]],
        seconds: float,
    ) -> tuple[list[Side], dict[str, str]]:  # fmt: skip
        """What is timed, and why some of the others cannot be: they may serve a call and yet not
        let themselves be captured in a graph. Of our own, that is an error."""
        found = [self.capture(name, run, seconds) for name, run in own.items()]
        refusals = {}
        for name, run in others.items():
            try:
                found.append(attempt(lambda n=name, r=run: self.capture(n, r, seconds)))
            except Refused as error:
                refusals[name] = f"not in a CUDA graph: {error}"
        return found, refusals
