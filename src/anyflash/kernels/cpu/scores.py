"""From q·k to masked scores, for one batch of pieces: what forward and backward share.

Shapes: N pieces, B batch elements, H heads, R rows, C keys; scores (N, B, H, R, C). Scores are kept
in units of the exponential that is fast, see `Unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.kernels.cpu.masking import hidden
from anyflash.kernels.cpu.pieces import Batch
from anyflash.masks.compiled import Form
from anyflash.masks.index import Coordinates, Extent
from anyflash.masks.places import Packed
from anyflash.numerics import LOG2E, accumulation_dtype, visible_product
from anyflash.rng import keep_elements, keep_mask


class Unit(NamedTuple):
    """Base 2 in float32: on a CPU exp2 is ten times as fast as exp (5.8 against 0.5 billion values
    a second on two AVX-512 cores, torch 2.13). In float64 base e, for accuracy."""

    per_nat: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Unit:
        return cls(1.0 if dtype == torch.float64 else LOG2E)

    def power_(self, x: Tensor) -> Tensor:
        """base^x in place."""
        return x.exp_() if self.per_nat == 1.0 else x.exp2_()

    def of_bias(self, bias: Tensor) -> Tensor:
        """A bias in units. The change of base must not turn finfo.min, which masks weigh nothing
        with, into −inf, which takes part in nothing: a row of it is the mean of V."""
        if self.per_nat == 1.0:
            return bias
        scaled = (bias * self.per_nat).clamp_(min=torch.finfo(bias.dtype).min)
        return scaled.masked_fill_(bias == -torch.inf, -torch.inf)

    def log(self, x: Tensor) -> Tensor:
        return x.log() if self.per_nat == 1.0 else x.log2()


@dataclass(frozen=True)
class Rules:
    """How scores become weights, for query heads that each have their own key head.

    `heads` are the indices (H,) of these query heads among all `heads_total`; bias, alibi and sink
    are cut to them. `packed` translates packed rows and keys into their sequences' own.
    """

    scale: float  # ≥ 0
    softcap: float
    dropout: float
    seed: Tensor | None
    bias: Tensor | None  # (1|B, 1|H, 1|Sq, 1|Sk)
    alibi: Tensor | None  # (1|B, H)
    sink: Tensor | None  # (H,)
    extent: Extent
    form_of: Callable[[], Form]
    full: bool  # the mask masks nothing
    causal: bool  # it is exactly causal, with as many queries as keys
    heads: range
    heads_total: int
    packed: Packed | None
    strict: bool  # inputs are not finite: keep masked slots out of products, see isolation.py

    @property
    def form(self) -> Form:
        """What kernels read of the mask; where one call of the fused kernel serves, nobody asks."""
        return self.form_of()

    def of_heads(self, heads: slice) -> Rules:
        """The same for some of the heads."""
        if self.heads[heads] == self.heads:
            return self
        bias, alibi, sink = self.bias, self.alibi, self.sink
        return replace(
            self,
            bias=bias if bias is None or bias.shape[1] == 1 else bias[:, heads],
            alibi=None if alibi is None else alibi[:, heads],
            sink=None if sink is None else sink[heads],
            heads=self.heads[heads],
        )


class Places:
    """Where the scores of a batch of pieces are; computed only if something asks."""

    def __init__(self, rules: Rules, batch: Batch) -> None:
        self.rules, self.batch = rules, batch

    @cached_property
    def at(self) -> Coordinates:
        extent, packed = self.rules.extent, self.rules.packed
        at = self.batch.coordinates(torch.device("cpu"), extent.keys - extent.queries)
        if packed is None:
            return at
        # The sequence's number, its own row and key, and its offset.
        local, (_, key) = packed.rows(at.row), packed.keys(at.key)
        # Keys of another sequence are masked: any index inside will do.
        inside = key.minimum((local.length - 1).clamp(min=0))
        return Coordinates(local.sequence, at.head, local.row, inside, local.offset)

    def columns(self, start: int, stop: int) -> Coordinates:
        """For keys start:stop of each piece."""
        return self.at._replace(key=self.at.key[..., start:stop])

    def kept(self, seed: Tensor, start: int, stop: int) -> Tensor:
        """Which scores of keys start:stop dropout keeps, (N, B, H, R, C)."""
        at, rules = self.columns(start, stop), self.rules
        heads = torch.tensor(rules.heads, device=at.head.device)
        head = at.batch * rules.heads_total + heads[at.head]
        if rules.packed is not None:
            return keep_elements(seed, head, at.row, at.key, rules.dropout)
        # One draw for four scores, where rows and keys are the same for all heads of a piece.
        return torch.stack(
            [
                keep_mask(seed, h[..., 0, 0], r.flatten(), k.flatten(), rules.dropout)
                for h, r, k in zip(head, at.row, at.key, strict=True)
            ]
        )

    def bias(self, start: int, stop: int, dtype: torch.dtype) -> Tensor | None:
        """Bias and ALiBi of keys start:stop, broadcastable to (N, B, H, R, C)."""
        rules, bias = self.rules, None
        if rules.bias is not None and rules.packed is None:
            bias = self.batch.scores(rules.bias, start, stop).to(dtype)
        elif rules.bias is not None:
            bias = rules.bias[bias_index(rules.bias, self.columns(start, stop))].to(dtype)
        if rules.alibi is not None:
            at, slopes = self.columns(start, stop), rules.alibi.to(dtype)
            distance = (at.key - (at.row + at.offset)).abs().to(dtype)
            element = at.batch if slopes.shape[0] > 1 else torch.zeros_like(at.batch[:1])
            linear = slopes[element, at.head] * -distance
            bias = linear if bias is None else bias + linear
        return bias


@dataclass(frozen=True)
class Tile:
    """The scores of one batch of pieces and a range of their keys."""

    rules: Rules
    places: Places
    unit: Unit
    hidden: Tensor | None  # (N|1, 1, 1, R, C): scores that are not attended
    start: int
    stop: int

    @classmethod
    def of(cls, rules: Rules, batch: Batch, dtype: torch.dtype) -> Tile:
        masked = hidden(rules.form, batch)[:, None, None] if batch.masked else None
        width = batch.pieces[0].width
        return cls(rules, Places(rules, batch), Unit.of(dtype), masked, 0, width)

    def columns(self, keys: slice) -> Tile:
        """The part of a whole tile with some keys of each piece, by number."""
        masked = None if self.hidden is None else self.hidden[..., keys]
        return replace(self, hidden=masked, start=keys.start, stop=keys.stop)

    def queries(self, q: Tensor) -> Tensor:
        """q with the factors of the scores in it, once per batch instead of once per score."""
        softcap = self.rules.softcap
        return q * (self.rules.scale / softcap if softcap else self.rules.scale * self.unit.per_nat)

    def sink(self, q: Tensor) -> Tensor | None:
        """The sinks of the rows of q, in units: (N, B, H, R, 1)."""
        sink = self.rules.sink
        if sink is None:
            return None
        logits = self.places.batch.heads(sink).to(accumulation_dtype(q.dtype)).unsqueeze(-1)
        return (logits * self.unit.per_nat).expand(*q.shape[:-1], 1)

    def scores(self, queries: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Masked scores in units, and tanh of the softcap if there is one.

        queries (N, B, H, R, D) from `queries`, k (N, B, H, C, D), in the accumulation dtype.
        """
        s = torch.matmul(queries, k.mT)
        bent = None
        if self.rules.softcap:
            bent = s.tanh_()
            s = bent * (self.rules.softcap * self.unit.per_nat)
        bias = self.places.bias(self.start, self.stop, s.dtype)
        if bias is not None:
            s.add_(self.unit.of_bias(bias))
        if self.hidden is not None:
            s.masked_fill_(self.hidden, -torch.inf)
        return s, bent

    def keep(self, dtype: torch.dtype) -> Tensor | None:
        """0 where dropout drops, 1/(1 − dropout) where it keeps."""
        rules = self.rules
        if not rules.dropout or rules.seed is None:
            return None
        kept = self.places.kept(rules.seed, self.start, self.stop).to(dtype)
        return kept / (1 - rules.dropout) if rules.dropout < 1 else kept

    def product(self, weights: Tensor, values: Tensor, *, transposed: bool = False) -> Tensor:
        """weights @ values (or weightsᵀ @ values) in which masked slots add nothing."""
        seen = ~self.hidden if self.rules.strict and self.hidden is not None else None
        if transposed:
            return visible_product(weights.mT, values, None if seen is None else seen.mT)
        return visible_product(weights, values, seen)

    def add_bias_gradient(self, dbias: Tensor, ds: Tensor) -> None:
        """Add ds (N, B, H, R, C) onto dbias (1|B, 1|H, 1|Sq, 1|Sk)."""
        if self.rules.packed is None:
            self.places.batch.add_scores(dbias, ds, self.start)
            return
        index = bias_index(dbias, self.places.columns(self.start, self.stop))
        shape = torch.broadcast_shapes(*(i.shape for i in index))
        # In one dimension index_add_ goes in order; index_put_ may not, and sequences share biases.
        sums = torch.zeros(dbias.shape, dtype=dbias.dtype, device=dbias.device)
        place = sum(i * step for i, step in zip(index, sums.stride(), strict=True))
        sums.view(-1).index_add_(
            0, torch.as_tensor(place).flatten(), ds.sum_to_size(shape).flatten()
        )
        dbias.add_(sums)


def bias_index(bias: Tensor, at: Coordinates) -> tuple[Tensor, ...]:
    """Where each score of packed rows finds its bias; broadcast dimensions always at 0."""
    zero = torch.zeros((1, 1, 1, 1, 1), dtype=torch.int64, device=bias.device)
    index = (at.batch, at.head, at.row, at.key)
    return tuple(i if size > 1 else zero for i, size in zip(index, bias.shape, strict=True))
