"""A run on a Hopper card as tables, ratios first."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from anyflash.bench.hopper import ablations, anchors, goals
from anyflash.bench.hopper.card import Card
from anyflash.bench.hopper.first import CACHED, COLD
from anyflash.bench.hopper.goals import WAYS, Line
from anyflash.bench.hopper.instruments import Settings
from anyflash.bench.hopper.results import BURST, SUSTAINED, RowResult
from anyflash.bench.hopper.rows import (
    CALLS,
    CUDNN,
    FA2,
    FIRST,
    HOST,
    LIBRARY,
    OURS,
    PRODUCT,
    VARIANTS,
)
from anyflash.bench.report import Report
from anyflash.bench.tables import (
    NOTHING,
    Table,
    error_cells,
    markdown,
    number,
    provenance,
    ratio,
)

SIDES = (OURS, CUDNN, FA2)
UNITS = ("TFLOP/s", "MHz", "W", "J/TFLOP")
VARIANTS_TITLE = "Variants of the kernel, burst"
MET = {True: "yes", False: "NO", None: "not measured"}

# How rows are measured, forward and backward, and what belongs to forward alone.
HOW = """A ratio is our rate over the other side's, so above 1 anyflash is faster: in a burst the
median of all rounds, with the least and the most. All inputs are bfloat16, standard normal.
**Burst**: samples of about {seconds:g} ms of all sides in random order, {rounds} rounds, as
CUDA graphs, timed by the card's events. **Sustained**: each side keeps the card busy for
{sustained:g} s and more, in the order a b b a; energy and clock are NVML's."""
HOW_FORWARD = f"""Rates count
2·(D + Dv) operations for each pair of a query and a key in each head: half of the pairs if causal,
those within a window. The best is the fastest of cuDNN, FlashAttention-2, -3 and -4, relative to
cuDNN ({anchors.SOURCE}); from one card to another only ratios to cuDNN compare. The check compares
a sample with float64: all rows of a few heads up to S=4096, a random part of longer ones, and some
rows of every other head."""


def section(report: Report[Card, Settings, RowResult]) -> str:
    """One report as Markdown."""
    notes = {VARIANTS_TITLE: ablations.PUBLISHED}
    return written(report, "forward", HOW_FORWARD, tables(report.results), notes)


