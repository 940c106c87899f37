"""One row: tensors, check, and only then time and power."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from anyflash.bench.check import Check, Error
from anyflash.bench.hopper.backward import ablations
from anyflash.bench.hopper.backward.check import Reference
from anyflash.bench.hopper.backward.goals import deterministic_bar
from anyflash.bench.hopper.backward.peers import Contest, Gradients, Maker, Run
from anyflash.bench.hopper.backward.rows import DETERMINISTIC
from anyflash.bench.hopper.check import poisoned
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.peers import first_calls, unserved
from anyflash.bench.hopper.results import RowResult
from anyflash.bench.hopper.rows import OURS, Inputs, Row
from anyflash.bench.hopper.suite import OnRound, measure


@dataclass
class Trials:
    """First calls of our sides: those that are right by name, the errors of all, and why others do
    not serve."""

    refusals: dict[str, str]
    right: dict[str, Run] = field(default_factory=dict)
    errors: list[Error] = field(default_factory=list)

    def call(
        self, name: str, make: Maker, reference: Reference, peer: Gradients | None = None,
        of: str = "",
    ) -> None:  # fmt: skip
        """Call a side and compare; `of` is what it is called among the errors."""
        try:
            run = make(reference.inputs)
            with poisoned():
                found = run()
        except Exception as error:
            why = unserved(error)
            if why is None:
                raise
            self.refusals[name] = why
            return
        errors = reference.errors(found, peer, of)
        self.errors += errors
        if all(error.passed for error in errors):
            self.right[name] = run

    def result(self, row: Row) -> RowResult:
        return RowResult(row, tuple(self.errors), self.refusals)


def run_row(
    row: Row,
    settings: Settings,
    tools: Instruments,
    on_round: OnRound = lambda: None,
    contest: Contest | None = None,
) -> RowResult:
    """Check a row, and measure it if what users get is right. `contest` is anyflash against
    PyTorch's kernels if not given. An algorithm, or a variant, that is wrong is not timed and fails
    the row's check."""
    with torch.no_grad():
        return _run(row, settings, tools, on_round, contest or Contest())


def _run(
    row: Row, settings: Settings, tools: Instruments, on_round: OnRound, contest: Contest
) -> RowResult:
    inputs = Inputs.of(row, tools.device)
    others, refusals = first_calls(contest.others, inputs)
    if row.name in ablations.NAMES:
        contest, without = ablations.contest(row, contest)
        refusals |= without
    peer = others[row.against][1] if row.against in others else None
    trials, reference, needed = Trials(refusals), Reference(inputs), {OURS}
    trials.call(OURS, contest.ours, reference, peer)
    if row.yardstick is not None:
        yard = Reference(Inputs.of(row.yardstick, tools.device))
        trials.call(row.against, contest.ours, yard, of=f"on {row.yardstick.name}")
        needed.add(row.against)
    if not needed <= trials.right.keys():
        return trials.result(row)
    for name, make in contest.algorithms.items():
        trials.call(name, make, reference, of=name)
    runs = {name: run for name, (run, _) in others.items()}
    sides, failed = tools.sides(trials.right, runs, settings.seconds)
    trials.refusals |= failed
    timed = Check(row.name, tuple(error for error in trials.errors if error.passed))
    result = replace(trials.result(row), picked=contest.picked(inputs))
    return measure(result, sides, settings, tools, on_round, check=timed, heavy=heavy(row))


def heavy(row: Row) -> set[str]:
    """Sides that are held under load: those that something is demanded of."""
    others = () if deterministic_bar(row) is None else DETERMINISTIC
    return {OURS, row.against, *others}
