"""The forward kernel for Hopper: in the emulator, on a card, and through the compiler."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from torch import Tensor

import plain
from anyflash.kernels.hopper import forward as kernel
from anyflash.kernels.hopper.tiles import ROWS, Tile, choose
from gluon_compile import Compiled, compile_launches
from gluon_plugin import Gluon
from plain import Terms, assert_close, assert_same

SMALL = Tile(64, consumers=2, block_kv=64, kv_slots=2)  # many tiles in few keys
WIDE = Tile(64, consumers=3, block_kv=64, kv_slots=3, registers=(128, 160, 24))
TURNS = Tile(64, consumers=2, block_kv=64, kv_slots=2, pingpong=True)
HALF = Tile(128, consumers=2, block_kv=64, kv_slots=2, shared_out=True)
PART = Tile(128, consumers=2, block_kv=32, kv_slots=2, q_columns=64)
IN_REGISTERS = Tile(64, consumers=2, block_kv=64, kv_slots=2, q_columns=64)


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
    "one key": Case((1, 2, 2, 1, 1), options={"right": 0}),
    "one query": Case((2, 4, 1, 1, 333)),
    "half of Q in registers": Case((1, 2, 2, 200, 200), (128, 128), tile=PART),
    "Q in registers": Case((1, 2, 2, 200, 200), tile=IN_REGISTERS, options={"right": 0}),
    "table 64": Case((1, 2, 2, 200, 260), tile=None),
    "table 64, long": Case((1, 1, 1, 200, 2200), tile=None),
    "table 128": Case((1, 2, 2, 200, 260), (128, 128), tile=None, options={"right": 0}),
    "table 256": Case((1, 2, 2, 140, 130), (256, 256), tile=None, options={"right": 0}),
}


def tensors(case: Case, device: torch.device) -> list[Tensor]:
    """q, k, v in the layout of the case, amid NaN where it has gaps."""
    g = torch.Generator().manual_seed(sum(case.shape) + sum(case.dims))
    (b, hq, hkv, sq, sk), (d, dv) = case.shape, case.dims
    found = []
    for heads, rows, columns in ((hq, sq, d), (hkv, sk, d), (hkv, sk, dv)):
        x = torch.randn(b, heads, rows, columns, generator=g).to(case.dtype).to(device)
        if case.layout == "bshd":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif case.layout == "fused":
            room = torch.full((b, rows, heads, 3, 128), math.nan, dtype=case.dtype, device=device)
            room = room[:, :, :, 1, :columns]
            x = room.copy_(x.transpose(1, 2)).transpose(1, 2)
        found.append(x)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward(gluon: Gluon, case: Case) -> None:
    q, k, v = tensors(case, gluon.device)
    options = {"scale": case.dims[0] ** -0.5, **(case.options or {})}
    sink = None
    if options.pop("sink", False):
        sink = torch.randn(case.shape[1], generator=torch.Generator().manual_seed(1))
        sink = sink.to(gluon.device)
    out, lse = kernel.forward(q, k, v, **options, sink=sink, tile=case.tile, programs=case.programs)
    assert len(gluon.launches) == gluon.emulated

    left, right = options.get("left"), options.get("right")

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        distance = j - (i + offset)
        low = -math.inf if left is None else -left
        return (distance >= low) & (distance <= (math.inf if right is None else right))

    softcap = options.get("softcap")
    terms = Terms(scale=options["scale"], softcap=softcap, seen=seen, sink=sink)
    like = plain.attention(q, k, v, terms)
    wide = terms._replace(sink=None if sink is None else sink.double())
    exact = plain.attention(*(x.double() for x in (q, k, v)), wide)
    for name, x, y, z in zip(("out", "lse"), (out, lse), like, exact, strict=True):
        assert_close(name, x, y, z, softcap=softcap is not None)
    assert out.dtype == q.dtype


def test_what_tma_cannot_address_is_copied(gluon: Gluon) -> None:
    case = Case((2, 2, 2, 70, 130))
    q, k, v = tensors(case, gluon.device)
    run = {"scale": 0.125, "tile": SMALL, "programs": 3}
    expected = kernel.forward(q, k, v, **run)
    rows = torch.empty(2, 2, 130, 65, dtype=k.dtype, device=k.device)[..., 1:].copy_(k)
    columns = v.transpose(2, 3).contiguous().transpose(2, 3)
    one = q[:1, :1].expand(2, 2, 70, 64)
    assert not any(map(kernel.addressable, (rows, columns, one)))
    assert all(map(kernel.addressable, (q, k, v, k.transpose(1, 2), k[:, :, ::2])))
    for name, x, y in zip(
        ("out", "lse"), kernel.forward(q, rows, columns, **run), expected, strict=True
    ):
        assert_same(name, x, y)
    out, _ = kernel.forward(one, k, v, **run)
    assert_same("out", out, kernel.forward(one.contiguous(), k, v, **run)[0])


def test_the_output_has_the_axes_of_q(gluon: Gluon) -> None:
    for layout, order in (("bhsd", (0, 1, 2)), ("bshd", (0, 2, 1)), ("fused", (0, 2, 1))):
        q, k, v = tensors(Case((2, 3, 3, 70, 70), layout=layout), gluon.device)
        out, _ = kernel.forward(q, k, v, scale=1.0, tile=SMALL, programs=3)
        steps = [out.stride(axis) for axis in order]
        assert steps == sorted(steps, reverse=True)


def test_rows_beyond_a_sequence_do_not_leak(gluon: Gluon) -> None:
    """The keys of one head end inside a tile, and in memory NaN follows."""
    room = torch.full((1, 1, 200, 64), math.nan, dtype=torch.bfloat16, device=gluon.device)
    q, k, v = (room.clone()[:, :, :n].copy_(torch.randn(1, 1, n, 64)) for n in (70, 90, 90))
    out, lse = kernel.forward(q, k, v, scale=0.125, tile=SMALL, programs=3)
    alone = kernel.forward(
        *(x.contiguous() for x in (q, k, v)), scale=0.125, tile=SMALL, programs=3
    )
    assert_same("out", out, alone[0])
    assert_same("lse", lse, alone[1])


def test_no_queries() -> None:
    q, k = torch.empty(2, 2, 0, 64), torch.empty(2, 2, 5, 64)
    out, lse = kernel.forward(q, k, k, scale=1.0, programs=1)
    assert out.shape == (2, 2, 0, 64) and lse.shape == (2, 2, 0)


# The table.


def test_tiles() -> None:
    assert choose(64, 2048, True).consumers == 2 and choose(64, 2049, True).consumers == 3
    assert choose(128, 4096, True).q_columns == 0 and choose(128, 4096, False).q_columns == 64
    columns = [choose(n, 4096, True).columns for n in (1, 64, 65, 128, 129, 256)]
    assert columns == [64, 64, 128, 128, 256, 256]
    for fault in (
        {"consumers": 4}, {"columns": 96}, {"kv_slots": 8}, {"block_kv": 48},
        {"consumers": 3, "pingpong": True}, {"registers": (168, 240, 40)}, {"q_columns": 32},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no kernel for"):
            Tile(**{"columns": 128, "consumers": 2, "block_kv": 128, "kv_slots": 2} | fault)


# Through the compiler, as a launch would do it.


def compiled(tile: Tile, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Compiled:
    q = torch.empty(1, 2, 2048, tile.columns, dtype=dtype, device="meta")
    (found,) = compile_launches(
        kernel.forward, q, q, q, scale=0.1, tile=tile, programs=8, **options
    )
    return found


# What ptxas keeps in local memory, outside of the loop over keys without a mask: three consumers
# have 160 registers each, and a mask needs some for the limits of its rows.
MOST_SPILLS = {64: 40, 128: 0, 256: 4}


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.tile.columns}-{r.tile.consumers}")
def test_machine_code(row: Any, causal: bool) -> None:
    tile = row.tile
    if row.masked is not None and row.masked != causal:
        pytest.skip("the table does not use this tile so")
    found = compiled(tile, right=0 if causal else None)
    for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert found.opcodes[opcode], opcode
    assert not found.serialised
    assert found.spills <= MOST_SPILLS[tile.columns]
    assert not found.opcodes["PRMT"] or tile.consumers == 3
    assert found.registers == tile.registers[0]
    assert tile.shared_bytes <= found.shared_bytes <= tile.shared_bytes + 1024


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
