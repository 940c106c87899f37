"""The forward kernel for Hopper: in the emulator, on a card, and through the compiler."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")


import plain
from anyflash.kernels.hopper import launch as kernel
from anyflash.kernels.hopper.operands import addressable
from anyflash.kernels.hopper.tiles import ROWS, Columns, Tile, choose, typical_keys
from gluon_compile import Compiled, compile_launches
from gluon_plugin import Gluon
from hopper_cases import (
    INTERVALS,
    MAPS,
    bounds_of,
    map_of,
    seen_by,
    seen_in,
    seen_on,
    tensors,
)  # fmt: skip
from plain import Terms, assert_close, assert_same


def small(columns: int | Columns, **changes: Any) -> Tile:
    """A tile of few keys, so that few keys make many tiles."""
    c = columns if isinstance(columns, Columns) else Columns(columns)
    return Tile(**{"qk": c, "v": c, "consumers": 2, "block_kv": 64, "kv_slots": 2} | changes)


SMALL = small(64)
WIDE = small(64, consumers=3, kv_slots=3, apart=True, registers=(128, 160, 24))
TURNS = small(64, pingpong=True)
THREE_TURNS = small(64, consumers=3, pingpong=True, registers=(128, 160, 24))
HALF = small(128, shared_out=True)
IN_REGISTERS = small(64, q_registers=True)
PANELS = small(Columns(32, 3), v=Columns(32, 2), shared_out=True)
LONG = small(64, block_kv=128)
MIXED = small(Columns(32, 3), v=Columns(128))


class Case(NamedTuple):
    shape: tuple[int, int, int, int, int]  # B, Hq, Hkv, Sq, Sk
    dims: tuple[int, int] = (64, 64)  # D, Dv
    tile: Tile | None = SMALL
    programs: int = 3  # fewer than blocks: they are drawn from a counter
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhsd"
    options: dict[str, Any] | None = None


CASES = {
    "dense": Case((1, 2, 2, 300, 300)),
    "a block each": Case((2, 2, 2, 100, 200), programs=64),
    "causal": Case((1, 2, 2, 300, 300), options={"right": 0}),
    "causal, more keys": Case((1, 2, 2, 130, 333), options={"right": 0}),
    "causal, rows without keys": Case((1, 2, 2, 333, 130), options={"right": 0}),
    "window": Case((1, 2, 2, 400, 400), options={"left": 70, "right": 0}),
    "window both ways": Case((1, 1, 1, 300, 250), options={"left": 20, "right": 90}),
    "left only": Case((1, 1, 1, 200, 300), options={"left": 60}),
    "of one key": Case((1, 1, 1, 130, 130), options={"left": 0, "right": 0}),
    "beyond all keys": Case((1, 1, 1, 100, 300), options={"left": -250, "right": 400}),
    "three consumers": Case((1, 2, 2, 400, 300), tile=WIDE, options={"right": 0}),
    "taking turns": Case((1, 3, 3, 300, 300), tile=TURNS, options={"right": 0}),
    "three take turns": Case((1, 3, 3, 300, 300), tile=THREE_TURNS, options={"right": 0}),
    "scores of 30, wide": Case((1, 2, 2, 200, 300), (128, 128), HALF, options={"scale": 30.0}),
    "output in Q's place": Case((1, 4, 2, 200, 200), (128, 128), tile=HALF, options={"right": 0}),
    "grouped": Case((2, 6, 2, 130, 130), layout="bshd"),
    "float16": Case((1, 2, 1, 200, 200), dtype=torch.float16, options={"right": 0}),
    "D 80, Dv 48": Case((1, 2, 2, 130, 130), (80, 48), tile=HALF),
    "odd D": Case((1, 2, 2, 130, 130), (5, 3)),
    "D 40, Dv 64": Case((1, 2, 2, 70, 70), (40, 64), layout="fused"),
    "negative scale": Case((1, 2, 2, 130, 200), options={"scale": -0.3, "right": 0}),
    "scale 0": Case((1, 2, 2, 130, 200), options={"scale": 0.0, "right": 0}),
    "softcap": Case((1, 2, 2, 130, 200), options={"softcap": 5.0, "right": 0}),
    "sink": Case((1, 3, 3, 200, 130), options={"sink": True, "right": 0}),
    "two sections of heads": Case((1, 17, 17, 200, 70), options={"right": 0}),
    "three sections of heads": Case((3, 11, 11, 130, 70)),
    **{
        f"tile edge {left}, {right}": Case(
            (1, 1, 1, 300, 300), options={"left": left, "right": right}
        )
        for left, right in (
            (None, 1),
            (None, 62),
            (None, 63),
            (None, 64),
            (63, 0),
            (64, 0),
            (65, 0),
            (126, 0),
            (127, 0),
            (128, 5),
            (2**31 - 1, 0),
            (3, 2**31 - 2),
            (2**40, 2**40),
            (-(2**31), None),
            (None, -(2**40)),
        )
    },
    "tiny scale": Case((1, 1, 1, 100, 100), options={"scale": 1e-46, "right": 0}),
    "large scores": Case((1, 1, 1, 100, 100), options={"scale": 1e5, "right": 0}),
    "one key": Case((1, 2, 2, 1, 1), options={"right": 0}),
    "one query": Case((2, 4, 1, 1, 333)),
    "Q in registers": Case((1, 2, 2, 200, 200), tile=IN_REGISTERS, options={"right": 0}),
    "table 64, long": Case((1, 1, 1, 200, 2200), tile=None),
    "panels": Case((1, 2, 2, 200, 150), (96, 64), tile=PANELS, options={"right": 0}),
    "panels of two widths": Case((1, 2, 2, 70, 150), (96, 100), tile=MIXED),
    "panels, narrow": Case((1, 2, 2, 70, 150), (70, 40), tile=PANELS, layout="fused"),
    "share 2": Case((2, 4, 2, 100, 150), options={"right": 0, "share": 2, "sink": True}),
    "share 4": Case(
        (1, 8, 2, 70, 150), layout="bshd", options={"left": 20, "right": 3, "share": 4}
    ),
    "share 4 of 12": Case((1, 12, 1, 30, 70), options={"share": 4, "right": 0}),
    "share 64": Case((1, 64, 1, 5, 150), tile=WIDE, options={"share": 64, "right": 0}),
    "share, panels": Case((1, 4, 2, 50, 150), (96, 64), tile=PANELS, options={"share": 2}),
    "dropout": Case((2, 2, 1, 200, 150), options={"dropout": 0.3, "right": 0}),
    "dropout, three consumers": Case((1, 2, 2, 250, 131), tile=WIDE, options={"dropout": 0.8}),
    "dropping everything": Case((1, 2, 2, 70, 70), options={"dropout": 1.0}),
    "table 64": Case((1, 2, 2, 200, 260), tile=None),
    "table 96": Case((1, 2, 2, 140, 260), (96, 96), tile=None, options={"right": 0}),
    "table 192": Case((1, 2, 2, 140, 130), (192, 192), tile=None, options={"right": 0}),
    "table 192, 128": Case((1, 2, 2, 140, 260), (192, 128), tile=None, options={"right": 0}),
    "table, one query": Case((2, 8, 1, 1, 333), tile=None, options={"right": 0}),
    "table 128": Case((1, 2, 2, 200, 260), (128, 128), tile=None, options={"right": 0}),
    "table 256": Case((1, 2, 2, 140, 130), (256, 256), tile=None, options={"right": 0}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward(gluon: Gluon, case: Case) -> None:
    q, k, v = tensors(case, gluon.device)
    options = {"scale": case.dims[0] ** -0.5, **(case.options or {})}
    sink = seed = None
    if options.pop("sink", False):
        sink = torch.randn(case.shape[1], generator=torch.Generator().manual_seed(1))
        sink = sink.to(gluon.device)
    if options.get("dropout"):
        seed = torch.tensor([2**40 + 12345], device=gluon.device)
    run = {**options, "sink": sink, "seed": seed, "tile": case.tile, "programs": case.programs}
    out, lse = kernel.forward(q, k, v, **run)
    assert len(gluon.launches) == gluon.emulated

    softcap = options.get("softcap")
    terms = Terms(
        scale=options["scale"], softcap=softcap, seen=seen_by(options), sink=sink,
        dropout=options.get("dropout", 0.0), seed=seed,
    )  # fmt: skip
    # lse is float32 whatever q is, and is held to that.
    like = (
        plain.attention(q, k, v, terms)[0],
        plain.attention(*(x.float() for x in (q, k, v)), terms)[1],
    )
    wide = terms._replace(sink=None if sink is None else sink.double())
    exact = plain.attention(*(x.double() for x in (q, k, v)), wide)
    for name, x, y, z in zip(("out", "lse"), (out, lse), like, exact, strict=True):
        assert_close(name, x, y, z, softcap=softcap is not None)
    assert out.dtype == q.dtype


@pytest.mark.parametrize("form", INTERVALS)
@pytest.mark.parametrize("tile", [SMALL, WIDE], ids=["2 consumers", "3 consumers"])
def test_row_intervals(gluon: Gluon, form: str, tile: Tile) -> None:
    q, k, v = tensors(Case((2, 2, 1, 260, 400)), gluon.device)
    forms = [form, "documents" if len(INTERVALS[form](torch.arange(1), 9)) == 1 else form]
    bounds = torch.stack([bounds_of(f, 260, 400) for f in forms])
    for some in (bounds, bounds[:1]):
        run = {"bounds": some.to(gluon.device), "tile": tile, "programs": 3, "scale": 0.125}
        found = kernel.forward(q, k, v, **run)
        compare(found, (q, k, v), Terms(scale=0.125, seen=seen_in(some)))


@pytest.mark.parametrize("form", MAPS)
@pytest.mark.parametrize("tile", [SMALL, WIDE, LONG], ids=["2", "3", "128 keys"])
def test_tile_maps(gluon: Gluon, form: str, tile: Tile) -> None:
    q, k, v = tensors(Case((2, 2, 1, 260, 330)), gluon.device)
    run = {"tile_map": map_of(form, (2, 2, 260, 330), gluon.device), "tile": tile, "programs": 3}
    found = kernel.forward(q, k, v, **run, scale=0.125)
    compare(found, (q, k, v), Terms(scale=0.125, seen=seen_on(form)))


@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256])
def test_tile_maps_with_all_else(gluon: Gluon, columns: int) -> None:
    q, k, v = tensors(Case((1, 2, 1, 200, 140), (columns, columns)), gluon.device)
    sink = torch.tensor([0.5, -1.0], device=gluon.device)
    seed = torch.tensor([2**40 + 12345], device=gluon.device)
    more: dict[str, Any] = {"softcap": 3.0, "sink": sink, "dropout": 0.3, "seed": seed}
    tile_map = map_of("random", (1, 2, 200, 140), gluon.device)
    found = kernel.forward(q, k, v, scale=0.1, tile_map=tile_map, programs=2, **more)
    terms = Terms(scale=0.1, seen=seen_on("random"), **more)
    compare(found, (q, k, v), terms, softcap=True)


@pytest.mark.parametrize("order", [(2, 0, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3), (0, 2, 1, 3)])
def test_intervals_of_values_in_any_order(gluon: Gluon, order: tuple[int, ...]) -> None:
    """v is read as one long sequence, in which batch elements begin every so many rows: copied
    where it cannot be."""
    q, k, v = tensors(Case((2, 2, 2, 70, 90)), gluon.device)
    bounds = torch.stack([bounds_of(form, 70, 90) for form in ("documents", "empty rows")])
    run = {"scale": 0.125, "bounds": bounds.to(gluon.device), "tile": SMALL, "programs": 3}
    back = [order.index(n) for n in range(4)]
    moved = v.permute(order).contiguous().permute(back)
    for x, y in zip(
        kernel.forward(q, k, moved, **run), kernel.forward(q, k, v, **run), strict=True
    ):
        assert_same("moved", x, y)


def test_nothing_seen_is_nothing_read(gluon: Gluon) -> None:
    q, k, v = tensors(Case((1, 2, 2, 70, 150)), gluon.device)
    bounds = torch.empty(1, 70, 0, 2, dtype=torch.int32, device=gluon.device)
    v = torch.full_like(v, math.nan)
    out, lse = kernel.forward(q, k, v, scale=1.0, bounds=bounds, tile=SMALL, programs=3)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("fault", [{"share": 3}, {"share": 4}, {"share": 2, "dropout": 0.5}])
def test_heads_that_cannot_share(fault: dict[str, Any]) -> None:
    q, k, v = (torch.empty(1, n, 64, 64, dtype=torch.bfloat16) for n in (6, 3, 3))
    with pytest.raises(ValueError, match="share"):
        kernel.forward(q, k, v, scale=1.0, tile=SMALL, programs=3, **fault)


def test_shared_tiles_of_intervals(gluon: Gluon) -> None:
    q, k, v = tensors(Case((2, 8, 2, 50, 200)), gluon.device)
    bounds = bounds_of("first keys and a window", 50, 200)[None]
    run = {"bounds": bounds.to(gluon.device), "tile": SMALL, "programs": 3, "share": 4}
    found = kernel.forward(q, k, v, **run, scale=0.125)
    compare(found, (q, k, v), Terms(scale=0.125, seen=seen_in(bounds)))


def compare(found: Any, qkv: Any, terms: Terms, softcap: bool = False) -> None:
    """By the tolerance rule; lse is float32 whatever q is, and is held to that."""
    like = (
        plain.attention(*qkv, terms)[0],
        plain.attention(*(x.float() for x in qkv), terms)[1],
    )
    wide = terms._replace(sink=None if terms.sink is None else terms.sink.double())
    exact = plain.attention(*(x.double() for x in qkv), wide)
    for name, x, y, z in zip(("out", "lse"), found, like, exact, strict=True):
        assert_close(name, x, y, z, softcap=softcap)


def test_what_tma_cannot_address_is_copied(gluon: Gluon) -> None:
    case = Case((2, 2, 2, 70, 130))
    q, k, v = tensors(case, gluon.device)
    run = {"scale": 0.125, "tile": SMALL, "programs": 3}
    expected = kernel.forward(q, k, v, **run)
    rows = torch.empty(2, 2, 130, 65, dtype=k.dtype, device=k.device)[..., 1:].copy_(k)
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    one = q[:1, :1].expand(2, 2, 70, 64)
    assert not any(map(addressable, (rows, columns, one)))
    assert all(map(addressable, (q, k, v, k.transpose(1, 2), k[:, :, ::2])))
    for name, x, y in zip(
        ("out", "lse"), kernel.forward(q, rows, columns, **run), expected, strict=True
    ):
        assert_same(name, x, y)
    out, _ = kernel.forward(one, k, v, **run)
    assert_same("out", out, kernel.forward(one.contiguous(), k, v, **run)[0])


def test_exact_numbers(gluon: Gluon) -> None:
    """Scores of 0 or far below, values that are small integers: every weight is one over a power of
    two, and nothing is rounded."""
    rows = torch.arange(256, device=gluon.device)
    q = torch.eye(256, 64, device=gluon.device)[rows % 64].expand(1, 2, 256, 64).bfloat16()
    v = torch.randint(-8, 9, (1, 2, 256, 64), generator=torch.Generator().manual_seed(0))
    v = v.bfloat16().to(gluon.device)
    out, lse = kernel.forward(q, q, v, scale=2.0**12, tile=SMALL, programs=3)
    expected = v.float().unflatten(2, (4, 64)).mean(2).repeat(1, 1, 4, 1)
    assert_same("out", out, expected.to(out.dtype))
    assert_close(
        "lse", lse, torch.full_like(lse, 2.0**12), torch.full_like(lse, 4096 + math.log(4)).double()
    )


@pytest.mark.parametrize("bytes_off", [2, 6, 8, 16])
def test_bases_off_by_a_few_bytes(gluon: Gluon, bytes_off: int) -> None:
    q, k, v = tensors(Case((1, 2, 2, 70, 130)), gluon.device)
    room = torch.zeros(k.numel() + 16, dtype=k.dtype, device=k.device)[bytes_off // 2 :]
    moved = room[: k.numel()].view(k.shape).copy_(k)
    assert addressable(moved) == (bytes_off == 16)
    run = {"scale": 0.125, "tile": SMALL, "programs": 3}
    assert_same("out", kernel.forward(q, moved, v, **run)[0], kernel.forward(q, k, v, **run)[0])


def test_axes_of_length_one_with_any_stride(gluon: Gluon) -> None:
    q, k, v = tensors(Case((1, 1, 1, 1, 130)), gluon.device)
    odd = q.as_strided(q.shape, (7, 3, 5, 1))
    run = {"scale": 0.125, "tile": SMALL, "programs": 3}
    assert_same("out", kernel.forward(odd, k, v, **run)[0], kernel.forward(q, k, v, **run)[0])


def test_a_sink_alone(gluon: Gluon) -> None:
    """Rows that see nothing: lse is the sink, −inf and 1e38 among them."""
    q, k, v = tensors(Case((1, 3, 3, 130, 64)), gluon.device)
    sink = torch.tensor([-math.inf, 0.5, 1e38], device=gluon.device)
    run = {"scale": 0.125, "right": -100, "sink": sink, "tile": SMALL, "programs": 3}
    out, lse = kernel.forward(q, k, v, **run)
    assert (out[:, :, :100] == 0).all() and out.isfinite().all()
    assert (lse[0, 0, :100] == -math.inf).all() and (lse[0, 2] > 0.99e38).all()
    torch.testing.assert_close(lse[0, 1, :100], torch.full_like(lse[0, 1, :100], 0.5))


def test_the_output_has_the_axes_of_q(gluon: Gluon) -> None:
    for layout, order in (("bhsd", (0, 1, 2)), ("bshd", (0, 2, 1)), ("fused", (0, 2, 1))):
        q, k, v = tensors(Case((2, 3, 3, 70, 70), layout=layout), gluon.device)
        out, _ = kernel.forward(q, k, v, scale=1.0, tile=SMALL, programs=3)
        steps = [out.stride(axis) for axis in order]
        assert steps == sorted(steps, reverse=True)
    one = q[:1].expand(2, 3, 70, 64)
    out, _ = kernel.forward(one, k, v, scale=1.0, tile=SMALL, programs=3)
    assert out.stride(0) == max(out.stride())


def test_rows_beyond_a_sequence_do_not_leak(gluon: Gluon) -> None:
    """The keys of one head end inside a tile, and in memory NaN follows."""
    room = torch.full((1, 1, 200, 64), math.nan, dtype=torch.bfloat16, device=gluon.device)
    given = tensors(Case((1, 1, 1, 70, 90)), gluon.device)
    q, k, v = (room.clone()[:, :, : x.shape[2]].copy_(x) for x in given)
    out, lse = kernel.forward(q, k, v, scale=0.125, tile=SMALL, programs=3)
    alone = kernel.forward(
        *(x.contiguous() for x in (q, k, v)), scale=0.125, tile=SMALL, programs=3
    )
    assert_same("out", out, alone[0])
    assert_same("lse", lse, alone[1])


# Packed sequences.


class Sequences(NamedTuple):
    queries: list[int]
    keys: list[int]
    used: list[int] | None = None
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    tile: Tile | None = SMALL
    programs: int = 3
    options: dict[str, Any] | None = None


PACKED = {
    "causal": Sequences([100, 1, 130, 64], [100, 1, 130, 64], options={"right": 0}),
    "more keys": Sequences([100, 1, 130], [130, 90, 200], options={"right": 0}, tile=WIDE),
    "fewer keys": Sequences([100, 70], [30, 64], options={"right": 0}),
    "empty ones": Sequences([0, 100, 0, 0, 30, 0], [3, 90, 0, 7, 0, 5]),
    "unused keys": Sequences([100, 30, 65], [90, 130, 64], [70, 0, 64]),
    "window": Sequences([200, 150], [200, 180], options={"left": 40, "right": 10}),
    "many": Sequences([5] * 300, [9] * 300, options={"right": 0}, programs=4, heads=(1, 1)),
    "one": Sequences([130], [200], programs=64, tile=TURNS),
    "one row": Sequences([1], [1], tile=HALF, dims=(128, 128)),
    "sink": Sequences([70, 70], [30, 90], options={"right": 0, "sink": True}),
    "narrow": Sequences([70, 70], [30, 90], dims=(40, 24)),
    "table": Sequences([300, 10], [200, 40], tile=None, dims=(128, 128)),
}


@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED.keys())
def test_packed_sequences(gluon: Gluon, case: Sequences) -> None:
    g = torch.Generator().manual_seed(len(case.queries))
    starts_q, starts_k = ([0, *itertools.accumulate(x)] for x in (case.queries, case.keys))
    (hq, hkv), (d, dv) = case.heads, case.dims
    shapes = (starts_q[-1], hq, d), (starts_k[-1], hkv, d), (starts_k[-1], hkv, dv)
    q, k, v = (torch.randn(s, generator=g).bfloat16().to(gluon.device) for s in shapes)
    clean = k, v
    if case.used is not None:
        k, v = k.clone(), v.clone()
        for start, end, used in zip(starts_k, starts_k[1:], case.used, strict=False):
            k[start + used : end] = v[start + used : end] = math.nan
    options = {"scale": 0.125, **(case.options or {})}
    sink = torch.randn(hq, generator=g).to(gluon.device) if options.pop("sink", False) else None
    numbers = [
        None if x is None else torch.tensor(x, dtype=torch.int32, device=gluon.device)
        for x in (starts_q, starts_k, case.used)
    ]
    run = {**options, "sink": sink, "tile": case.tile, "programs": case.programs}
    found = kernel.forward_packed(q, k, v, *numbers, **run)
    assert len(gluon.launches) == gluon.emulated

    terms = Terms(scale=0.125, seen=seen_by(options), sink=sink)
    packing = plain.Packing(starts_q, starts_k, case.used)
    like = (
        plain.packed(q, *clean, terms, packing)[0],
        plain.packed(*(x.float() for x in (q, *clean)), terms, packing)[1],
    )
    wide = terms._replace(sink=None if sink is None else sink.double())
    exact = plain.packed(*(x.double() for x in (q, *clean)), wide, packing)
    for name, x, y, z in zip(("out", "lse"), found, like, exact, strict=True):
        assert_close(name, x, y, z)


def test_packed_neighbours_do_not_leak(gluon: Gluon) -> None:
    """A sequence amid NaN is bitwise what it is alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 64, generator=g).bfloat16() for n in (70, 90, 90))
    room = [torch.full((n + 100, 2, 64), math.nan, dtype=q.dtype) for n in (70, 90, 90)]
    for big, x in zip(room, (q, k, v), strict=True):
        big[50 : 50 + len(x)] = x
    run = {"scale": 0.125, "tile": SMALL, "programs": 3}
    starts = ([0, 50, 120, 170], [0, 50, 140, 190])
    cu = [torch.tensor(x, dtype=torch.int32, device=gluon.device) for x in starts]
    out, lse = kernel.forward_packed(*(x.to(gluon.device) for x in room), *cu, **run)
    cu = [torch.tensor([0, n], dtype=torch.int32, device=gluon.device) for n in (70, 90)]
    alone = kernel.forward_packed(*(x.to(gluon.device) for x in (q, k, v)), *cu, **run)
    assert_same("out", out[50:120], alone[0])
    assert_same("lse", lse[:, 50:120], alone[1])
    assert out[:50].isnan().all() and out[120:].isnan().all()


