"""Whether a row is computed rightly: without this no number.

A sample of the output is compared with plain PyTorch in float64 on the same device: all rows of a
few (sequence, head) pairs, or a random part of them where sequences are long, and some rows of
every other pair. The tolerance is the rule in `numerics`. No element anywhere may be NaN or
infinite, and memory is full of NaN when the call begins, so that all of it must have been written.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from anyflash.bench.check import Error, attend
from anyflash.bench.hopper.rows import Inputs
from anyflash.numerics import max_error, tolerance

WHOLE = 4  # pairs that are compared as a whole, the first and the last among them
ALL_ROWS = 4096  # of a sequence of at most so many queries
MANY, FEW = 2048, 32  # rows of longer ones, and of the other pairs
CHUNK = 512  # rows at a time: on 16384 keys 67 MB in float64


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # then `torch.empty` fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def sample(inputs: Inputs, seed: int = 0) -> list[tuple[int, int, list[int]]]:
    """(sequence, head, rows): what is compared, the first and the last row of each pair with it."""
    draw, pairs = random.Random(seed), list(inputs.pairs())
    whole = {pairs[0], pairs[-1], *draw.sample(pairs, min(WHOLE - 2, len(pairs)))}
    found = []
    for b, h in pairs:
        length = inputs.row.sequences[b][0]
        most = FEW if (b, h) not in whole else length if length <= ALL_ROWS else MANY
        rows = draw.sample(range(length), min(most, length))
        found.append((b, h, sorted({0, length - 1, *rows})))
    return found


def references(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Plain PyTorch in `dtype` on the sample, (rows of all pairs, Dv)."""
    parts = []
    for b, h, rows in sample(inputs):
        q, k, v = (inputs.head(x, b, h).to(dtype) for x in (inputs.q, inputs.k, inputs.v))
        chunks = torch.tensor(rows, device=q.device).split(CHUNK)
        parts += [attend(q[chunk], k, v, inputs.seen(chunk)) for chunk in chunks]
    return torch.cat(parts)


def taken(inputs: Inputs, out: Tensor) -> Tensor:
    """The sample of an output, as `references` has it."""
    parts = [
        inputs.head(out, b, h)[torch.tensor(rows, device=out.device)]
        for b, h, rows in sample(inputs)
    ]
    return torch.cat(parts)


class Reference:
    """The sample of a row in float64 and in bfloat16, for any number of outputs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.exact = references(inputs, torch.float64)
        self.plain = references(inputs, inputs.q.dtype)

    def error(self, out: Tensor, peer: Tensor | None = None, name: str = "out") -> Error:
        """The largest error of an output and, where there is one, of a peer's."""
        ours = self._largest(out)
        other = None if peer is None else self._largest(peer)
        plain = max_error(self.plain, self.exact)
        return Error(name, ours, other, plain, tolerance(self.plain, self.exact))

    def _largest(self, out: Tensor) -> float:
        row, q = self.inputs.row, self.inputs.q
        expected = (*q.shape[:-1], row.head_dim_v)
        if out.shape != expected:
            raise ValueError(f"row {row.name!r}: out is {tuple(out.shape)}, expected {expected}")
        if not bool(out.isfinite().all()):
            return math.inf
        return max_error(taken(self.inputs, out), self.exact)
