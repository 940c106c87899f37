"""The package's backward kernels as subjects of planted faults: see gluon_mutants.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import plain
from anyflash.kernels.hopper.algorithms import ALL
from anyflash.kernels.hopper.tiles import Columns
from anyflash.kernels.hopper.tiles_backward import Split, Stored, Walk, split_of
from anyflash.problem import Gradients, Needs, Saved
from gluon_mutants import Result
from gluon_subjects import bounds_of, in_intervals, in_window, inputs, mapped, seed_of
from hopper_cases import how, query_tiles_of, seen_on
from plain import Seen, Terms

Attention = Callable[..., tuple[Tensor, Tensor]]


C64 = Columns(64)
SMALL = split_of(C64, C64)
APART = split_of(C64, C64, together=False, slots=3, slots_2=1)
RESULTS_APART = split_of(C64, C64, shared_out=False, early=True)
PANELS = split_of(Columns(32, 2), Columns(32, 2))
MORE_PANELS = split_of(Columns(32, 3), Columns(32, 2), together=False)
BY_ROLE = Walk(
    *(C64, C64), block=64, slots=2, slots_2=2, second=True, shared_out=False, ds="role",
    registers=(128, 208, 24, 72),
)  # fmt: skip
SHARED_ROLE = replace(BY_ROLE, shared_out=True, early=True, ds_slots=1, slots=3)
PANELS_ROLE = replace(BY_ROLE, qk=Columns(32, 2), shared_out=True)
BY_CONSUMERS = replace(
    BY_ROLE, qk=Columns(32, 2), ds="consumers", shared_out=True, ds_slots=1,
    registers=(168, 240, 24, 0),
)  # fmt: skip
CONSUMERS_APART = replace(BY_CONSUMERS, shared_out=False, ds_slots=2)
STORES = Stored(
    Walk(*(C64, C64), block=64, slots=2, slots_2=1, second=True, ds="stored"), None, slots=2
)
STORES_PANELS = Stored(
    Walk(
        *(Columns(32, 2), C64), block=64, slots=2, slots_2=2, shared_out=False, ds="stored",
        ds_slots=3,
    ),
    PANELS.value, slots=1, consumers=2, registers=(168, 240, 24),
)  # fmt: skip


def gradients(
    attention: Attention, leaves: list[Tensor], dout: Tensor, dlse: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in leaves]
    out, lse = attention(*leaves)
    given = dout.to(out.dtype), dlse.to(lse.dtype)
    return torch.autograd.grad((out, lse), leaves, given, materialize_grads=True)


def example(attention: Attention, leaves: list[Tensor]) -> tuple[Saved, tuple, tuple]:
    """What forward has saved, with gradients of it, and those of the inputs."""
    out, lse = attention(*(x.float() for x in leaves))
    dout = inputs(torch.float32, out.shape)[0].flip(0, -1).to(leaves[0].dtype)
    dlse = torch.where(lse == -math.inf, 0.0, inputs(torch.float32, lse.shape)[0])
    like = gradients(attention, leaves, dout, dlse)
    exact = gradients(attention, [x.double() for x in leaves], dout, dlse)
    dlse = torch.where(lse == -math.inf, lse, dlse)  # has no effect
    return Saved(out.to(dout.dtype), lse, dout, dlse), like, exact


def untouched(leaves: list[Tensor], saved: Saved) -> tuple[list[Tensor], Saved]:
    """Copies: a fault may write its results over its inputs, which serve for the next one too."""
    copies = [None if x is None else x.clone() for x in saved]
    return [x.clone() for x in leaves], Saved(*copies)


def compared(found: Gradients, like: tuple, exact: tuple) -> list[Result]:
    results = (found.q, found.k, found.v, found.sink)[: len(exact)]
    each = zip(("dq", "dk", "dv", "dsink"), results, like, exact, strict=False)
    return [Result(n, x, y, z) for n, x, y, z in each if x is not None]


@dataclass(frozen=True)
class Dense:
    shape: tuple[int, int, int, int, int]  # B, Hq, Hkv, Sq, Sk
    walks: Split | Walk | Stored = SMALL
    dims: tuple[int, int] = (64, 64)  # D, Dv
    programs: int = 2  # fewer than blocks: they are drawn from a counter
    section: int | None = None
    left: int | None = None
    right: int | None = None
    intervals: tuple[str, ...] = ()  # of all batch elements, or of each
    tile_map: str = ""
    scale: float = 0.125
    softcap: float = 0.0
    sink: tuple[float, ...] | None = None
    dropout: float = 0.0
    offset: float = 0.0  # of q; −offset of k: scores far below 0
    needs: Needs = ALL
    more: dict[str, Any] = field(default_factory=dict)

    def __call__(self, module: ModuleType) -> list[Result]:
        leaves, bounds, saved, like, exact = self.example
        leaves, saved = untouched(leaves, saved)
        tiles = None if bounds is None else query_tiles_of(bounds, self.shape[4])
        found = module.backward(
            *leaves[:3], saved, self.needs._replace(sink=self.sink is not None),
            scale=self.scale, left=self.left, right=self.right, softcap=self.softcap,
            bounds=bounds, query_tiles=tiles, tile_map=mapped(self.tile_map, self.shape),
            sink=leaves[3] if self.sink else None,
            dropout=self.dropout, seed=seed_of(self.dropout), section=self.section,
            programs=self.programs, **self.more, **how(self.walks),
        )  # fmt: skip
        return compared(found, like, exact)

    @cached_property
    def example(self) -> tuple[list[Tensor], Tensor | None, Saved, tuple, tuple]:
        (b, hq, hkv, sq, sk), (d, dv) = self.shape, self.dims
        leaves = inputs(torch.float16, (b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
        if self.offset:
            leaves[0], leaves[1] = leaves[0].abs() + self.offset, -leaves[1].abs() - self.offset
        if self.sink is not None:
            leaves.append(torch.tensor(self.sink))
        each = [bounds_of(name, sq, sk) for name in self.intervals]
        seen = in_intervals(each) if each else in_window(self.left, self.right)
        seen = seen_on(self.tile_map) if self.tile_map else seen

        def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
            terms = Terms(
                scale=self.scale, softcap=self.softcap, seen=seen,
                sink=x[3] if self.sink else None, dropout=self.dropout, seed=seed_of(self.dropout),
            )  # fmt: skip
            return plain.attention(*x[:3], terms)

        found = example(attention, leaves)
        bounds = torch.stack(each) if each else None
        if bounds is not None and bounds.shape[2]:  # what lies behind all intervals has no effect
            lo, hi = bounds.expand(b, -1, -1, -1).unbind(-1)
            for n, last in enumerate((hi * (lo < hi)).flatten(1).amax(1).tolist()):
                leaves[1][n, :, last:] = leaves[2][n, :, last:] = math.nan
        return leaves, bounds, *found


@dataclass(frozen=True)
class Packed:
    """Sequences one behind the other. Unused keys are NaN."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    used: tuple[int, ...]
    walks: Split | Walk | Stored = SMALL
    heads: tuple[int, int] = (2, 1)
    left: int | None = None
    right: int | None = None
    intervals: str | None = None  # of each sequence; they reach beyond its used keys
    dropout: float = 0.0

    def __call__(self, module: ModuleType) -> list[Result]:
        leaves, numbers, bounds, saved, like, exact = self.example
        leaves, saved = untouched(leaves, saved)
        found = module.backward_packed(
            *leaves, saved, *numbers, scale=0.125, left=self.left, right=self.right, bounds=bounds,
            query_tiles=None if bounds is None else query_tiles_of(bounds, sum(self.keys)),
            dropout=self.dropout, seed=seed_of(self.dropout), programs=2, **how(self.walks),
        )  # fmt: skip
        return compared(found, like, exact)

    @cached_property
    def example(self) -> tuple[list[Tensor], list[Tensor], Tensor | None, Saved, tuple, tuple]:
        hq, hkv = self.heads
        lengths = (self.queries, hq), (self.keys, hkv), (self.keys, hkv)
        leaves = inputs(torch.float16, *((sum(n), h, 64) for n, h in lengths))
        at_q, at_k = ([0, *accumulate(n)] for n in (self.queries, self.keys))
        seen: Seen = in_window(self.left, self.right)
        bounds, each = None, []
        if self.intervals:
            sizes = zip(self.queries, self.keys, strict=True)
            each = [bounds_of(self.intervals, *size) for size in sizes]
            seen = in_intervals(each)
            bounds = torch.cat([x + start for x, start in zip(each, at_k, strict=False)])[None]
        terms = Terms(scale=0.125, seen=seen, dropout=self.dropout, seed=seed_of(self.dropout))
        packing = plain.Packing(at_q, at_k, list(self.used))
        found = example(lambda *x: plain.packed(*x, terms, packing), leaves)
        for n, (start, end, used) in enumerate(zip(at_k, at_k[1:], self.used, strict=False)):
            if self.intervals:  # what lies behind all of them has no effect either
                lo, hi = each[n].unbind(-1)
                used = min(used, int((hi * (lo < hi)).max())) if each[n].numel() else 0
            leaves[1][start + used : end] = leaves[2][start + used : end] = math.nan
        numbers = [torch.tensor(x, dtype=torch.int32) for x in (at_q, at_k, self.used)]
        return leaves, numbers, bounds, *found


