"""A run on the terminal: how far it is, where it was written, what failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from anyflash.bench import report
from anyflash.bench.cases import NamedT
from anyflash.bench.report import Report

ResultT = TypeVar("ResultT")


def measure(
    cases: Sequence[NamedT],
    run: Callable[[NamedT, Callable[[], None]], ResultT],
    rounds: int,
    screen: Console,
    line: Callable[[ResultT], str] | None = None,
    results: list[ResultT] | None = None,
) -> list[ResultT]:
    """Run all cases under a progress bar: `run` takes a case and what to call after each of its
    `rounds`; `line` is what to print of a result at once. `results` is filled as they come, so that
    they are there if a case raises."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = [] if results is None else results
    with Progress(*columns, console=screen, transient=True) as progress:
        whole = progress.add_task("cases", total=len(cases))
        part = progress.add_task("", total=rounds)
        for case in cases:
            progress.reset(part, description=case.name)
            results.append(run(case, lambda: progress.advance(part)))
            if line is not None:
                screen.print(line(results[-1]), markup=False, highlight=False, soft_wrap=True)
            progress.advance(whole)
    return results


def write(
    made: Report[Any, Any, Any], output: Path | None, folder: Path, part: bool, screen: Console
) -> None:
    """Write a report to `output`; a whole run has a place of its own under `folder`."""
    if output is None and not part:
        output = folder / made.machine.slug / f"{made.suite}.json"
    if output is None:
        screen.print("nothing written: a part or a quick run needs --output", style="dim")
    else:
        report.write(made, output)
        screen.print(f"written: {output}", markup=False, soft_wrap=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Cells as a table for the terminal: long ones give way where it is narrow."""
    found = Table()
    for name, *cells in zip(head, *rows, strict=True):
        short = all(len(cell) <= 12 for cell in cells)
        found.add_column(name, overflow="fold", no_wrap=short)
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def tell(
    wrong: Sequence[str], failures: Mapping[str, Sequence[str]], check: bool, screen: Console
) -> int:
    """Name the cases whose check failed and, by how, what else did; the exit code, for which the
    others count with `check` only."""
    for how, names in {"check failed": wrong, **failures}.items():
        if names:
            screen.print(f"{how}: {'; '.join(names)}", style="red", markup=False)
    return 1 if wrong or (check and any(failures.values())) else 0
