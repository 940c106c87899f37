"""What came out of a row, and what follows from it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from anyflash.bench.check import Check, Error
from anyflash.bench.hopper.first import COLD, FirstCall
from anyflash.bench.hopper.rows import FIRST, HOST, OURS, Row
from anyflash.bench.hopper.timing import Burst, Load
from anyflash.bench.timing import Timing

BURST, SUSTAINED = "burst", "sustained"  # ways of measuring


@dataclass(frozen=True)
class RowResult:
    """A row, the errors of its check, and what was measured; nothing is, if the check failed.

    `refusals` says, for each side that does not serve the row, why. `sustained` is by side. `host`
    holds the host's milliseconds of a call of ours and of FA2's, `first` the first calls of
    processes, by what they find compiled. `picked` is the algorithm that ours is, of backward.
    """

    row: Row
    errors: tuple[Error, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    burst: Burst | None = None
    sustained: dict[str, Load] = field(default_factory=dict)
    host: Timing | None = None
    first: dict[str, FirstCall] = field(default_factory=dict)
    picked: str = ""

    @property
    def refused(self) -> bool:
        """Whether anyflash itself does not serve the row."""
        return OURS in self.refusals

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        return Check(self.row.name, self.errors).passed

    def sides(self, way: str) -> list[str]:
        """Who was measured in that way."""
        if way == SUSTAINED:
            return list(self.sustained)
        return [] if self.burst is None else list(self.burst.times)

    def milliseconds(self, side: str, way: str = BURST) -> float | None:
        """Of a call; None if it was not measured."""
        if side not in self.sides(way):
            return None
        if way == SUSTAINED:
            return self.sustained[side].milliseconds
        return None if self.burst is None else self.burst.milliseconds(side)

    def tflops(self, side: str, way: str = BURST) -> float | None:
        milliseconds = self.milliseconds(side, way)
        return None if milliseconds is None else self._flops(side) / milliseconds / 1e9

    def ratios(self, other: str, way: str = BURST, side: str = OURS) -> list[float]:
        """A side's rate, ours if not given, over another's: of every round of a burst, or the one
        that is sustained; nothing if one of them was not measured."""
        sides = self.sides(way)
        if side not in sides or other not in sides:
            return []
        share = self._flops(side) / self._flops(other)
        if way == SUSTAINED:
            own, peer = (self.sustained[name].milliseconds for name in (side, other))
            return [share * peer / own]
        return [] if self.burst is None else [share * r for r in self.burst.ratios(side, other)]

    def ratio(self, other: str, way: str = BURST, side: str = OURS) -> float | None:
        ratios = self.ratios(other, way, side)
        return statistics.median(ratios) if ratios else None

    @property
    def host_ratio(self) -> float | None:
        """What a call of ours costs the host, over what FA2's costs: below 1 ours is cheaper."""
        return None if self.host is None else statistics.median(1 / r for r in self.host.ratios)

    def over_best(self, way: str = BURST) -> float | None:
        """Our speed over that of the fastest of the others."""
        ratio = self.ratio(self.row.against, way)
        return None if ratio is None or self.row.best is None else ratio / self.row.best

    def joules_per_tflop(self, side: str) -> float | None:
        """Energy for 10¹² operations under load."""
        load, tflops = self.sustained.get(side), self.tflops(side, SUSTAINED)
        if load is None or load.watts is None or tflops is None:
            return None
        return load.watts / tflops

    def met_in(self, way: str) -> bool | None:
        """Whether the bar is met in one way of measuring; None without a bar or a figure."""
        bar = self.row.bar
        if bar is None or not self.passed:
            return None
        if self.row.measure == HOST:
            return None if self.host_ratio is None else self.host_ratio <= bar
        if self.row.measure == FIRST:
            return self.first[COLD].total <= bar if self.first else None
        ratio = self.ratio(self.row.against, way)
        return None if ratio is None else ratio >= bar

    @property
    def met(self) -> bool | None:
        """Whether the bar is met, sustained as well where the row asks for it; None without a bar,
        and where it is neither missed nor fully measured."""
        found = [self.met_in(BURST)] + ([self.met_in(SUSTAINED)] if self.row.sustained else [])
        if False in found:
            return False
        return None if None in found else True

    def derived(self) -> dict[str, Any]:
        """What follows from the numbers, for human readers of a result file."""
        ratios = self.ratios(self.row.against)
        return {
            "ratio": self.ratio(self.row.against),
            "ratio_least": min(ratios, default=None),
            "ratio_most": max(ratios, default=None),
            "over_best": self.over_best(),
            "tflops": {side: self.tflops(side) for side in self.sides(BURST)},
            "sustained_ratio": self.ratio(self.row.against, SUSTAINED),
            "sustained_over_best": self.over_best(SUSTAINED),
            "sustained_tflops": {s: self.tflops(s, SUSTAINED) for s in self.sustained},
            "watts": {side: load.watts for side, load in self.sustained.items()},
            "mhz": {side: load.mhz for side, load in self.sustained.items()},
            "joules_per_tflop": {side: self.joules_per_tflop(side) for side in self.sustained},
            "host_ratio": self.host_ratio,
            "first_call_seconds": {name: call.total for name, call in self.first.items()},
            "check_passed": self.passed,
            "bar_met": self.met,
        }

    def _flops(self, side: str) -> float:
        row, yardstick = self.row, self.row.yardstick
        if yardstick is not None and side == row.against:
            return yardstick.flops
        return row.flops
