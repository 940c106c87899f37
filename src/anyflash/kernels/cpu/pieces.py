"""Which work there is: a block of query rows and exactly the keys that it needs.

A piece is some query rows of some batch elements and heads with the key spans that they see. Pieces
of equal shape are stacked into one batch: a window of 512 at S=8192 becomes one call with a batch
of 32 instead of 32 calls, or of one call over S×S scores. Where the pieces of a batch lie evenly
in memory, stacking is a strided view and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.masks.compiled import Form
from anyflash.masks.index import Coordinates
from anyflash.masks.intervals import RowIntervals
from anyflash.masks.tiles import FULL, GRANULE, PARTIAL, SKIP, TileMap, unpack

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


@dataclass(frozen=True)
class Batch:
    """Pieces of equal shape, computed together."""

    pieces: tuple[Piece, ...]

    @property
    def masked(self) -> bool:
        return self.pieces[0].masked

    @property
    def empty(self) -> bool:
        return any(p.empty for p in self.pieces)

    def rows(self, x: Tensor) -> Tensor:
        """x (B, H, S, ·) → (pieces, batch, heads, rows, ·): a view where the pieces lie evenly."""
        return _stack(x, self.pieces, [(p.rows,) for p in self.pieces])

    def keys(self, x: Tensor) -> Tensor:
        """x (B, H, S, ·) → (pieces, batch, heads, keys, ·)."""
        return _stack(x, self.pieces, [p.keys for p in self.pieces])

    def heads(self, x: Tensor) -> Tensor:
        """x (H,) → (pieces, 1, heads, 1)."""
        return torch.stack([x[slice(*p.heads)] for p in self.pieces])[:, None, :, None]

    def write_rows(self, x: Tensor, values: Tensor) -> None:
        for piece, value in zip(self.pieces, values, strict=True):
            _block(x, piece, piece.rows).copy_(value)

    def add_keys(self, x: Tensor, values: Tensor) -> None:
        """Add (pieces, batch, heads, keys, ·) onto x, where pieces may share keys."""
        for piece, value in zip(self.pieces, values, strict=True):
            start = 0
            for span in piece.keys:
                stop = start + span[1] - span[0]
                _block(x, piece, span).add_(value[:, :, start:stop])
                start = stop

    def coordinates(self, device: torch.device, offset: int) -> Coordinates:
        """Indices of the batch's scores, each broadcastable to (pieces, batch, heads, rows, keys)."""

        def index(spans: list[tuple[Span, ...]], dim: int) -> Tensor:
            values = torch.tensor(
                [[i for a, b in s for i in range(a, b)] for s in spans], device=device
            )
            shape = [-1 if d == 0 else values.shape[1] if d == dim else 1 for d in range(5)]
            return values.view(shape)

        batch, head = (
            index([(p.batch,) for p in self.pieces], 1),
            index([(p.heads,) for p in self.pieces], 2),
        )
        row, key = (
            index([(p.rows,) for p in self.pieces], 3),
            index([p.keys for p in self.pieces], 4),
        )
        return Coordinates(batch, head, row, key, offset)


def batches(
    form: Form, batch: int, heads: Sequence[int], block: int, scores: int
) -> Iterator[Batch]:
    """All work of some heads (their places in the mask) in query blocks of `block` rows.

    `block` is a multiple of 64. A batch has at most `scores` scores, unless one piece has more.
    """
    groups: dict[object, list[Piece]] = {}
    for piece in _pieces(form, batch, heads, block, scores):
        width = sum(b - a for a, b in piece.keys)
        size = piece.batch[1] - piece.batch[0], piece.heads[1] - piece.heads[0]
        height = piece.rows[1] - piece.rows[0]
        key = size, height, width, piece.masked
        group = groups.setdefault(key, [])
        group.append(piece)
        if (len(group) + 1) * size[0] * size[1] * height * width > scores:
            yield Batch(tuple(groups.pop(key)))
    for group in groups.values():
        yield Batch(tuple(group))


def visible(form: Form, batch: Batch) -> Tensor:
    """Which scores of a masked batch are attended: bool (pieces or 1, rows, keys)."""
    if isinstance(form, RowIntervals):
        return _visible_intervals(form, batch)
    return torch.stack([_visible_tiles(form, piece) for piece in batch.pieces])


