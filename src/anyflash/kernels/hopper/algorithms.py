"""Which algorithm a call of the backward pass gets, and what memory it takes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from anyflash.kernels.hopper.launch import Heads, Lengths, Starts, programs_of, within
from anyflash.kernels.hopper.operands import KEPT
from anyflash.kernels.hopper.statistics import STATISTICS
from anyflash.kernels.hopper.stored import ROWS, TILE_KEYS, Layout
from anyflash.kernels.hopper.tiles_backward import (
    Split,
    Stored,
    Walk,
    choose_fused,
    choose_split,
    choose_stored,
    preferred,
)
from anyflash.masks.tiles import TileMap
from anyflash.problem import Needs

# Bytes of dS that there may be at a time: two heads of 16 K queries and keys, four if causal, whose
# tiles on the diagonal are what it is above 2^30.
SCRATCH_BYTES = 11 * 10**8


class Options(NamedTuple):
    """What a call asks for besides its tensors; see `backward`."""

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    bounds: Tensor | None = None
    query_tiles: Tensor | None = None
    tile_map: TileMap | bool | None = None  # True, where it does not matter which
    part: tuple[int, int] = (0, 0)  # batch element and head of the map, with which the call begins
    sink: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    algorithm: str | None = None
    deterministic: bool = False
    split: Split | None = None
    fused: Walk | None = None
    stored: Stored | None = None
    scratch: int = SCRATCH_BYTES
    section: int | None = None
    programs: int | None = None


ALGORITHMS = ("split", "fused", "stored")
ALL = Needs(q=True, k=True, v=True, bias=False, sink=False)


class Call(NamedTuple):
    """What all launches of a call have in common."""

    lengths: Lengths
    starts: Starts | None
    options: Options
    statistics: Tensor
    ends: Tensor | None  # of keys that are seen, under bounds
    heads: int
    heads_kv: int


def chosen(
    o: Options, lengths: Lengths, heads: Heads, needs: Needs = ALL
) -> tuple[str, Split | Walk | Stored]:
    """The algorithm of a call and its kernels: the one it asks for or, where that does not serve,
    split; if it asks for none, the fastest that serves."""
    columns = heads.columns, heads.columns_v
    names = preferred(*columns, o.deterministic) if o.algorithm is None else (o.algorithm,)
    if not {*names} <= {*ALGORITHMS}:
        raise ValueError(f"algorithm {o.algorithm!r}: {' or '.join(map(repr, ALGORITHMS))}")
    for name in names:
        kernels = None
        if needs.q and needs.k and needs.v:
            if name == "fused":
                kernels = o.fused or choose_fused(*columns)
            elif name == "stored" and serves(lengths, heads, o):
                kernels = o.stored or choose_stored(*columns)
        if kernels is not None:
            return name, kernels
    return "split", o.split or choose_split(*columns)


def described(o: Options, lengths: Lengths, heads: Heads) -> tuple[str, int]:
    """The algorithm of a call that asks for dq, dk and dv, and the bytes it has besides them."""
    name, _ = chosen(o, lengths, heads)
    rows = 1 if lengths.packed else lengths.batch
    found = rows * heads.heads * tiles_of(lengths) * 2 * STATISTICS.value * 4
    if name == "fused":
        found += 4 * rows * lengths.queries * heads.heads * heads.columns
    elif name == "stored":
        elements, most = shares(lengths, heads.heads, heads.heads_kv, o)
        group = heads.heads // heads.heads_kv
        found += elements * bytes_of(lengths, o, most * group)
    return name, found


def tiles_of(lengths: Lengths) -> int:
    """Of statistics, in a head."""
    if lengths.packed:
        return lengths.queries // STATISTICS.value + lengths.batch
    return -(-lengths.queries // STATISTICS.value)


# stored: dS of all heads would be too much, so that a call is done in parts.


@lru_cache(maxsize=KEPT)
def layout_of(lengths: Lengths, heads: int, left: int | None, right: int | None) -> Layout:
    """How dS^T of so many heads lies in memory. Under a window a block of keys has as many tiles as
    its queries reach, under a causal mask of as many queries as keys those from its own on."""
    rows, row = -(-lengths.keys // TILE_KEYS.value), -(-lengths.longest_q // ROWS.value)
    if lengths.packed:
        rows = lengths.keys // TILE_KEYS.value + lengths.batch
    if is_triangle(lengths, left, right):
        return Layout(heads, rows * (row - rows + 1), row, 0)
    if lengths.packed or left is None or right is None:  # all queries, from the first on
        return Layout(heads, rows * row, row, 2**30)
    left, right = within(lengths, left, right)
    reach = max(0, TILE_KEYS.value + left + right)
    row = min(row, reach // ROWS.value + 2)
    return Layout(heads, rows * row, row, right + lengths.keys - lengths.queries)


def is_triangle(lengths: Lengths, left: int | None, right: int | None) -> bool:
    causal = left is None and right == 0 and not lengths.packed
    return causal and lengths.queries == lengths.keys


def bytes_of(lengths: Lengths, o: Options, heads: int) -> int:
    """Of dS^T of so many heads of a batch element, or of a packed batch."""
    tiles = heads * layout_of(lengths, heads, o.left, o.right).of_head
    return 2 * TILE_KEYS.value * ROWS.value * tiles


def shares(lengths: Lengths, heads: int, heads_kv: int, o: Options) -> tuple[int, int]:
    """How many batch elements, and how many key heads of each, a part has at most: in as few parts
    as there can be, of which none is much larger than the others."""
    most = max(1, o.scratch // max(1, bytes_of(lengths, o, heads // heads_kv)))
    batch = 1 if lengths.packed else lengths.batch
    elements, most = min(max(1, most // heads_kv), batch), min(most, heads_kv)
    return -(-batch // -(-batch // elements)), -(-heads_kv // -(-heads_kv // most))


def serves(lengths: Lengths, heads: Heads, o: Options) -> bool:
    """Whether it does a call. Draws of dropout are numbered by all heads.

    If it is not asked for, only where it is ahead: where parts keep all programs at work, with two
    blocks of keys for each of them, or, where blocks are of unequal length, 2.5 (16 K causal: 2.6
    blocks, 1.03 of split; 8 K causal with grouped heads: 1.3 blocks, 0.85). Not of a packed batch
    (0.82), whose dS has room for the longest sequence in each; there, too, it would rest on
    `longest_q`, which callers give.
    """
    group = heads.heads // heads.heads_kv
    of_one = bytes_of(lengths, o, group)
    if o.dropout or of_one > o.scratch:
        return False
    if o.algorithm is not None or lengths.packed:
        return o.algorithm is not None
    elements, most = shares(lengths, heads.heads, heads.heads_kv, o)
    number = -(-lengths.batch // elements) * -(-heads.heads_kv // most)
    blocks = -(-lengths.keys // TILE_KEYS.value) * lengths.batch * heads.heads_kv / number
    alike = o.bounds is None and not o.tile_map and (o.left is None) == (o.right is None)
    return number == 1 or blocks >= (1.9 if alike else 2.5) * programs_of(o.programs, heads.device)
