"""Which work there is: a block of query rows and exactly the keys that it needs.

A piece is some query rows of some batch elements and heads with the key spans that they see. Pieces
of equal shape are stacked into one batch: a window of 512 at S=8192 becomes one call with a batch
of 32 instead of 32 calls, or of one call over S×S scores. Where the pieces of a batch lie evenly
in memory, stacking is a strided view and copies nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.masks.compiled import Form
from anyflash.masks.index import Coordinates
from anyflash.masks.intervals import RowIntervals
from anyflash.masks.tiles import FULL, GRANULE, SKIP, TileMap

Span = tuple[int, int]


class Piece(NamedTuple):
    """Batch elements, heads (among those at hand), query rows, and the spans of keys they see."""

    batch: Span
    heads: Span
    rows: Span
    keys: tuple[Span, ...]
    masked: bool  # some score of rows × keys is not attended
    empty: bool  # some row attends nothing
    mask_head: int  # where the mask has these heads; 0 if it is the same for all

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.keys)

    @property
    def area(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.width


@dataclass(frozen=True, eq=False)
class Batch:
    """Pieces of equal shape, computed together."""

    pieces: tuple[Piece, ...]

    @property
    def masked(self) -> bool:
        return self.pieces[0].masked

    @property
    def empty(self) -> bool:
        return any(p.empty for p in self.pieces)

    @property
    def rows_computed(self) -> int:
        piece = self.pieces[0]
        sides = (b - a for a, b in (piece.batch, piece.heads, piece.rows))
        return len(self.pieces) * math.prod(sides)

    def rows(self, x: Tensor) -> Tensor:
        """x (B, H, S, ·) → (pieces, batch, heads, rows, ·): a view where the pieces lie evenly."""
        return _stack(x, self.pieces, [(p.rows,) for p in self.pieces])

    def keys(self, x: Tensor) -> Tensor:
        """x (B, H, S, ·) → (pieces, batch, heads, keys, ·)."""
        return _stack(x, self.pieces, [p.keys for p in self.pieces])

    def heads(self, x: Tensor) -> Tensor:
        """x (H,) → (pieces, 1, heads, 1)."""
        return torch.stack([x[slice(*p.heads)] for p in self.pieces])[:, None, :, None]

    def scores(self, x: Tensor, first: int, last: int) -> Tensor:
        """x (1|B, 1|H, 1|Sq, 1|Sk) → (pieces, 1|batch, 1|heads, 1|rows, 1|keys), of the piece's
        keys number first:last."""
        return torch.stack(
            [
                torch.cat([x[c] for c, _, _ in _corners(x, p, first, last)], -1)
                if x.shape[3] > 1
                else x[_corner(x, p, p.rows)]
                for p in self.pieces
            ]
        )

    def write_rows(self, x: Tensor, values: Tensor) -> None:
        """(pieces, batch, heads, rows, ·) → their places in x (B, H, S, ·)."""
        blocks = [_block(x, p, p.rows) for p in self.pieces]
        view = _even(blocks)
        if view is not None:
            view.copy_(values)
            return
        for block, value in zip(blocks, values, strict=True):
            block.copy_(value)

    def add_keys(self, x: Tensor, values: Tensor) -> None:
        """Add (pieces, batch, heads, keys, ·) onto x, where pieces may share keys."""
        for piece, value in zip(self.pieces, values, strict=True):
            start = 0
            for span in piece.keys:
                stop = start + span[1] - span[0]
                _block(x, piece, span).add_(value[:, :, start:stop])
                start = stop

    def add_scores(self, x: Tensor, values: Tensor, first: int) -> None:
        """Add (pieces, batch, heads, rows, keys from number `first` on) onto x, summed over the
        dimensions that x (1|B, 1|H, 1|Sq, 1|Sk) does not have."""
        for piece, value in zip(self.pieces, values, strict=True):
            for corner, a, b in _corners(x, piece, first, first + value.shape[-1]):
                place = x[corner]
                place.add_(value[..., a:b].sum_to_size(place.shape))

    def coordinates(self, device: torch.device, offset: int) -> Coordinates:
        """Where its scores are, each broadcastable to (pieces, batch, heads, rows, keys)."""

        def index(spans: list[tuple[Span, ...]], dim: int) -> Tensor:
            values = [[i for start, stop in s for i in range(start, stop)] for s in spans]
            shape = [-1 if d == 0 else len(values[0]) if d == dim else 1 for d in range(5)]
            return torch.tensor(values, device=device).view(shape)

        return Coordinates(
            index([(p.batch,) for p in self.pieces], 1),
            index([(p.heads,) for p in self.pieces], 2),
            index([(p.rows,) for p in self.pieces], 3),
            index([p.keys for p in self.pieces], 4),
            offset,
        )


class Budget(NamedTuple):
    """How a kernel likes its work cut. Costs are in scores, which heads and batch multiply."""

    blocks: tuple[tuple[int, float], ...]  # query rows (multiples of 64), cost of a score there
    call: int  # fixed cost of a batch of pieces
    piece: int  # fixed cost of a piece in it
    scores: int  # most scores of a batch; one piece alone may have more
    copied: int  # most keys, over batch and heads, that are worth copying to share a call


_plans: WeakKeyDictionary[Form, dict[object, list[Batch]]] = WeakKeyDictionary()


def plan(form: Form, batch: int, heads: Sequence[int], budget: Budget) -> list[Batch]:
    """All work of some heads (their places in the mask), cut the cheapest way; kept per form.

    A batch element's cut depends on its own mask alone: what a row gets, to the bit, must not
    depend on its neighbours.
    """
    by_head = isinstance(form, TileMap) and form.kinds.shape[1] > 1
    key = batch, tuple(heads) if by_head else len(heads), budget
    plans = _plans.setdefault(form, {})
    if key not in plans:
        cut = _cut_apart if form.tensors[0].shape[0] > 1 else _cut_together
        plans[key] = list(_batches(cut(form, batch, heads, budget), budget))
    return plans[key]


def _cut_together(form: Form, batch: int, heads: Sequence[int], budget: Budget) -> list[Piece]:
    """One mask for the whole batch: the cheapest cut of one element."""

    def cost(way: tuple[tuple[int, float], bool]) -> float:
        (block, weight), exact = way
        pieces = list(_pieces(form, 1, heads, block, exact, budget))
        return _cost(pieces, weight, budget) + budget.call * len(list(_batches(pieces, budget)))

    (block, _), exact = min(itertools.product(budget.blocks, (True, False)), key=cost)
    return list(_pieces(form, batch, heads, block, exact, budget))


def _cut_apart(form: Form, batch: int, heads: Sequence[int], budget: Budget) -> list[Piece]:
    """A mask for each element: the cheapest cut of each, with rounded spans, so that elements of
    different lengths share calls (32 padded sentences of 40: 37 ms apart, 3 ms together)."""
    best: dict[Span, tuple[float, list[Piece]]] = {}
    for block, weight in budget.blocks:
        pieces = _pieces(form, batch, heads, block, False, budget)
        for element, found in itertools.groupby(pieces, key=lambda p: p.batch):
            some = list(found)
            cost = _cost(some, weight, budget)
            if element not in best or cost < best[element][0]:
                best[element] = cost, some
    return [piece for _, pieces in best.values() for piece in pieces]


def _cost(pieces: list[Piece], weight: float, budget: Budget) -> float:
    """What pieces cost, in scores; a mask of one piece alone has to fit."""
    if any(p.area > budget.scores for p in pieces):
        return math.inf
    return sum(p.area * weight * (p.heads[1] - p.heads[0]) + budget.piece for p in pieces)


def _batches(pieces: list[Piece], budget: Budget) -> Iterator[Batch]:
    groups: dict[object, list[Piece]] = {}
    for piece in pieces:
        size = [b - a for a, b in (piece.batch, piece.heads, piece.rows)]
        key = *size, tuple(b - a for a, b in piece.keys), piece.masked
        groups.setdefault(key, []).append(piece)
    for group in groups.values():
        first = group[0]
        rows = (first.batch[1] - first.batch[0]) * (first.heads[1] - first.heads[0])
        most = max(1, budget.scores // max(1, rows * first.area))
        # Pieces that lie evenly are stacked for nothing; others if copying costs less than a call.
        runs = [group] if rows * first.width <= budget.copied else _even_runs(group)
        for run in runs:
            for start in range(0, len(run), most):
                yield Batch(tuple(run[start : start + most]))


def _even_runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Pieces in runs that follow each other at one step."""
    run: list[Piece] = []
    step: list[int] = []
    for piece in pieces:
        place = _place(piece)
        if run:
            gap = [a - b for a, b in zip(place, _place(run[-1]), strict=True)]
            if len(run) > 1 and gap != step:
                yield run
                run = []
            step = gap
        run.append(piece)
    if run:
        yield run


