"""Problems that the tests of the Hopper kernels are about: tensors, and what rows see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

import plain
from anyflash.kernels.hopper.tiles_backward import Split, Stored, Walk
from anyflash.masks import from_function
from anyflash.masks.index import Extent
from anyflash.masks.tiles import TileMap, build


class Problem(Protocol):
    @property
    def shape(self) -> tuple[int, int, int, int, int]: ...  # B, Hq, Hkv, Sq, Sk
    @property
    def dims(self) -> tuple[int, int]: ...  # D, Dv
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def layout(self) -> str: ...


def tensors(case: Problem, device: torch.device) -> list[Tensor]:
    """q, k, v in the layout of the case, amid NaN where it has gaps."""
    g = torch.Generator().manual_seed(sum(case.shape) + sum(case.dims))
    (b, hq, hkv, sq, sk), (d, dv) = case.shape, case.dims
    found = []
    for heads, rows, columns in ((hq, sq, d), (hkv, sk, d), (hkv, sk, dv)):
        x = torch.randn(b, heads, rows, columns, generator=g).to(case.dtype).to(device)
        if case.layout == "bshd":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif case.layout == "fused":
            room = torch.full((b, rows, heads, 3, 256), math.nan, dtype=case.dtype, device=device)
            room = room[:, :, :, 1, :columns]
            x = room.copy_(x.transpose(1, 2)).transpose(1, 2)
        found.append(x)
    return found


def seen_by(options: dict[str, Any]) -> plain.Seen:
    left, right = options.get("left"), options.get("right")

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        distance = j - (i + offset)
        low = -math.inf if left is None else -left
        return (distance >= low) & (distance <= (math.inf if right is None else right))

    return seen


# Intervals of keys by row: what each row sees, of (queries, keys) → (lo, hi) pairs of each row.
INTERVALS = {
    "documents": lambda i, sk: [((i // 50) * 50, (i // 50) * 50 + 50)],
    "prefix": lambda i, sk: [(i * 0, (i + 1).clamp(min=90))],
    "empty rows": lambda i, sk: [(i, torch.where(i % 3 == 0, i, i + 80))],
    "first keys and a window": lambda i, sk: [(i * 0, i * 0 + 4), ((i - 30).clamp(min=4), i + 1)],
    "two far apart": lambda i, sk: [(i // 8, i // 8 + 9), (sk - 90 - i // 4, sk - i // 4)],
    "a long lower one": lambda i, sk: [(i * 0, i * 0 + 200), (i * 0 + sk - 20, i * 0 + sk)],
    "one or two": lambda i, sk: [(i * 0 + 100, i * 0 + 130), (i + 200, i * 0 + 250)],
    "all of one block": lambda i, sk: [(i * 0, torch.where(i < 128, sk, 1))],
    "nothing": lambda i, sk: [],
}


def bounds_of(form: str, queries: int, keys: int) -> Tensor:
    """(Sq, n, 2) as `RowIntervals.bounds`: sorted, empty ones last at Sk."""
    pairs = INTERVALS[form](torch.arange(queries), keys)
    bounds = torch.stack(
        [torch.stack(torch.broadcast_tensors(lo, torch.as_tensor(hi)), -1) for lo, hi in pairs], 1
    ) if pairs else torch.empty(queries, 0, 2)  # fmt: skip
    bounds = bounds.clamp(0, keys)
    empty = (bounds[..., 0] >= bounds[..., 1])[..., None]
    bounds = torch.where(empty, keys, bounds)
    order = bounds[..., 0].argsort(dim=-1, stable=True)[..., None].expand_as(bounds)
    return bounds.gather(1, order).int()


def seen_in(bounds: Tensor) -> plain.Seen:
    """By rows of a batch element (1 or B, Sq, n, 2)."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        lo, hi = bounds.to(i.device)[b.clamp(max=len(bounds) - 1), i].long().unbind(-1)
        return ((j[..., None] >= lo) & (j[..., None] < hi)).any(-1)

    return seen


def random_bits(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Half of the scores, others for each head and batch element."""
    return ((i * 73 + j * 151 + h * 37 + b * 11) * 40503 >> 7) % 2 == 0


# Tile maps: which scores exist, of indices (b, h, i, j).
MAPS: dict[str, Callable[..., Tensor]] = {
    "random": random_bits,
    "random, of all heads": lambda b, h, i, j: random_bits(b, 0, i, j),
    "random, of all batch elements": lambda b, h, i, j: random_bits(0, h, i, j),
    "blocks": lambda b, h, i, j: (i // 128 + 2 * (j // 128) + h) % 3 == 0,
    "every other granule": lambda b, h, i, j: (i // 64 + j // 64) % 2 == 0,
    "image": lambda b, h, i, j: ((i // 16 - j // 16).abs() < 3) & ((i % 16 - j % 16).abs() < 3),
    "rows that see nothing": lambda b, h, i, j: (i % 160 < 50) & (j % 7 == 3) & (j > 130),
    "all but one score": lambda b, h, i, j: (i != 100) | (j != 70),
    "one score": lambda b, h, i, j: (i == 130) & (j == 63),
}


def map_of(name: str, shape: tuple[int, int, int, int], device: torch.device) -> TileMap:
    """Of (B, Hq, Sq, Sk)."""
    found = build(from_function(MAPS[name]), Extent(*shape), torch.device("cpu"))
    tensors = {n: x.to(device) for n, x in vars(found).items() if isinstance(x, Tensor)}
    return replace(found, **tensors)


def seen_on(name: str) -> plain.Seen:
    return lambda b, h, i, j, offset: MAPS[name](b, h, i, j)


def query_tiles_of(bounds: Tensor, keys: int) -> Tensor:
    """(1 or B, ⌈keys / 64⌉, 2): tiles of 64 queries that see some of 64 keys."""
    batch, queries = bounds.shape[:2]
    lo, hi = bounds[:, :, None].unbind(-1)
    key = torch.arange(keys)[:, None]
    seen = ((key >= lo) & (key < hi)).any(-1)
    tiles = torch.zeros(batch, -(-queries // 64) * 64, -(-keys // 64) * 64, dtype=torch.bool)
    tiles[:, :queries, :keys] = seen
    tiles = tiles.unflatten(1, (-1, 64)).unflatten(3, (-1, 64)).any(4).any(2)
    first, last = tiles.int().argmax(1), tiles.shape[1] - tiles.flip(1).int().argmax(1)
    return (torch.stack([first, last], -1) * tiles.any(1)[..., None]).int()


def how(kernels: Split | Walk | Stored | None) -> dict[str, Any]:
    """The options of a call that is to use them; None is the table's split."""
    if isinstance(kernels, Walk):
        return {"algorithm": "fused", "fused": kernels}
    if isinstance(kernels, Stored):
        return {"algorithm": "stored", "stored": kernels}
    return {"algorithm": "split", "split": kernels}
