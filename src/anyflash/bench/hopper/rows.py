"""What is measured: rows as data, and the tensors of a row.

A mask is written twice: as the user gives it to anyflash (`peers.ours`) and in plain PyTorch
(`Inputs.seen`), so that the check of a row does not rest on the code that it checks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from anyflash.bench.hopper import anchors
from anyflash.errors import InvalidInput

# What a row measures: a call of attention, its backward pass, a training step (forward and
# backward), a matrix product, what a call costs the host, the first call of a process, or variants
# of the kernel side by side.
ATTENTION, BACKWARD, STEP = "attention", "backward", "step"
PRODUCT, HOST, FIRST, VARIANTS = "product", "host", "first call", "variants"
CALLS = (ATTENTION, BACKWARD, STEP)  # those of which all sides are timed on the card
# Operations over those of forward, which has two products where backward has five.
WORK = {BACKWARD: 2.5, STEP: 3.5}

OURS, CUDNN, FA2, LIBRARY = "anyflash", "cuDNN", "FA2", "matrix library"  # sides

QUERIES = 16384  # of a row of the table, in all
WIDTH = 2048  # heads times D
TOO_WIDE = 256  # columns of a head, which cuDNN's backward on Hopper does not take
DOUT_SEED = 1  # q is drawn from 0


@dataclass(frozen=True)
class Row:
    """One measurement, in bfloat16.

    `bar` is the least rate of ours over that of `against`: of cuDNN, of FA2 for a step and where
    cuDNN does not serve, or of ours on the `yardstick`; of a row that measures the host it is the
    most of our cost over FA2's, and of a first call the most seconds with nothing compiled. `best`
    is what the fastest of the others reaches of the speed of `against`. `window` is how many
    earlier keys a query sees besides its own. `lengths` are those of packed sequences; `queries`
    and `keys` are then their sum. A `product` is of queries × head_dim by head_dim × keys.
    `sustained` rows are held under load for seconds, too.
    """

    name: str
    queries: int
    keys: int
    head_dim: int
    head_dim_v: int
    heads: int
    heads_kv: int
    batch: int = 1
    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()
    measure: str = ATTENTION
    best: float | None = None
    bar: float | None = None
    yardstick: Row | None = None
    sustained: bool = False

    def __post_init__(self) -> None:
        kinds = (*CALLS, PRODUCT, HOST, FIRST, VARIANTS)
        if self.measure not in kinds:
            expected = f"one of {', '.join(map(repr, kinds))}"
            raise InvalidInput(f"Row(measure) of {self.name!r}", repr(self.measure), expected)
        if self.queries != self.keys and (self.causal or self.window is not None or self.lengths):
            got = f"{self.queries} queries and {self.keys} keys"
            expected = "as many keys as queries where there is a mask or a packing"
            raise InvalidInput(f"Row of {self.name!r}", got, expected)

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence."""
        if self.lengths:
            return tuple((n, n) for n in self.lengths)
        return ((self.queries, self.keys),) * self.batch

    @property
    def attended(self) -> float:
        """Pairs of a query and a key in one head, over all sequences. Half of all if causal, as
        is the custom; exactly those in a window."""
        if self.window is not None:
            n, seen = self.queries, min(self.window + 1, self.queries)
            return self.batch * (seen * n - seen * (seen - 1) / 2)
        return sum(q * k for q, k in self.sequences) * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        """Operations of a call: 2 for each product of two numbers."""
        if self.measure == PRODUCT:
            return 2.0 * self.queries * self.keys * self.head_dim
        forward = 2.0 * self.heads * self.attended * (self.head_dim + self.head_dim_v)
        return WORK.get(self.measure, 1.0) * forward

    @property
    def against(self) -> str:
        """The side that `bar` is relative to."""
        if self.yardstick is not None:
            return f"{OURS} on {self.yardstick.name}"
        refused = self.measure == BACKWARD and self.head_dim >= TOO_WIDE
        return FA2 if refused or self.measure in (HOST, STEP) else CUDNN

    @property
    def shape(self) -> str:
        """(B, H, S, D), with what is different on both sides as queries/keys or D/Dv."""
        if self.measure == PRODUCT:
            return f"{self.queries} × {self.head_dim} by {self.head_dim} × {self.keys}"
        pairs = (
            (self.heads, self.heads_kv),
            (self.queries, self.keys),
            (self.head_dim, self.head_dim_v),
        )
        parts = [str(a) if a == b else f"{a}/{b}" for a, b in pairs]
        batch = f"{len(self.lengths)} packed" if self.lengths else str(self.batch)
        return f"({', '.join([batch, *parts])})"

    @property
    def quick(self) -> Row:
        """The same row at a sixteenth of its length, with few heads: for tests of the benchmark,
        not for publication."""
        group = self.heads // self.heads_kv
        lengths = tuple(max(8, n // 16) for n in self.lengths)
        small = (sum(lengths),) * 2 if lengths else _small(self.queries, self.keys)
        return replace(
            self, queries=small[0], keys=small[1], lengths=lengths, batch=min(2, self.batch),
            heads=2 * group, heads_kv=2, window=None if self.window is None else self.window // 16,
            yardstick=None if self.yardstick is None else self.yardstick.quick,
        )  # fmt: skip


def _small(queries: int, keys: int) -> tuple[int, int]:
    return max(128, queries // 16), max(128, keys // 16)


def square(head_dim: int, length: int, causal: bool, head_dim_v: int | None = None) -> Row:
    """A row of as many queries and heads as the table's, without a bar."""
    heads, wide = WIDTH // head_dim, head_dim_v or head_dim
    dims = f"{head_dim}" if wide == head_dim else f"{head_dim}/{wide}"
    name = f"D={dims}, S={length}, {'causal' if causal else 'dense'}"
    batch = QUERIES // length
    return Row(name, length, length, head_dim, wide, heads, heads, batch, causal)


def log_uniform(total: int, least: int, most: int, seed: int) -> tuple[int, ...]:
    """Lengths whose logarithms are uniform, until their sum is `total`; the last is cut to it."""
    draw, lengths = random.Random(seed), []
    while (rest := total - sum(lengths)) > 0:
        lengths.append(min(rest, round(math.exp(draw.uniform(math.log(least), math.log(most))))))
    return tuple(lengths)


def _anchor(key: tuple[int, int, bool]) -> Row:
    best, bar = anchors.BEST[key], anchors.bar(key)
    return replace(square(*key), best=best, bar=bar, sustained=True)


def _packed() -> Row:
    # Of the first seeds the one with the longest sequence. Weighted by its queries, a sequence has
    # 4064 keys, so dense sequences of 4096 do the same work.
    lengths = log_uniform(32768, 128, 8192, seed=3)
    dense = Row("D=128, S=4096, dense, B=8", 4096, 4096, 128, 128, 16, 16, 8)
    name = f"{len(lengths)} packed sequences of 128…8192"
    total = sum(lengths)
    return Row(name, total, total, 128, 128, 16, 16, lengths=lengths, bar=0.9, yardstick=dense)


CEILING = Row(
    "8192³ product", 8192, 8192, 8192, 8192, 1, 1, measure=PRODUCT, sustained=True
)  # fmt: skip
ANCHORS = tuple(_anchor(key) for key in anchors.BEST)
ODD = tuple(
    square(d, 4096, causal, dv)
    for d, dv in ((96, 96), (192, 192), (192, 128))
    for causal in (False, True)
)
GROUPED = Row("GQA 32/8, S=8192, causal", 8192, 8192, 128, 128, 32, 8, causal=True)
WINDOW = Row(
    "window 1024 of 16384", 16384, 16384, 128, 128, 16, 16, window=1024, bar=0.85,
    yardstick=square(128, 16384, True),
)  # fmt: skip
PACKED = _packed()
ROWS = (
    CEILING,
    *ANCHORS,
    *ODD,
    GROUPED,
    WINDOW,
    PACKED,
    Row("128 queries on 16384 keys", 128, 16384, 128, 128, 16, 16),
    Row("host cost of a small call", 128, 128, 128, 128, 1, 1, measure=HOST, bar=2.0),
    *(Row(f"first call, D={d}", 1024, 1024, d, d, 1, 1, measure=FIRST, bar=4.0)
      for d in (64, 128, 256)),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a row, standard normal: q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and
    v (B, Hkv, Sk, Dv), or packed (total, H, ·) with int32 `offsets` (n + 1,)."""

    row: Row
    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor | None

    @classmethod
    def of(cls, row: Row, device: str, seed: int = 0) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, length: int, columns: int) -> Tensor:
            shape = (length, heads) if row.lengths else (row.batch, heads, length)
            x = torch.randn(*shape, columns, generator=generator, device=device)
            return x.to(torch.bfloat16)

        offsets = None
        if row.lengths:
            ends = torch.tensor((0, *row.lengths), device=device).cumsum(0)
            offsets = ends.to(torch.int32)
        q = normal(row.heads, row.queries, row.head_dim)
        k = normal(row.heads_kv, row.keys, row.head_dim)
        return cls(row, q, k, normal(row.heads_kv, row.keys, row.head_dim_v), offsets)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """All (sequence, query head)."""
        sequences = range(len(self.row.sequences))
        return ((b, h) for b in sequences for h in range(self.row.heads))

    @cached_property
    def dout(self) -> Tensor:
        """The gradient of the output, standard normal, shaped as it: (B, Hq, Sq, Dv) or packed."""
        generator = torch.Generator(self.q.device).manual_seed(DOUT_SEED)
        shape = (*self.q.shape[:-1], self.row.head_dim_v)
        x = torch.randn(*shape, generator=generator, device=self.q.device)
        return x.to(self.q.dtype)

    def heads(self, x: Tensor, sequence: int) -> Tensor:
        """What a tensor of queries or keys holds for a sequence, (H, S, ·)."""
        if not self.row.lengths:
            return x[sequence]
        start = sum(self.row.lengths[:sequence])
        return x[start : start + self.row.lengths[sequence]].transpose(0, 1)

    def head(self, x: Tensor, sequence: int, head: int) -> Tensor:
        """What it holds for a query head of a sequence, (S, ·)."""
        return self.heads(x, sequence)[head * x.shape[1] // self.row.heads]

    def seen(self, rows: Tensor) -> Tensor | None:
        """Which keys these query rows of any sequence see, (rows, Sk), in plain PyTorch; None is
        all."""
        if not self.row.causal and self.row.window is None:
            return None
        i, j = rows.unsqueeze(-1), torch.arange(self.row.keys, device=rows.device)
        seen = j <= i
        return seen if self.row.window is None else seen & (i - j <= self.row.window)
