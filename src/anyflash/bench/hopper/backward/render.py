"""A run of the backward pass as tables, ratios first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyflash.bench.hopper import anchors, goals, render
from anyflash.bench.hopper.backward import ablations
from anyflash.bench.hopper.backward.check import NAMES, labelled
from anyflash.bench.hopper.backward.goals import lines
from anyflash.bench.hopper.backward.rows import ALGORITHMS
from anyflash.bench.hopper.card import Card
from anyflash.bench.hopper.instruments import Settings
from anyflash.bench.hopper.render import (
    UNITS,
    bar_cell,
    demand_table,
    load_cells,
    met_cell,
    number_cell,
    refusal_table,
    summary_table,
)
from anyflash.bench.hopper.results import BURST, SUSTAINED, RowResult
from anyflash.bench.hopper.rows import CUDNN, FA2, OURS
from anyflash.bench.report import Report
from anyflash.bench.tables import NOTHING, Table, ratio

SIDES = (OURS, *ALGORITHMS, CUDNN, FA2)

HOW = f"""Rates count 2.5 times the operations of forward, which are 2·(D + Dv) for each pair of a
query and a key in each head: half of the pairs if causal, those within a window; and 3.5 times for
forward and backward together. What is timed is all of the backward pass, from dout and forward's
results to dq, dk and dv, as the operators that autograd calls. anyflash is what users get, with the
algorithm that it picks; beside it is each algorithm alone. Where cuDNN does not serve, the ratio is
to FA2. The best is the fastest of cuDNN, FlashAttention-2, -3 and -4, relative to the same
({anchors.SOURCE}); from one card to another only ratios compare. The check compares all of dq, dk
and dv with float64."""


def section(report: Report[Card, Settings, RowResult]) -> str:
    """One report as Markdown."""
    return render.written(report, "backward", HOW, tables(report.results))


def tables(results: Sequence[RowResult]) -> list[tuple[str, Table]]:
    """The tables of a run by title; a table without rows has nothing to show."""
    usual = [r for r in results if r.row.name not in ablations.NAMES]
    return [
        ("Bars and goals", demand_table(lines(results))),
        ("Burst", burst_table(usual)),
        ("Sustained", sustained_table(usual)),
        ("Variants of the kernels, burst", variant_table(results)),
        ("What does not serve", refusal_table(results)),
        ("Errors against float64", error_table(results)),
    ]


def summary_tables(results: Sequence[RowResult]) -> list[Table]:
    """A run in little width, for a terminal."""
    usual = [r for r in results if r.row.name not in ablations.NAMES]
    whole = [
        summary_table(usual),
        rate_table(usual),
        variant_table(results),
        refusal_table(results),
        demand_table(lines(results)),
    ]
    return [table for table in whole if table[1]]


def burst_table(results: Sequence[RowResult]) -> Table:
    head, rows = render.burst_table(results, SIDES)
    cells = zip(rows, results, strict=True)
    return [*head, "anyflash is"], [[*row, r.picked or NOTHING] for row, r in cells]


def rate_table(results: Iterable[RowResult]) -> Table:
    """The rates of all sides in a burst."""
    head = ["burst, TFLOP/s", *SIDES, "anyflash is"]
    return head, [
        [r.row.name, *(number_cell(r.tflops(side)) for side in SIDES), r.picked or NOTHING]
        for r in results
        if r.burst
    ]


def variant_table(results: Iterable[RowResult]) -> Table:
    """A line for each variant that was timed: its speed over what it is compared with."""
    head = ["row", "variant", "over cuDNN or FA2", "TFLOP/s"]
    rows = []
    for r in results:
        if r.row.name in ablations.NAMES:
            for side in r.sides(BURST):
                cells = [ratio(r.ratio(r.row.against, side=side)), number_cell(r.tflops(side))]
                rows.append([r.row.name, side, *cells])
    return head, rows


def sustained_table(results: Iterable[RowResult]) -> Table:
    """A line for each side under load; its ratios are ours over it."""
    head = ["row", "side", "anyflash over it", "bar", "met", "over best", "energy over its", *UNITS]
    rows = []
    for r in results:
        for side in r.sustained:
            cells = [NOTHING] * 5
            if side == r.row.against:
                cells[1:4] = [
                    bar_cell(r), met_cell(r, SUSTAINED), ratio(r.over_best(SUSTAINED)),
                ]  # fmt: skip
            if side != OURS:
                cells[0] = ratio(r.ratio(side, SUSTAINED))
                cells[4] = ratio(goals.energy_ratio(r, side))
            rows.append([r.row.name, side, *cells, *load_cells(r, side)])
    return head, rows


def error_table(results: Iterable[RowResult]) -> Table:
    """A line for each gradient of a row, and of its yardstick."""
    head = ["row", "tensor", OURS, *ALGORITHMS, "cuDNN or FA2", "plain PyTorch", "tolerance"]
    rows = []
    for r in results:
        by_name = {error.tensor: error for error in r.errors}
        alone = {labelled(name, side) for name in NAMES for side in ALGORITHMS}
        for name, error in by_name.items():
            if name in alone:  # beside ours
                continue
            sides = [by_name.get(labelled(name, side)) for side in ALGORITHMS]
            ours = [error.ours, *(None if e is None else e.ours for e in sides)]
            figures = [*ours, error.peer, error.plain, error.tolerance]
            cells = [NOTHING if x is None else f"{x:.2e}" for x in figures]
            passed = all(e is None or e.passed for e in (error, *sides))
            rows.append([r.row.name, name, *cells, "yes" if passed else "NO"])
    return [*head, "passed"], rows
