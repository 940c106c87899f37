"""Variants of the backward kernels side by side: what each choice in their tables is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from anyflash.bench.hopper.backward.peers import Contest, Maker, launched, timed, user
from anyflash.bench.hopper.backward.rows import backward
from anyflash.bench.hopper.rows import Inputs, Row, square
from anyflash.kernels.hopper.tiles_backward import (
    Walk,
    choose_fused,
    choose_split,
    choose_stored,
)

LENGTHS = (4096, 16384)


class Variant(NamedTuple):
    """What is changed in a walk that the tables choose: that of `fused`, that from the keys of
    `stored`, or one of `split`; or, of `stored`, how much memory it has."""

    name: str
    walk: str  # "fused", "stored", "queries", "keys", "key" or "value"
    changes: dict[str, Any]


# By D and Dv.
VARIANTS_OF = {
    (64, 64): (
        Variant("fused", "fused", {}),
        Variant("fused, S early, X from shared memory", "fused",
                {"early": True, "own_registers": False}),
        Variant("fused, X from shared memory", "fused", {"own_registers": False}),
        Variant("fused, three slots", "fused", {"slots": 3, "slots_2": 3}),
        Variant("fused, results in X's place", "fused", {"shared_out": True}),
        Variant("fused, one slot of dS", "fused", {"ds_slots": 1}),
        Variant("split", "queries", {}),
        Variant("queries, 128 keys a tile", "queries", {"block": 128, "slots": 2, "slots_2": 2}),
        Variant("queries, X from shared memory", "queries", {"own_registers": False}),
        Variant("keys, X from shared memory", "keys", {"own_registers": False}),
        Variant("keys, results in X's place", "keys", {"shared_out": True}),
        Variant("stored", "stored", {}),
        Variant("stored, two slots of Q and dO", "stored", {"slots": 2, "slots_2": 2}),
    ),
    (128, 128): (
        Variant("fused", "fused", {}),
        Variant("fused, one slot of dS", "fused", {"ds_slots": 1}),
        Variant("fused, one slot of dO", "fused", {"slots_2": 1}),
        Variant("fused, S early", "fused", {"early": True}),
        Variant("split", "queries", {}),
        Variant("queries, 128 keys a tile", "queries",
                {"block": 128, "slots": 2, "slots_2": 2, "own_registers": False}),
        Variant("queries, two slots, X from shared memory", "queries",
                {"slots": 2, "slots_2": 2, "own_registers": False}),
        Variant("keys, S early", "keys", {"early": True}),
        Variant("keys, results in X's place", "keys", {"shared_out": True}),
        Variant("stored", "stored", {}),
        Variant("stored, results in X's place, three of dS", "stored",
                {"shared_out": True, "ds_slots": 3}),
        Variant("stored, 256 MiB", "stored", {"scratch": 2**28}),
        Variant("stored, 4 GiB", "stored", {"scratch": 2**32}),
    ),
    (256, 256): (
        Variant("split", "queries", {}),
        Variant("queries, 32 keys a tile", "queries", {"block": 32, "slots": 2, "slots_2": 2}),
        Variant("value, S early", "value", {"early": True}),
        Variant("key, S early", "key", {"early": True}),
    ),
}  # fmt: skip

ROWS = tuple(
    replace(row, name=f"variants, {row.name}")
    for row in (
        backward(square(d, s, causal, dv))
        for d, dv in VARIANTS_OF
        for s in LENGTHS
        for causal in (False, True)
    )
)
NAMES = frozenset(row.name for row in ROWS)


def options(row: Row, variant: Variant) -> dict[str, Any]:
    """Of the launcher. Raises ValueError or TypeError for a walk that there is not."""
    columns = row.head_dim, row.head_dim_v
    name, walk, changes = variant
    if walk in ("fused", "stored"):
        base = choose_fused(*columns) if walk == "fused" else choose_stored(*columns)
        if base is None:
            raise ValueError(f"{name}: no walk of {walk} for heads of {columns} columns")
        if isinstance(base, Walk):
            return {"algorithm": walk, walk: replace(base, **changes)}
        of_all = {"scratch": changes["scratch"]} if "scratch" in changes else {}
        keys = replace(base.keys, **{n: x for n, x in changes.items() if n not in of_all})
        return {"algorithm": walk, walk: replace(base, keys=keys), **of_all}
    split = choose_split(*columns)
    chosen: Walk | None = getattr(split, walk)
    if chosen is None:
        raise ValueError(f"{name}: {walk} is no walk of its own for heads of {columns} columns")
    return {"algorithm": "split", "split": split._replace(**{walk: replace(chosen, **changes)})}


def contest(row: Row, usual: Contest) -> tuple[Contest, dict[str, str]]:
    """With each variant of a row as if it were an algorithm, and why others cannot be built."""
    found: dict[str, Maker] = {}
    refusals = {}
    for variant in VARIANTS_OF[row.head_dim, row.head_dim_v]:
        try:
            asked = options(row, variant)
        except (TypeError, ValueError) as error:
            refusals[variant.name] = str(error)
            continue
        found[variant.name] = timed(lambda inputs, asked=asked: _passes(inputs, asked))
    return replace(usual, algorithms=found), refusals


def _passes(inputs: Inputs, asked: dict[str, Any]) -> Any:
    return user(inputs)._replace(backward=lambda saved: launched(inputs, saved, **asked))