def _place(piece: Piece) -> list[int]:
    return [piece.batch[0], piece.heads[0], piece.rows[0], *(a for a, _ in piece.keys)]


def _pieces(
    form: Form, batch: int, heads: Sequence[int], block: int, exact: bool, budget: Budget
) -> Iterator[Piece]:
    """`exact`: a span that needs no mask keeps its own width; otherwise all are rounded."""
    if isinstance(form, RowIntervals):
        by_batch, by_head = form.bounds.shape[0] > 1, False
        found = _spans_of_intervals(form, block, exact)
    else:
        by_batch, by_head = form.kinds.shape[0] > 1, form.kinds.shape[1] > 1
        found = _spans_of_tiles(form, block, heads if by_head else [0])
    # One batch element, one head at a time where the mask differs, else as many as fit.
    count_h = 1 if by_head else len(heads)
    for (b, h, t), (keys, masked, empty) in found:
        rows = (t * block, min((t + 1) * block, form.extent.queries))
        width = sum(stop - start for start, stop in keys)
        fit = max(1, budget.scores // max(1, count_h * (rows[1] - rows[0]) * width))
        count_b = 1 if by_batch else min(batch, fit)
        for b0 in (b,) if by_batch else range(0, batch, count_b):
            elements = (b0, min(b0 + count_b, batch))
            place = heads[h] if by_head else 0
            yield Piece(elements, (h, h + count_h), rows, keys, masked, empty, place)


Found = Iterator[tuple[tuple[int, int, int], tuple[tuple[Span, ...], bool, bool]]]


def _spans_of_intervals(form: RowIntervals, block: int, exact: bool) -> Found:
    """(batch, 0, block) → (spans, masked, empty) for every block of rows that sees any key."""
    keys = form.extent.keys
    lo, hi = form.bounds.long().unbind(-1)  # (B, rows, n)
    blocks = -(-lo.shape[1] // block)
    pad = (0, 0, 0, blocks * block - lo.shape[1])
    used, lo, hi = (F.pad(x, pad).unflatten(1, (blocks, block)) for x in (lo < hi, lo, hi))
    beyond = (
        torch.arange(blocks * block, device=lo.device).view(1, blocks, block, 1)
        >= form.bounds.shape[1]
    )
    first = torch.where(used, lo, keys).amin(2).tolist()  # (B, blocks, n)
    last = torch.where(used, hi, 0).amax(2).tolist()
    # What every row sees of the first interval; rows beyond the last do not count.
    inner_first = torch.where(beyond, 0, torch.where(used, lo, keys)).amax(2).tolist()
    inner_last = torch.where(beyond, keys, torch.where(used, hi, 0)).amin(2).tolist()
    empty = (~(used.any(3) | beyond[..., 0])).any(2).tolist()
    for b, t in itertools.product(range(len(first)), range(blocks)):
        hulls = [(f, e) for f, e in zip(first[b][t], last[b][t], strict=True) if f < e]
        if not hulls:
            continue
        full = hulls == [(inner_first[b][t][0], inner_last[b][t][0])]
        spans = _merge(hulls, keys)
        if full and (exact or list(spans) == hulls):
            yield (b, 0, t), ((hulls[0],), False, False)
        else:
            yield (b, 0, t), (spans, True, empty[b][t])


def _spans_of_tiles(form: TileMap, block: int, heads: Sequence[int]) -> Found:
    """(batch, head among `heads`, block) → (spans, masked, empty), as above."""
    per_block = block // GRANULE
    kinds = F.pad(form.kinds[:, heads], (0, 0, 0, -form.kinds.shape[2] % per_block))
    kinds = kinds.unflatten(2, (-1, per_block))
    exists = torch.arange(kinds.shape[2] * per_block, device=kinds.device) < form.kinds.shape[2]
    needed = (kinds != SKIP).any(3)
    partial = ((kinds != FULL) & exists.view(1, 1, -1, per_block, 1)).any(3) & needed
    pad = (0, kinds.shape[2] * block - form.extent.queries)
    filled = F.pad(form.filled[:, heads], pad, value=True).unflatten(2, (-1, block))
    lists, masked, full = needed.tolist(), partial.any(3).tolist(), filled.all(3).tolist()
    for b, h, t in itertools.product(*(range(n) for n in needed.shape[:3])):
        tiles = [i for i, some in enumerate(lists[b][h][t]) if some]
        if tiles:
            spans = [(i * GRANULE, (i + 1) * GRANULE) for i in tiles]
            merged = _merge(spans, form.extent.keys)
            yield (b, h, t), (merged, masked[b][h][t], not full[b][h][t])


def _merge(hulls: list[Span], keys: int) -> tuple[Span, ...]:
    """Round spans outward to granules (equal widths can be stacked) and join those that meet."""
    rounded = sorted((a // GRANULE * GRANULE, -(-b // GRANULE) * GRANULE) for a, b in hulls)
    merged = [rounded[0]]
    for a, b in rounded[1:]:
        if a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple((a, min(b, keys)) for a, b in merged)


def _block(x: Tensor, piece: Piece, span: Span) -> Tensor:
    return x[slice(*piece.batch), slice(*piece.heads), slice(*span)]


def _corner(x: Tensor, piece: Piece, keys: Span) -> tuple[slice, ...]:
    """Where a piece finds its part of x (1|B, 1|H, 1|Sq, 1|Sk)."""
    spans = (piece.batch, piece.heads, piece.rows, keys)
    return tuple(
        slice(*span) if size > 1 else slice(None) for span, size in zip(spans, x.shape, strict=True)
    )


def _corners(
    x: Tensor, piece: Piece, first: int, last: int
) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """A piece's keys number first:last in x: a corner per span, and which of these keys it has."""
    begin = 0
    for start, stop in piece.keys:
        a, b = max(first, begin), min(last, begin + stop - start)
        if a < b:
            span = (start + a - begin, start + b - begin)
            yield _corner(x, piece, span), a - first, b - first
        begin += stop - start


def _even(blocks: list[Tensor]) -> Tensor | None:
    """Blocks that follow each other at one step in memory, as one tensor; None if they do not."""
    if len(blocks) == 1:
        return blocks[0].unsqueeze(0)
    places = [block.storage_offset() for block in blocks]
    step = places[1] - places[0]
    if step < 0 or any(b - a != step for a, b in itertools.pairwise(places)):
        return None
    return blocks[0].as_strided((len(blocks), *blocks[0].shape), (step, *blocks[0].stride()))


def _stack(x: Tensor, pieces: tuple[Piece, ...], spans: list[tuple[Span, ...]]) -> Tensor:
    if all(len(s) == 1 for s in spans):
        blocks = [_block(x, p, s[0]) for p, s in zip(pieces, spans, strict=True)]
        view = _even(blocks)
        return torch.stack(blocks) if view is None else view
    parts = [
        torch.cat([_block(x, p, s) for s in ss], 2) for p, ss in zip(pieces, spans, strict=True)
    ]
    return torch.stack(parts)
