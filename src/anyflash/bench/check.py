"""Whether a case is computed rightly: without this no number.

Every element of out, and of dq, dk, dv where the case has a backward pass, is compared with plain
PyTorch in float64. The tolerance is the rule in `numerics`: twice the error of plain PyTorch in the
case's own dtype, and 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anyflash.bench.cases import BOTH, Workload
from anyflash.errors import AttentionError
from anyflash.numerics import default_scale, max_error, tolerance

ROWS = 256  # query rows of plain PyTorch at a time: with 8192 keys and 8 heads 130 MB in float64


class CheckFailed(AttentionError):
    """A timer was asked to run a case whose check did not pass."""


@dataclass(frozen=True)
class Error:
    """Largest absolute errors against float64 of one tensor ("out", "dq", "dk" or "dv").

    `ours` of anyflash, `peer` of SDPA (None where it was not called), `plain` of plain PyTorch in
    the case's dtype, and the `tolerance` that follows from it.
    """

    tensor: str
    ours: float
    peer: float | None
    plain: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.ours <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Check:
    """The errors of all tensors of a case."""

    name: str
    errors: tuple[Error, ...]

    @property
    def passed(self) -> bool:
        return bool(self.errors) and all(error.passed for error in self.errors)

    def require(self) -> None:
        """Raise CheckFailed unless all errors are within their tolerance."""
        if self.passed:
            return
        wrong = [e for e in self.errors if not e.passed]
        parts = [f"{e.tensor} is off by {e.ours:.3g}, allowed are {e.tolerance:.3g}" for e in wrong]
        what = "; ".join(parts) or "nothing was compared"
        raise CheckFailed(f"case {self.name!r} is not timed, because its check failed: {what}")


def check(
    work: Workload, ours: tuple[Tensor, ...], peer: tuple[Tensor, ...] | None = None
) -> Check:
    """Compare results (out, and then dq, dk, dv if the case has them) with float64."""
    exact = plain(work, torch.float64)
    same = plain(work, work.q.dtype)
    names = ("out", "dq", "dk", "dv")[: len(exact)]
    peers = [None] * len(exact) if peer is None else peer
    if not len(ours) == len(peers) == len(exact):
        got = f"got {len(ours)} results, expected {', '.join(names)}"
        raise CheckFailed(f"case {work.case.name!r} is not timed: {got}")
    errors = []
    for name, a, b, c, d in zip(names, ours, peers, same, exact, strict=True):
        other = None if b is None else max_error(b, d)
        errors.append(Error(name, max_error(a, d), other, max_error(c, d), tolerance(c, d)))
    return Check(work.case.name, tuple(errors))


def plain(work: Workload, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """softmax(q·kᵀ·scale + mask)·v and its gradients by autograd, in `dtype`, a few rows at a time.

    Keys that none of these rows sees are left out: they add exact zeros. Nothing here is
    anyflash's own code.
    """
    q, k, v, dout = (x.to(dtype) for x in (work.q, work.k, work.v, work.dout))
    results = [torch.zeros_like(x) for x in (q, q, k, v)]
    out, dq, dk, dv = results
    both = work.case.direction == BOTH
    for start in range(0, work.case.length, ROWS):
        rows = slice(start, min(start + ROWS, work.case.length))
        seen = work.allowed(rows)
        keys = slice(0, work.case.length)
        if seen is not None:
            used = seen.flatten(0, 1).any(0).nonzero().flatten()
            keys = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
        part = [
            x.detach().requires_grad_(both) for x in (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        ]
        result = attend(*part, None if seen is None else seen[..., keys])
        out[:, :, rows] = result.detach()
        if both:
            gradients = torch.autograd.grad(result, part, dout[:, :, rows])
            dq[:, :, rows] = gradients[0]
            dk[:, :, keys] += gradients[1]
            dv[:, :, keys] += gradients[2]
    return tuple(results) if both else (out,)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """The textbook's attention (…, rows, Dv) of q (…, rows, D) to k and v (…, keys, ·), where a row
    sees a key if `seen` (…, rows, keys) is true or None, in their dtype throughout."""
    scores = q @ k.mT * default_scale(q.shape[-1])
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v
