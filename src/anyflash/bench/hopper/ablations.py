"""Variants of the forward kernel side by side: what each choice in its table of tiles is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from anyflash.bench.check import Check, Error
from anyflash.bench.hopper import timing
from anyflash.bench.hopper.check import Reference, poisoned
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.peers import Contest, Run, first_calls, unserved
from anyflash.bench.hopper.results import RowResult
from anyflash.bench.hopper.rows import CUDNN, OURS, VARIANTS, Inputs, Row, square
from anyflash.kernels.hopper.tiles import OF_THREE, Columns, Tile, choose, typical_keys

LENGTHS = (1024, 8192)
# What to compare with, and why 8192 is among the lengths.
PUBLISHED = (
    "The announcement of FlashAttention-3 has for D=128, S=8192 on an H100: 570 TFLOP/s, 620 with "
    "ping-pong, 640 to 660 with the overlap inside a warpgroup as well. That overlap is no variant "
    "here: with exponentials held in front of the wait for P V an earlier kernel ran at 0.96 of "
    "its speed (D=128; with S one tile ahead at D=64 0.91), and this one has no product in flight "
    "where it decides whether to rescale."
)


class Variant(NamedTuple):
    """What is changed in the tile that the table chooses."""

    name: str
    changes: dict[str, Any]


# By D and Dv. Registers follow the consumers: what a thread has is 65536 over the threads.
TWO, THREE = (
    {"consumers": 2, "registers": (168, 240, 24)},
    {"consumers": 3, "registers": OF_THREE},
)
WIDE = {**TWO, "block_kv": 128, "kv_slots": 2, "apart": False}
FULL = {"qk": Columns(256), "v": Columns(256)}
VARIANTS_OF = {
    (64, 64): (
        Variant("two consumers, Q in registers", {**TWO, "q_registers": True, "pingpong": False}),
        Variant("two, Q in registers, ping-pong", {**TWO, "q_registers": True, "pingpong": True}),
        Variant("two consumers, ping-pong", {**TWO, "q_registers": False, "pingpong": True}),
        Variant("three consumers, ping-pong", {**THREE, "q_registers": False, "pingpong": True}),
        Variant("three consumers", {**THREE, "q_registers": False, "pingpong": False}),
        Variant("64 keys a tile, four slots", {"block_kv": 64, "kv_slots": 4}),
        Variant("masked tiles apart", {"apart": True}),
        Variant("three slots of K and V", {"kv_slots": 3}),
    ),
    (128, 128): (
        Variant("ping-pong", {"pingpong": True}),
        Variant("two consumers, 128 keys", WIDE),
        Variant("two consumers, 64 keys", {**TWO, "block_kv": 64, "kv_slots": 3}),
        Variant("three consumers, 64 keys", {**THREE, "block_kv": 64, "kv_slots": 3}),
        Variant("masked tiles not apart", {"apart": False}),
        Variant("three, four slots", {**THREE, "block_kv": 64, "kv_slots": 4}),
        Variant("three, two slots", {**THREE, "block_kv": 64, "kv_slots": 2}),
        Variant("three, ping-pong", {**THREE, "block_kv": 64, "kv_slots": 3, "pingpong": True}),
        Variant("two consumers, Q in registers", {**WIDE, "q_registers": True}),
        Variant("output in Q's place", {"shared_out": True}),
    ),
    (96, 96): (
        Variant("filled up to 128 columns", {"qk": Columns(128), "v": Columns(128)}),
        Variant("two consumers, 128 keys", WIDE),
        Variant("ping-pong", {"pingpong": True}),
        Variant("four slots of K and V", {"kv_slots": 4}),
    ),
    (192, 192): (
        Variant("filled up to 256 columns", {**FULL, "shared_out": True}),
        Variant("ping-pong", {"pingpong": True}),
        Variant("three slots, output in Q's place", {"kv_slots": 3, "shared_out": True}),
        Variant("32 keys a tile", {"block_kv": 32}),
    ),
    (192, 128): (
        Variant("without ping-pong", {"pingpong": False}),
        Variant("64 keys a tile", {"block_kv": 64}),
        Variant("three consumers, 64 keys", {**THREE, "block_kv": 64, "pingpong": False}),
        Variant("V filled up to 192 columns", {"v": Columns(64, 3), "block_kv": 64}),
    ),
    (256, 256): (
        Variant("ping-pong", {"pingpong": True}),
        Variant("32 keys a tile", {"block_kv": 32}),
        Variant("32 keys a tile, three slots", {"block_kv": 32, "kv_slots": 3}),
        Variant("32 keys a tile, output apart", {"block_kv": 32, "shared_out": False}),
        Variant("masked tiles apart", {"apart": True}),
    ),
}  # fmt: skip

ROWS = tuple(
    replace(row, name=f"kernel variants, {row.name}", measure=VARIANTS)
    for row in (
        square(d, s, causal, dv)
        for d, dv in VARIANTS_OF
        for s in LENGTHS
        for causal in (False, True)
    )
)


def tiles(row: Row) -> tuple[dict[str, Tile], dict[str, str]]:
    """The tile of each side, the table's own as OURS first, and why other variants have none."""
    keys = typical_keys(row.keys, None, 0 if row.causal else None)
    base = choose(row.head_dim, row.head_dim_v, keys)
    found, refusals = {OURS: base}, {}
    for name, changes in VARIANTS_OF[row.head_dim, row.head_dim_v]:
        try:
            tile = replace(base, **changes)
        except (TypeError, ValueError) as error:  # no such field, or no such kernel
            refusals[name] = str(error)
            continue
        if tile == base:
            refusals[name] = "it is the table's tile"
        else:
            found[name] = tile
    return found, refusals


def run(
    row: Row,
    settings: Settings,
    tools: Instruments,
    on_round: Callable[[], None],
    contest: Contest,
) -> RowResult:
    """Check the variants of a row, and time those that are right against the table's tile and
    cuDNN. A variant that is wrong fails the row's check; the others are timed nonetheless."""
    inputs = Inputs.of(row, tools.device)
    reference = Reference(inputs)
    others, refusals = first_calls({CUDNN: contest.others[CUDNN]}, inputs)
    found, without = tiles(row)
    refusals |= without
    errors: list[Error] = []
    right: dict[str, Run] = {}
    for name, tile in found.items():
        call = _call(contest.kernel, inputs, tile)
        try:
            with poisoned():
                out = call()
        except Exception as error:
            why = unserved(error)
            if name == OURS or why is None:
                raise
            refusals[name] = why
            continue
        errors.append(reference.error(out, name=f"out, {name}"))
        if errors[-1].passed:
            right[name] = call
    result = RowResult(row, tuple(errors), refusals)
    if OURS not in right:
        return result
    peers = {name: run for name, (run, _) in others.items()}
    sides, failed = tools.sides(right, peers, settings.seconds)
    check = Check(row.name, tuple(e for e in errors if e.passed))
    burst = timing.burst(
        check, sides, rounds=settings.rounds, event=tools.event, on_round=on_round
    )  # fmt: skip
    return replace(result, refusals=refusals | failed, burst=burst)


def _call(kernel: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, tile: Tile) -> Run:
    row = inputs.row
    scale, right = row.head_dim**-0.5, 0 if row.causal else None
    return lambda: kernel(inputs.q, inputs.k, inputs.v, scale=scale, right=right, tile=tile)[0]
