"""What is measured of the backward pass: rows of forward, with bars of their own."""

from __future__ import annotations

from dataclasses import replace

from anyflash.bench.hopper import rows as forward
from anyflash.bench.hopper.anchors import BARS_BACKWARD, BEST_BACKWARD
from anyflash.bench.hopper.rows import BACKWARD, STEP, Row, square

# The algorithms of the backward kernels, by the name that their launcher takes: each is a side of
# its own. Of these, DETERMINISTIC ones give the same bits in each run.
ALGORITHMS = ("fused", "split", "stored")
DETERMINISTIC = ("split", "stored")


def backward(row: Row, bar: float | None = None) -> Row:
    """The backward pass of a row of forward, and of its yardstick."""
    yardstick = None if row.yardstick is None else backward(row.yardstick)
    return replace(
        row, measure=BACKWARD, bar=bar, best=None, sustained=False, yardstick=yardstick
    )  # fmt: skip


def _anchor(key: tuple[int, int, bool]) -> Row:
    head_dim, length, _ = key
    row = backward(square(*key), bar=BARS_BACKWARD[head_dim, length])
    return replace(row, best=BEST_BACKWARD[key], sustained=True)


LONG = square(128, 16384, True)
ROWS = (
    *(_anchor(key) for key in BEST_BACKWARD),
    *(backward(row, bar=1.0) for row in (*forward.ODD, forward.GROUPED)),
    backward(forward.WINDOW, bar=0.8),
    backward(forward.PACKED),
    replace(LONG, name=f"forward and backward, {LONG.name}", measure=STEP, bar=2.0),
)
