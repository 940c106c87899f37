"""What `explain` answers: who serves a call, why the others do not, and what its mask becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anyflash.backends.base import Explaining
from anyflash.dispatch import load, refusals
from anyflash.errors import InvalidInput
from anyflash.masks import intervals
from anyflash.masks.algebra import Window
from anyflash.masks.compiled import compiled
from anyflash.masks.expression import Mask
from anyflash.masks.index import Extent, grid
from anyflash.masks.intervals import RowIntervals
from anyflash.masks.kinds import kind_of
from anyflash.masks.tiles import FULL, GRANULE, PARTIAL, SKIP, TileMap, tiles_in, unpack
from anyflash.problem import Inputs, Problem, packed_mask

if TYPE_CHECKING:
    from rich.console import RenderableType

# Work that an explanation may cost, in scores evaluated or (row, key tile) pairs counted: about a
# second on two CPU cores. What it builds is cached, so that a call that follows finds it ready.
CHEAP = 1 << 24

STEP = 1 << 20  # pairs counted at a time, which stay in cache


@dataclass(frozen=True)
class MaskForm:
    """The form of a mask that kernels read, and how much of the scores it leaves.

    kind           "none", "window (arithmetic)", "row intervals" or "tile map"
    bytes          memory of the form; None if it was too large to build here
    skip           number of 64×64 tiles of which no score is attended,
    full, partial  of which all are, and the rest; None where `note` says why they are not counted
    attended       share of the scores that is attended, from 0 to 1, or None as well

    Counts are of what is stored: a mask that all heads share counts once.
    """

    kind: str
    bytes: int | None = 0
    skip: int | None = None
    full: int | None = None
    partial: int | None = None
    attended: float | None = None
    note: str = ""

    def __str__(self) -> str:
        parts = [self.kind]
        if self.bytes:
            parts.append(f"{self.bytes:,} bytes")
        if self.attended is not None:
            parts.append(f"{100 * self.attended:.1f} % of the scores attended")
            parts.append(
                f"tiles of {GRANULE}×{GRANULE}: {self.skip:,} skipped, {self.full:,} full, "
                f"{self.partial:,} partial"
            )
        return "; ".join([*parts, self.note] if self.note else parts)

    @classmethod
    def of(cls, mask: Mask, extent: Extent, device: torch.device) -> MaskForm:
        """Build the form where that is cheap, on `device`, and count its tiles."""
        if isinstance(mask, Window):
            rows = extent.queries * tiles_in(extent.keys)
            form = cls("window (arithmetic)", 0)
            if rows > CHEAP:
                return replace(form, note="too many tiles to count here")
            cpu = torch.device("cpu")  # arithmetic needs no device: count where nothing waits
            return _counted(form, intervals.build(mask, extent._replace(batch=1), cpu))
        if getattr(mask, "form", None) is None and kind_of(mask) == "tiles":
            batches, heads = _stored(mask, extent, device)
            scores = batches * heads * extent.queries * extent.keys
            if scores > CHEAP:
                note = f"not built here, which would evaluate {scores:,} scores"
                return cls("tile map", None, note=note)
        form = compiled(mask, extent, device)
        size = sum(t.numel() * t.element_size() for t in form.tensors)
        kind = "row intervals" if isinstance(form, RowIntervals) else "tile map"
        return _counted(cls(kind, size), form)


def _stored(mask: Mask, extent: Extent, device: torch.device) -> tuple[int, int]:
    """For how many batch elements and heads a tile map of this mask is stored."""
    if not (extent.queries and extent.keys):
        return 0, 0
    shape = mask.visible(grid(extent, slice(0, 1), slice(0, 1), device)).shape
    return shape[0], shape[1]


def _counted(form: MaskForm, built: RowIntervals | TileMap) -> MaskForm:
    if isinstance(built, RowIntervals):
        pairs = built.bounds[..., 0].numel() * tiles_in(built.extent.keys)
        if pairs > CHEAP:
            return replace(form, note="too many tiles to count here")
        seen, size = _seen_by_intervals(built)
    else:
        seen, size = _seen_by_tiles(built)
    counts = [int(c.sum()) for c in (seen == 0, seen == size, (seen > 0) & (seen < size))]
    total = int(size.expand(seen.shape).sum())
    attended = int(seen.sum()) / total if total else None
    return replace(form, skip=counts[0], full=counts[1], partial=counts[2], attended=attended)


def _sizes(extent: Extent, device: torch.device) -> Tensor:
    """Scores that exist in each tile: int64 (Tq, Tk); those at the edges have fewer."""
    sides = []
    for length in (extent.queries, extent.keys):
        start = torch.arange(tiles_in(length), device=device) * GRANULE
        sides.append((length - start).clamp(max=GRANULE))
    return sides[0].unsqueeze(-1) * sides[1]


def _seen_by_intervals(form: RowIntervals) -> tuple[Tensor, Tensor]:
    """Attended scores of each tile (B, Tq, Tk), and the tiles' sizes (Tq, Tk)."""
    extent, device = form.extent, form.bounds.device
    size = _sizes(extent, device)
    start = torch.arange(size.shape[1], device=device, dtype=torch.int32) * GRANULE
    stop = (start + GRANULE).clamp(max=extent.keys)
    seen = size.new_zeros((form.bounds.shape[0], *size.shape))
    per_tile = max(1, form.bounds.shape[0] * GRANULE * size.shape[1])
    step = max(1, STEP // per_tile)
    for t in range(0, size.shape[0], step):
        bounds = form.bounds[:, t * GRANULE : (t + step) * GRANULE]
        overlap = bounds.new_zeros((*bounds.shape[:2], size.shape[1]))
        for lo, hi in (pair.unbind(-1) for pair in bounds.unsqueeze(-2).unbind(2)):
            overlap += (torch.minimum(hi, stop) - torch.maximum(lo, start)).clamp(min=0)
        pad = (0, 0, 0, -overlap.shape[1] % GRANULE)
        tiles = torch.nn.functional.pad(overlap, pad).unflatten(1, (-1, GRANULE))
        seen[:, t : t + step] = tiles.sum(2)
    return seen, size


def _seen_by_tiles(form: TileMap) -> tuple[Tensor, Tensor]:
    """Attended scores of each tile (1|B, 1|Hq, Tq, Tk), and the tiles' sizes (Tq, Tk)."""
    size = _sizes(form.extent, form.kinds.device)
    bits = [unpack(part.unsqueeze(-1)).flatten(1).sum(1) for part in form.bits.split(1024)]
    of_bits = torch.cat([*bits, size.new_zeros(1)])  # the last one is for no number
    partial = of_bits[form.numbers.clamp(min=-1).long()] * (form.kinds == PARTIAL)
    return torch.where(form.kinds == FULL, size, partial * (form.kinds != SKIP)), size


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why; see `anyflash.explain`.

    problem    the call without its data
    chosen     the name of the backend that would serve it, or None
    refusals   each backend that was asked, in order → why it does not serve, or None if it does
    mask_form  what the mask becomes
    algorithm  how the gradients of q, k and v are computed where all three are asked for, and what
               memory that takes besides them; None if no gradient is, or where there is but one way
    """

    problem: Problem
    chosen: str | None
    refusals: dict[str, str | None]
    mask_form: MaskForm
    algorithm: str | None = None

    @classmethod
    def of(
        cls, problem: Problem, inputs: Inputs, backend: str | None, device: str | None
    ) -> Explanation:
        """`device` is the one to ask about, None for the tensors' own."""
        where = inputs.q.device
        if device is not None:
            problem = replace(problem, device=_checked(device))
        found = refusals(problem, backend)
        chosen = next((name for name, sentence in found.items() if sentence is None), None)
        if inputs.packed:  # sequences that do not see each other are part of the mask
            extent = Extent(1, problem.heads, inputs.q.shape[0], inputs.k.shape[0])
            form = MaskForm.of(packed_mask(inputs), extent, where)
        elif inputs.mask is None:
            form = MaskForm("none")
        else:
            form = MaskForm.of(inputs.mask, problem.extent, where)
        backend_chosen = None if chosen is None else load(chosen)
        algorithm = None
        if problem.gradient and isinstance(backend_chosen, Explaining):
            algorithm = backend_chosen.algorithm(problem, inputs)
        return cls(problem, chosen, found, form, algorithm)

    def __str__(self) -> str:
        width = max(len(name) for name in self.refusals)
        lines = [
            f"problem: {self.problem.describe()}",
            f"mask: {self.mask_form}",
            *([] if self.algorithm is None else [f"backward: {self.algorithm}"]),
            f"served by: {self.chosen or 'nothing'}",
        ]
        return "\n".join([*lines, *(f"  {n:{width}}  {s}" for n, s in self._rows())])

    def __rich__(self) -> RenderableType:
        from rich.table import Table  # only where a table is asked for
        from rich.text import Text

        backward = "" if self.algorithm is None else f"\nbackward: {self.algorithm}"
        title = Text(f"{self.problem.describe()}\nmask: {self.mask_form}{backward}")
        table = Table(title=title, title_justify="left", title_style="", caption_justify="left")
        table.add_column("backend", no_wrap=True)
        table.add_column("serves")
        table.add_column("why not", overflow="fold")
        for name, sentence in self.refusals.items():
            style = "bold green" if name == self.chosen else "" if sentence is None else "dim"
            table.add_row(name, "no" if sentence else "yes", Text(sentence or ""), style=style)
        table.caption = f"served by: {self.chosen or 'nothing'}"
        return table

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, sentence or "serves") for name, sentence in self.refusals.items()]


def _checked(device: str) -> str:
    try:
        return str(torch.device(device))
    except RuntimeError as error:
        expected = "a device of torch, such as 'cpu', 'cuda', 'cuda:1' or 'mps'"
        raise InvalidInput("device", repr(device), expected) from error
