"""The backward kernels for Hopper: in the emulator, on a card, and through the compiler."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from torch import Tensor

import plain
from anyflash.kernels.hopper import algorithms
from anyflash.kernels.hopper import launch as forward
from anyflash.kernels.hopper import launch_backward as kernel
from anyflash.kernels.hopper.algorithms import ALGORITHMS, ALL
from anyflash.kernels.hopper.tiles import Columns
from anyflash.kernels.hopper.tiles_backward import (
    FUSED,
    SPLITS,
    STORED,
    Split,
    Stored,
    Walk,
    choose_split,
    split_of,
)
from anyflash.problem import Gradients, Needs, Saved
from gluon_compile import Compiled, compile_launches
from gluon_plugin import Gluon
from hopper_cases import (
    INTERVALS,
    MAPS,
    bounds_of,
    how,
    map_of,
    query_tiles_of,
    seen_by,
    seen_in,
    seen_on,
    tensors,
)
from plain import Terms, assert_close, assert_same


def only(names: str) -> Needs:
    return Needs(*(n in names for n in "qkv"), bias=False, sink=False)


SMALL = split_of(Columns(64), Columns(64))
APART = split_of(Columns(64), Columns(64), together=False, slots=3, slots_2=1)
RESULTS_APART = split_of(Columns(64), Columns(64), shared_out=False)
IN_REGISTERS = split_of(Columns(64), Columns(64), own_registers=True)
WIDE = split_of(Columns(128), Columns(128), slots_2=1)
PANELS = split_of(Columns(32, 3), Columns(32, 2))
# dQ added up in memory, by a role of its own or by the consumers.
BY_ROLE = Walk(
    *(Columns(64), Columns(64)), block=64, slots=2, slots_2=2, second=True, shared_out=False,
    ds="role", registers=(128, 208, 24, 72),
)  # fmt: skip
BY_CONSUMERS = Walk(
    *(Columns(32, 2), Columns(64)), block=64, slots=2, slots_2=1, second=True, ds="consumers",
    ds_slots=1,
)  # fmt: skip
VARIED = replace(BY_ROLE, shared_out=True, own_registers=True, slots=3, ds_slots=1)
WIDE_ROLE = replace(BY_ROLE, qk=Columns(64, 2), v=Columns(64, 2), ds_slots=1, shared_out=True)
PANELS_APART = split_of(Columns(32, 3), Columns(32, 2), together=False)
# dS kept in memory.
STORES = Stored(
    Walk(*(Columns(64), Columns(64)), block=64, slots=2, slots_2=1, second=True, ds="stored"),
    value=None,
    slots=2,
)
STORES_PANELS = Stored(
    Walk(
        *(Columns(32, 2), Columns(32, 2)), block=64, slots=3, slots_2=2, second=True,
        shared_out=False, ds="stored", ds_slots=3,
    ),
    value=None,
    slots=3,
)  # fmt: skip


STORES_APART = Stored(
    Walk(*(Columns(32, 3), Columns(32, 2)), block=64, slots=2, slots_2=1, ds="stored"),
    PANELS_APART.value, slots=2, consumers=2, registers=(168, 240, 24),
)  # fmt: skip


KINDS = ["split", "role", "consumers", "stored"]


class Case(NamedTuple):
    shape: tuple[int, int, int, int, int]  # B, Hq, Hkv, Sq, Sk
    dims: tuple[int, int] = (64, 64)  # D, Dv
    kernels: Split | Walk | Stored | None = SMALL  # a Walk is `fused`; None, the table's split
    programs: int = 3  # fewer than blocks: they are drawn from a counter
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhsd"
    options: dict[str, Any] | None = None
    needs: Needs = ALL


CASES = {
    "dense": Case((1, 2, 2, 200, 300)),
    "a block each": Case((2, 2, 2, 100, 200), programs=64),
    "causal": Case((1, 2, 2, 300, 300), options={"right": 0}),
    "causal, more keys": Case((1, 2, 2, 130, 333), options={"right": 0}),
    "causal, rows without keys": Case((1, 2, 2, 333, 130), options={"right": 0}),
    "window": Case((1, 2, 2, 400, 400), options={"left": 70, "right": 0}),
    "window both ways": Case((1, 1, 1, 300, 250), options={"left": 20, "right": 90}),
    "left only": Case((1, 2, 1, 200, 300), options={"left": 60}),
    "of one key": Case((1, 1, 1, 130, 130), options={"left": 0, "right": 0}),
    "keys that nobody sees": Case((1, 2, 1, 100, 400), options={"left": 20, "right": 10}),
    "beyond all keys": Case((1, 1, 1, 100, 300), options={"left": -250, "right": 400}),
    "grouped": Case((2, 6, 2, 130, 130), layout="bshd", options={"right": 0}),
    "of one head": Case((1, 4, 1, 70, 200), options={"right": 0}),
    "results apart": Case((1, 4, 2, 200, 300), kernels=RESULTS_APART, options={"right": 0}),
    "dK and dV apart": Case((1, 4, 2, 200, 300), kernels=APART, options={"right": 0}),
    "X in registers": Case((1, 2, 2, 200, 300), kernels=IN_REGISTERS, options={"right": 0}),
    "one slot of dO": Case((1, 4, 2, 130, 200), (128, 128), WIDE, options={"right": 0}),
    "scores of 30, wide": Case((1, 2, 2, 100, 200), (128, 128), WIDE, options={"scale": 30.0}),
    "float16": Case((1, 2, 1, 200, 200), dtype=torch.float16, options={"right": 0}),
    "D 80, Dv 48": Case((1, 2, 2, 130, 130), (80, 48), WIDE),
    "odd D": Case((1, 2, 2, 130, 130), (5, 3)),
    "D 40, Dv 64": Case((1, 2, 2, 70, 70), (40, 64), layout="fused"),
    "negative scale": Case((1, 2, 2, 130, 200), options={"scale": -0.3, "right": 0}),
    "scale 0": Case((1, 2, 2, 130, 200), options={"scale": 0.0, "right": 0}),
    "tiny scale": Case((1, 1, 1, 100, 100), options={"scale": 1e-46, "right": 0}),
    "softcap": Case((1, 2, 2, 130, 200), options={"softcap": 5.0, "right": 0}),
    "sink": Case((1, 3, 3, 200, 130), options={"sink": True, "right": 0}),
    "gradient of lse": Case((1, 4, 2, 150, 130), options={"dlse": True, "right": 0}),
    "two sections of heads": Case((1, 17, 17, 130, 70), options={"right": 0, "section": 9}),
    "one key": Case((1, 2, 2, 1, 1), options={"right": 0}),
    "one query": Case((2, 4, 1, 1, 333)),
    "panels": Case((1, 2, 2, 200, 150), (96, 64), PANELS, options={"right": 0}),
    "panels, narrow": Case((1, 2, 2, 70, 150), (70, 40), PANELS, layout="fused"),
    "panels apart": Case((1, 4, 2, 70, 150), (96, 64), PANELS_APART, options={"right": 0}),
    "dropout": Case((2, 2, 1, 200, 150), options={"dropout": 0.3, "right": 0}),
    "dropout, apart": Case((1, 2, 2, 150, 131), kernels=APART, options={"dropout": 0.8}),
    "dropping everything": Case((1, 2, 2, 70, 70), options={"dropout": 1.0}),
    "dq": Case((1, 2, 1, 130, 130), needs=only("q")),
    "dk": Case((1, 2, 1, 130, 130), needs=only("k")),
    "dv": Case((1, 2, 1, 130, 130), needs=only("v")),
    "dq and dv": Case((1, 2, 1, 130, 130), needs=only("qv")),
    **{
        f"tile edge {left}, {right}": Case(
            (1, 1, 1, 260, 260), options={"left": left, "right": right}
        )
        for left, right in ((None, 63), (63, 0), (64, 0), (65, 0), (127, 0), (128, 5), (None, -63))
    },
    "fused": Case((1, 2, 2, 200, 300), kernels=BY_ROLE),
    "fused, causal": Case((2, 4, 2, 200, 300), kernels=BY_ROLE, options={"right": 0}),
    "fused, window": Case((1, 2, 1, 300, 300), kernels=VARIED, options={"left": 70, "right": 9}),
    "fused, few programs": Case((2, 6, 2, 150, 200), kernels=VARIED, options={"right": 0}),
    "fused, fewer keys": Case((1, 2, 2, 200, 90), kernels=BY_ROLE, options={"right": 0}),
    "fused, dropout": Case((1, 2, 2, 130, 150), kernels=BY_ROLE, options={"dropout": 0.3}),
    "fused, softcap": Case((1, 2, 1, 130, 150), kernels=BY_ROLE, options={"softcap": 3.0}),
    "fused, narrow": Case((1, 2, 2, 70, 150), (40, 50), kernels=BY_ROLE, layout="fused"),
    "fused, odd D": Case((1, 2, 2, 70, 150), (5, 3), kernels=BY_ROLE, layout="bshd"),
    "fused, two panels": Case((1, 4, 2, 130, 200), (128, 100), kernels=WIDE_ROLE),
    "by consumers": Case((1, 2, 2, 200, 300), kernels=BY_CONSUMERS),
    "by consumers, causal": Case((2, 4, 2, 200, 300), kernels=BY_CONSUMERS, options={"right": 0}),
    "by consumers, apart": Case(
        (1, 4, 2, 200, 200), kernels=replace(BY_CONSUMERS, shared_out=False, ds_slots=2, early=True)
    ),
    "fused, scale 0": Case((1, 1, 1, 70, 90), kernels=BY_ROLE, options={"scale": 0.0}),
    "fused, negative scale": Case((1, 1, 1, 70, 90), kernels=BY_CONSUMERS, options={"scale": -0.3}),
    **{
        f"fused table {w.qk.total}": Case(
            (1, 2, 2, 140, 150), (w.qk.total, w.v.total), kernels=w, options={"right": 0}
        )
        for w in FUSED
    },
    "stored": Case((1, 2, 2, 200, 300), kernels=STORES),
    "stored, causal": Case((2, 4, 2, 200, 300), kernels=STORES, options={"right": 0}),
    **{
        f"stored, paired, {length}": Case(
            (2, heads, 1, length, length), kernels=STORES, options={"right": 0}
        )
        for length, heads in ((64, 2), (129, 3), (300, 3))
    },
    "stored, fewer keys": Case((1, 2, 1, 333, 130), kernels=STORES, options={"right": 0}),
    "stored, window": Case((1, 2, 1, 300, 300), kernels=STORES, options={"left": 70, "right": 9}),
    "stored, left only": Case((1, 2, 1, 200, 300), kernels=STORES, options={"left": 60}),
    "stored, of one key": Case(
        (1, 1, 1, 130, 130), kernels=STORES, options={"left": 0, "right": 0}
    ),
    "stored, far keys": Case((1, 1, 1, 70, 400), kernels=STORES, options={"left": 20, "right": 10}),
    "stored, beyond all keys": Case(
        (1, 1, 1, 100, 300), kernels=STORES, options={"left": -250, "right": 400}
    ),
    "stored, a head at a time": Case(
        (2, 6, 3, 150, 200), kernels=STORES, options={"right": 0, "scratch": 2 * 384 * 192 * 2}
    ),
    "stored, two heads at a time": Case(
        (2, 6, 3, 150, 200), kernels=STORES, options={"scratch": 5 * 256 * 192 * 2}
    ),
    "stored, an element at a time": Case(
        (3, 2, 2, 150, 200), kernels=STORES, options={"scratch": 3 * 256 * 192 * 2}
    ),
    "stored, no room": Case(
        (1, 4, 1, 150, 200), kernels=STORES, options={"scratch": 2 * 384 * 192 * 2}
    ),
    "stored, panels": Case((1, 2, 2, 130, 200), (60, 64), kernels=STORES_PANELS, layout="fused"),
    "stored, dV apart": Case((1, 4, 2, 130, 200), (96, 60), STORES_APART, options={"right": 0}),
    "stored, odd D": Case((1, 2, 2, 70, 150), (5, 3), kernels=STORES, layout="bshd"),
    "stored, softcap": Case((1, 2, 1, 130, 150), kernels=STORES, options={"softcap": 3.0}),
    "stored, sink": Case(
        (1, 3, 3, 200, 130), kernels=STORES, options={"sink": True, "right": 0, "dlse": True}
    ),
    "stored, dropout": Case((1, 2, 2, 130, 150), kernels=STORES, options={"dropout": 0.3}),
    "stored, dq and dv": Case((1, 2, 1, 130, 130), kernels=STORES, needs=only("qv")),
    **{
        f"stored table {x.keys.qk.total}, {x.keys.v.total}": Case(
            (1, 2, 2, 140, 150), (x.keys.qk.total, x.keys.v.total), x, options={"right": 0}
        )
        for x in STORED
    },
    "table 64": Case((1, 2, 2, 200, 260), kernels=None),
    "table 96": Case((1, 2, 2, 140, 150), (96, 96), kernels=None, options={"right": 0}),
    "table 128": Case((1, 2, 2, 140, 150), (128, 128), kernels=None, options={"right": 0}),
    "table 192, 128": Case((1, 2, 2, 140, 150), (192, 128), kernels=None, options={"right": 0}),
    "table 192": Case((1, 2, 2, 140, 130), (192, 192), kernels=None, options={"right": 0}),
    "table 256": Case((1, 2, 2, 140, 130), (256, 256), kernels=None, options={"right": 0}),
}


def results(attention: Any, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse as forward gives them: computed in float32, out rounded."""
    out, lse = attention(*(x.float() for x in inputs))
    return out.to(inputs[0].dtype), lse


