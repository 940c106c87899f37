"""A whole run against its bars and goals: what no single row tells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anyflash.bench.hopper.anchors import BEST
from anyflash.bench.hopper.first import CACHED
from anyflash.bench.hopper.results import BURST, SUSTAINED, RowResult
from anyflash.bench.hopper.rows import CUDNN, HOST, LIBRARY, OURS, PRODUCT
from anyflash.bench.tables import ratio

WAYS = (BURST, SUSTAINED)
MEAN_BAR = 1.03  # geometric mean of ours over the best
BEST_GOAL = 1.05  # ours over the best, on every row
CEILING_GOAL = 0.85  # of the matrix product's rate: causal, S=16384, D=128 and 256
HOST_GOAL = 1.6  # of FA2's cost
CACHED_BAR = 0.5  # seconds of a first call from the disk cache
ENERGY_FROM = 4096  # the length from which on ours should need less energy than cuDNN


@dataclass(frozen=True)
class Line:
    """One demand on the run. `met` is None where it could not be measured; a goal that is missed
    is told, a bar that is missed fails the run under --check."""

    what: str
    figure: str
    demand: str
    is_bar: bool
    met: bool | None


def table(results: Sequence[RowResult]) -> list[RowResult]:
    """The rows with a known best."""
    return [r for r in results if r.row.best is not None]


def geometric_mean(results: Sequence[RowResult], way: str) -> float | None:
    """Of ours over the best, over the whole table; None if a row of it is missing."""
    return mean([r.over_best(way) for r in table(results)], len(BEST))


def mean(figures: Sequence[float | None], count: int) -> float | None:
    """The geometric mean of `count` figures; None if one of them is missing."""
    known = [x for x in figures if x is not None]
    return statistics.geometric_mean(known) if len(known) == len(figures) == count else None


def lines(results: Sequence[RowResult]) -> list[Line]:
    """The demands on a run, bars first."""
    found = []
    for way in WAYS:
        what = f"geometric mean of ours over the best, {way}"
        found.append(least(what, geometric_mean(results, way), MEAN_BAR))
    for result in results:
        if result.first:
            seconds = result.first[CACHED].total
            what = f"{result.row.name}, {CACHED}"
            met = seconds <= CACHED_BAR
            found.append(Line(what, f"{seconds:.2f} s", f"≤ {CACHED_BAR} s", True, met))
    for way in WAYS:
        what = f"ours over the best on every row, {way}"
        figures = [r.over_best(way) for r in table(results)]
        found.append(each_least(what, figures, BEST_GOAL, is_bar=False))
    found += [line for way in WAYS for line in _ceilings(results, way)]
    what = f"energy over cuDNN's on every row from S={ENERGY_FROM} on"
    figures = [energy_ratio(r) for r in table(results) if r.row.queries >= ENERGY_FROM]
    found.append(_each(what, "< 1", figures, lambda x: x < 1, max))
    for result in results:
        if result.row.measure == HOST:
            x = result.host_ratio
            met = None if x is None else x <= HOST_GOAL
            found.append(
                Line(f"{result.row.name}, over FA2's", ratio(x), f"≤ {HOST_GOAL}", False, met)
            )
    return found


def energy_ratio(result: RowResult, other: str = CUDNN) -> float | None:
    """Our joules for the same work over another side's."""
    ours, peer = (result.joules_per_tflop(side) for side in (OURS, other))
    return None if ours is None or peer is None else ours / peer


def derived(results: Sequence[RowResult]) -> dict[str, Any]:
    """What follows from all rows together, for human readers of a result file."""
    means = {way: geometric_mean(results, way) for way in WAYS}
    return {"geometric_mean_over_best": means, "demands": told(lines(results))}


def told(demands: Sequence[Line]) -> list[dict[str, Any]]:
    """Demands in a result file."""
    return [
        {"what": x.what, "figure": x.figure, "demand": x.demand, "bar": x.is_bar, "met": x.met}
        for x in demands
    ]


def failures(results: Sequence[RowResult], whole: bool) -> dict[str, list[str]]:
    """What besides wrong results fails a run under --check, by how. Demands on all rows together
    count in a `whole` run."""
    return failed(results, results, lines(results) if whole else ())


def failed(
    results: Sequence[RowResult], held: Sequence[RowResult], demands: Sequence[Line]
) -> dict[str, list[str]]:
    """What fails a run, by how: rows that we refuse, those of the `held` that miss the bar they
    may have, and bars among the demands."""
    bars = [line for line in demands if line.is_bar]
    barred = [r for r in held if r.row.bar is not None and r.passed]
    return {
        "refused": [r.row.name for r in results if r.refused],
        "bar missed": [r.row.name for r in barred if r.met is False]
        + [line.what for line in bars if line.met is False],
        "bar not measured": [r.row.name for r in barred if r.met is None]
        + [line.what for line in bars if line.met is None],
    }


def _ceilings(results: Sequence[RowResult], way: str) -> list[Line]:
    product = next((r for r in results if r.row.measure == PRODUCT), None)
    most = None if product is None else product.tflops(LIBRARY, way)
    found = []
    for result in table(results):
        row = result.row
        if row.causal and row.queries == 16384 and row.head_dim in (128, 256):
            ours = result.tflops(OURS, way)
            share = None if ours is None or most is None else ours / most
            met = None if share is None else share >= CEILING_GOAL
            what = f"{row.name}, of the product's rate, {way}"
            found.append(Line(what, ratio(share), f"≥ {CEILING_GOAL}", False, met))
    return found


def least(what: str, figure: float | None, bar: float) -> Line:
    """A bar for one figure of the whole run."""
    return Line(what, ratio(figure), f"≥ {bar}", True, None if figure is None else figure >= bar)


def each_least(what: str, figures: Sequence[float | None], bar: float, is_bar: bool) -> Line:
    """A figure that each of some rows has to reach."""
    return _each(what, f"≥ {bar}", figures, lambda x: x >= bar, min, is_bar)


def _each(
    what: str,
    demand: str,
    figures: Sequence[float | None],
    good: Callable[[float], bool],
    worst: Callable[[Sequence[float]], float],
    is_bar: bool = False,
) -> Line:
    """A demand on each of some rows: how many meet it, and the worst of them."""
    known = [x for x in figures if x is not None]
    if not known or len(known) < len(figures):
        return Line(what, ratio(None), demand, is_bar, None)
    count = sum(map(good, known))
    text = f"{count} of {len(known)} rows, worst {ratio(worst(known))}"
    return Line(what, text, demand, is_bar, count == len(known))