CHECKS = (
    Dense((1, 4, 2, 130, 200), programs=1, right=0),
    Dense((1, 2, 1, 130, 200), BY_ROLE, programs=1, right=0),
    Dense((1, 2, 1, 130, 200), BY_CONSUMERS, programs=1, right=0),
    Dense((1, 2, 2, 130, 140), SHARED_ROLE, left=40, right=9),
    Dense((1, 2, 2, 130, 140), CONSUMERS_APART, programs=1, left=40),
    # Of two key heads one at a time; rows of tiles that are full; keys that nobody sees behind
    # those that some do; batch elements one at a time.
    Dense((1, 4, 2, 150, 150), STORES, programs=1, right=0, more={"scratch": 3 * 2**16}),
    Dense((1, 1, 1, 400, 400), STORES_PANELS, (64, 60), left=78, right=1),
    Dense((1, 1, 1, 100, 400), STORES, left=100, right=-60),
    Dense((1, 1, 1, 70, 90), STORES, scale=1.0, offset=4.0),
    Dense(
        (2, 2, 1, 140, 300),
        STORES,
        intervals=("edges", "documents"),
        more={"scratch": 300_000},
    ),
    Packed((70, 100), (90, 130), (50, 130), STORES, intervals="edges"),
    Packed((70, 0, 100), (90, 5, 130), (40, 0, 110), STORES, right=0),
    Dense((1, 3, 3, 150, 90), RESULTS_APART, programs=1, right=0, sink=(0.5, -1.0, 2.0)),
    Dense((1, 2, 1, 130, 200), APART, programs=1),
    Dense((1, 2, 1, 100, 137), PANELS, (64, 50), programs=1, right=0),
    Dense((1, 2, 1, 100, 137), PANELS_ROLE, (40, 64), programs=1),
    Dense((2, 2, 2, 140, 200), dims=(64, 50), intervals=("documents", "band")),
    Dense((2, 2, 1, 140, 470), BY_ROLE, intervals=("first keys",)),
    Dense((1, 1, 1, 140, 470), intervals=("last keys",)),
    Dense((1, 1, 1, 70, 200), intervals=("nothing",)),
    Dense((1, 1, 1, 140, 300), intervals=("edges",)),
    Dense((1, 1, 1, 140, 200), intervals=("backwards",)),
    Packed((70, 100), (90, 130), (90, 130), intervals="documents"),
    Packed((70, 100), (90, 130), (50, 130), BY_ROLE, intervals="edges"),
    Packed((20, 0, 140), (90, 5, 150), (60, 0, 130), intervals="some rows", dropout=0.6),
    Packed((70, 0, 100), (90, 5, 130), (40, 0, 110), heads=(4, 2), left=40, right=20),
    Packed((70, 100), (90, 130), (40, 110), BY_ROLE, right=0),
    Dense((1, 2, 1, 140, 137), dropout=0.6, right=20),
    Dense((1, 1, 1, 70, 137), softcap=2.0, scale=0.3),
    Dense((1, 1, 1, 70, 130), scale=-0.125, left=0),
    Dense((1, 1, 1, 70, 90), BY_ROLE, scale=1.0, offset=4.0),
    Dense((1, 1, 1, 130, 130), needs=ALL._replace(q=False, v=False)),
    Dense((1, 1, 1, 130, 130), needs=ALL._replace(k=False)),
    Dense((1, 2, 1, 70, 137), MORE_PANELS, (96, 60)),
    # Of each head, of each batch element; tiles of which one consumer sees all or nothing.
    Dense((2, 4, 2, 140, 200), tile_map="random", programs=3),
    Dense((2, 2, 1, 140, 200), BY_ROLE, tile_map="random, of all heads", programs=1),
    Dense((1, 2, 1, 200, 137), tile_map="every other granule", programs=1),
    Dense((1, 2, 1, 200, 300), tile_map="blocks", programs=1),
    Dense((1, 1, 1, 140, 137), tile_map="all but one score", scale=1.0, offset=4.0),
    Dense((1, 1, 1, 140, 137), BY_ROLE, tile_map="all but one score", scale=1.0, offset=4.0),
    Dense((1, 1, 1, 70, 270), tile_map="one score"),
    # Two of four heads at a time; granules that nobody needs, of tiles that are not written.
    Dense((2, 4, 2, 140, 200), STORES, tile_map="random", more={"scratch": 300_000}),
    Dense((1, 2, 2, 200, 300), STORES, tile_map="blocks", programs=1, more={"scratch": 200_000}),
)