def gradients(
    attention: Any, inputs: list[Tensor], dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    """Of `attention(*inputs) → out, lse`, by autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attention(*leaves)
    results, given = [out], [dout.to(out.dtype)]
    if dlse is not None:
        results.append(lse)
        given.append(dlse.to(lse.dtype))
    return torch.autograd.grad(results, leaves, given, materialize_grads=True)


def compare(
    found: Gradients, attention: Any, inputs: list[Tensor], dout: Tensor,
    dlse: Tensor | None = None, softcap: bool = False,
) -> None:  # fmt: skip
    """By the tolerance rule."""
    like = gradients(attention, inputs, dout, dlse)
    exact = gradients(attention, [x.double() for x in inputs], dout, dlse)
    each = found.q, found.k, found.v, found.sink
    for name, x, y, z in zip(("q", "k", "v", "sink"), each, like, exact, strict=False):
        if x is not None:
            assert_close(f"d{name}", x, y, z, softcap=softcap)
            assert x.dtype == (torch.float32 if name == "sink" else y.dtype)


def randn(like: Tensor, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=g).to(like.dtype).to(like.device)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_backward(gluon: Gluon, case: Case) -> None:
    q, k, v = tensors(case, gluon.device)
    options = {"scale": case.dims[0] ** -0.5, **(case.options or {})}
    inputs, seed, dlse, needs = [q, k, v], None, None, case.needs
    if options.pop("sink", False):
        g = torch.Generator().manual_seed(1)
        inputs.append(torch.randn(case.shape[1], generator=g).bfloat16().float().to(gluon.device))
        needs = needs._replace(sink=True)
    if options.get("dropout"):
        seed = torch.tensor([2**40 + 12345], device=gluon.device)
    has_dlse, section = options.pop("dlse", False), options.pop("section", None)
    run = {**options, "seed": seed, "programs": case.programs, "section": section}
    run["sink"] = inputs[3] if needs.sink else None

    def attention(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        terms = Terms(
            scale=options["scale"], softcap=options.get("softcap"), seen=seen_by(options),
            sink=sink, dropout=options.get("dropout", 0.0), seed=seed,
        )  # fmt: skip
        return plain.attention(q, k, v, terms)

    out, lse = results(attention, inputs)
    dout = randn(out, 2)
    if has_dlse:
        dlse = torch.where(lse == -math.inf, 0.0, randn(lse, 3))
    before = len(gluon.launches)
    saved = Saved(out, lse, dout, dlse)
    found = kernel.backward(q, k, v, saved, needs, **run, **how(case.kernels))
    assert (len(gluon.launches) > before) == gluon.emulated
    assert tuple(x is not None for x in found) == needs
    compare(found, attention, inputs, dout, dlse, softcap="softcap" in options)


@pytest.mark.parametrize("form", INTERVALS)
def test_row_intervals(gluon: Gluon, form: str) -> None:
    q, k, v = tensors(Case((2, 2, 1, 260, 400)), gluon.device)
    forms = [form, "documents" if len(INTERVALS[form](torch.arange(1), 9)) == 1 else form]
    bounds = torch.stack([bounds_of(f, 260, 400) for f in forms])
    for some in (bounds, bounds[:1]):
        terms = Terms(scale=0.125, seen=seen_in(some))

        def attention(*x: Tensor, terms: Terms = terms) -> tuple[Tensor, Tensor]:
            return plain.attention(*x, terms)

        run = {"bounds": some.to(gluon.device), "programs": 3, "scale": 0.125}
        run["query_tiles"] = query_tiles_of(some, 400).to(gluon.device)
        out, lse = results(attention, [q, k, v])
        dout = randn(out, 2)
        saved = Saved(out, lse, dout, None)
        for kernels in (SMALL, BY_ROLE, STORES):
            found = kernel.backward(q, k, v, saved, **run, **how(kernels))
            compare(found, attention, [q, k, v], dout)


@pytest.mark.parametrize("form", MAPS)
@pytest.mark.parametrize(
    "kernels", [SMALL, BY_ROLE, STORES, STORES_PANELS], ids=["split", "fused", "stored", "panels"]
)
def test_tile_maps(gluon: Gluon, form: str, kernels: Walk | Split | Stored) -> None:
    q, k, v = tensors(Case((2, 2, 1 if kernels is SMALL else 2, 200, 270)), gluon.device)
    terms = Terms(scale=0.125, seen=seen_on(form))

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        return plain.attention(*x, terms)

    run = {"tile_map": map_of(form, (2, 2, 200, 270), gluon.device), "programs": 3, "scale": 0.125}
    if kernels is STORES:  # one head at a time
        run["scratch"] = 200_000
    out, lse = results(attention, [q, k, v])
    dout = randn(out, 2)
    found = kernel.backward(q, k, v, Saved(out, lse, dout, None), **run, **how(kernels))
    compare(found, attention, [q, k, v], dout)


@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256])
def test_tile_maps_by_the_table(gluon: Gluon, columns: int) -> None:
    q, k, v = tensors(Case((1, 2, 1, 130, 200), (columns, columns)), gluon.device)
    seed = torch.tensor([2**40 + 12345], device=gluon.device)
    more: dict[str, Any] = {"softcap": 3.0, "dropout": 0.3, "seed": seed}
    terms = Terms(scale=0.1, seen=seen_on("random"), **more)

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        return plain.attention(*x, terms)

    tile_map = map_of("random", (1, 2, 130, 200), gluon.device)
    out, lse = results(attention, [q, k, v])
    dout = randn(out, 2)
    saved, run = Saved(out, lse, dout, None), {"scale": 0.1, "programs": 2, **more}
    found = kernel.backward(q, k, v, saved, tile_map=tile_map, **run)
    compare(found, attention, [q, k, v], dout, softcap=True)


def test_what_tma_cannot_address_is_copied(gluon: Gluon) -> None:
    q, k, v = tensors(Case((1, 2, 2, 70, 130)), gluon.device)
    run = {"scale": 0.125, "programs": 3}
    out, lse = forward.forward(q, k, v, **run)
    rows = randn(out, 2)
    dout = rows[:, :, :, :1].expand_as(out)
    for given in (
        dout,
        rows.transpose(2, 3).contiguous().transpose(2, 3),
        rows[:1, :1].expand_as(out),
    ):
        results = [
            kernel.backward(q, k, v, Saved(out, lse, x, None), ALL, **run, split=SMALL)
            for x in (given, given.contiguous())
        ]
        for name, x, y in zip(("dq", "dk", "dv"), *results, strict=False):
            assert_same(name, x, y)


def test_results_have_heads_inside(gluon: Gluon) -> None:
    for layout in ("bhsd", "fused"):
        given = tensors(Case((2, 3, 3, 70, 70), layout=layout), gluon.device)
        out, lse = forward.forward(*given, scale=1.0, programs=3)
        saved = Saved(out, lse, randn(out, 2), None)
        for x in kernel.backward(*given, saved, scale=1.0, programs=3, split=SMALL)[:3]:
            assert x is not None and x.transpose(1, 2).is_contiguous()


def test_exact_numbers(gluon: Gluon) -> None:
    """Every weight is 1/4, everything else small integers: nothing is rounded."""
    g = torch.Generator().manual_seed(0)
    rows = torch.arange(256, device=gluon.device)
    q = torch.eye(256, 64, device=gluon.device)[rows % 64].expand(1, 2, 256, 64).bfloat16()
    v, dout = (torch.randint(-4, 5, (1, 2, 256, 64), generator=g).bfloat16() for _ in range(2))
    v, dout = v.to(gluon.device), dout.to(gluon.device)
    out = v.float().unflatten(2, (4, 64)).mean(2).repeat(1, 1, 4, 1)
    lse = torch.full((1, 2, 256), 4096 + math.log(4), device=gluon.device)
    saved = Saved(out.bfloat16(), lse, dout, None)
    dq, _, dv, *_ = kernel.backward(q, q, v, saved, scale=2.0**12, programs=3, split=SMALL)
    expected = dout.float().unflatten(2, (4, 64)).mean(2).repeat(1, 1, 4, 1)
    assert_close("dv", dv, expected.bfloat16(), expected.double())
    assert dq is not None and dq.isfinite().all()


@pytest.mark.parametrize("kernels", [SMALL, BY_ROLE, BY_CONSUMERS, STORES], ids=KINDS)
def test_scores_far_below_zero(gluon: Gluon, kernels: Split | Walk | Stored) -> None:
    """2^(0 − lse), the weight of a key of zeros, is infinite: none may count."""
    q, k, v = tensors(Case((1, 2, 1, 70, 90)), gluon.device)
    q, k = 4 + q.abs(), -4 - k.abs()
    run = {"scale": 1.0, "programs": 3}
    out, lse = forward.forward(q, k, v, **run)
    assert lse.max() < -300
    saved = Saved(out, lse, randn(out, 2), None)
    for x in kernel.backward(q, k, v, saved, **run, **how(kernels))[:3]:
        assert x is not None and x.isfinite().all()


@pytest.mark.parametrize("kernels", [SMALL, BY_ROLE, BY_CONSUMERS, STORES], ids=KINDS)
def test_incoming_gradients_of_rows_that_see_nothing(
    gluon: Gluon, kernels: Split | Walk | Stored
) -> None:
    """lse is −inf there, and so is the gradient of its square."""
    q, k, v = tensors(Case((1, 2, 1, 100, 64)), gluon.device)
    run: dict[str, Any] = {"scale": 0.125, "right": 0, "programs": 3}
    out, lse = forward.forward(q, k, v, **run)
    dout, dlse = randn(out, 2), randn(lse, 3)
    empty = lse == -math.inf
    assert empty.any() and not empty.all()
    run |= how(kernels)
    results = [
        kernel.backward(q, k, v, Saved(out, lse, dout, torch.where(empty, x, dlse)), **run)
        for x in (0.0, -math.inf)
    ]
    for x, y in zip(*(found[:3] for found in results), strict=True):
        assert x is not None and y is not None and x.isfinite().all()
        assert_close("gradient", y, x, x.double())


def test_rows_beyond_a_sequence_do_not_leak(gluon: Gluon) -> None:
    """Heads end inside a tile, and in memory NaN follows."""
    case = Case((1, 2, 1, 70, 90))
    q, k, v = tensors(case, gluon.device)
    run = {"scale": 0.125, "programs": 3}
    out, lse = forward.forward(q, k, v, **run)
    given = [q, k, v, out, randn(out, 2)]
    amid = []
    for x in given:
        room = torch.full((1, x.shape[1], 200, 64), math.nan, dtype=x.dtype, device=x.device)
        amid.append(room[:, :, : x.shape[2]].copy_(x))
    results = [
        kernel.backward(*x[:3], Saved(x[3], lse, x[4], None), ALL, **run, split=SMALL)
        for x in (given, amid)
    ]
    for name, x, y in zip(("dq", "dk", "dv"), *results, strict=False):
        assert_same(name, x, y)


# Packed sequences.


class Sequences(NamedTuple):
    queries: list[int]
    keys: list[int]
    used: list[int] | None = None
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    kernels: Split | None = SMALL
    programs: int = 3
    options: dict[str, Any] | None = None


PACKED = {
    "causal": Sequences([100, 1, 130, 64], [100, 1, 130, 64], options={"right": 0}),
    "more keys": Sequences([100, 1, 130], [130, 90, 200], options={"right": 0}),
    "fewer keys": Sequences([100, 70], [30, 64], options={"right": 0}),
    "empty ones": Sequences([0, 100, 0, 0, 30, 0], [3, 90, 0, 7, 0, 5]),
    "unused keys": Sequences([100, 30, 65], [90, 130, 64], [70, 0, 64]),
    "window": Sequences([200, 150], [200, 180], options={"left": 40, "right": 10}),
    "left only": Sequences([200, 150], [200, 180], options={"left": 40}),
    "many": Sequences([5] * 30, [9] * 30, options={"right": 0}, programs=4, heads=(1, 1)),
    "one row": Sequences([1], [1], kernels=WIDE, dims=(128, 128)),
    "narrow": Sequences([70, 70], [30, 90], dims=(40, 24), heads=(4, 2)),
    "table": Sequences([200, 10], [200, 40], kernels=None, dims=(128, 128)),
    "dropout": Sequences([70, 130], [90, 70], options={"dropout": 0.4}),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(gluon: Gluon, name: str) -> None:
    run_packed(gluon, PACKED[name], intervals=False)


@pytest.mark.parametrize("name", [n for n, case in PACKED.items() if not case.options])
def test_packed_intervals(gluon: Gluon, name: str) -> None:
    run_packed(gluon, PACKED[name], intervals=True)


@pytest.mark.parametrize("name", ["causal", "empty ones", "unused keys", "dropout"])
def test_packed_sequences_fused(gluon: Gluon, name: str) -> None:
    run_packed(gluon, PACKED[name], not PACKED[name].options, BY_ROLE)


@pytest.mark.parametrize("name", ["fewer keys", "empty ones", "unused keys", "window", "many"])
def test_packed_sequences_stored(gluon: Gluon, name: str) -> None:
    run_packed(gluon, PACKED[name], not PACKED[name].options, STORES, scratch=2**18)


def run_packed(
    gluon: Gluon, case: Sequences, intervals: bool, kernels: Walk | Stored | None = None,
    **more: Any,
) -> None:  # fmt: skip
    options = {"scale": 0.125, **(case.options or {})}
    g = torch.Generator().manual_seed(len(case.queries))
    starts_q, starts_k = ([0, *itertools.accumulate(x)] for x in (case.queries, case.keys))
    (hq, hkv), (d, dv) = case.heads, case.dims
    shapes = (starts_q[-1], hq, d), (starts_k[-1], hkv, d), (starts_k[-1], hkv, dv)
    q, k, v = (torch.randn(s, generator=g).bfloat16().to(gluon.device) for s in shapes)
    clean = [q, k, v]
    if case.used is not None:
        k, v = k.clone(), v.clone()
        for start, end, used in zip(starts_k, starts_k[1:], case.used, strict=False):
            k[start + used : end] = v[start + used : end] = math.nan
    numbers = [
        None if x is None else torch.tensor(x, dtype=torch.int32, device=gluon.device)
        for x in (starts_q, starts_k, case.used)
    ]
    seed = torch.tensor([77], device=gluon.device) if "dropout" in options else None
    run = {**options, "seed": seed, "programs": case.programs}
    seen = seen_by(options)
    if intervals:
        lengths = list(zip(case.queries, case.keys, strict=True))
        each = [bounds_of("first keys and a window", *n) for n in lengths]
        seen = seen_of_each(each)
        moved = [x + at for x, at in zip(each, starts_k, strict=False)]
        run["bounds"] = torch.cat(moved)[None].int().to(gluon.device)
        tiles = query_tiles_of(torch.cat(moved)[None], starts_k[-1])
        more["query_tiles"] = tiles.to(gluon.device)
    terms = Terms(scale=0.125, seen=seen, dropout=options.get("dropout", 0.0), seed=seed)
    packing = plain.Packing(starts_q, starts_k, case.used)

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        return plain.packed(*x, terms, packing)

    out, lse = results(attention, clean)
    dout = randn(out, 2)
    saved = Saved(out, lse, dout, None)
    run |= {**more, **how(kernels or case.kernels)}
    found = kernel.backward_packed(q, k, v, saved, *numbers, **run)
    compare(found, attention, clean, dout)


def seen_of_each(bounds: list[Tensor]) -> plain.Seen:
    """Of one sequence after the other, whose number is b."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        lo, hi = bounds[int(b)].to(i.device)[i.flatten()].long().unbind(-1)
        at = j.flatten()[:, None]
        found = ((at >= lo[:, None]) & (at < hi[:, None])).any(-1)
        return found[None, None]

    return seen


def test_packed_neighbours_do_not_leak(gluon: Gluon) -> None:
    """A sequence amid NaN is bitwise what it is alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(n, 2, 64, generator=g).bfloat16() for n in (70, 90, 90, 70))
    one = [torch.tensor([0, n], dtype=torch.int32, device=gluon.device) for n in (70, 90)]
    starts = ([0, 50, 120, 170], [0, 50, 140, 190])
    three = [torch.tensor(x, dtype=torch.int32, device=gluon.device) for x in starts]
    results = []
    for cu, amid in ((one, False), (three, True)):
        given = []
        for x in (q, k, v, dout):
            room = torch.full((len(x) + 100, 2, 64), math.nan, dtype=x.dtype)
            room[50 : 50 + len(x)] = x
            given.append((room if amid else x).to(gluon.device))
        run = {"scale": 0.125, "programs": 3}
        out, lse = forward.forward_packed(*given[:3], *cu, **run)
        saved = Saved(out, lse, given[3], None)
        found = kernel.backward_packed(*given[:3], saved, *cu, **run, split=SMALL)
        results.append(
            [x[50 : 50 + n] if amid else x for x, n in zip(found[:3], (70, 90, 90), strict=True)]
        )
    for name, x, y in zip(("dq", "dk", "dv"), *results, strict=False):
        assert_same(name, x, y)


def test_no_queries() -> None:
    q, k = torch.empty(2, 2, 0, 64), torch.empty(2, 2, 5, 64)
    saved = Saved(q, torch.empty(2, 2, 0), q, None)
    needs = only("qk")
    dq, dk, dv, *_ = kernel.backward(q, k, k, saved, needs, scale=1.0, programs=1)
    assert dq is not None and dq.shape == q.shape and dv is None
    assert dk is not None and (dk == 0).all() and dk.shape == k.shape


# On a card only: sizes that take the emulator hours.


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_longer_sequences(dim: int, algorithm: str) -> None:
    card = torch.device("cuda")
    q, k, v = tensors(Case((2, 4, 2, 1100, 1300), (dim, dim), layout="bshd"), card)
    run = {"scale": dim**-0.5, "left": 900, "right": 0}

    def attention(*x: Tensor) -> tuple[Tensor, Tensor]:
        return plain.attention(*x, Terms(scale=run["scale"], seen=seen_by(run)))

    out, lse = forward.forward(q, k, v, **run)
    saved = Saved(out, lse, randn(out, 2), None)
    compare(
        kernel.backward(q, k, v, saved, **run, algorithm=algorithm),
        attention,
        [q, k, v],
        saved.dout,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "algorithm"),
    [(64, "split"), (128, "split"), (256, "split"), (64, "stored"), (128, "stored")],
)
def test_the_same_bits(dim: int, algorithm: str) -> None:
    """A thousand times, while another stream takes multiprocessors away."""
    card = torch.device("cuda")
    q, k, v = tensors(Case((1, 8, 2, 1100, 1100), (dim, dim)), card)
    run: dict[str, Any] = {"scale": dim**-0.5, "right": 0}
    out, lse = forward.forward(q, k, v, **run)
    run |= {"algorithm": algorithm, "scratch": 2**23}  # stored, three of eight heads at a time
    saved = Saved(out, lse, randn(out, 2), None)
    first = kernel.backward(q, k, v, saved, **run)
    differ = torch.zeros((), dtype=torch.int64, device=card)
    noise, side = torch.randn(2048, 2048, device=card), torch.cuda.Stream()
    for n in range(1000):
        if n % 10 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        again = kernel.backward(q, k, v, saved, **run)
        for x, y in zip(again[:3], first[:3], strict=True):
            assert x is not None and y is not None
            differ += (x != y).sum()
    assert differ.item() == 0


# The table.

LENGTHS = forward.Lengths(2, 1000, 1000, 1000, 1000, False)


def test_another_algorithm() -> None:
    x, lse = torch.empty(1, 1, 64, 64, device="meta"), torch.empty(1, 1, 64, device="meta")
    heads = forward.Heads(8, 2, 64, 64, torch.device("meta"))
    with pytest.raises(ValueError, match="algorithm 'fast': 'split' or 'fused' or 'stored'"):
        algorithms.chosen(algorithms.Options(1.0, algorithm="fast"), LENGTHS, heads)
    with pytest.raises(TypeError, match="algorithms"):
        kernel.backward(x, x, x, Saved(x, lse, x, None), scale=1.0, algorithms="split")


def test_splits() -> None:
    columns = [choose_split(n, n).queries.qk.total for n in (1, 64, 65, 128, 129, 192, 193, 256)]
    assert columns == [64, 64, 128, 128, 192, 192, 256, 256]
    assert choose_split(192, 128).queries.v == Columns(64, 2)
    assert choose_split(64, 200).queries.qk == Columns(256)
    with pytest.raises(ValueError, match="300 and 64 columns: at most 256"):
        choose_split(300, 64)
    c = Columns(128)
    fields: dict[str, Any] = {"qk": c, "v": c, "block": 64, "slots": 2, "slots_2": 2}
    for fault in (
        {"qk": Columns(96)}, {"v": Columns(64, 0)}, {"block": 48}, {"slots": 1}, {"slots_2": 0},
        {"slots": 12}, {"v": Columns(64), "first": False, "second": True}, {"first": False},
        {"consumers": 3}, {"ds": "nobody"}, {"ds": "consumers", "second": True},
        {"ds": "role", "second": True}, {"second": True, "block": 32},
        {"registers": (200, 240, 24, 0)}, {"registers": (168, 240, 40, 0)},
        {"early": True, "own_registers": True}, {"ds": "stored", "ds_slots": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no kernel for"):
            Walk(**fields | fault)
    for walk, value, slots in (
        (STORES.keys, None, 0), (STORES.keys, None, 8), (BY_ROLE, None, 2),
        (STORES.keys, SMALL.value, 2), (replace(STORES.keys, second=False), None, 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no kernels for"):
            Stored(walk, value, slots)


CARD = torch.device("meta")


def test_what_is_chosen() -> None:
    def chosen(
        columns: int = 64, needs: Needs = ALL, lengths: forward.Lengths = LENGTHS, **options: Any
    ) -> Any:
        o = algorithms.Options(1.0, programs=132, **options)
        heads = forward.Heads(8, 2, columns, columns, CARD)
        name, kernels = algorithms.chosen(o, lengths, heads, needs)
        kind = {"split": Split, "fused": Walk, "stored": Stored}[name]
        assert isinstance(kernels, kind)
        return kernels

    assert chosen() is chosen(algorithm="fused") is FUSED[0]
    assert chosen(deterministic=True) is chosen(algorithm="split") is SPLITS[0]
    assert chosen(100) is chosen(100, deterministic=True) is STORED[1]
    assert chosen(192).value is not None
    assert chosen(256) is SPLITS[-1]
    room = 4 * 1024 * 1024 * 2  # of 1000 keys and queries and four heads
    assert chosen(algorithm="stored", scratch=room) is STORED[0]
    assert chosen(algorithm="stored", scratch=room - 1) is SPLITS[0]
    for algorithm in ("fused", "stored", None):
        assert chosen(algorithm=algorithm, needs=only("qk")) is SPLITS[0]
    for algorithm in ("fused", "stored"):
        assert chosen(256, algorithm=algorithm) is SPLITS[-1]
    assert chosen(algorithm="stored", dropout=0.1) is SPLITS[0]
    # In parts: programs must not be without work.
    long = forward.Lengths(2, 16384, 16384, 16384, 16384, False)
    assert isinstance(chosen(128, lengths=long, scratch=2**32), Stored)
    assert chosen(128, lengths=long, scratch=2**31) is SPLITS[1]  # one key head of four at a time
    single = forward.Heads(16, 16, 128, 128, CARD)
    for batch, causal, name in ((1, True, "stored"), (1, False, "stored"), (3, True, "stored")):
        lengths, right = long._replace(batch=batch), 0 if causal else None
        o = algorithms.Options(1.0, right=right, programs=132)
        assert algorithms.chosen(o, lengths, single)[0] == name
    assert chosen(128, lengths=long, scratch=2**31, algorithm="stored") is STORED[1]
    packed = LENGTHS._replace(packed=True)
    assert chosen(128, lengths=packed) is SPLITS[1]
    assert chosen(128, lengths=packed, algorithm="stored") is STORED[1]
    narrow = {"left": 1024, "right": 0}
    assert chosen(128, lengths=long, **narrow) is STORED[1]


@pytest.mark.parametrize("left", [None, 0, 5, 200, -70])
@pytest.mark.parametrize("right", [None, 0, 90, -70])
@pytest.mark.parametrize("sizes", [(300, 300), (129, 700), (700, 129), (64, 64)])
def test_tiles_of_scores(sizes: tuple[int, int], left: int | None, right: int | None) -> None:
    """All pairs of a block of keys and 64 queries that see some of them have a place of their own,
    within what is reckoned for a head."""
    queries, keys = sizes
    lengths = forward.Lengths(1, queries, keys, queries, keys, False)
    layout = algorithms.layout_of(lengths, 1, left, right)
    triangle = algorithms.is_triangle(lengths, left, right)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    seen = seen_by({"left": left, "right": right})
    scores = seen(torch.zeros(1), torch.zeros(1), i, j, keys - queries).expand(queries, keys)
    places = set()
    for b, t in itertools.product(range(-(-keys // 128)), range(-(-queries // 64))):
        if not scores[64 * t : 64 * t + 64, 128 * b : 128 * b + 128].any():
            continue
        column = t - max(128 * b - layout.first, 0) // 64
        place = b * layout.row - triangle * b * (b - 1) + column
        assert 0 <= column < layout.row and 0 <= place < layout.of_head
        assert place not in places
        places.add(place)
    if triangle:
        assert len(places) == layout.of_head


# Through the compiler, as a launch would do it.

NEEDS = {
    "fused": ALL,
    "stored": ALL,
    "queries": only("q"),
    "keys": only("kv"),
    "key": only("k"),
    "value": only("v"),
}
ROWS = [
    *(("fused", walk) for walk in FUSED),
    *(("stored", stored.keys) for stored in STORED),
    *((name, getattr(row, name)) for row in SPLITS for name in Split._fields),
]
# Of dK and dV apart only where they do not fit beside each other.
WALKS = [
    pytest.param(name, walk, id=f"{name}-{walk.qk.total}-{walk.v.total}")
    for name, walk in ROWS
    if walk and (name not in ("key", "value") or walk.qk.total > 128)
]


def stored_of(walk: Walk) -> Stored:
    return next(x for x in STORED if x.keys == walk)


def compiled(name: str, walk: Walk, starts: Tensor | None = None, **options: Any) -> Compiled:
    """One walk, for a call that needs just that."""
    shapes = ((1, 2, 2048, n) for n in (walk.qk.total, walk.v.total))
    q, v = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    lse = torch.empty(1, 2, 2048, device="meta")
    row = Split(walk, walk if name == "keys" else None, walk, walk)
    run = {"scale": 0.1, "programs": 8, "needs": NEEDS[name], **options}
    kernels = walk if name == "fused" else stored_of(walk) if name == "stored" else row
    run |= how(kernels)
    launcher = kernel.backward
    if starts is not None:
        q, v, lse = q[0].transpose(0, 1), v[0].transpose(0, 1), lse[0]
        launcher = partial(kernel.backward_packed, cu_seqlens_q=starts, cu_seqlens_k=starts)
    statistics, found, *more = compile_launches(launcher, q, q, v, Saved(v, lse, v, None), **run)
    assert statistics.spills == 0
    for product in more:
        assert product.opcodes["HGMMA"] and not product.serialised
        assert product.spills <= 2  # of the producer, which looks through intervals
    return found


def products(walk: Walk) -> int:
    """Of a consumer and a tile, 16 columns or rows at a time: S, dP, dV, dK and its part of dQ."""
    rows = walk.block // 16
    found = walk.qk.total // 16 + walk.second * rows * walk.v.boxes
    found += walk.first * (walk.v.total // 16 + rows * walk.qk.boxes)
    return found + (walk.consumers * 4 if walk.ds == "consumers" else 0)


# What ptxas may keep in local memory, by columns: stores in all, and loads in the loop over tiles.
# Where consumers make dQ as well, registers are short in the loop.
MOST_SPILLS = {64: (3, 1), 128: (19, 1), 192: (23, 0), 256: (24, 0)}
MOST_SPILLS_OF_CONSUMERS = (58, 22)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("name", "walk"), WALKS)
def test_machine_code(name: str, walk: Walk, causal: bool) -> None:
    found = compiled(name, walk, right=0 if causal else None)
    for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert found.opcodes[opcode], opcode
    assert bool(found.opcodes["UTMAREDG"]) == (walk.ds in ("role", "consumers"))
    assert not found.serialised and not found.opcodes["PRMT"]
    most, most_in_loop = MOST_SPILLS[walk.qk.total]
    if walk.ds == "consumers":
        most, most_in_loop = MOST_SPILLS_OF_CONSUMERS
    assert found.spills <= most
    assert found.loop_with(products(walk))["LDL"] <= most_in_loop
    assert found.registers == walk.registers[0]
    assert walk.shared_bytes - 2048 <= found.shared_bytes <= walk.shared_bytes + 1024


@pytest.mark.parametrize(("name", "walk"), [x for x in WALKS if x.values[1].ds != "consumers"])
def test_machine_code_of_tile_maps(name: str, walk: Walk) -> None:
    tile_map = map_of("random", (1, 2, 2048, 2048), torch.device("meta"))
    found = compiled(name, walk, tile_map=tile_map)
    assert found.opcodes["HGMMA"] and not found.serialised and not found.opcodes["PRMT"]
    assert found.spills <= 45  # outside of the loop, most of them of the producer, of stored at 128
    loop = found.loop_with(products(walk))
    assert not loop["LDL"] and not loop["STL"]


@pytest.mark.parametrize("name", ["queries", "keys", "fused", "stored"])
def test_every_option_compiles(name: str) -> None:
    """The emulator takes more than the compiler: layouts of as many warps as there are, say."""
    walks = {"fused": FUSED[0], "stored": STORED[0].keys}
    walk = walks[name] if name in walks else getattr(SPLITS[0], name)
    meta = torch.device("meta")
    bounds, tiles = (torch.empty(1, n, 2, dtype=torch.int32, device=meta) for n in (2048, 32))
    seed = torch.empty(1, dtype=torch.int64, device=meta)
    for options in (
        {"bounds": bounds[:, :, None].expand(1, 2048, 2, 2), "query_tiles": tiles},
        {"left": 9, "right": 0, "softcap": 2.0}, {"dropout": 0.5, "seed": seed},
    ):  # fmt: skip
        assert compiled(name, walk, **options).opcodes["HGMMA"]
    starts = torch.empty(9, dtype=torch.int32, device=meta)
    one = bounds[:, :, None]
    assert compiled(name, walk, starts=starts, bounds=one, query_tiles=tiles).opcodes["HGMMA"]
