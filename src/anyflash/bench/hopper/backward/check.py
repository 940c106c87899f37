"""Whether gradients are right: without this no number.

All of dq, dk and dv is compared with plain PyTorch's autograd in float64 on the same device: a row
of dk needs all queries of its heads, so that a sample would cost nearly as much. The tolerance is
the rule in `numerics`. Memory is full of NaN when the call begins, so that all of it must have been
written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.bench.check import Error, attend
from anyflash.bench.hopper.backward.peers import Gradients
from anyflash.bench.hopper.rows import Inputs
from anyflash.numerics import accumulation_dtype, max_error, tolerance

NAMES = ("dq", "dk", "dv")
# Scores at a time, of all heads of a sequence. In float64 1 GB, of which autograd has about ten.
SCORES = 2**27


def gradients(inputs: Inputs, dtype: torch.dtype) -> Gradients:
    """dq, dk, dv by plain PyTorch in `dtype`, shaped as q, k, v. What comes from different rows is
    added up as wide as a matrix product adds, and rounded once."""
    wide = accumulation_dtype(dtype)
    found = tuple(torch.zeros_like(x, dtype=wide) for x in (inputs.q, inputs.k, inputs.v))
    for sequence, (queries, keys) in enumerate(inputs.row.sequences):
        q, k, v, dout = (
            inputs.heads(x, sequence).to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        dq, dk, dv = (inputs.heads(x, sequence) for x in found)
        step = max(1, SCORES // (len(q) * keys))
        for rows in torch.arange(queries, device=q.device).split(step):
            part = _gradients(q[:, rows], k, v, dout[:, rows], inputs.seen(rows))
            dq[:, rows] = part[0].to(wide)
            dk += part[1]
            dv += part[2]
    return tuple(x.to(dtype) for x in found)


def _gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor | None) -> Gradients:
    """Of some rows of all heads of a sequence: q (Hq, rows, D), k and v (Hkv, Sk, ·)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    group = len(q) // len(k)
    with torch.enable_grad():
        keys, values = (x.repeat_interleave(group, 0) for x in leaves[1:])
        out = attend(leaves[0], keys, values, seen)
    return torch.autograd.grad(out, leaves, dout)


class Reference:
    """The gradients of a row in float64 and in bfloat16, for any number of sides."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.exact = gradients(inputs, torch.float64)
        plain = gradients(inputs, inputs.q.dtype)
        self.plain = [max_error(a, b) for a, b in zip(plain, self.exact, strict=True)]
        self.allowed = [tolerance(a, b) for a, b in zip(plain, self.exact, strict=True)]

    def errors(
        self, found: Gradients, peer: Gradients | None = None, of: str = ""
    ) -> tuple[Error, ...]:
        """The largest errors of dq, dk, dv and, where there are any, of a peer's. `of` tells which
        side's they are, if not ours on the row itself."""
        ours = self._largest(found)
        others = (None,) * len(NAMES) if peer is None else self._largest(peer)
        columns = zip(NAMES, ours, others, self.plain, self.allowed, strict=True)
        return tuple(Error(labelled(name, of), a, b, c, d) for name, a, b, c, d in columns)

    def _largest(self, found: Gradients) -> list[float]:
        expected = [tuple(x.shape) for x in self.exact]
        shapes = [tuple(x.shape) for x in found]
        if shapes != expected:
            name = self.inputs.row.name
            raise ValueError(f"row {name!r}: gradients are {shapes}, expected {expected}")
        return [max_error(x, exact) for x, exact in zip(found, self.exact, strict=True)]


def labelled(name: str, of: str) -> str:
    """A gradient's name in a list of errors."""
    return f"{name}, {of}" if of else name
