"""A whole run against its bars and goals: what no single row tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anyflash.bench.hopper import goals
from anyflash.bench.hopper.anchors import BEST_BACKWARD
from anyflash.bench.hopper.backward.rows import DETERMINISTIC
from anyflash.bench.hopper.goals import WAYS, Line, each_least, least, table
from anyflash.bench.hopper.results import RowResult
from anyflash.bench.hopper.rows import CUDNN, FA2, TOO_WIDE, Row

MEAN_BAR = 1.15  # geometric mean of ours over cuDNN, where it serves
DETERMINISTIC_BARS = {128: 0.98, 64: 0.95}  # of cuDNN, by D: the faster of the deterministic ones
DETERMINISTIC_FROM = 4096  # the length from which on that is demanded
BEST_GOAL = 1.0  # ours over the best, on every row
WIDE_GOAL = 1.9  # ours over FA2, on every row of D=256
SERVED = sum(head_dim < TOO_WIDE for head_dim, _, _ in BEST_BACKWARD)  # rows, by cuDNN


def geometric_mean(results: Sequence[RowResult], way: str) -> float | None:
    """Of ours over cuDNN, over the rows of the table that it serves; None if one is missing."""
    served = [r for r in table(results) if r.row.against == CUDNN]
    return goals.mean([r.ratio(CUDNN, way) for r in served], SERVED)


def deterministic_bar(row: Row) -> float | None:
    """The least speed of the faster deterministic algorithm over cuDNN, if any is demanded."""
    demanded = row.best is not None and row.queries >= DETERMINISTIC_FROM
    return DETERMINISTIC_BARS.get(row.head_dim) if demanded else None


def deterministic_ratio(result: RowResult, way: str) -> float | None:
    """The speed of the faster deterministic algorithm over cuDNN."""
    found = [result.ratio(CUDNN, way, side) for side in DETERMINISTIC]
    return max((x for x in found if x is not None), default=None)


def lines(results: Sequence[RowResult]) -> list[Line]:
    """The demands on a run, bars first."""
    means = [
        least(f"geometric mean of ours over cuDNN, {way}", geometric_mean(results, way), MEAN_BAR)
        for way in WAYS
    ]
    return [*means, *_deterministic(results), *_goals(results)]


def derived(results: Sequence[RowResult]) -> dict[str, Any]:
    """What follows from all rows together, for human readers of a result file."""
    means = {way: geometric_mean(results, way) for way in WAYS}
    return {"geometric_mean_over_cudnn": means, "demands": goals.told(lines(results))}


def failures(results: Sequence[RowResult], whole: bool) -> dict[str, list[str]]:
    """What besides wrong results fails a run under --check, by how. Demands on all rows together
    count in a `whole` run. Beyond the table, where cuDNN refuses a row there is nothing to reach.
    """
    held = [r for r in results if r.row.best is not None or r.row.against not in r.refusals]
    return goals.failed(results, held, lines(results) if whole else ())


def _deterministic(results: Sequence[RowResult]) -> Iterator[Line]:
    for head_dim, bar in DETERMINISTIC_BARS.items():
        demanded = [
            r
            for r in table(results)
            if r.row.head_dim == head_dim and deterministic_bar(r.row) is not None
        ]
        for way in WAYS:
            what = (
                f"the fastest deterministic algorithm over cuDNN, D={head_dim} from "
                f"S={DETERMINISTIC_FROM} on, {way}"
            )
            figures = [deterministic_ratio(r, way) for r in demanded]
            yield each_least(what, figures, bar, is_bar=True)


def _goals(results: Sequence[RowResult]) -> Iterator[Line]:
    for way in WAYS:
        figures = [r.over_best(way) for r in table(results)]
        what = f"ours over the best on every row, {way}"
        yield each_least(what, figures, BEST_GOAL, is_bar=False)
    for way in WAYS:
        figures = [r.ratio(FA2, way) for r in table(results) if r.row.head_dim == TOO_WIDE]
        what = f"ours over FA2 on every row of D={TOO_WIDE}, {way}"
        yield each_least(what, figures, WIDE_GOAL, is_bar=False)
