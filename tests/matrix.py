"""Which cases the battery runs: axes, and rows in which every pair of values of two axes meets.

The full product would be millions of cases; a fault usually needs two things together, so each row
is chosen to bring as many new pairs as possible. The construction has no randomness: the same rows
in the same order everywhere, with the most varied ones first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyflash as af
from plain import Seen

Axes = dict[str, tuple[Any, ...]]


def cover(axes: Axes) -> list[dict[str, Any]]:
    """Rows of an array in which each value of each axis meets each value of every other axis."""
    names = list(axes)
    missing = {
        (a, x, b, y)
        for a, b in combinations(range(len(names)), 2)
        for x, y in product(range(len(axes[names[a]])), range(len(axes[names[b]])))
    }
    use = [[0] * len(axes[name]) for name in names]
    rows = []
    for first in sorted(missing):
        if first not in missing:
            continue
        row = {first[0]: first[1], first[2]: first[3]}
        while len(row) < len(names):
            best = (-1, 0, 0, 0)
            for axis in range(len(names)):
                if axis in row:
                    continue
                for value in range(len(axes[names[axis]])):
                    new = sum(_pair(axis, value, *other) in missing for other in row.items())
                    best = max(best, (new, -use[axis][value], -axis, -value))
            row[-best[2]] = -best[3]
        for pair in combinations(sorted(row.items()), 2):
            missing.discard((*pair[0], *pair[1]))
        for axis, value in row.items():
            use[axis][value] += 1
        rows.append({names[axis]: axes[names[axis]][value] for axis, value in sorted(row.items())})
    return rows


def _pair(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
    return (a, x, b, y) if a < b else (b, y, a, x)


class Row(NamedTuple):
    """One case. `dtype` counts modulo the number of dtypes that a backend has."""

    dtype: int = 0
    lengths: Any = (127, 129)  # (Sq, Sk); packed: the name of an entry of PACKINGS
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_v: str = "same"
    mask: str = "none"
    sink: bool = False
    layout: str = "plain"
    loss: str = "out+lse"
    scale: float | None = None
    softcap: float | None = None
    added: str = "none"
    dropout: float = 0.0

    @property
    def width_v(self) -> int:
        other = {"same": 0, "less": -self.head_dim // 2, "more": 8}[self.head_dim_v]
        return max(2, self.head_dim + other) if other else self.head_dim

    def __str__(self) -> str:
        sides = self.lengths
        lengths = sides if isinstance(sides, str) else "x".join(map(str, sides))
        parts = [f"S{lengths}", "h{}k{}".format(*self.heads), f"D{self.head_dim}v{self.width_v}"]
        parts += [self.mask, self.layout, self.loss]
        parts += ["sink"] if self.sink else []
        parts += [] if self.scale is None else [f"scale{self.scale}"]
        parts += [f"cap{self.softcap}"] if self.softcap else []
        parts += [f"bias-{self.added}"] if self.added != "none" else []
        parts += [f"drop{self.dropout}"] if self.dropout else []
        return "-".join(parts)


HEAD_DIMS = (64, 128, 1, 3, 16, 40, 63, 72, 80, 96, 100, 192, 256)
LENGTHS = ((63, 65), (127, 129), (64, 64), (1, 1), (1, 128), (3, 799), (799, 3), (256, 256))
HEADS = ((2, 2), (4, 2), (3, 1), (6, 2))
LAYOUTS = ("plain", "bshd", "fused", "padded", "odd", "transposed", "expanded")
LOSSES = ("out+lse", "out", "lse", "sum", "strided")
DTYPES = (0, 1, 2, 3)
SCALES = (None, 0.0, -0.5, 0.7)
# What is added to the scores: a bias of each broadcast shape, some in a dtype of their own.
ADDED = (
    "none", "bhij", "11ij:float32", "b11j", "1hi1:float16", "b1ij:bfloat16", "j", "ij", "bh11",
    "alibi-h", "alibi-bh",
)  # fmt: skip


class Case(NamedTuple):
    """A mask for the library (as keyword arguments), and what it means."""

    arguments: dict[str, Any]
    seen: Seen | None


class Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device | str


Maker = Callable[[Sizes, torch.Generator], Case]
MASKS: dict[str, Maker] = {}


def _define(name: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        MASKS[name] = maker
        return maker

    return add


def _plain_mask(name: str, mask: Callable[[Sizes], Any], seen: Seen) -> None:
    MASKS[name] = lambda n, g: Case({"mask": mask(n)}, seen)


# Formulas, written without the library. p is where query i stands among the keys.


def _window(left: int | None, right: int | None) -> Seen:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        p = i + offset
        low = j >= p - left if left is not None else j >= 0
        high = j <= p + right if right is not None else j >= 0
        return low & high

    return seen


def _prefix(n: int) -> Seen:
    return lambda b, h, i, j, offset: j < n


def _both(f: Seen, g: Seen) -> Seen:
    return lambda *at: f(*at) & g(*at)


def _either(f: Seen, g: Seen) -> Seen:
    return lambda *at: f(*at) | g(*at)


def _not(f: Seen) -> Seen:
    return lambda *at: ~f(*at)


CAUSAL = _window(None, 0)

MASKS["none"] = lambda n, g: Case({}, None)
MASKS["causal"] = lambda n, g: Case({"causal": True}, CAUSAL)
_plain_mask("causal()", lambda n: af.causal(), CAUSAL)
_plain_mask("window(20,0)", lambda n: af.window(20, 0), _window(20, 0))
_plain_mask("window(70,9)", lambda n: af.window(70, 9), _window(70, 9))
_plain_mask("window(None,64)", lambda n: af.window(None, 64), _window(None, 64))
_plain_mask("window(64,None)", lambda n: af.window(64, None), _window(64, None))
_plain_mask("window(0,0)", lambda n: af.window(0, 0), _window(0, 0))
_plain_mask("prefix", lambda n: af.prefix(65), _prefix(65))
_plain_mask("prefix-lm", lambda n: af.causal() | af.prefix(70), _either(CAUSAL, _prefix(70)))
_plain_mask("~window", lambda n: ~af.window(40, 0), _not(_window(40, 0)))
_plain_mask("~causal", lambda n: ~af.causal(), _not(CAUSAL))
_plain_mask(
    "sink+window",
    lambda n: af.causal() & (af.window(30) | af.prefix(4)),
    _both(CAUSAL, _either(_window(30, None), _prefix(4))),
)
_plain_mask(  # three intervals in a row: no longer the interval form
    "three-intervals",
    lambda n: ~(af.window(20, 20) | af.prefix(3)) | af.window(2, 2),
    _either(_not(_either(_window(20, 20), _prefix(3))), _window(2, 2)),
)
_plain_mask("nothing", lambda n: af.prefix(0), _prefix(0))
_plain_mask(
    "function",
    lambda n: af.from_function(lambda b, h, i, j: (3 * i + 5 * j + 7 * h + b) % 4 < 2),
    lambda b, h, i, j, offset: (3 * i + 5 * j + 7 * h + b) % 4 < 2,
)
_plain_mask(
    "function-ij",
    lambda n: af.from_function(lambda b, h, i, j: (i // 40 + j // 40) % 2 == 0),
    lambda b, h, i, j, offset: (i // 40 + j // 40) % 2 == 0,
)


def _ids(n: Sizes, g: torch.Generator, per_batch: bool, sort: bool) -> tuple[Tensor, Tensor]:
    """Document ids; some ids of queries have no key, and the other way round."""
    shape = (n.batch,) if per_batch else ()
    ids_q, ids_k = (
        torch.randint(first, first + 4, (*shape, length), generator=g)
        for first, length in ((0, n.queries), (1, n.keys))
    )
    if sort:
        ids_q, ids_k = ids_q.sort(-1).values, ids_k.sort(-1).values
    return ids_q, ids_k


def _documents(per_batch: bool, sort: bool, also: str) -> Maker:
    def make(n: Sizes, g: torch.Generator) -> Case:
        ids_q, ids_k = _ids(n, g, per_batch, sort)
        mask, other = af.documents(ids_q.to(n.device), ids_k.to(n.device)), _window(None, 0)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
            rows, keys = (x.to(i.device).expand(n.batch, -1) for x in (ids_q, ids_k))
            same = rows[b, i] == keys[b, j]
            return same & other(b, h, i, j, offset) if also == "&causal" else same

        if also == "&causal":
            return Case({"mask": mask, "causal": True}, seen)
        return Case({"mask": ~mask}, _not(seen)) if also == "~" else Case({"mask": mask}, seen)

    return make


MASKS["documents"] = _documents(per_batch=False, sort=True, also="")
MASKS["documents-b"] = _documents(per_batch=True, sort=True, also="&causal")
MASKS["scattered"] = _documents(per_batch=False, sort=False, also="")
MASKS["scattered-b"] = _documents(per_batch=True, sort=False, also="&causal")
MASKS["~documents"] = _documents(per_batch=True, sort=True, also="~")


@_define("documents-self")
def _self_documents(n: Sizes, g: torch.Generator) -> Case:
    """ids_k left out where there are as many keys as queries."""
    ids = torch.arange(n.queries) * 3 // max(1, n.queries)
    others = torch.arange(n.keys) * 3 // max(1, n.keys)
    both = (ids,) if n.queries == n.keys else (ids, others)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        return ids.to(i.device)[i] == others.to(i.device)[j]

    return Case({"mask": af.documents(*(x.to(n.device) for x in both))}, seen)


def _padding(n: Sizes, g: torch.Generator) -> tuple[Tensor, Seen]:
    lengths = torch.randint(0, n.keys + 1, (n.batch,), generator=g)
    lengths[0] = 0
    return lengths.to(n.device), lambda b, h, i, j, offset: j < lengths.to(j.device)[b]


@_define("padding")
def _padded(n: Sizes, g: torch.Generator) -> Case:
    lengths, seen = _padding(n, g)
    return Case({"mask": af.padding(lengths)}, seen)


@_define("padding&window")
def _padded_window(n: Sizes, g: torch.Generator) -> Case:
    lengths, seen = _padding(n, g)
    mask = af.window(50, 50) & ~af.padding(lengths)
    return Case({"mask": mask}, _both(_window(50, 50), _not(seen)))


def _tensor(letters: str, also: str = "") -> Maker:
    """A boolean tensor: `letters` are the sides that it has, 1 where it broadcasts."""

    def make(n: Sizes, g: torch.Generator) -> Case:
        sides = dict(zip("bhij", n[:4], strict=True))
        shape = [sides.get(letter, 1) for letter in letters]
        tensor = torch.rand(shape, generator=g) < 0.6
        if "i" in letters:
            tensor[..., ::5, :] = False  # rows that attend nothing
        given = tensor.to(n.device)
        if also == "strided":  # what a transposed product leaves
            given = given.mT.contiguous().mT

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
            whole = tensor.to(i.device).expand(n[:4])
            return whole[b, h, i, j]

        if also == "causal":
            return Case({"mask": given, "causal": True}, _both(seen, CAUSAL))
        if also == "compiled":
            return Case({"mask": af.from_tensor(given).compile(*n[:4], device=n.device)}, seen)
        return Case({"mask": given}, seen)

    return make


for _letters in ("bhij", "1hij", "b1ij", "b11j", "b1i1", "bh11", "ij", "j"):
    MASKS[f"tensor-{_letters}"] = _tensor(_letters)
MASKS["tensor-ij-strided"] = _tensor("ij", "strided")
MASKS["tensor-b1ij&causal"] = _tensor("b1ij", "causal")
MASKS["compiled-b1ij"] = _tensor("b1ij", "compiled")
_plain_mask(
    "compiled-window",
    lambda n: af.window(33, 5).compile(*n[:4], device=n.device),
    _window(33, 5),
)


@_define("at")
def _at(n: Sizes, g: torch.Generator) -> Case:
    """Rows and keys of a shard: every other key, the rows in any order."""
    rows, keys = torch.randperm(n.queries + 5, generator=g)[: n.queries], 2 * torch.arange(n.keys)
    mask = af.window(90, 60).at(rows.to(n.device), keys.to(n.device))
    formula = _window(90, 60)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        return formula(b, h, rows.to(i.device)[i], keys.to(j.device)[j], 0)

    return Case({"mask": mask}, seen)


# Masks that a packed batch cannot have: a compiled one is made for one length, positions too.
DENSE_ONLY = ("compiled-b1ij", "compiled-window", "at", "documents-self")

# Lengths of packed sequences: queries, keys, and keys in use.
PACKINGS: dict[str, tuple[list[int], list[int], list[int] | None]] = {
    "mixed": ([5, 0, 64, 1, 130], [5, 3, 64, 66, 0], None),
    "self": ([63, 65, 1, 0, 128], [63, 65, 1, 0, 128], None),
    "used": ([3, 70, 0, 1, 9], [80, 70, 5, 129, 9], [65, 70, 0, 128, 0]),
    "one": ([130], [127], None),
    "decode": ([1, 1, 0, 1], [3, 128, 4, 65], None),
    "tail": ([0, 0, 0, 7], [0, 9, 0, 7], None),
}
PACKED_LAYOUTS = ("plain", "fused", "padded", "odd", "heads-first", "transposed")

# The masks that meet score modifications: one of each form.
SOME_MASKS = (
    "none", "causal", "window(70,9)", "sink+window", "documents-b", "scattered", "tensor-bhij",
    "tensor-b11j", "function", "nothing",
)  # fmt: skip


@cache
def dense_rows() -> list[Row]:
    """Shapes, masks and memory layouts, with scores as they are."""
    axes: Axes = {
        "mask": tuple(MASKS), "head_dim": HEAD_DIMS, "lengths": LENGTHS, "layout": LAYOUTS,
        "loss": LOSSES, "heads": HEADS, "dtype": DTYPES, "head_dim_v": ("same", "less", "more"),
        "sink": (False, True),
    }  # fmt: skip
    return [Row(**row) for row in cover(axes)]


@cache
def score_rows() -> list[Row]:
    """Everything that changes scores or weights, with some shapes, masks and layouts."""
    axes: Axes = {
        "added": ADDED, "mask": SOME_MASKS, "lengths": ((63, 65), (64, 64), (3, 799), (260, 70)),
        "loss": LOSSES, "scale": SCALES, "head_dim": (40, 64, 128, 1), "dtype": DTYPES,
        "heads": HEADS[1:], "layout": ("plain", "bshd", "expanded"), "softcap": (None, 15.0, 2.0),
        "dropout": (0.0, 0.3), "sink": (False, True),
    }  # fmt: skip
    return [Row(**row) for row in cover(axes)]


@cache
def packed_rows() -> list[Row]:
    """Packed sequences."""
    masks = ("window(0,0)", "~causal", "padding", "tensor-1hij", "prefix-lm", "scattered-b")
    axes: Axes = {
        "mask": (*SOME_MASKS, *masks), "lengths": tuple(PACKINGS), "head_dim": (64, 40, 128, 3),
        "layout": PACKED_LAYOUTS, "loss": LOSSES, "heads": HEADS, "dtype": DTYPES,
        "added": ("none", "bhij", "b11j", "alibi-bh"), "head_dim_v": ("same", "less", "more"),
        "scale": (None, -0.5), "softcap": (None, 15.0), "dropout": (0.0, 0.3),
        "sink": (False, True),
    }  # fmt: skip
    plain = [
        Row(n % 4, lengths, HEADS[n % 4], layout=layout, mask=mask)
        for n, (mask, (lengths, layout)) in enumerate(
            zip(axes["mask"] * 2, product(PACKINGS, PACKED_LAYOUTS), strict=False)
        )
    ]
    return list(dict.fromkeys([*plain, *(Row(**row) for row in cover(axes))]))


# Several tiles in both directions: what loops over blocks, splits and carries state.
LONG = (1023, 1024)
LONG_ROWS = [
    Row(0, LONG, (2, 1), 64, mask="causal"),
    Row(1, LONG, (2, 2), 64, mask="causal"),
    Row(1, LONG, (2, 2), 96, mask="none", sink=True),
    Row(2, LONG, (2, 1), 64, mask="window(70,9)", layout="bshd"),
    Row(3, LONG, (2, 2), 128, mask="function"),
    Row(0, LONG, (2, 2), 64, mask="documents", added="alibi-h"),
    Row(1, LONG, (2, 1), 80, mask="tensor-b1ij", softcap=15.0),
    Row(2, LONG, (2, 2), 64, mask="three-intervals", added="11ij:float32"),
    Row(3, LONG, (2, 1), 64, mask="~window", scale=-0.2, layout="fused"),
    Row(1, LONG, (2, 1), 64, mask="sink+window", dropout=0.3),
    Row(0, (1030, 515), (2, 1), 32, mask="causal", softcap=2.0, sink=True),
]
