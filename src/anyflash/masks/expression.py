"""What every mask is: an immutable expression that knows its text, its tensors and its scores."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyflash.errors import InvalidInput
from anyflash.masks.compiled import compile_mask, forget
from anyflash.masks.index import Coordinates, Extent, Rows, grid

NODES: dict[str, Any] = {}  # every kind of mask by its class name, as `text` spells it


class Mask:
    """Base of all masks: closed under `&`, `|`, `~`; `masks/__init__.py` has the makers.

    `text` and `leaves` are the expression as a string and its tensors in order: what passes through
    a torch.library operator, and the key under which the compiled mask is cached.
    """

    text: str
    leaves: tuple[Tensor, ...]

    def __init_subclass__(cls) -> None:
        NODES[cls.__name__] = cls

    def __post_init__(self) -> None:
        words: list[str] = []
        leaves: list[Tensor] = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Mask):
                words.append(value.text)
                leaves += value.leaves
            elif isinstance(value, Tensor):
                words.append("t")
                leaves.append(value)
            elif isinstance(value, int):  # index(): a number even where dynamo holds a symbol
                words.append(repr(operator.index(value)))
            else:
                words.append(repr(value))
        object.__setattr__(self, "text", f"{type(self).__name__}({','.join(words)})")
        object.__setattr__(self, "leaves", tuple(leaves))

    def __bool__(self) -> bool:
        """`a and b` would silently drop a: masks combine with &, | and ~."""
        raise InvalidInput("mask", "a mask as a truth value", "masks combined with &, | and ~")

    def __and__(self, other: Mask) -> Mask:
        _require_mask(other, "&")
        return NODES["And"].of(self, other)

    def __or__(self, other: Mask) -> Mask:
        _require_mask(other, "|")
        return NODES["Or"](self, other)

    def __invert__(self) -> Mask:
        return NODES["Not"].of(self)

    def at(self, q_positions: Tensor, k_positions: Tensor) -> Mask:
        """The same mask for a shard or a chunk of a square problem.

        q_positions (Sq,) and k_positions (Sk,), integers: local query row i is row q_positions[i]
        of the whole problem, local key j its key k_positions[j]. A whole problem has as many
        queries as keys, so row r stands at key position r.
        """
        return NODES["At"](
            self, _positions("q_positions", q_positions), _positions("k_positions", k_positions)
        )

    def materialise(
        self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The mask as a boolean tensor (batch, heads, queries, keys), for tests."""
        extent = Extent(batch, heads, queries, keys)
        self.check(extent)
        index = grid(extent, slice(0, queries), slice(0, keys), torch.device(device))
        return self.visible(index).expand(batch, heads, queries, keys).contiguous()

    def show(
        self, queries: int, keys: int, *, batch: int = 0, head: int = 0, tile: int = 64
    ) -> str:
        """A picture of one head, a character a tile: '·' skip, '▒' partial, '█' full."""
        extent = Extent(batch + 1, head + 1, queries, keys)
        self.check_reach(extent)
        lines = []
        for q0 in range(0, queries, tile):
            index = grid(
                extent, slice(q0, min(q0 + tile, queries)), slice(0, keys), torch.device("cpu")
            )
            index = index._replace(batch=index.batch[-1:], head=index.head[:, -1:], box=None)
            seen = self.visible(index)
            seen = seen.expand(1, 1, index.row.shape[2], keys)[0, 0]
            tiles = [t for t in seen.split(tile, dim=1) if t.numel()]
            lines.append("".join("█" if t.all() else "▒" if t.any() else "·" for t in tiles))
        return "\n".join(lines)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self), tuple(getattr(self, f.name) for f in fields(self)))  # type: ignore[arg-type]

    def compile(
        self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str = "cpu"
    ) -> Mask:
        """The mask in the form that kernels read, built now, for exactly this problem.

        For a mask that serves many layers and steps: nothing is looked up or built later, but for
        the lists of tiles that a kernel makes of a tile map at its first call. The result holds no
        expression any more, so that it can always be pickled.
        """
        extent = Extent(batch, heads, queries, keys)
        self.check(extent)
        form = compile_mask(self, extent, torch.device(device))
        return NODES["Compiled"](type(form).__name__, *extent, *form.tensors)

    # What every mask answers. `check` raises InvalidInput; the others may assume that it passed.

    def check_reach(self, least: Extent) -> None:
        """Raise InvalidInput if the mask's tensors do not reach as far as `least`: they may hold
        more rows and keys, and more of a batch, but not fewer."""
        for field in fields(self):  # type: ignore[arg-type]
            inner = getattr(self, field.name)
            if isinstance(inner, Mask):
                inner.check_reach(least)

    def check(self, extent: Extent) -> None:
        """Raise InvalidInput if the mask's tensors do not fit the problem."""

    def visible(self, at: Coordinates) -> Tensor:
        """Boolean, in its natural shape: size 1 along what the mask does not depend on."""
        raise NotImplementedError

    def interval_bound(self) -> int | None:
        """How many key intervals a row can have, or None if rows need not be intervals."""
        return None

    def intervals(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Key intervals [lo, hi) of each row: int64 (B, rows, n) each, sorted, disjoint, inside
        [0, keys); unused ones are empty and come last. Only if `interval_bound()` is a number."""
        raise NotImplementedError


def _rebuild(kind: type[Mask], values: tuple[Any, ...]) -> Mask:
    return kind(*values)


def from_text(text: str, leaves: Iterable[Tensor]) -> Mask | None:
    """The mask whose `text` and `leaves` these are; None for the empty text."""
    return _builder(text)(iter(leaves)) if text else None


# Masks that travel by name: what holds a function, or a form that plans are kept for.
_by_number: weakref.WeakValueDictionary[int, Mask] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(mask: Mask) -> str:
    """A text by which `from_text` finds this very mask while it lives."""
    number = next(_numbers)
    _by_number[number] = mask
    weakref.finalize(mask, forget, number).atexit = False
    return f"#{number}"


def numbered(number: int) -> Mask:
    mask = _by_number.get(number)
    if mask is None:
        got = f"mask number {number}, which no longer exists"
        expected = "a mask that lives until its backward pass has run"
        raise InvalidInput("mask", got, expected)
    return mask


@lru_cache(maxsize=256)
def _builder(text: str) -> Callable[[Iterator[Tensor]], Mask]:
    """Parse once per expression; the result only takes leaves in order."""
    position = 0

    def parse() -> Callable[[Iterator[Tensor]], Any]:
        nonlocal position
        stop = next(i for i in itertools.count(position) if i == len(text) or text[i] in "(),")
        word, position = text[position:stop], stop
        if word == "t":
            return next
        if word.startswith("#"):
            number = int(word[1:])
            return lambda leaves: numbered(number)
        if word not in NODES:
            value = None if word == "None" else int(word) if word.lstrip("-").isdigit() else word
            return lambda leaves: value
        parts = []
        while text[position] != ")":
            position += 1  # past "(" or ","
            if text[position] != ")":
                parts.append(parse())
        position += 1
        return lambda leaves: NODES[word](*[part(leaves) for part in parts])

    return parse()


def _require_mask(value: object, operator: str) -> None:
    if not isinstance(value, Mask):
        got = type(value).__name__
        raise InvalidInput(
            f"mask {operator}", got, "another mask", "wrap a boolean tensor in from_tensor"
        )


def integers(name: str, value: object, ranks: tuple[int, ...]) -> Tensor:
    if (
        not isinstance(value, Tensor)
        or value.dtype.is_floating_point
        or value.dtype.is_complex
        or value.dtype == torch.bool
    ):
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(name, got, "an integer tensor")
    if value.ndim not in ranks:
        raise InvalidInput(name, tuple(value.shape), f"{' or '.join(f'{r}-D' for r in ranks)}")
    return value


def _positions(name: str, value: object) -> Tensor:
    return integers(f"at({name})", value, (1,))
