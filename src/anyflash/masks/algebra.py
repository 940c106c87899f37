"""What the user writes: masks as an algebra of small immutable values.

A mask says which scores (b, h, i, j) exist: batch b, query head h, query row i, key j. True means
attend. It never holds an S×S matrix unless the user gave one. `masks/compiled.py` turns an
expression into the forms that kernels read (row intervals or a tile map).

Alignment: query i stands at key position i + offset with offset = Sk − Sq (bottom-right), so that
the last query sees the last key. `Coordinates.offset` carries it; a shard or a packed sequence has
its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyflash.errors import InvalidInput
from anyflash.masks.expression import Mask, register
from anyflash.masks.index import Coordinates, Extent, Rows
from anyflash.masks.intervals import complement, intersection, one_interval


@dataclass(frozen=True, eq=False)
class Everything(Mask):
    """Every score exists."""

    def visible(self, at: Coordinates) -> Tensor:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=at.row.device)

    def interval_bound(self) -> int | None:
        return 1

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return one_interval(rows, 0, rows.keys)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Keys from `left` before to `right` after the query's own position; None is unbounded."""

    left: int | None
    right: int | None

    def visible(self, at: Coordinates) -> Tensor:
        distance = at.key - (at.row + at.offset)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen &= distance >= -self.left
        if self.right is not None:
            seen &= distance <= self.right
        return seen

    def interval_bound(self) -> int | None:
        return 1

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        here = rows.row + rows.offset
        lo = 0 if self.left is None else here - self.left
        hi = rows.keys if self.right is None else here + self.right + 1
        return one_interval(rows, lo, hi)


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Keys j < length."""

    length: int

    def visible(self, at: Coordinates) -> Tensor:
        return at.key < self.length

    def interval_bound(self) -> int | None:
        return 1

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return one_interval(rows, 0, self.length)


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Queries and keys with equal ids; ids (1 or B, S)."""

    ids_q: Tensor
    ids_k: Tensor | None

    def check_reach(self, least: Extent) -> None:
        needed = (least.batch, least.queries), (least.batch, least.keys)
        for name, ids, (batch, length) in zip(
            ("ids_q", "ids_k"), (self.ids_q, self._keys), needed, strict=True
        ):
            if ids.shape[1] < length or 1 < ids.shape[0] < batch:
                expected = f"at least ({batch}, {length})"
                raise InvalidInput(f"mask documents({name})", tuple(ids.shape), expected)

    def check(self, extent: Extent) -> None:
        for name, ids, length in (
            ("ids_q", self.ids_q, extent.queries),
            ("ids_k", self._keys, extent.keys),
        ):
            if ids.shape[0] not in (1, extent.batch) or ids.shape[1] != length:
                advice = ""
                if name == "ids_k" and self.ids_k is None:
                    advice = "ids_k=None needs as many keys as queries: give ids_k"
                expected = f"({length},) or ({extent.batch}, {length})"
                raise InvalidInput(f"mask documents({name})", tuple(ids.shape), expected, advice)

    @property
    def _keys(self) -> Tensor:
        return self.ids_q if self.ids_k is None else self.ids_k

    def visible(self, at: Coordinates) -> Tensor:
        ids_q, ids_k = self.ids_q.to(at.row.device), self._keys.to(at.row.device)
        batch_q = at.batch if ids_q.shape[0] > 1 else torch.zeros_like(at.batch[:1])
        batch_k = at.batch if ids_k.shape[0] > 1 else torch.zeros_like(at.batch[:1])
        return ids_q[batch_q, at.row] == ids_k[batch_k, at.key]

    def interval_bound(self) -> int | None:
        ids, where = torch.sort(self._keys, dim=-1, stable=True)
        together = (where[:, 1:] - where[:, :-1] == 1) | (ids[:, 1:] != ids[:, :-1])
        return 1 if bool(together.all()) else None

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        device = rows.row.device
        ids_q, ids_k = self.ids_q.to(device), self._keys.to(device)
        # Ranks make ids comparable across the batch: one sorted list of (batch, rank) serves all.
        names, rank = torch.unique(
            torch.cat([ids_q.flatten(), ids_k.flatten()]), return_inverse=True
        )
        rank_q, rank_k = rank[: ids_q.numel()].view_as(ids_q), rank[ids_q.numel() :].view_as(ids_k)
        batches, length = ids_k.shape
        rank_k, where = torch.sort(rank_k, dim=-1, stable=True)
        step = len(names) * torch.arange(batches, device=device).unsqueeze(-1)
        listed = (rank_k + step).flatten()
        batch_q = rows.batch if ids_q.shape[0] > 1 else torch.zeros_like(rows.batch[:1])
        batch_k = rows.batch if batches > 1 else torch.zeros_like(rows.batch[:1])
        wanted = (rank_q[batch_q, rows.row] + len(names) * batch_k).contiguous()
        first = torch.searchsorted(listed, wanted)
        count = torch.searchsorted(listed, wanted, right=True) - first
        if length:
            first = where.flatten()[first.clamp(max=listed.numel() - 1)]
        return one_interval(rows, first, first + count)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Keys j < lengths[b]; lengths (1 or B,)."""

    lengths: Tensor

    def check_reach(self, least: Extent) -> None:
        if 1 < self.lengths.shape[0] < least.batch:
            got, expected = tuple(self.lengths.shape), f"at least ({least.batch},)"
            raise InvalidInput("mask padding(lengths_k)", got, expected)

    def check(self, extent: Extent) -> None:
        if self.lengths.shape[0] not in (1, extent.batch):
            raise InvalidInput(
                "mask padding(lengths_k)", tuple(self.lengths.shape), f"({extent.batch},)"
            )

    def _of(self, batch: Tensor) -> Tensor:
        lengths = self.lengths.to(batch.device)
        return lengths[batch] if len(lengths) != 1 else lengths.view([1] * batch.ndim)

    def visible(self, at: Coordinates) -> Tensor:
        return at.key < self._of(at.batch)

    def interval_bound(self) -> int | None:
        return 1

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return one_interval(rows, 0, self._of(rows.batch))


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor, 4-D, each side full or 1."""

    tensor: Tensor

    def check_reach(self, least: Extent) -> None:
        if any(1 < size < needed for size, needed in zip(self.tensor.shape, least, strict=True)):
            raise InvalidInput("mask", tuple(self.tensor.shape), f"at least {tuple(least)}")

    def check(self, extent: Extent) -> None:
        wrong = [s for s, full in zip(self.tensor.shape, extent, strict=True) if s not in (1, full)]
        if wrong:
            expected = f"broadcastable to (B, Hq, Sq, Sk) = {tuple(extent)}"
            raise InvalidInput("mask", tuple(self.tensor.shape), expected)

    def visible(self, at: Coordinates) -> Tensor:
        tensor = self.tensor.to(at.row.device)
        if at.box is not None:  # a view, where indexing would build an int64 index per score
            box = zip(at.box, tensor.shape, strict=True)
            return tensor[tuple(side if size > 1 else slice(None) for side, size in box)]
        index = (at.batch, at.head, at.row, at.key)
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=at.row.device)
        picks = [i if size != 1 else zero for i, size in zip(index, tensor.shape, strict=True)]
        return tensor[picks[0], picks[1], picks[2], picks[3]]


