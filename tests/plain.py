"""Attention written a second time, for tests: einsum, a boolean mask and a softmax by hand.

Nothing here comes from the library except the dropout bits, whose generator has tests of its own.
In float64 it is the reference, in the dtype under test it is the "plain PyTorch" of the tolerance
rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.numerics import max_error, tolerance
from anyflash.rng import keep_elements

# seen(b, h, i, j, offset): which scores exist, on index tensors; offset = Sk − Sq.
Seen = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class Terms(NamedTuple):
    """All that turns q·k into weights."""

    scale: float | None = None
    softcap: float | None = None
    seen: Seen | None = None
    bias: Tensor | None = None  # broadcastable to (B, Hq, Sq, Sk)
    slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    sink: Tensor | None = None  # (Hq,)
    dropout: float = 0.0
    seed: Tensor | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, t: Terms, number: int = 0) -> tuple[Tensor, Tensor]:
    """out and lse in q's dtype. `number` is the index of the first batch element."""
    batch, heads, queries, dim = q.shape
    keys, offset = k.shape[2], k.shape[2] - queries
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) if heads else x for x in (k, v))
    scale = (1 / math.sqrt(dim) if dim else 1.0) if t.scale is None else t.scale
    s = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if t.softcap:
        s = t.softcap * torch.tanh(s / t.softcap)
    b, h, i, j = indices(batch, heads, queries, keys, q.device)
    b = b + number
    if t.bias is not None:
        s = s + t.bias.to(s.dtype)
    if t.slopes is not None:
        s = s - t.slopes.to(s.dtype).view(-1, heads, 1, 1) * (i + offset - j).abs()
    if t.seen is not None:
        s = torch.where(t.seen(b, h, i, j, offset), s, -math.inf)
    logits = s
    if t.sink is not None:
        sink = t.sink.to(s.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        logits = torch.cat([s, sink], -1)
    top = s.new_full((batch, heads, queries, 1), -math.inf)
    if logits.shape[-1]:
        top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    p = torch.exp(s - top) / total
    lse = torch.where(empty, -math.inf, top + total.log()).squeeze(-1)
    if t.dropout:
        kept = keep_elements(t.seed, b * heads + h, i, j, t.dropout)
        p = p * kept / (1 - t.dropout) if t.dropout < 1 else p * 0
    return torch.einsum("bhij,bhjd->bhid", p, v), lse


class Packing(NamedTuple):
    """Where the sequences of a packed batch stand."""

    starts_q: list[int]
    starts_k: list[int]
    used_k: list[int] | None = None


def packed(q: Tensor, k: Tensor, v: Tensor, t: Terms, at: Packing) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence alone: out (total_q, Hq, Dv), lse (Hq, total_q)."""
    outs, lses = [], []
    for n in range(len(at.starts_q) - 1):
        rows = slice(at.starts_q[n], at.starts_q[n + 1])
        first, last = at.starts_k[n], at.starts_k[n + 1]
        keys = slice(first, last if at.used_k is None else first + at.used_k[n])
        one = [x[s].transpose(0, 1)[None] for x, s in ((q, rows), (k, keys), (v, keys))]
        bias, slopes = t.bias, t.slopes
        if bias is not None:
            bias = bias[(None,) * (4 - bias.ndim)]
            bias = bias[min(n, bias.shape[0] - 1)][None, :, : one[0].shape[2], : one[1].shape[2]]
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[n : n + 1]
        out, lse = attention(*one, t._replace(bias=bias, slopes=slopes), number=n)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    if not outs:
        return q.new_zeros(0, q.shape[1], v.shape[2]), q.new_zeros(q.shape[1], 0)
    return torch.cat(outs), torch.cat(lses, -1)


def indices(batch: int, heads: int, queries: int, keys: int, device: object) -> list[Tensor]:
    """b, h, i, j, broadcastable to (batch, heads, queries, keys)."""
    sides = enumerate((batch, heads, queries, keys))
    return [
        torch.arange(n, device=device).view([-1 if d == side else 1 for d in range(4)])
        for side, n in sides
    ]


def scores(seen: Seen, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """The boolean mask of a formula, in full."""
    index = indices(batch, heads, queries, keys, "cpu")
    return seen(*index, keys - queries).expand(batch, heads, queries, keys)


FLOOR = 1e-5  # of `tolerance`


def assert_close(
    what: str,
    actual: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    softcap: bool = False,
    others: Iterable[tuple[Tensor, Tensor]] = (),
    terms: int = 1,
) -> None:
    """The tolerance rule: an error at most twice that of plain PyTorch in the same dtype.

    `others` are further pairs of plain and exact, of other random numbers: the largest error of
    plain PyTorch counts. Where all of it is exactly 0, and 0 in plain PyTorch, since rows see one
    key and its softmax cancels to the bit, there is no such error: dP − delta is what two float32
    sums of the same products differ by, and of `terms` rows these add up.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}")
    actual, exact = actual.detach().cpu(), exact.detach().cpu()
    error, limit = max_error(actual, exact), 0.0
    if not exact.any() and not plain.any():
        limit = FLOOR * math.sqrt(terms)
    for draw_plain, draw_exact in chain([(plain, exact)], others):
        one = tolerance(draw_plain.detach().cpu(), draw_exact.detach().cpu(), softcap=softcap)
        limit = max(limit, one)
        if error <= limit:
            return
    where = max_error_at(actual, exact)
    raise AssertionError(f"{what}: error {error:.3g} at {where}, allowed {limit:.3g}")


def max_error_at(actual: Tensor, exact: Tensor) -> tuple[int, ...]:
    difference = (actual.double() - exact.double()).abs()
    difference = torch.where(actual.double() == exact.double(), 0.0, difference)
    flat = int(difference.nan_to_num(math.inf).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), exact.shape))


def assert_same(what: str, actual: Tensor, expected: Tensor) -> None:
    """Bitwise, but for the sign of zero and the payload of NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {tuple(actual.shape)}, "
            f"not {expected.dtype} {tuple(expected.shape)}"
        )
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not bool(same.all()):
        where = tuple((~same).nonzero()[0].tolist())
        count = int((~same).sum())
        raise AssertionError(
            f"{what}: {count} of {same.numel()} differ, first at {where}: "
            f"{actual[where].item()!r} instead of {expected[where].item()!r}"
        )


def assert_rounded(what: str, actual: Tensor, expected: Tensor) -> None:
    """The same numbers, each sum perhaps in another order.

    A matrix product picks its code by the strides and the alignment of its operands, and on some
    processors (an AMD EPYC, in float64) that moves the last bit. A wrong element would be off by
    far more than the 16 units in the last place of the largest value that are allowed here.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        assert_same(what, actual, expected)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    largest = expected.abs().max().item()
    error = (actual - expected).abs().max().item()
    if not error <= 16 * torch.finfo(expected.dtype).eps * largest:
        raise AssertionError(f"{what}: differs by {error}, the largest value being {largest}")
