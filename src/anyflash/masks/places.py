"""The same mask from another place: shards, packed sequences, and the forms that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash.errors import InvalidInput
from anyflash.masks.compiled import Form
from anyflash.masks.expression import Mask, register
from anyflash.masks.index import Coordinates, Extent, Rows, readable
from anyflash.masks.intervals import RowIntervals, compact
from anyflash.masks.tiles import TileMap


@dataclass(frozen=True, eq=False)
class At(Mask):
    """`operand` seen from local rows and keys that stand at given positions."""

    operand: Mask
    q_positions: Tensor
    k_positions: Tensor

    def check_reach(self, least: Extent) -> None:
        ends = len(self.q_positions), len(self.k_positions)
        if least.queries > ends[0] or least.keys > ends[1]:
            expected = f"positions of at least {least.queries} queries and {least.keys} keys"
            raise InvalidInput("mask at", f"{ends[0]} and {ends[1]} positions", expected)
        for name, positions in (("q", self.q_positions), ("k", self.k_positions)):
            if not readable(positions):
                return
            if positions.numel() and int(positions.min()) < 0:
                got = f"{int(positions.min())}"
                raise InvalidInput(f"mask at({name}_positions)", got, "positions ≥ 0")
        reach = least._replace(queries=_end(self.q_positions), keys=_end(self.k_positions))
        self.operand.check_reach(reach)

    def check(self, extent: Extent) -> None:
        for name, positions, length in (
            ("q_positions", self.q_positions, extent.queries),
            ("k_positions", self.k_positions, extent.keys),
        ):
            if positions.shape[0] != length:
                raise InvalidInput(f"mask at({name})", tuple(positions.shape), f"({length},)")
        self.check_reach(extent)

    def visible(self, at: Coordinates) -> Tensor:
        q, k = self.q_positions.to(at.row.device).long(), self.k_positions.to(at.row.device).long()
        return self.operand.visible(at._replace(row=q[at.row], key=k[at.key], offset=0, box=None))

    def interval_bound(self) -> int | None:
        increasing = bool((self.k_positions[1:] > self.k_positions[:-1]).all())
        return self.operand.interval_bound() if increasing else None

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        q, k = (
            self.q_positions.to(rows.row.device).long(),
            self.k_positions.to(rows.row.device).long().contiguous(),
        )
        lo, hi = self.operand.intervals(Rows(rows.batch, q[rows.row], 0, max(_end(q), _end(k))))
        lo, hi = (torch.searchsorted(k, x.contiguous()) for x in (lo, hi))
        return compact(lo, hi, rows.keys)


class Local(NamedTuple):
    """Packed rows as their sequences see them; tensors of the rows' shape."""

    sequence: Tensor
    row: Tensor
    length: Tensor  # keys in use
    offset: Tensor  # length − queries
    first_key: Tensor  # where the sequence's keys start


@dataclass(frozen=True, eq=False)
class Packed(Mask):
    """`operand` applied to each sequence of a packed batch, and nothing across sequences.

    starts_q, starts_k (n + 1,) offsets into the packed rows and keys; used_k (n,) keys in use, None
    for all. The operand's batch is the sequence, its rows and keys count from the sequence's start.
    """

    operand: Mask
    starts_q: Tensor
    starts_k: Tensor
    used_k: Tensor | None

    def rows(self, rows: Tensor) -> Local:
        starts_q, starts_k = (
            self.starts_q.to(rows.device).long(),
            self.starts_k.to(rows.device).long(),
        )
        lengths = starts_k.diff() if self.used_k is None else self.used_k.to(rows.device).long()
        sequence = _segment(starts_q, rows)
        length = lengths[sequence]
        offset = length - starts_q.diff()[sequence]
        return Local(sequence, rows - starts_q[sequence], length, offset, starts_k[sequence])

    def keys(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The sequence of packed keys, and their number in it."""
        starts = self.starts_k.to(keys.device).long()
        sequence = _segment(starts, keys)
        return sequence, keys - starts[sequence]

    def visible(self, at: Coordinates) -> Tensor:
        local, (sequence, key) = self.rows(at.row), self.keys(at.key)
        mine = (local.sequence == sequence) & (key < local.length)
        # A key of another sequence need not fit this one's tensors: ask about key 0 there.
        key = torch.where(mine, key, 0)
        inner = Coordinates(local.sequence, at.head, local.row, key, local.offset)
        return mine & self.operand.visible(inner)

    def interval_bound(self) -> int | None:
        return self.operand.interval_bound()

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        local = self.rows(rows.row)
        inner = Rows(local.sequence, local.row, local.offset, local.length)
        lo, hi = self.operand.intervals(inner)
        start, length = local.first_key.unsqueeze(-1), local.length.unsqueeze(-1)
        lo, hi = torch.minimum(lo, length), torch.minimum(hi, length)
        return compact(lo + start, hi + start, rows.keys)


class Compiled(Mask):
    """A kernel form as a mask; see `Mask.compile`."""

    def __init__(
        self, kind: str, batch: int, heads: int, queries: int, keys: int, *tensors: Tensor
    ) -> None:
        self.extent = Extent(batch, heads, queries, keys)
        self.form: Form = {"RowIntervals": RowIntervals, "TileMap": TileMap}[kind](
            self.extent, *tensors
        )
        self.text, self.leaves = register(self), ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Compiled, (type(self.form).__name__, *self.extent, *self.form.tensors)

    def check(self, extent: Extent) -> None:
        if extent != self.extent:
            expected = f"tensors of exactly these: (B, Hq, Sq, Sk) = {tuple(self.extent)}"
            advice = f"got tensors of {tuple(extent)}; compile the mask for them"
            raise InvalidInput(
                "mask", f"a mask compiled for {tuple(self.extent)}", expected, advice
            )

    def check_reach(self, least: Extent) -> None:
        if any(size < needed for size, needed in zip(self.extent, least, strict=True)):
            got = f"a mask compiled for {tuple(self.extent)}"
            raise InvalidInput("mask", got, f"one for at least {tuple(least)}")

    def visible(self, at: Coordinates) -> Tensor:
        return self.form.visible(at)

    def interval_bound(self) -> int | None:
        return self.form.bounds.shape[2] if isinstance(self.form, RowIntervals) else None

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        if isinstance(self.form, TileMap):
            raise TypeError("a tile map has no intervals")
        return self.form.of(rows)


def _end(positions: Tensor) -> int:
    return int(positions.max()) + 1 if positions.numel() else 0


def _segment(starts: Tensor, positions: Tensor) -> Tensor:
    """The segment [starts[s], starts[s + 1]) that holds each position; empty ones hold none."""
    last = max(starts.shape[0] - 2, 0)
    return (torch.searchsorted(starts, positions.contiguous(), right=True) - 1).clamp(0, last)
