"""Inputs that show what a kernel reads and writes where it should not.

Every tensor stands inside a larger buffer of NaN (True for masks, a huge number for integers): a
read past its end shows in the result, a write into it or past it is found by `check`. Layouts are
views of leaves, as a model makes them: gradients are those of the leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

GUARD, ODD = 128, 67  # elements before a tensor; an odd number makes its address unaligned

QKV = tuple[Tensor, Tensor, Tensor]


class Views(NamedTuple):
    """Leaf tensors by name, and how q, k and v are views of them."""

    leaves: dict[str, Tensor]
    qkv: Callable[[dict[str, Tensor]], QKV]


class Arena:
    """Buffers that remember what they held."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.held: list[tuple[Tensor, Tensor]] = []

    def put(self, x: Tensor, guard: int = GUARD) -> Tensor:
        """A contiguous copy of x on the device, in the middle of a buffer of its own."""
        filler = float("nan") if x.is_floating_point() else x.dtype == torch.bool or 2**30
        buffer = torch.full((2 * guard + x.numel(),), filler, dtype=x.dtype, device=self.device)
        inside = buffer[guard : guard + x.numel()].view(x.shape)
        inside.copy_(x)
        self.held.append((buffer, buffer.clone()))
        return inside.detach()

    def check(self) -> None:
        """Raise if any input or anything around one was written to."""
        for buffer, before in self.held:
            if not torch.equal(_bits(buffer), _bits(before)):
                where = int((_bits(buffer) != _bits(before)).nonzero()[0])
                raise AssertionError(f"element {where} of a buffer of {len(before)} was written to")


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def dense(arena: Arena, layout: str, q: Tensor, k: Tensor, v: Tensor) -> Views:
    """q (B, Hq, Sq, D), k, v (B, Hkv, Sk, ·) with these contents, laid out as `layout` says.

    plain       each on its own
    odd         each at an address that is a multiple of its element size only
    bshd        (B, S, H, D) in memory
    transposed  (B, H, D, S) in memory: the last stride is not 1
    padded      rows and heads longer than they seem, NaN beyond
    fused       slices of one projection (B, S, ·) of all three; of k and v where lengths differ
    expanded    k and v have one head and one batch element, shared by all with stride 0
    """
    if layout in ("fused", "fused-kv"):
        return _fused(arena, q, k, v)
    if layout == "expanded":
        leaves = {"q": q, "k": k[:1, :1], "v": v[:1, :1]}
        shape = k.shape[:2]

        def expand(own: dict[str, Tensor]) -> QKV:
            return own["q"], own["k"].expand(*shape, -1, -1), own["v"].expand(*shape, -1, -1)

        return Views({n: arena.put(x) for n, x in leaves.items()}, expand)
    return _each(arena, layout, (1, 2), q, k, v)


def packed(arena: Arena, layout: str, q: Tensor, k: Tensor, v: Tensor) -> Views:
    """The same for q (total_q, Hq, D), k, v (total_k, Hkv, ·); `heads-first` is (H, total, D)."""
    if layout == "fused":
        whole = _fused(arena, *(x.transpose(0, 1)[None] for x in (q, k, v)))

        def unbatch(own: dict[str, Tensor]) -> QKV:
            a, b, c = (x[0].transpose(0, 1) for x in whole.qkv(own))
            return a, b, c

        return Views(whole.leaves, unbatch)
    return _each(arena, "bshd" if layout == "heads-first" else layout, (0, 1), q, k, v)


def _each(arena: Arena, layout: str, swapped: tuple[int, int], *qkv: Tensor) -> Views:
    def inward(x: Tensor) -> Tensor:  # what stands in memory
        if layout == "bshd":
            return x.transpose(*swapped)
        if layout == "transposed":
            return x.mT
        if layout == "padded":
            return torch.nn.functional.pad(x, (0, 5, 0, 2), value=float("nan"))
        return x

    def outward(x: Tensor, like: Tensor) -> Tensor:  # what attention is given
        if layout == "bshd":
            return x.transpose(*swapped)
        if layout == "transposed":
            return x.mT
        if layout == "padded":
            return x[..., : like.shape[-2], : like.shape[-1]]
        return x

    guard = ODD if layout == "odd" else GUARD
    shapes = dict(zip("qkv", (x.detach() for x in qkv), strict=True))
    leaves = {name: arena.put(inward(x), guard) for name, x in shapes.items()}

    def views(own: dict[str, Tensor]) -> QKV:
        a, b, c = (outward(own[name], x) for name, x in shapes.items())
        return a, b, c

    return Views(leaves, views)


def _fused(arena: Arena, q: Tensor, k: Tensor, v: Tensor) -> Views:
    together = "qkv" if q.shape[2] == k.shape[2] else "kv"
    given = {"q": q, "k": k, "v": v}
    flat = [given[name].transpose(1, 2).flatten(2) for name in together]
    leaves = {together: arena.put(torch.cat(flat, -1))}
    leaves |= {} if together == "qkv" else {"q": arena.put(q)}
    heads = [given[name].shape[1] for name in together]
    widths = [x.shape[-1] for x in flat]

    def split(own: dict[str, Tensor]) -> QKV:
        parts = own[together].split(widths, -1)
        views = [x.unflatten(2, (h, -1)).transpose(1, 2) for x, h in zip(parts, heads, strict=True)]
        a, b, c = views if together == "qkv" else (own["q"], *views)
        return a, b, c

    return Views(leaves, split)
