"""The kernels' inputs for test_gluon_mutants.py, and what they should make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import plain
from anyflash.kernels.hopper.tiles import Tile
from gluon_mutants import Result
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

SMALL = Tile(64, consumers=2, block_kv=64, kv_slots=2)
REGISTERS = Tile(64, consumers=2, block_kv=64, kv_slots=2, q_registers=True)
TURNS = Tile(64, consumers=2, block_kv=64, kv_slots=2, pingpong=True)
THREE = Tile(64, consumers=3, block_kv=64, kv_slots=3, registers=(128, 160, 24))
SHARED = Tile(128, consumers=2, block_kv=64, kv_slots=2, shared_out=True)


@dataclass(frozen=True)
class Hopper:
    shape: tuple[int, int, int, int, int]  # B, Hq, Hkv, Sq, Sk
    tile: Tile = SMALL
    dims: tuple[int, int] = (64, 64)  # D, Dv
    programs: int = 2  # fewer than blocks: they are drawn from a counter
    section: int = 16
    left: int | None = None
    right: int | None = None
    scale: float = 0.125
    softcap: float = 0.0
    sink: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float16

    def __call__(self, module: ModuleType) -> list[Result]:
        (q, k, v), sink, like, exact = self.example
        module.SECTION = self.section
        found = module.forward(
            q, k, v, scale=self.scale, left=self.left, right=self.right, softcap=self.softcap,
            sink=sink, tile=self.tile, programs=self.programs,
        )  # fmt: skip
        return [Result(*x) for x in zip(("out", "lse"), found, like, exact, strict=True)]

    @cached_property
    def example(self) -> tuple[list[Tensor], Tensor | None, tuple, tuple]:
        (b, hq, hkv, sq, sk), (d, dv) = self.shape, self.dims
        xs = inputs(self.dtype, (b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
        sink = None if self.sink is None else torch.tensor(self.sink)
        seen = in_window(self.left, self.right)
        terms = Terms(scale=self.scale, softcap=self.softcap, seen=seen, sink=sink)
        out, _ = plain.attention(*xs, terms)
        _, lse = plain.attention(*(x.float() for x in xs), terms)
        return xs, sink, (out, lse), plain.attention(*(x.double() for x in xs), terms)


@dataclass(frozen=True)
class Packed:
    """Sequences of two query heads and one key head. Unused keys are NaN."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    used: tuple[int, ...]
    left: int | None = None
    right: int | None = None

    def __call__(self, module: ModuleType) -> list[Result]:
        (q, k, v), numbers, like, exact = self.example
        options = {"scale": 0.125, "left": self.left, "right": self.right}
        found = module.forward_packed(q, k, v, *numbers, tile=SMALL, programs=2, **options)
        return [Result(*x) for x in zip(("out", "lse"), found, like, exact, strict=True)]

    @cached_property
    def example(self) -> tuple[list[Tensor], list[Tensor], tuple, tuple]:
        q, k, v = inputs(torch.float16, *((sum(n), h, 64) for n, h in self.lengths))
        at_q, at_k = ([0, *accumulate(n)] for n in (self.queries, self.keys))
        packing = plain.Packing(at_q, at_k, list(self.used))
        terms = Terms(scale=0.125, seen=in_window(self.left, self.right))
        out, _ = plain.packed(q, k, v, terms, packing)
        _, lse = plain.packed(q.float(), k.float(), v.float(), terms, packing)
        exact = plain.packed(q.double(), k.double(), v.double(), terms, packing)
        for start, end, used in zip(at_k, at_k[1:], self.used, strict=False):
            k[start + used : end] = v[start + used : end] = math.nan
        numbers = [torch.tensor(x, dtype=torch.int32) for x in (at_q, at_k, self.used)]
        return [q, k, v], numbers, (out, lse), exact

    @property
    def lengths(self) -> tuple:
        return (self.queries, 2), (self.keys, 1), (self.keys, 1)


def in_window(left: int | None, right: int | None) -> Seen:
    low = -math.inf if left is None else -left
    high = math.inf if right is None else right
    return lambda b, h, i, j, offset: (j - i >= offset + low) & (j - i <= offset + high)
