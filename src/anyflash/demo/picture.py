"""One picture: which tiles a packed row of sentences needs, and how long everything took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyflash.demo.measure import Measured, duration
from anyflash.masks import documents
from anyflash.masks.index import Extent
from anyflash.masks.tiles import FULL, GRANULE, PARTIAL, SKIP, build

# In the order of the legend.
TILES = {SKIP: "#eef1f5", PARTIAL: "#7fb2e5", FULL: "#12406f"}
NAMES = {SKIP: "skipped", PARTIAL: "partial", FULL: "full"}
PLAIN, MINE, OUTLINE = "#9aa3ad", "#e8743b", "#c2410c"
ZOOM = 14  # tiles along a side of the enlarged part


def draw(path: Path, which: Tensor, groups: dict[str, dict[str, Measured]]) -> None:
    """Save the picture.

    which (tokens,): the sentence of each packed token; groups: title → alternatives that computed
    the same.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, without pyplot: no display is needed and no global state changed.
    figure = Figure(figsize=(13, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _tiles(left, which)
    _bars(right, groups)
    figure.savefig(path, dpi=150)


def _tiles(axes: Any, which: Tensor) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    length = len(which)
    kinds = build(documents(which), Extent(1, 1, length, length), torch.device("cpu")).kinds[0, 0]
    _image(axes, kinds)
    handles = []
    for kind, colour in TILES.items():
        share = float((kinds == kind).float().mean())
        handles.append(Patch(color=colour, label=f"{NAMES[kind]}, {share:.1%}"))
    axes.legend(handles=handles, loc="upper right", fontsize=10)
    axes.set_title(f"Tiles of {GRANULE}×{GRANULE} scores, {length:,} tokens packed in a row")
    for axis, name in ((axes.xaxis, "key tile"), (axes.yaxis, "query tile")):
        axis.set_major_locator(MaxNLocator(integer=True))
        axis.set_label_text(name)
    if len(kinds) > 3 * ZOOM:
        _enlarged(axes, kinds, which)


def _image(axes: Any, kinds: Tensor) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([TILES[kind] for kind in sorted(TILES)])
    axes.imshow(kinds.numpy(), cmap=colours, vmin=0, vmax=len(TILES) - 1, interpolation="nearest")


def _enlarged(axes: Any, kinds: Tensor, which: Tensor) -> None:
    """The surroundings of the longest sentence, and the outlines of sentences."""
    from matplotlib.patches import Rectangle

    counts = torch.bincount(which)
    ends = counts.cumsum(0)
    longest = int(counts.argmax())
    middle = float(ends[longest] - counts[longest] / 2) / GRANULE
    first = min(max(middle - ZOOM / 2, 0), len(kinds) - ZOOM) - 0.5
    part = axes.inset_axes((0.05, 0.05, 0.43, 0.43))
    _image(part, kinds)
    for end, count in zip(ends.tolist(), counts.tolist(), strict=True):
        corner, side = (end - count) / GRANULE - 0.5, count / GRANULE
        part.add_patch(Rectangle((corner, corner), side, side, fill=False, color=OUTLINE, lw=1))
    part.set(xlim=(first, first + ZOOM), ylim=(first + ZOOM, first), xticks=[], yticks=[])
    part.set_title("enlarged; red: sentences", fontsize=9)
    axes.indicate_inset_zoom(part, edgecolor="#444")


def _bars(axes: Any, groups: dict[str, dict[str, Measured]]) -> None:
    """Horizontal bars, each group against the slowest of its own: their times differ by far."""
    place, ticks, labels = 0.0, [], []
    for title, found in groups.items():
        axes.text(0, place - 0.15, title, fontweight="bold", va="bottom")
        slowest = max(one.seconds for one in found.values())
        place += 0.5
        for name, one in found.items():
            share = one.seconds / slowest
            colour = MINE if name.startswith("anyflash") else PLAIN
            axes.barh(place, share, color=colour, height=0.8)
            axes.text(share + 0.015, place, duration(one.seconds), va="center")
            ticks.append(place)
            labels.append(name)
            place += 1
        place += 0.9
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 1.2, -0.8)
    axes.set_xlim(0, 1.16)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.set_title("Time, in each group against its slowest")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
