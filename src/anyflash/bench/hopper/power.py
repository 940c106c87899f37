"""Clock and energy of a card, read from NVML while it works.

The energy counter is brought up to date only every few tens of milliseconds, so power is taken from
change to change of it. NVML's own power reading is no substitute: on this generation it is a mean
over the last second.
"""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from anyflash.errors import Unsupported

PERIOD = 0.005  # seconds from one reading to the next


@dataclass(frozen=True)
class Reading:
    """At `seconds` of the host's clock: energy since the driver was loaded, and the clock of the
    multiprocessors."""

    seconds: float
    joules: float
    mhz: int


@dataclass(frozen=True)
class Power:
    """Over some time: mean power, None if the counter did not move twice; median, least and most
    of the multiprocessors' clock, None without a reading."""

    watts: float | None
    mhz: float | None
    mhz_least: int | None
    mhz_most: int | None

    @classmethod
    def of(cls, readings: Sequence[Reading], start: float, stop: float) -> Power:
        """Of readings in order of time, those between `start` and `stop`."""
        times = [r.seconds for r in readings]
        inside = readings[bisect_left(times, start) : bisect_right(times, stop)]
        moved = [b for a, b in pairwise(inside) if b.joules != a.joules]
        watts = None
        if len(moved) > 1:
            first, last = moved[0], moved[-1]
            watts = (last.joules - first.joules) / (last.seconds - first.seconds)
        clocks = [r.mhz for r in inside]
        if not clocks:
            return cls(watts, None, None, None)
        return cls(watts, statistics.median(clocks), min(clocks), max(clocks))


class Meter:
    """NVML's counters of the current card."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.nvml, self.clock = nvml(), clock
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        try:
            self.nvml.nvmlInit()
            # NVML numbers cards in its own order.
            self.card = self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.driver = str(self.nvml.nvmlSystemGetDriverVersion())
            self.power_limit = self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.card) / 1000
            kind = self.nvml.NVML_CLOCK_SM
            self.most_mhz = int(self.nvml.nvmlDeviceGetMaxClockInfo(self.card, kind))
            self.read()
        except self.nvml.NVMLError as error:
            advice = "run it where NVML can read the card's energy counter and clock"
            raise Unsupported(f"measuring power here: NVML says {error}", {}, advice) from error

    def read(self) -> Reading:
        joules = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.card) / 1000
        mhz = self.nvml.nvmlDeviceGetClockInfo(self.card, self.nvml.NVML_CLOCK_SM)
        return Reading(self.clock(), joules, int(mhz))


def nvml() -> Any:
    """NVML's Python module; raises Unsupported if it is not installed."""
    try:
        import pynvml
    except ImportError as error:
        advice = "pip install anyflash[bench]"
        raise Unsupported("measuring power without nvidia-ml-py", {}, advice) from error
    return pynvml


class Sampler:
    """Reads all the time, in a thread, while it is entered."""

    def __init__(self, read: Callable[[], Reading], period: float = PERIOD) -> None:
        self.read, self.period = read, period
        self.readings: list[Reading] = []
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def power(self, start: float, stop: float) -> Power:
        """Between two times of the host's clock; raises what reading raised."""
        if self.error is not None:
            raise self.error
        return Power.of(list(self.readings), start, stop)

    def _run(self) -> None:
        while not self.stop.wait(self.period):
            try:
                self.readings.append(self.read())
            except Exception as error:  # raised where the readings are asked for
                self.error = error
                return