@dataclass(frozen=True, eq=False)
class Function(Mask):
    """f(b, h, i, j) → bool on index tensors."""

    f: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __deepcopy__(self, memo: object) -> Function:
        return Function(self.f)

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = getattr(self.f, "__qualname__", "")
        if "<locals>" in name or "<lambda>" in name:
            advice = (
                "define it at module level, or pickle mask.compile(...), which holds no function"
            )
            raise pickle.PicklingError(f"mask from_function: {name} cannot be pickled; {advice}")
        return super().__reduce_ex__(protocol)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", register(self))
        object.__setattr__(self, "leaves", ())

    def visible(self, at: Coordinates) -> Tensor:
        seen = self.f(at.batch, at.head, at.row, at.key)
        expected = "a boolean tensor that broadcasts with b, h, i and j"
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise InvalidInput("mask from_function(f)", f"a result of {got}", expected)
        shape = torch.broadcast_shapes(at.batch.shape, at.head.shape, at.row.shape, at.key.shape)
        sizes = [1] * (len(shape) - seen.ndim) + list(seen.shape)
        if len(sizes) > len(shape) or any(
            size not in (1, full) for size, full in zip(sizes, shape, strict=True)
        ):
            got = f"a result of shape {tuple(seen.shape)} for scores {tuple(shape)}"
            raise InvalidInput("mask from_function(f)", got, expected)
        return seen.view(sizes)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Exactly the scores that the operand does not have."""

    operand: Mask

    @classmethod
    def of(cls, operand: Mask) -> Mask:
        return operand.operand if isinstance(operand, Not) else cls(operand)

    def check(self, extent: Extent) -> None:
        self.operand.check(extent)

    def visible(self, at: Coordinates) -> Tensor:
        return ~self.operand.visible(at)

    def interval_bound(self) -> int | None:
        bound = self.operand.interval_bound()
        return None if bound is None else bound + 1

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return complement(*self.operand.intervals(rows), rows.keys)


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Scores that both have."""

    first: Mask
    second: Mask

    @classmethod
    def of(cls, first: Mask, second: Mask) -> Mask:
        """Two windows are one: it stays arithmetic for kernels."""
        if isinstance(first, Window) and isinstance(second, Window):
            left, right = _tighter(first.left, second.left), _tighter(first.right, second.right)
            return Window(left, right)
        return cls(first, second)

    def check(self, extent: Extent) -> None:
        self.first.check(extent)
        self.second.check(extent)

    def visible(self, at: Coordinates) -> Tensor:
        return self.first.visible(at) & self.second.visible(at)

    def interval_bound(self) -> int | None:
        bounds = self.first.interval_bound(), self.second.interval_bound()
        return None if None in bounds else sum(bounds) - 1  # type: ignore[arg-type]

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return intersection(self.first.intervals(rows), self.second.intervals(rows), rows.keys)


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Scores that either has."""

    first: Mask
    second: Mask

    def check(self, extent: Extent) -> None:
        self.first.check(extent)
        self.second.check(extent)

    def visible(self, at: Coordinates) -> Tensor:
        return self.first.visible(at) | self.second.visible(at)

    def interval_bound(self) -> int | None:
        bounds = self.first.interval_bound(), self.second.interval_bound()
        return None if None in bounds else sum(bounds)  # type: ignore[arg-type]

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        outside = [complement(*m.intervals(rows), rows.keys) for m in (self.first, self.second)]
        lo, hi = complement(*intersection(outside[0], outside[1], rows.keys), rows.keys)
        bound = self.interval_bound()
        return lo[..., :bound], hi[..., :bound]


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
