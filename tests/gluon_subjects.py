"""The kernels' inputs for test_gluon_mutants.py, and what they should make of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import plain
from anyflash.kernels.hopper.tiles import Columns, Tile
from anyflash.masks.tiles import TileMap
from gluon_mutants import Result
from hopper_cases import map_of, seen_on
from plain import Seen, Terms


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
    return j <= i + offset


def inputs(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(map(math.prod, shapes)))
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def attention(q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    return plain.attention(q, k, v, Terms(seen=causal if masked else None))


Sizes = tuple[int, int, int, int]  # heads, queries, keys, D


@cache
def forward_example(sizes: Sizes, masked: bool) -> tuple[list[Tensor], tuple, tuple]:
    heads, sq, sk, d = sizes
    xs = inputs(torch.float16, (1, heads, sq, d), (1, heads, sk, d), (1, heads, sk, d))
    return xs, attention(*xs, masked), attention(*(x.double() for x in xs), masked)


def forward(module: ModuleType, sizes: Sizes, masked: bool, **options: Any) -> list[Result]:
    xs, like, exact = forward_example(sizes, masked)
    found = module.forward(*xs, masked, block_kv=64, **options)
    return [Result(*x) for x in zip(("out", "lse"), found, like, exact, strict=True)]


@cache
def backward_example(sizes: Sizes, masked: bool, low: bool) -> tuple[list[Tensor], list, list]:
    heads, sq, sk, d = sizes
    shapes = (1, heads, sq, d), (1, heads, sk, d), (1, heads, sk, d), (1, heads, sq, d)
    q, k, v, dout = inputs(torch.float16, *shapes)
    if low:  # scores so far below zero that exp(−lse) is infinite
        q, k = q + 4, k - 4

    def gradients(*xs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in xs]
        out, lse = attention(*leaves, masked)
        return [out, lse, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    out, lse, *exact = gradients(q.double(), k.double(), v.double())
    given = [q, k, v, out.detach().half(), lse.detach().float(), dout]
    return given, gradients(q, k, v)[2:], exact


def backward(
    module: ModuleType, sizes: Sizes, masked: bool, low: bool = False, **options: Any
) -> list[Result]:
    given, like, exact = backward_example(sizes, masked, low)
    found = module.backward(*given, causal=masked, **options)
    return [Result(*x) for x in zip(("dq", "dk", "dv"), found, like, exact, strict=True)]


@cache
def fp8_example(sizes: Sizes, peak: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    heads, sq, sk, d = sizes
    e4m3 = torch.float8_e4m3fn
    xs = inputs(e4m3, (1, heads, sq, d), (1, heads, sk, d), (1, heads, sk, d))
    if peak:  # one key far above the others, whose P are then small numbers of e4m3
        xs[0][..., 0], xs[1][:, :, 5, 0] = 4, 20
    exact = attention(*(x.double() for x in xs), False)[0]
    # Plain PyTorch with P in e4m3, at 256 times its size as in the kernel.
    q, k, v = (x.float() for x in xs)
    s = q @ k.mT / math.sqrt(d)
    p = torch.exp(s - s.amax(-1, keepdim=True)) * 256
    like = p.to(e4m3).float() @ v / p.sum(-1, keepdim=True)
    return xs, like, exact


def fp8(module: ModuleType, sizes: Sizes, peak: bool = False, **options: Any) -> list[Result]:
    (q, k, v), like, exact = fp8_example(sizes, peak)
    found = module.forward(q, k, module.prepare_values(v), block_kv=64, **options)
    return [Result("out", found, like.to(found.dtype), exact)]


# The package's forward kernel.


def small(columns: int | Columns, **changes: Any) -> Tile:
    """A tile of few keys, so that few keys make many tiles."""
    c = columns if isinstance(columns, Columns) else Columns(columns)
    return Tile(**{"qk": c, "v": c, "consumers": 2, "block_kv": 64, "kv_slots": 2} | changes)


SMALL = small(64)
LONG = small(64, block_kv=128)
REGISTERS = small(64, q_registers=True)
TURNS = small(64, pingpong=True)
THREE = small(64, consumers=3, kv_slots=3, apart=True, registers=(128, 160, 24))
THREE_TURNS = small(64, consumers=3, pingpong=True, registers=(128, 160, 24))
SHARED = small(128, shared_out=True)
PANELS = small(Columns(32, 3), v=Columns(32, 2), shared_out=True)
PANELS_OF_V = small(64, v=Columns(32, 3))

Pairs = list[tuple[Tensor, Tensor]]
# By name: of rows i and a number of keys, the intervals [lo, hi) of each row, the lower one first.
INTERVALS: dict[str, Callable[[Tensor, int], Pairs]] = {
    "nothing": lambda i, keys: [],
    "documents": lambda i, keys: [(i // 50 * 50, i // 50 * 50 + 50)],
    # All rows of the first block see the keys 64 to 128.
    "band": lambda i, keys: [(i // 2, i + 140)],
    # Tiles between that nobody sees, below the longer interval and above it.
    "first keys": lambda i, keys: [(0 * i, i % 3), (170 + i, 400 + i // 4)],
    "last keys": lambda i, keys: [(i // 64, 190 + i // 3), (keys - 60 + i // 9, keys - i % 2)],
    # Every fourth row sees nothing, the others all keys but the first ones.
    "to the end": lambda i, keys: [(10 + (i % 4 == 0) * (keys - 10), keys + 0 * i)],
    # Of a block of 128 keys, a tile sees the first or the last; later keys are seen by nobody.
    "edges": lambda i, keys: [(0 * i + 127 * (i >= 64), 129 + 0 * i)],
    # The later a row, the earlier its keys.
    "backwards": lambda i, keys: [(keys - i - 30, keys - i)],
    # Every fifth row sees nothing, others one key, or two intervals that begin with the keys.
    "some rows": lambda i, keys: [(i % 5, i % 5 + (i % 5 > 0) * 12), (20 + i // 2, 75 + i // 2)],
}


def bounds_of(name: str, queries: int, keys: int) -> Tensor:
    """(queries, n, 2) as the kernel wants them: sorted, empty ones last."""
    pairs = [torch.stack(pair, -1) for pair in INTERVALS[name](torch.arange(queries), keys)]
    if not pairs:
        return torch.empty(queries, 0, 2, dtype=torch.int32)
    bounds = torch.stack(pairs, 1).clamp(0, keys)
    empty = bounds[..., :1] >= bounds[..., 1:]
    bounds = torch.where(empty, keys, bounds)
    order = empty.int().argsort(dim=1, stable=True).expand_as(bounds)
    return bounds.gather(1, order).int()


def in_intervals(bounds: list[Tensor]) -> Seen:
    """By batch element, or one for all of them: (queries, n, 2)."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        each = [bounds[min(n, len(bounds) - 1)][i.flatten()] for n in b.flatten().tolist()]
        lo, hi = (x[:, None, :, None] for x in torch.stack(each).unbind(-1))
        return ((j[..., None] >= lo) & (j[..., None] < hi)).any(-1)

    return seen