def test_no_queries() -> None:
    q, k = torch.empty(2, 2, 0, 64), torch.empty(2, 2, 5, 64)
    out, lse = kernel.forward(q, k, k, scale=1.0, programs=1)
    assert out.shape == (2, 2, 0, 64) and lse.shape == (2, 2, 0)


# The table.


def test_tiles() -> None:
    assert choose(64, 64, 512).consumers == 2 and choose(64, 64, 513).consumers == 3
    assert typical_keys(4096, None, None) == 4096 and typical_keys(4096, None, 0) == 1024
    assert typical_keys(4096, 100, None) == 4096 and typical_keys(4096, 100, 0) == 101
    assert typical_keys(4096, 100, -200) == 1
    columns = [choose(n, n, 4096).qk.total for n in (1, 64, 65, 96, 128, 129, 192, 193, 256)]
    assert columns == [64, 64, 96, 96, 128, 192, 192, 256, 256]
    assert choose(192, 128, 4096).v == Columns(64, 2)
    assert choose(64, 200, 4096).qk == Columns(256)
    with pytest.raises(ValueError, match="300 and 64 columns: at most 256"):
        choose(300, 64, 4096)
    for fault in (
        {"consumers": 4}, {"qk": Columns(96)}, {"kv_slots": 8}, {"block_kv": 48},
        {"v": Columns(64, 0)}, {"registers": (168, 240, 40)},
        {"v": Columns(64), "shared_out": True}, {"v": Columns(128, 2), "shared_out": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no kernel for"):
            small(128, **{"block_kv": 128} | fault)


# Through the compiler, as a launch would do it.


def compiled_packed(tile: Tile, **options: Any) -> Compiled:
    q, v = (
        torch.empty(4096, 2, n, dtype=torch.bfloat16, device="meta")
        for n in (tile.qk.total, tile.v.total)
    )
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    run = {"scale": 0.1, "tile": tile, "programs": 8, **options}
    (found,) = compile_launches(kernel.forward_packed, q, q, v, starts, starts, **run)
    return found


def compiled(tile: Tile, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Compiled:
    q, v = (
        torch.empty(1, 2, 2048, n, dtype=dtype, device="meta")
        for n in (tile.qk.total, tile.v.total)
    )
    (found,) = compile_launches(
        kernel.forward, q, q, v, scale=0.1, tile=tile, programs=8, **options
    )
    return found


# What ptxas may keep in local memory outside of the loop over keys: three consumers have 160
# registers each, and masks need some for the limits of rows.
MOST_SPILLS = {2: 10, 3: 32}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda r: f"{r.tile.qk.total}-{r.tile.v.total}-{r.tile.consumers}"
)
def test_machine_code(row: Any, causal: bool, packed: bool) -> None:
    tile = row.tile
    found = (compiled_packed if packed else compiled)(tile, right=0 if causal else None)
    for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert found.opcodes[opcode], opcode
    assert not found.serialised
    assert found.spills <= MOST_SPILLS[tile.consumers]
    # The loop without a mask: S = Q K^T and O += P V, 16 columns or keys at a time.
    loop = found.loop_with((tile.qk.total + tile.block_kv * tile.v.boxes) // 16)
    assert not loop["STL"] and not loop["LDL"] and not loop["PRMT"]
    assert found.registers == tile.registers[0]
    assert tile.shared_bytes <= found.shared_bytes <= tile.shared_bytes + 1024


@pytest.mark.parametrize(
    ("columns", "columns_v"), {(r.tile.qk.total, r.tile.v.total) for r in ROWS}
)
def test_machine_code_of_tile_maps(columns: int, columns_v: int) -> None:
    """Bits come from memory while the product is on its way, and nothing waits for them there."""
    tile = choose(columns, columns_v, 0)
    found = compiled(tile, tile_map=map_of("random", (1, 2, 2048, 2048), torch.device("meta")))
    assert found.opcodes["HGMMA"] and not found.serialised
    assert found.spills <= MOST_SPILLS[2]
    loop = found.loop_with((tile.qk.total + tile.block_kv * tile.v.boxes) // 16)
    assert not loop["STL"] and not loop["LDL"] and not loop["PRMT"]


def test_every_option_compiles() -> None:
    options = {"left": 9, "right": 0, "softcap": 2.0, "sink": torch.empty(2, device="meta")}
    for tile in (TURNS, HALF):
        assert compiled(tile, torch.float16, **options).opcodes["HGMMA"]
    assert compiled(SMALL, left=9).opcodes["HGMMA"]


def test_lengths_do_not_compile_anew() -> None:
    """The same kernel, whatever the lengths, the batch, the window and the scale."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    keys = set()

    def instead(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        bind = create_function_from_signature(
            self.signature, self.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        _, specialization, _ = bind(*args, **kwargs)
        keys.add(str(specialization))

    real, JITFunction.run = JITFunction.run, instead
    try:
        for b, sq, sk, left, right in (
            (1, 100, 100, 1, 0), (16, 101, 300, 16, 1), (3, 160, 1, 17, 16), (1, 128, 4096, 64, 7),
        ):  # fmt: skip
            q, k = (torch.empty(b, 2, s, 64, dtype=torch.float16, device="meta") for s in (sq, sk))
            run = {"left": left, "right": right, "tile": SMALL, "programs": 10**6}
            kernel.forward(q, k, k, scale=1 / b, **run)
    finally:
        JITFunction.run = real
    assert len(keys) == 1