def written(
    report: Report[Card, Settings, RowResult],
    what: str,
    how: str,
    found: Sequence[tuple[str, Table]],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A report of rows as Markdown: which card, how it was measured, and those of the tables that
    have rows, with what there is to say below them by title."""
    card, settings, host = report.machine, report.settings, report.machine.host
    measured = HOW.format(
        seconds=1000 * settings.seconds, rounds=settings.rounds,
        sustained=settings.sustained_seconds,
    )  # fmt: skip
    text = [
        f"## {card.name}, {what}",
        provenance(report.date, report.commit, report.dirty, report.versions)
        + f" {card.multiprocessors} multiprocessors, {card.memory_gb:g} GB, "
        f"{card.power_limit_watts:g} W, at most {card.clock_mhz} MHz; driver {card.driver}, "
        f"CUDA {card.cuda}. Host: {host.cpu}, {host.cores} cores, {host.system}."
        + (" Small sizes: not for comparison." if settings.quick else ""),
        " ".join(f"{measured} {how}".split()),
    ]
    for title, (head, rows) in found:
        if rows:
            text += [f"### {title}", markdown(head, rows), *filter(None, [notes.get(title)])]
    return "\n\n".join(text)


def tables(results: Sequence[RowResult]) -> list[tuple[str, Table]]:
    """The tables of a run by title; a table without rows has nothing to show."""
    return [
        ("Bars and goals", demand_table(goals.lines(results))),
        ("Burst", burst_table(results)),
        ("Sustained", sustained_table(results)),
        ("Ceiling: a matrix product in the same run", ceiling_table(results)),
        ("What a small call costs the host", host_table(results)),
        ("The first call of a process", first_table(results)),
        (VARIANTS_TITLE, variant_table(results)),
        ("What does not serve", refusal_table(results)),
        ("Errors against float64", error_table(results)),
    ]


def summary_tables(results: Sequence[RowResult]) -> list[Table]:
    """A run in little width, for a terminal."""
    whole = [
        summary_table(results),
        variant_table(results),
        refusal_table(results),
        demand_table(goals.lines(results)),
    ]
    return [table for table in whole if table[1]]


def summary_table(results: Iterable[RowResult]) -> Table:
    """All rows: the ratio that the bar is about and our rate, in a burst and sustained."""
    head = ["row", "ratio", "sustained", "bar", "met", "over best", "TFLOP/s", "J/TFLOP"]
    rows = []
    for r in results:
        if r.row.measure == VARIANTS:
            continue
        side = LIBRARY if r.row.measure == PRODUCT else OURS
        if r.row.measure == FIRST:
            first = r.first[COLD].total if r.first else None
        else:
            first = r.host_ratio if r.row.measure == HOST else r.ratio(r.row.against)
        best = " ".join(ratio(r.over_best(way)) for way in WAYS) if r.row.best else NOTHING
        rates = " ".join(number_cell(r.tflops(side, way)) for way in WAYS)
        cells = [
            ratio(first),
            ratio(r.ratio(r.row.against, SUSTAINED)),
            bar_cell(r),
            verdict(r),
            best,
        ]
        rows.append([r.row.name, *cells, rates, number_cell(r.joules_per_tflop(side))])
    return head, rows


def demand_table(lines: Iterable[Line]) -> Table:
    head = ["of the whole run", "figure", "kind", "demanded", "met"]
    rows = []
    for line in lines:
        kind = "bar" if line.is_bar else "goal"
        rows.append([line.what, line.figure, kind, line.demand, _met(line.met)])
    return head, rows


def burst_table(results: Iterable[RowResult], sides: Sequence[str] = SIDES) -> Table:
    head = ["row", "ratio", "to", "bar", "met", "over best", "over FA2"]
    head += [f"{side}, TFLOP/s" for side in sides] + ["anyflash, ms", "(B, H, S, D)"]
    rows = []
    for r in results:
        if r.row.measure not in CALLS:
            continue
        to = r.row.against
        other = to if r.row.yardstick is None else f"{to}: {number_cell(r.tflops(to))} TFLOP/s"
        row = [r.row.name, ratio(r.ratio(to), r.ratios(to)), other, bar_cell(r), met_cell(r, BURST)]
        row += [ratio(r.over_best()), ratio(r.ratio(FA2))]
        row += [number_cell(r.tflops(side)) for side in sides]
        rows.append([*row, number_cell(r.milliseconds(OURS)), r.row.shape])
    return head, rows


def sustained_table(results: Iterable[RowResult]) -> Table:
    head = ["row", "ratio to cuDNN", "bar", "met", "over best", "energy over cuDNN's"]
    head += [f"{side}, {unit}" for unit in UNITS for side in (OURS, CUDNN)]
    rows = []
    for r in results:
        if r.row.measure not in CALLS or not r.sustained:
            continue
        row = [r.row.name, ratio(r.ratio(CUDNN, SUSTAINED)), bar_cell(r), met_cell(r, SUSTAINED)]
        row += [ratio(r.over_best(SUSTAINED)), ratio(goals.energy_ratio(r))]
        loads = [load_cells(r, side) for side in (OURS, CUDNN)]
        rows.append(row + [cell for pair in zip(*loads, strict=True) for cell in pair])
    return head, rows


def ceiling_table(results: Iterable[RowResult]) -> Table:
    head = ["product", "burst, TFLOP/s", *(f"sustained, {unit}" for unit in UNITS)]
    rows = [
        [r.row.shape, number_cell(r.tflops(LIBRARY)), *load_cells(r, LIBRARY)]
        for r in results
        if r.row.measure == PRODUCT
    ]
    return head, rows


def host_table(results: Iterable[RowResult]) -> Table:
    head = ["row", "over FA2's", "bar", "met", "anyflash, µs", "FA2, µs", "(B, H, S, D)"]
    rows = []
    for r in results:
        if r.row.measure != HOST:
            continue
        sides = (None, None) if r.host is None else (r.host.ours, r.host.peer)
        costs = [number_cell(None if x is None else 1000 * statistics.median(x)) for x in sides]
        rows.append([r.row.name, ratio(r.host_ratio), bar_cell(r), verdict(r), *costs, r.row.shape])
    return head, rows


def first_table(results: Iterable[RowResult]) -> Table:
    parts = ("imports, s", "call, s")
    head = ["row", "bar", "met", *(f"{name}: {part}" for name in (COLD, CACHED) for part in parts)]
    rows = []
    for r in results:
        if r.row.measure != FIRST:
            continue
        calls = [r.first[name] for name in (COLD, CACHED)] if r.first else []
        cells = [f"{x:.2f}" for call in calls for x in (call.imports, call.call)]
        rows.append([r.row.name, bar_cell(r), verdict(r), *(cells or [NOTHING] * 4)])
    return head, rows


def variant_table(results: Iterable[RowResult]) -> Table:
    head = ["row", "variant", "over the table's tile", "over cuDNN", "TFLOP/s"]
    rows = []
    for r in results:
        if r.row.measure != VARIANTS or r.burst is None:
            continue
        for side in r.sides(BURST):
            found = [
                r.burst.ratios(side, other) for other in (OURS, CUDNN) if other in r.burst.times
            ]
            cells = [ratio(statistics.median(x), x) for x in found] + [NOTHING] * (2 - len(found))
            name = "the table's tile" if side == OURS else side
            rows.append([r.row.name, name, *cells, number_cell(r.tflops(side))])
    return head, rows


def refusal_table(results: Iterable[RowResult]) -> Table:
    head = ["row", "side", "why not"]
    return head, [[r.row.name, side, why] for r in results for side, why in r.refusals.items()]


def error_table(results: Iterable[RowResult]) -> Table:
    head = ["row", "tensor", "anyflash", "cuDNN", "plain PyTorch", "tolerance", "passed"]
    return head, [[r.row.name, *error_cells(e)] for r in results for e in r.errors]


def verdict(result: RowResult) -> str:
    """Whether the bar is met, or why that is not known."""
    if result.refused:
        return "REFUSED"
    if not result.passed:
        return "CHECK FAILED"
    return NOTHING if result.row.bar is None else _met(result.met)


def one_line(result: RowResult) -> str:
    """A row, as soon as it is done."""
    row, parts = result.row, []
    for way in WAYS:
        x, product = result.ratio(row.against, way), result.tflops(LIBRARY, way)
        if x is not None and row.measure in CALLS:
            parts.append(f"{way} {ratio(x)} of {row.against}")
        if product is not None:
            parts.append(f"{way} {number(product)} TFLOP/s")
    if result.first:
        parts += [f"{call.total:.2f} s {name}" for name, call in result.first.items()]
    if result.host_ratio is not None:
        parts.append(f"{ratio(result.host_ratio)} of {FA2}'s")
    said = verdict(result)
    return f"{row.name}: {', '.join(parts + ([] if said == NOTHING else [f'bar: {said}']))}"


def load_cells(result: RowResult, side: str) -> list[str]:
    """The UNITS of a side under load."""
    load = result.sustained.get(side)
    figures = (
        result.tflops(side, SUSTAINED),
        None if load is None else load.mhz,
        None if load is None else load.watts,
        result.joules_per_tflop(side),
    )
    return [number_cell(x) for x in figures]


def bar_cell(result: RowResult) -> str:
    if result.row.bar is None:
        return NOTHING
    if result.row.measure == FIRST:
        return f"≤ {result.row.bar:g} s"
    return f"{'≤' if result.row.measure == HOST else '≥'} {result.row.bar:.2f}"


def met_cell(result: RowResult, way: str) -> str:
    said = verdict(result)
    return _met(result.met_in(way)) if said in MET.values() else said


def _met(met: bool | None) -> str:
    return MET[met]


def number_cell(x: float | None) -> str:
    return NOTHING if x is None else number(x)
