"""A suite of rows on the card that is here, from the command line: run, write, tell."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from anyflash.bench import cases, console, report
from anyflash.bench.hopper import card, power
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.render import one_line
from anyflash.bench.hopper.results import RowResult
from anyflash.bench.hopper.rows import Row
from anyflash.bench.tables import Table

QUICK = Settings(rounds=2, seconds=0.002, sustained_seconds=0.2, quick=True)


@dataclass(frozen=True)
class Suite:
    """`name` is that of the result file, `failures` what fails a run of all rows, or of some, by
    how."""

    name: str
    rows: Sequence[Row]
    run_row: Callable[[Row, Settings, Instruments, Callable[[], None]], RowResult]
    summary: Callable[[Sequence[RowResult]], Sequence[Table]]
    failures: Callable[[Sequence[RowResult], bool], dict[str, list[str]]]


class Asked(NamedTuple):
    """What the command line says; None is the usual. `rows` is a part of their names."""

    quick: bool
    rows: str | None
    output: Path | None
    check: bool
    rounds: int | None
    sustained_seconds: float | None

    @property
    def settings(self) -> Settings:
        usual = QUICK if self.quick else Settings()
        load = self.sustained_seconds
        return replace(
            usual, rounds=self.rounds or usual.rounds,
            sustained_seconds=usual.sustained_seconds if load is None else load,
        )  # fmt: skip


def run(suite: Suite, asked: Asked, folder: Path) -> int:
    """Measure what is asked for, write it, below `folder` if nobody says where, and tell what
    failed; the exit code. What was measured before a row raised, or SIGTERM came, is not lost."""
    chosen = cases.select(suite.rows, asked.rows, "--rows")
    card.require()
    meter = power.Meter()
    settings = asked.settings
    chosen = [row.quick for row in chosen] if asked.quick else chosen
    screen = Console()
    source = report.source()  # of the code that is loaded now: files may change meanwhile
    tools = Instruments.of_card(meter)
    results: list[RowResult] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `finally` runs
    try:
        console.measure(
            chosen, lambda row, tell: suite.run_row(row, settings, tools, tell), settings.rounds,
            screen, one_line, results,
        )  # fmt: skip
    finally:
        machine = card.Card.here(meter)
        made = report.Report.of(suite.name, settings, results, source, machine)
        cut = len(results) < len(chosen)
        output = asked.output
        place = output.with_suffix(".part.json") if output is not None and cut else output
        part = asked.quick or asked.rows is not None or cut
        console.write(made, place, folder, part, screen)
    for table in suite.summary(results):
        screen.print(console.table(*table))
    wrong = [r.row.name for r in results if not r.passed and not r.refused]
    failures = suite.failures(results, asked.rows is None)
    return console.tell(wrong, failures, asked.check, screen)