def in_window(left: int | None, right: int | None) -> Seen:
    low = -math.inf if left is None else -left
    high = math.inf if right is None else right
    return lambda b, h, i, j, offset: (j - i >= offset + low) & (j - i <= offset + high)


def mapped(name: str, shape: tuple[int, int, int, int, int]) -> TileMap | None:
    b, hq, _, sq, sk = shape
    return map_of(name, (b, hq, sq, sk), torch.device("cpu")) if name else None


def seed_of(dropout: float) -> Tensor | None:
    """With both halves, and both different from zero."""
    return torch.tensor([(12345 << 32) + 678]) if dropout else None


@dataclass(frozen=True)
class Hopper:
    shape: tuple[int, int, int, int, int]  # B, Hq, Hkv, Sq, Sk
    tile: Tile = SMALL
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
    share: int | None = None
    dtype: torch.dtype = torch.float16

    def __call__(self, module: ModuleType) -> list[Result]:
        (q, k, v), sink, bounds, like, exact = self.example
        found = module.forward(
            q, k, v, scale=self.scale, left=self.left, right=self.right, softcap=self.softcap,
            sink=sink, bounds=bounds, tile_map=mapped(self.tile_map, self.shape),
            dropout=self.dropout, seed=seed_of(self.dropout),
            tile=self.tile, share=self.share, section=self.section, programs=self.programs,
        )  # fmt: skip
        return [Result(*x) for x in zip(("out", "lse"), found, like, exact, strict=True)]

    @cached_property
    def example(self) -> tuple[list[Tensor], Tensor | None, Tensor | None, tuple, tuple]:
        (b, hq, hkv, sq, sk), (d, dv) = self.shape, self.dims
        xs = inputs(self.dtype, (b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
        sink = None if self.sink is None else torch.tensor(self.sink)
        each = [bounds_of(name, sq, sk) for name in self.intervals]
        seen = in_intervals(each) if each else in_window(self.left, self.right)
        seen = seen_on(self.tile_map) if self.tile_map else seen
        terms = Terms(
            scale=self.scale, softcap=self.softcap, seen=seen, sink=sink, dropout=self.dropout,
            seed=seed_of(self.dropout),
        )  # fmt: skip
        out, _ = plain.attention(*xs, terms)
        _, lse = plain.attention(*(x.float() for x in xs), terms)
        exact = plain.attention(*(x.double() for x in xs), terms)
        bounds = torch.stack(each) if each else None
        if bounds is not None and bounds.shape[2]:  # what lies behind all intervals has no effect
            lo, hi = bounds.expand(b, -1, -1, -1).unbind(-1)
            for n, last in enumerate((hi * (lo < hi)).flatten(1).amax(1).tolist()):
                xs[1][n, :, last:] = xs[2][n, :, last:] = math.nan
        return xs, sink, bounds, (out, lse), exact


@dataclass(frozen=True)
class Packed:
    """Sequences one behind the other. Unused keys are NaN."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    used: tuple[int, ...]
    heads: tuple[int, int] = (2, 1)
    left: int | None = None
    right: int | None = None
    intervals: str | None = None  # of each sequence; they reach beyond its used keys
    dropout: float = 0.0
    share: int | None = None

    def __call__(self, module: ModuleType) -> list[Result]:
        (q, k, v), numbers, bounds, like, exact = self.example
        options = {"scale": 0.125, "left": self.left, "right": self.right, "bounds": bounds}
        found = module.forward_packed(
            q, k, v, *numbers, **options, dropout=self.dropout, seed=seed_of(self.dropout),
            tile=SMALL, share=self.share, programs=2,
        )  # fmt: skip
        return [Result(*x) for x in zip(("out", "lse"), found, like, exact, strict=True)]

    @cached_property
    def example(self) -> tuple[list[Tensor], list[Tensor], Tensor | None, tuple, tuple]:
        hq, hkv = self.heads
        lengths = (self.queries, hq), (self.keys, hkv), (self.keys, hkv)
        q, k, v = inputs(torch.float16, *((sum(n), h, 64) for n, h in lengths))
        at_q, at_k = ([0, *accumulate(n)] for n in (self.queries, self.keys))
        packing = plain.Packing(at_q, at_k, list(self.used))
        seen, bounds = in_window(self.left, self.right), None
        if self.intervals:
            sizes = zip(self.queries, self.keys, strict=True)
            each = [bounds_of(self.intervals, *size) for size in sizes]
            seen = in_intervals(each)
            bounds = torch.cat([x + start for x, start in zip(each, at_k, strict=False)])[None]
        terms = Terms(scale=0.125, seen=seen, dropout=self.dropout, seed=seed_of(self.dropout))
        out, _ = plain.packed(q, k, v, terms, packing)
        _, lse = plain.packed(q.float(), k.float(), v.float(), terms, packing)
        exact = plain.packed(q.double(), k.double(), v.double(), terms, packing)
        for start, end, used in zip(at_k, at_k[1:], self.used, strict=False):
            k[start + used : end] = v[start + used : end] = math.nan
        numbers = [torch.tensor(x, dtype=torch.int32) for x in (at_q, at_k, self.used)]
        return [q, k, v], numbers, bounds, (out, lse), exact