def _pieces(
    form: Form, batch: int, heads: Sequence[int], block: int, scores: int
) -> Iterator[Piece]:
    if isinstance(form, RowIntervals):
        by_batch, by_head = form.bounds.shape[0] > 1, False
        found = _spans_of_intervals(form, block)
    else:
        by_batch, by_head = form.kinds.shape[0] > 1, form.kinds.shape[1] > 1
        found = _spans_of_tiles(form, block, heads if by_head else [0])
    # One batch element, one head at a time where the mask differs, else as many as fit.
    count_h = 1 if by_head else len(heads)
    for (b, h, t), (keys, masked, empty) in found:
        rows = (t * block, min((t + 1) * block, form.extent.queries))
        width = sum(stop - start for start, stop in keys)
        fit = max(1, scores // max(1, count_h * (rows[1] - rows[0]) * width))
        count_b = 1 if by_batch else min(batch, fit)
        for b0 in (b,) if by_batch else range(0, batch, count_b):
            elements = (b0, min(b0 + count_b, batch))
            place = heads[h] if by_head else 0
            yield Piece(elements, (h, h + count_h), rows, keys, masked, empty, place)


Found = Iterator[tuple[tuple[int, int, int], tuple[tuple[Span, ...], bool, bool]]]


def _spans_of_intervals(form: RowIntervals, block: int) -> Found:
    keys = form.extent.keys
    lo, hi = form.bounds.long().unbind(-1)  # (B, rows, n)
    blocks = -(-lo.shape[1] // block)
    pad = (0, 0, 0, blocks * block - lo.shape[1])
    used = torch.nn.functional.pad(lo < hi, pad)
    lo = torch.nn.functional.pad(lo, pad).unflatten(1, (blocks, block))
    hi = torch.nn.functional.pad(hi, pad).unflatten(1, (blocks, block))
    used = used.unflatten(1, (blocks, block))
    first = torch.where(used, lo, keys).amin(2).tolist()  # (B, blocks, n)
    last = torch.where(used, hi, 0).amax(2).tolist()
    # Full: every row has exactly the hull of its block (and rows beyond the last do not count).
    beyond = torch.arange(blocks * block).view(1, blocks, block, 1) >= form.bounds.shape[1]
    inner_first = torch.where(beyond, 0, torch.where(used, lo, keys)).amax(2).tolist()
    inner_last = torch.where(beyond, keys, torch.where(used, hi, 0)).amin(2).tolist()
    empty = (~(used.any(3) | beyond[..., 0])).any(2).tolist()
    for b in range(len(first)):
        for t in range(blocks):
            hulls = [(f, e) for f, e in zip(first[b][t], last[b][t], strict=True) if f < e]
            if not hulls:
                continue
            exact = (inner_first[b][t][0], inner_last[b][t][0])
            if len(hulls) == 1 and hulls[0] == exact:
                yield (b, 0, t), (tuple(hulls), False, False)
            else:
                yield (b, 0, t), (_merge(hulls, keys), True, empty[b][t])


def _merge(hulls: list[Span], keys: int) -> tuple[Span, ...]:
    """Round spans outward to granules (equal widths can be stacked) and join those that meet."""
    rounded = sorted(
        (a // GRANULE * GRANULE, min(-(-b // GRANULE) * GRANULE, keys)) for a, b in hulls
    )
    merged = [rounded[0]]
    for a, b in rounded[1:]:
        if a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple(merged)


def _spans_of_tiles(form: TileMap, block: int, heads: Sequence[int]) -> Found:
    per_block = block // GRANULE
    kinds = torch.nn.functional.pad(form.kinds[:, heads], (0, 0, 0, -form.kinds.shape[2] % per_block))
    kinds = kinds.unflatten(2, (-1, per_block))
    exists = (
        torch.arange(kinds.shape[2] * per_block).view(1, 1, -1, per_block, 1) < form.kinds.shape[2]
    )
    needed = (kinds != SKIP).any(3)
    partial = ((kinds != FULL) & exists).any(3) & needed
    pad = (0, kinds.shape[2] * block - form.extent.queries)
    empty = (
        (~torch.nn.functional.pad(form.filled[:, heads], pad, value=True)).unflatten(2, (-1, block)).any(3)
    )
    lists, partial, empty = needed.tolist(), partial.any(3).tolist(), empty.tolist()
    for b, h, t in (
        torch.cartesian_prod(*(torch.arange(n) for n in needed.shape[:3])).view(-1, 3).tolist()
    ):
        tiles = [i for i, some in enumerate(lists[b][h][t]) if some]
        if tiles:
            spans = [(i * GRANULE, (i + 1) * GRANULE) for i in tiles]
            yield (b, h, t), (_merge(spans, form.extent.keys), partial[b][h][t], empty[b][h][t])


def _visible_intervals(form: RowIntervals, batch: Batch) -> Tensor:
    pieces = batch.pieces
    shared = form.bounds.shape[0] == 1
    bounds = torch.stack([form.bounds[0 if shared else p.batch[0], slice(*p.rows)] for p in pieces])
    starts = torch.tensor([p.keys[0][0] for p in pieces], dtype=torch.int32)
    relative = bounds - starts.view(-1, 1, 1, 1)
    if all(len(p.keys) == 1 for p in pieces):
        if (relative == relative[:1]).all():  # as in the middle of a window: one mask for all
            relative = relative[:1]
        key = torch.arange(pieces[0].keys[0][1] - pieces[0].keys[0][0], dtype=torch.int32)
    else:
        relative = bounds
        key = torch.tensor(
            [[j for a, b in p.keys for j in range(a, b)] for p in pieces], dtype=torch.int32
        )
        key = key.unsqueeze(1)
    seen = None
    for slot in range(relative.shape[2]):
        lo, hi = relative[:, :, slot, :1], relative[:, :, slot, 1:]
        inside = (key >= lo) & (key < hi)
        seen = inside if seen is None else seen.logical_or_(inside)
    if seen is None:
        raise ValueError("row intervals of no slot")
    return seen


def _visible_tiles(form: TileMap, piece: Piece) -> Tensor:
    """(rows, keys) of one piece, unpacked from bits."""
    b = 0 if form.kinds.shape[0] == 1 else piece.batch[0]
    h = piece.mask_head
    tile_rows = slice(piece.rows[0] // GRANULE, -(-piece.rows[1] // GRANULE))
    parts = []
    for start, stop in piece.keys:
        columns = slice(start // GRANULE, -(-stop // GRANULE))
        kinds, numbers = (
            form.kinds[b, h, tile_rows, columns],
            form.numbers[b, h, tile_rows, columns],
        )
        words = torch.where(kinds == FULL, -1, 0).unsqueeze(-1)
        if len(form.bits):
            bits = form.bits[numbers.clamp(min=0).long()]
            words = torch.where((kinds == PARTIAL).unsqueeze(-1), bits, words)
        words = words.expand(*kinds.shape, GRANULE)
        seen = unpack(words.transpose(1, 2).flatten(0, 1))
        parts.append(seen[: piece.rows[1] - piece.rows[0], : stop - start])
    return torch.cat(parts, -1)


def _block(x: Tensor, piece: Piece, span: Span) -> Tensor:
    return x[slice(*piece.batch), slice(*piece.heads), slice(*span)]


def _stack(x: Tensor, pieces: tuple[Piece, ...], spans: list[tuple[Span, ...]]) -> Tensor:
    if all(len(s) == 1 for s in spans):
        blocks = [_block(x, p, s[0]) for p, s in zip(pieces, spans, strict=True)]
        offsets = [block.storage_offset() for block in blocks]
        step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
        if step >= 0 and all(b - a == step for a, b in zip(offsets, offsets[1:], strict=False)):
            first = blocks[0]
            return first.as_strided((len(blocks), *first.shape), (step, *first.stride()))
        return torch.stack(blocks)
    parts = [
        torch.cat([_block(x, p, s) for s in ss], 2) for p, ss in zip(pieces, spans, strict=True)
    ]
    return torch.stack(parts)
