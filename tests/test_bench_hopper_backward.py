"""The benchmark of the Hopper backend's backward pass, without a card.

What it shares with forward's is tested in test_bench_hopper.py. Every time and every watt here is
made up, and nothing made up is written outside of tmp_path.
"""

from __future__ import annotations

import json
import math
import os
import signal
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflash import ops
from anyflash.api import attention, attention_varlen
from anyflash.bench import render as pages
from anyflash.bench import report
from anyflash.bench.check import Check, CheckFailed, Error
from anyflash.bench.hopper import anchors, card, power
from anyflash.bench.hopper import peers as forward_peers
from anyflash.bench.hopper import rows as forward_rows
from anyflash.bench.hopper.backward import ablations, check, goals, peers, render, rows, suite
from anyflash.bench.hopper.backward.check import Reference
from anyflash.bench.hopper.backward.peers import Contest, Gradients, Maker, Passes, Run
from anyflash.bench.hopper.backward.rows import ALGORITHMS, DETERMINISTIC, ROWS
from anyflash.bench.hopper.backward.suite import run_row
from anyflash.bench.hopper.check import poisoned
from anyflash.bench.hopper.goals import WAYS, Line
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.peers import first_calls
from anyflash.bench.hopper.render import verdict
from anyflash.bench.hopper.results import BURST, SUSTAINED, RowResult
from anyflash.bench.hopper.rows import BACKWARD, CUDNN, FA2, OURS, STEP, Inputs, Row
from anyflash.bench.hopper.timing import Burst, Side
from anyflash.calls import Arguments
from anyflash.errors import Unsupported
from anyflash.kernels.hopper import algorithms, launch_backward
from anyflash.masks import window
from bench_cards import HERE, SHORT, a_load, made, run, words


def small(**changes: Any) -> Row:
    return replace(Row("small", 96, 96, 16, 16, 2, 2, measure=BACKWARD), **changes)


def row(name: str) -> Row:
    (found,) = (r for r in ROWS if r.name == name)
    return found


# Rows


def test_the_table_is_the_anchors() -> None:
    table = {(r.head_dim, r.queries, r.causal): r for r in ROWS if r.best is not None}
    assert len(table) == 18 and {key: r.best for key, r in table.items()} == anchors.BEST_BACKWARD
    assert table.keys() == anchors.BEST.keys()
    for (head_dim, length, _), r in table.items():
        assert r.batch * r.queries == 16384 and r.heads * r.head_dim == 2048 and r.sustained
        assert r.measure == BACKWARD and r.against == (FA2 if head_dim == 256 else CUDNN)
        short, long = {64: (1.0, 1.18), 128: (1.0, 1.0), 256: (1.5, 1.5)}[head_dim]
        assert r.bar == (short if length == 1024 else long)
    assert table[256, 4096, True].best == 1.59 and table[64, 16384, True].best == 1.35


def test_rows_beyond_the_table() -> None:
    assert len({r.name for r in ROWS}) == len(ROWS) == 28
    beyond = [r for r in ROWS if r.best is None]
    assert not any(r.sustained for r in beyond)
    bars = {r.name: (r.bar, r.against) for r in beyond}
    for name in ("D=96, S=4096, dense", "D=192/128, S=4096, causal", "GQA 32/8, S=8192, causal"):
        assert bars[name] == (1.0, CUDNN)
    assert bars["window 1024 of 16384"] == (0.8, "anyflash on D=128, S=16384, causal")
    assert bars[forward_rows.PACKED.name][0] is None
    assert bars["forward and backward, D=128, S=16384, causal"] == (2.0, FA2)
    assert all(r.quick.flops < r.flops for r in ROWS)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("D=128, S=4096, dense", 2.5 * 4 * 4 * 16 * 4096**2 * 128),
        ("D=192/128, S=4096, dense", 2.5 * 2 * 4 * 10 * 4096**2 * (192 + 128)),
        ("D=64, S=1024, causal", 2.5 * 4 * 16 * 32 * 1024**2 * 64 / 2),
        ("forward and backward, D=128, S=16384, causal", 3.5 * 4 * 16 * 16384**2 * 128 / 2),
    ],
)
def test_flops(name: str, flops: float) -> None:
    assert row(name).flops == flops


@pytest.mark.parametrize("name", ["window 1024 of 16384", forward_rows.PACKED.name])
def test_a_yardstick_is_a_backward_pass_as_well(name: str) -> None:
    """The ratio of rates is that of forward: 2.5 is on both sides."""
    (before,) = (r for r in forward_rows.ROWS if r.name == name)
    yardstick = row(name).yardstick
    assert yardstick is not None and before.yardstick is not None
    assert yardstick.flops / row(name).flops == before.yardstick.flops / before.flops
    assert yardstick.bar is yardstick.best is None


def test_what_comes_from_above() -> None:
    one = small(heads=6, head_dim_v=8, batch=2)
    inputs = Inputs.of(one, "cpu")
    assert inputs.dout.shape == (2, 6, 96, 8) and inputs.dout.dtype == torch.bfloat16
    assert inputs.dout is inputs.dout and torch.equal(inputs.dout, Inputs.of(one, "cpu").dout)
    inputs = Inputs.of(small(), "cpu")
    assert not torch.equal(inputs.dout, inputs.q)
    packed = Inputs.of(small(queries=70, keys=70, lengths=(30, 40)), "cpu")
    assert packed.dout.shape == packed.q.shape == (70, 2, 16)
    assert torch.equal(packed.heads(packed.dout, 1), packed.dout[30:].transpose(0, 1))


# Checks


def textbook(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Gradients:
    """The formulas of the gradients, one head after the other."""
    makers = (inputs.q, inputs.k, inputs.v)
    found = tuple(torch.empty_like(x).zero_().to(dtype) for x in makers)
    for b, h in inputs.pairs():
        q, k, v, dout = (inputs.head(x, b, h).to(dtype) for x in (*makers, inputs.dout))
        dq, dk, dv = (inputs.head(x, b, h) for x in found)
        scale, seen = 1 / math.sqrt(q.shape[1]), inputs.seen(torch.arange(len(q)))
        hidden = torch.zeros(()) if seen is None else torch.where(seen, 0.0, -math.inf)
        p = (q @ k.T * scale + hidden).softmax(-1)
        dp = dout @ v.T
        ds = p * (dp - (dout * (p @ v)).sum(-1, keepdim=True)) * scale
        dq += ds @ k
        dk += ds.T @ q
        dv += p.T @ dout
    return found


def right(inputs: Inputs) -> Run:
    """In float32, rounded once into fresh memory."""

    def call() -> Gradients:
        found = textbook(inputs)
        return tuple(torch.empty_like(x, dtype=inputs.q.dtype).copy_(x) for x in found)

    return call


def spoilt(fault: Callable[[Gradients], Any]) -> Maker:
    def make(inputs: Inputs) -> Run:
        def call() -> Gradients:
            found = right(inputs)()
            fault(found)
            return found

        return call

    return make


def raising(error: Exception) -> Maker:
    def make(inputs: Inputs) -> Run:
        def call() -> Gradients:
            raise error

        return call

    return make


def refusing(inputs: Inputs) -> Run:
    return raising(Unsupported("this", {"hopper": "it is made to refuse"}))(inputs)


def triton_error() -> Exception:
    kind = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    return kind("out of resource: shared memory\nRequired: much")


SHAPES = {
    "dense": small(batch=2),
    "causal": small(causal=True),
    "window": small(window=11),
    "grouped": small(heads=4),
    "packed": small(queries=70, keys=70, lengths=(1, 29, 40)),
    "narrow values": small(head_dim_v=8),
    "short queries": small(queries=5),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scores", [2**27, 500])
def test_the_check_knows_the_formulas(
    name: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it takes all rows at a time or a few."""
    monkeypatch.setattr(check, "SCORES", scores)
    inputs = Inputs.of(SHAPES[name], "cpu")
    expected = textbook(inputs, torch.float64)
    for exact, formula in zip(check.gradients(inputs, torch.float64), expected, strict=True):
        torch.testing.assert_close(exact, formula, rtol=0, atol=1e-12)


def test_sums_over_rows_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows a few at a time are no worse, so that the tolerance does not grow with their number."""
    inputs = Inputs.of(small(), "cpu")
    whole = Reference(inputs).plain
    monkeypatch.setattr(check, "SCORES", 500)
    assert all(a < 1.2 * b for a, b in zip(Reference(inputs).plain, whole, strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_right_passes(name: str) -> None:
    inputs = Inputs.of(SHAPES[name], "cpu")
    with poisoned():
        found = right(inputs)()
    errors = Reference(inputs).errors(found, found)
    assert [e.tensor for e in errors] == ["dq", "dk", "dv"]
    assert all(e.passed and e.ours == e.peer and 0 < e.ours < e.tolerance for e in errors)


def grow(x: Tensor) -> None:
    x.mul_(1.1)


def move_the_last(x: Tensor) -> None:
    x.flatten()[-1:].add_(1)


def leave_the_last(x: Tensor) -> None:
    x.flatten()[-1] = torch.empty(1, dtype=x.dtype)[0]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("fault", [grow, move_the_last, leave_the_last])
@pytest.mark.parametrize("wrong", range(3))
def test_what_is_wrong_does_not(name: str, fault: Callable[[Tensor], None], wrong: int) -> None:
    inputs = Inputs.of(SHAPES[name], "cpu")
    with poisoned():
        found = spoilt(lambda x: fault(x[wrong]))(inputs)()
    passed = [e.passed for e in Reference(inputs).errors(found)]
    assert passed == [n != wrong for n in range(3)]


def test_gradients_of_another_shape_are_an_error() -> None:
    inputs = Inputs.of(small(), "cpu")
    with pytest.raises(ValueError, match=r"small.*expected \[\(1, 2, 96, 16\)"):
        Reference(inputs).errors(right(inputs)()[:2])


# Who is measured


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend stands in for the one that needs a card."""
    monkeypatch.setattr(peers, "BACKEND", "cpu")


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("measure", [BACKWARD, STEP])
def test_ours_is_what_autograd_would_call(name: str, measure: str) -> None:
    inputs = Inputs.of(replace(SHAPES[name], measure=measure), "cpu")
    with torch.no_grad():
        found = peers.timed(peers.user)(inputs)()
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    reach = inputs.row.window
    options = {"mask": None if reach is None else window(reach, 0), "causal": inputs.row.causal}
    if inputs.offsets is None:
        out = attention(*leaves, **options, backend="cpu")
    else:
        out = attention_varlen(*leaves, inputs.offsets, inputs.offsets, **options, backend="cpu")
    for x, y in zip(found, torch.autograd.grad(out, leaves, inputs.dout), strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", SHAPES)
def test_ours_is_asked_as_forward_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators get what `attention` hands to them, but that a derivative will follow."""
    inputs, handed = Inputs.of(SHAPES[name], "cpu"), []

    def operator(*arguments: Any) -> Any:
        handed.append(Arguments(*arguments))
        raise ZeroDivisionError

    monkeypatch.setattr(forward_peers, "BACKEND", "cpu")
    monkeypatch.setattr(ops, "attention_forward", operator)
    with pytest.raises(ZeroDivisionError):
        forward_peers.ours(inputs)()
    expected = handed[0]._replace(gradient=True)
    for mine, other in zip(peers.arguments(inputs), expected, strict=True):
        assert mine is other or mine == other


@pytest.mark.parametrize(("measure", "forwards"), [(BACKWARD, 1), (STEP, 3)])
def test_forward_is_timed_in_a_step_alone(measure: str, forwards: int) -> None:
    called: list[str] = []
    side = Passes(lambda: called.append("forward"), lambda saved: called.append("backward") or ())
    call = peers.timed(lambda inputs: side)(Inputs.of(small(measure=measure), "cpu"))
    for _ in range(3):
        call()
    assert called.count("backward") == 3 and called.count("forward") == forwards


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", ["dense", "causal", "window", "packed"])
def test_an_algorithm_is_asked_for_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, asked = Inputs.of(SHAPES[name], "cpu"), {}

    def launched(q: Tensor, k: Tensor, v: Tensor, saved: Any, *rest: Any, **options: Any) -> Any:
        assert torch.equal(saved.dout, inputs.dout) and saved.dlse is None
        assert saved.out.shape == q.shape and saved.lse.dtype == torch.float32
        asked.update(options, offsets=[x for x in rest if isinstance(x, Tensor)])
        return launch_backward.Gradients(q, k, v, None, None)

    packed = inputs.offsets is not None
    monkeypatch.setattr(launch_backward, "backward_packed" if packed else "backward", launched)
    with torch.no_grad():
        found = peers.timed(peers.algorithm("split"))(inputs)()
    assert found[0] is inputs.q and found[2] is inputs.v and len(found) == 3
    assert asked.pop("offsets") == ([inputs.offsets] * 2 if packed else [])
    if packed:
        assert asked.pop("max_seqlen_q") == asked.pop("max_seqlen_k") == 40
        assert asked.pop("needs", algorithms.ALL) == algorithms.ALL
    reach = {"causal": (None, 0), "window": (11, 0)}.get(name, (None, None))
    assert (asked["left"], asked["right"]) == reach
    assert asked["scale"] == 1 / 4 and asked["algorithm"] == "split"
    algorithms.Options(**asked)  # it knows all of these


def test_an_algorithm_that_would_be_another_is_refused() -> None:
    """The launcher has wide heads split, whatever it is asked for."""
    wide = Inputs.of(small(head_dim=256, head_dim_v=256), "cpu")
    for name in ("fused", "stored"):
        with pytest.raises(Unsupported, match="does not do this row: split would, in its place"):
            peers.algorithm(name)(wide)
    for name, head_dim in (("fused", 128), ("stored", 192), ("split", 256)):
        peers.algorithm(name)(Inputs.of(small(head_dim=head_dim, head_dim_v=head_dim), "cpu"))


def test_all_algorithms_are_sides() -> None:
    contest = Contest()
    assert tuple(contest.algorithms) == ALGORITHMS and set(contest.others) == {CUDNN, FA2}
    assert set(ALGORITHMS) & set(DETERMINISTIC)


BY_SCHEMA = {  # where names differ, and what is undefined
    CUDNN: {"grad_out": "dout", "out": "output", "attn_bias": None},
    FA2: {"grad_out": "dout", "out": "output", "philox_seed": "rng_state"}
    | {"philox_offset": "unused"},
}


@pytest.mark.parametrize("side", [CUDNN, FA2])
def test_operators_get_what_their_schema_says(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward's results, by name, where backward expects them."""
    name = {
        CUDNN: "_scaled_dot_product_cudnn_attention",
        FA2: "_scaled_dot_product_flash_attention",
    }
    schemas = [getattr(peers.aten, name[side] + end).default._schema for end in ("", "_backward")]
    q, k, v, dout = "query", "key", "value", "dout"
    calls: list[dict[str, Any]] = []

    def operator(number: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            names = [a.name for a in schemas[number].arguments]
            calls.append(dict(zip(names, arguments, strict=False)))
            return tuple(r.name for r in schemas[0].returns)

        return call

    fake = {name[side]: operator(0), f"{name[side]}_backward": operator(1)}
    monkeypatch.setattr(peers, "aten", types.SimpleNamespace(**fake))
    inputs: Any = types.SimpleNamespace(q=q, k=k, v=v, dout=dout, row=small(causal=True))
    passes = {CUDNN: peers.cudnn_passes, FA2: peers.fa2_passes}[side](inputs)
    passes.backward(passes.forward())
    fixed = {"dropout_p": 0.0, "is_causal": True}
    expected = {
        n: BY_SCHEMA[side].get(n, n) for n in (a.name for a in schemas[1].arguments)
    } | fixed
    expected.pop("scale")  # left to be 1/√D
    assert calls[1] == expected
    own = {"attn_bias": None, "compute_log_sumexp": True} if side == CUDNN else {}
    assert calls[0] == {"query": q, "key": k, "value": v, **own, **fixed}


@pytest.mark.parametrize("passes", [peers.cudnn_passes, peers.fa2_passes])
def test_operators_run_without_data(passes: Callable[[Any], Passes]) -> None:
    tensors = {
        name: torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="meta")
        for name in ("q", "k", "v", "dout")
    }
    inputs: Any = types.SimpleNamespace(**tensors, row=small(causal=True))
    forward, backward = passes(inputs)
    assert [x.shape for x in backward(forward())] == [(2, 4, 128, 64)] * 3


def test_peers_on_a_machine_without_a_card() -> None:
    served, refusals = first_calls(peers.OTHERS, Inputs.of(small(), "cpu"))
    assert not served
    # SDPA has no cuDNN here, and a flash kernel which is another operator.
    assert "No viable backend" in refusals[CUDNN]
    assert "'aten::_scaled_dot_product_flash_attention'" in refusals[FA2]
    for name, said in (("window", "no window"), ("packed", "nested tensors")):
        _, refusals = first_calls(peers.OTHERS, Inputs.of(SHAPES[name], "cpu"))
        assert all(said in why for why in refusals.values()) and len(refusals) == 2


def test_a_peer_is_asked_whether_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no_grad, or with inputs that need no gradient, kernels serve more than they can."""

    def sdpa(inputs: Inputs) -> Callable[[], Tensor]:
        def call() -> Tensor:
            needed = [x.requires_grad for x in (inputs.q, inputs.k, inputs.v)]
            if torch.is_grad_enabled() and all(needed):
                raise RuntimeError("No available kernel.")
            return inputs.q

        return call

    monkeypatch.setattr(forward_peers, "sdpa", sdpa)
    with torch.no_grad():
        _, refusals = first_calls(peers.OTHERS, Inputs.of(small(), "cpu"))
    assert refusals == {CUDNN: "No available kernel.", FA2: "No available kernel."}


# A row as a whole


BOTH = {CUDNN: right, FA2: right}
FAIR = Contest(right, dict.fromkeys(ALGORITHMS, right), BOTH)


def test_a_measured_row() -> None:
    told: list[int] = []
    times = {OURS: 1e-3, "fused": 1e-3, "split": 1.25e-3, "stored": 1.1e-3}
    _, tools = made(**times, **{CUDNN: 1.2e-3, FA2: 3e-3})
    anchor = small(best=1.1, bar=1.15, sustained=True)
    result = run_row(anchor, SHORT, tools, lambda: told.append(1), FAIR)
    assert result.passed and len(told) == 3 and not result.refusals
    assert result.sides(BURST) == [OURS, *ALGORITHMS, CUDNN, FA2]
    names = [f"d{x}{of}" for of in ("", *(f", {x}" for x in ALGORITHMS)) for x in "qkv"]
    assert [e.tensor for e in result.errors] == names
    assert [e.peer is None for e in result.errors] == [False] * 3 + [True] * 9
    assert result.picked == "fused"  # at 32 columns
    assert result.ratio(CUDNN) == pytest.approx(1.2) and result.ratio(FA2) == pytest.approx(3)
    assert result.ratio(CUDNN, BURST, "split") == pytest.approx(1.2 / 1.25)
    assert result.ratio(CUDNN, SUSTAINED) == pytest.approx(1.2)
    assert result.tflops("split") == pytest.approx(2.5 * 2 * 2 * 96**2 * 32 / 1.25e-3 / 1e12)
    assert result.over_best() == pytest.approx(1.2 / 1.1) and result.met
    assert set(result.sustained) == {OURS, CUDNN}
    assert run_row(replace(anchor, bar=1.3), SHORT, tools, contest=FAIR).met is False


def test_who_is_held_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic algorithms too, where something is demanded of them, and FA2 at D=256."""
    loaded = {name: suite.heavy(row(name)) for name in (r.name for r in ROWS if r.sustained)}
    assert loaded["D=128, S=4096, causal"] == {OURS, CUDNN, *DETERMINISTIC}
    assert loaded["D=64, S=1024, dense"] == {OURS, CUDNN}
    assert loaded["D=256, S=16384, causal"] == {OURS, FA2}
    monkeypatch.setattr(goals, "DETERMINISTIC_FROM", 96)
    _, tools = made()
    one = small(head_dim=64, head_dim_v=64, best=1.0, sustained=True)
    assert list(run_row(one, SHORT, tools, contest=FAIR).sustained) == [OURS, *DETERMINISTIC, CUDNN]
    assert run_row(replace(one, sustained=False), SHORT, tools, contest=FAIR).sustained == {}


def test_a_wrong_gradient_is_not_timed() -> None:
    _, tools = made()
    tools = replace(tools, capture=lambda *_: pytest.fail("timed"))
    wrong = replace(FAIR, ours=spoilt(lambda x: grow(x[1])))
    result = run_row(small(bar=0.1), SHORT, tools, contest=wrong)
    assert not result.passed and result.met is None and result.burst is None
    assert verdict(result) == "CHECK FAILED"
    assert [e.tensor for e in result.errors] == ["dq", "dk", "dv"]


def test_all_of_ours_is_checked_in_memory_full_of_nan() -> None:
    fresh: list[bool] = []

    def looking(inputs: Inputs) -> Run:
        def call() -> Gradients:
            fresh.append(bool(torch.empty(5).isnan().all()))
            return right(inputs)()

        return call

    _, tools = made()
    tools = replace(tools, capture=lambda name, *_: Side(name, lambda: None, 1))
    one = small(yardstick=small(name="all", batch=2))
    run_row(one, SHORT, tools, contest=Contest(looking, {"split": looking}, BOTH))
    assert fresh == [True] * 3


def test_a_wrong_algorithm_fails_the_row_and_is_not_timed() -> None:
    _, tools = made()
    algorithms = {"fused": spoilt(lambda x: grow(x[0])), "split": right}
    result = run_row(small(bar=0.1), SHORT, tools, contest=replace(FAIR, algorithms=algorithms))
    assert [e.tensor for e in result.errors if not e.passed] == ["dq, fused"]
    assert result.sides(BURST) == [OURS, "split", CUDNN, FA2] and not result.passed
    assert result.met is None and verdict(result) == "CHECK FAILED"


def test_who_does_not_serve_is_told() -> None:
    _, tools = made()
    algorithms = {"fused": refusing, "split": raising(triton_error())}
    others = {CUDNN: raising(RuntimeError("No execution plans\nmore")), FA2: right}
    result = run_row(small(bar=0.1), SHORT, tools, contest=Contest(right, algorithms, others))
    assert result.passed and result.sides(BURST) == [OURS, FA2]
    assert result.refusals == {
        CUDNN: "No execution plans", "fused": "it is made to refuse",
        "split": "OutOfResources: out of resource: shared memory",
    }  # fmt: skip
    assert result.met is None and all(e.peer is None for e in result.errors)


def test_a_row_that_we_refuse() -> None:
    _, tools = made()
    result = run_row(small(bar=0.1), SHORT, tools, contest=replace(FAIR, ours=refusing))
    assert result.refused and result.refusals[OURS] == "it is made to refuse"
    assert verdict(result) == "REFUSED" and result.burst is None


def test_a_failure_of_an_algorithm_is_no_refusal() -> None:
    _, tools = made()
    broken = replace(FAIR, algorithms={"split": raising(KeyError("a mistake"))})
    with pytest.raises(KeyError):
        run_row(small(), SHORT, tools, contest=broken)


def test_a_peer_that_cannot_be_captured_is_told() -> None:
    _, tools = made()

    def capture(name: str, call: Run, seconds: float) -> Side:
        if name in (CUDNN, "split"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return tools.capture(name, call, seconds)

    tools_of_peer = replace(tools, capture=capture)
    contest = replace(FAIR, algorithms={})
    result = run_row(small(), SHORT, tools_of_peer, contest=contest)
    assert result.sides(BURST) == [OURS, FA2]
    assert result.refusals[CUDNN].startswith("not in a CUDA graph: operation not permitted")
    with pytest.raises(RuntimeError, match="not permitted"):  # of our own it is an error
        run_row(small(), SHORT, tools_of_peer, contest=FAIR)


def test_a_rate_against_our_own() -> None:
    """Half of the work in a little more than half of the time."""
    one = small(bar=0.85, yardstick=small(name="all", batch=2))
    _, tools = made(**{OURS: 1.1e-3, one.against: 2e-3})
    result = run_row(one, SHORT, tools, contest=replace(FAIR, algorithms={}))
    assert [e.tensor for e in result.errors] == ["dq", "dk", "dv"] + [
        f"d{x}, on all" for x in "qkv"
    ]
    assert result.ratio(one.against) == pytest.approx(2 / 1.1 / 2) and result.met

    def wrong_on_all(inputs: Inputs) -> Run:
        return (right if inputs.row.name == "small" else spoilt(lambda x: grow(x[2])))(inputs)

    result = run_row(one, SHORT, tools, contest=replace(FAIR, ours=wrong_on_all))
    assert not result.passed and result.burst is None


def test_a_step_is_against_fa2() -> None:
    _, tools = made(**{OURS: 1e-3, FA2: 2.5e-3})
    result = run_row(small(measure=STEP, bar=2.0), SHORT, tools, contest=FAIR)
    assert result.met and result.tflops(OURS) == pytest.approx(
        3.5 * 2 * 2 * 96**2 * 32 / 1e-3 / 1e12
    )
    assert run_row(small(measure=STEP, bar=2.6), SHORT, tools, contest=FAIR).met is False


def test_the_timers_themselves_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed on the word of a check of nothing."""
    _, tools = made()
    monkeypatch.setattr(suite, "Check", lambda name, errors: Check(name, ()))
    with pytest.raises(CheckFailed, match="'small' is not timed"):
        run_row(small(), SHORT, tools, contest=FAIR)


# Bars and goals, over a made-up run


SPEEDS = {64: 1.36, 128: 1.26, 256: 1.95}  # over the other side; all bars and goals are met
SPLIT = 1.1  # over cuDNN


def a_result(one: Row, speed: float, split: float = SPLIT, **changes: Any) -> RowResult:
    """A made-up result: `speed` times as fast as the other side, at 580 instead of 600 W."""
    errors = tuple(Error(f"d{x}", 1e-3, 1e-3, 2e-3, 4.01e-3) for x in "qkv")
    errors += tuple(replace(e, tensor=f"{e.tensor}, split", ours=1.5e-3) for e in errors)
    work = 1.0 if one.yardstick is None else one.flops / one.yardstick.flops
    times = {OURS: (work / speed,) * 3, "split": (1 / split,) * 3, one.against: (1.0,) * 3}
    load = {} if not one.sustained else {
        OURS: a_load(1 / speed, 580.0), "split": a_load(1 / split, 580.0),
        one.against: a_load(1.0, 600.0),
    }  # fmt: skip
    burst = Burst(times, dict.fromkeys(times, 20))
    found = RowResult(one, errors, {"fused": "no such kernel"}, burst, load, picked="split")
    return replace(found, **changes)


def a_run(**of_all: Any) -> list[RowResult]:
    return [a_result(r, SPEEDS[r.head_dim] if r.best else 2.5, **of_all) for r in ROWS]


def line(results: list[RowResult], what: str) -> Line:
    (found,) = (x for x in goals.lines(results) if x.what.startswith(what))
    return found


def at(results: list[RowResult], name: str) -> int:
    return [r.row.name for r in results].index(name)


def test_a_run_that_meets_everything() -> None:
    failures = goals.failures(a_run(), whole=True)
    assert not any(failures.values()), failures
    found = goals.lines(a_run())
    assert [x.is_bar for x in found] == [True] * 6 + [False] * 4 and all(x.met for x in found)
    assert line(a_run(), "ours over FA2 on every row of D=256, b").figure == (
        "6 of 6 rows, worst 1.95"
    )
    best = line(a_run(), "ours over the best on every row, burst")
    assert best.figure == f"18 of 18 rows, worst {1.26 / 1.25:.2f}"


def test_the_geometric_mean_is_over_what_cudnn_serves() -> None:
    results = a_run()
    expected = math.sqrt(1.36 * 1.26)
    assert goals.geometric_mean(results, BURST) == pytest.approx(expected)
    results[0] = a_result(results[0].row, 2 * 1.36)
    assert goals.geometric_mean(results, SUSTAINED) == pytest.approx(expected * 2 ** (1 / 12))
    assert goals.geometric_mean(results[1:], BURST) is None
    wide = at(results, "D=256, S=4096, dense")
    without = results[:wide] + results[wide + 1 :]
    assert goals.geometric_mean(without, BURST) == goals.geometric_mean(results, BURST)


def test_the_faster_deterministic_algorithm_counts() -> None:
    what = "the fastest deterministic algorithm over cuDNN, D=128 from S=4096 on, burst"
    assert line(a_run(), what).figure == "4 of 4 rows, worst 1.10"
    slow = a_run(split=0.96)
    assert line(slow, what).met is False and line(slow, what.replace("128", "64")).met
    missed = [x for x in goals.failures(slow, whole=True)["bar missed"] if "deterministic" in x]
    assert missed == [what, what.replace("burst", SUSTAINED)]
    for n, result in enumerate(slow):
        assert result.burst is not None
        times = result.burst.times | {"stored": (1 / 1.01,) * 3}
        slow[n] = replace(result, burst=Burst(times, dict.fromkeys(times, 20)))
    assert line(slow, what).figure == "4 of 4 rows, worst 1.01"
    assert line(slow, what.replace("burst", SUSTAINED)).met is False
    short = at(slow, "D=128, S=1024, dense")
    slow[short] = a_result(slow[short].row, 1.26, split=0.5)
    assert line(slow, what).met  # nothing is demanded of short ones


def test_a_run_that_misses_bars() -> None:
    results = a_run()
    n = at(results, "D=64, S=4096, causal")
    results[n] = a_result(results[n].row, 1.17)
    assert goals.failures(results, whole=True)["bar missed"] == ["D=64, S=4096, causal"]
    wide = at(results, "D=256, S=1024, dense")
    results[wide] = a_result(results[wide].row, 1.49)
    assert goals.failures(results, whole=False)["bar missed"][1] == "D=256, S=1024, dense"
    assert line(results, "ours over FA2 on every row of D=256, s").met is False
    low = [a_result(r, 1.1) for r in ROWS if r.best is not None]
    missed = goals.failures(low, whole=True)["bar missed"]
    assert set(missed) >= {f"geometric mean of ours over cuDNN, {way}" for way in WAYS}


def test_where_cudnn_refuses_there_is_nothing_to_reach_beyond_the_table() -> None:
    results = a_run()
    for name in ("D=192, S=4096, dense", "D=128, S=4096, dense"):
        one = results[at(results, name)]
        assert one.burst is not None
        times = {side: x for side, x in one.burst.times.items() if side != CUDNN}
        results[at(results, name)] = replace(
            one, burst=Burst(times, dict.fromkeys(times, 20)), sustained={}, refusals={CUDNN: "no"}
        )  # fmt: skip
    missing = goals.failures(results, whole=True)["bar not measured"]
    assert missing[0] == "D=128, S=4096, dense" and "D=192, S=4096, dense" not in missing
    assert f"geometric mean of ours over cuDNN, {BURST}" in missing
    results[0] = RowResult(results[0].row, refusals={OURS: "no"})
    assert goals.failures(results, whole=True)["refused"] == [results[0].row.name]
    # Of a part, the demands on the whole say nothing.
    assert not any(goals.failures(a_run()[:3], whole=False).values())


# Result files and the page


def a_report(results: list[RowResult] | None = None) -> report.Report[Any, Any, Any]:
    found = a_run() if results is None else results
    return report.Report.of(report.HOPPER_BACKWARD, Settings(), found, report.source(), HERE)


def test_a_result_file_comes_back_as_it_was(tmp_path: Path) -> None:
    whole, path = a_report(), tmp_path / "hopper-backward.json"
    report.write(whole, path)
    assert report.read(path) == whole and report.read(path).to_json() == path.read_text()
    data = json.loads(path.read_text())
    assert data["suite"] == "hopper-backward"
    assert data["derived"]["geometric_mean_over_cudnn"][BURST] == pytest.approx(1.309, abs=1e-3)
    first = data["results"][0]["derived"]
    assert first["bar_met"] is True and first["over_best"] == pytest.approx(1.36 / 1.18)
    assert set(first["tflops"]) == {OURS, "split", CUDNN}


def test_what_the_page_says(tmp_path: Path) -> None:
    report.write(a_report(), tmp_path / "results" / "hopper-backward.json")
    path = tmp_path / "performance.md"
    pages.render(tmp_path / "results", path)
    text = path.read_text()
    assert "## Made-up H200, backward" in text and anchors.SOURCE in text
    titles = [part[4:] for part in text.splitlines() if part.startswith("### ")]
    # A run without variants has no table of them.
    every = [title for title, _ in render.tables([])]
    assert titles == [title for title in every if not title.startswith("Variants")]
    assert len(titles) == len(every) - 1
    rate = row("D=64, S=1024, dense").flops / 1e9
    lines = text.splitlines()
    (burst,) = (x for x in lines if x.startswith("| D=64, S=1024, dense | 1.36 (1.36–1.36)"))
    assert "| cuDNN | ≥ 1.00 | yes | 1.15 | – |" in burst
    assert f"| {rate * 1.36:.0f} | – | {rate * 1.1:.0f} | – | {rate:.0f} | – | 0.74 |" in burst
    assert burst.endswith("| (16, 32, 1024, 64) | split |")
    assert "| D=256, S=1024, dense | 1.95 (1.95–1.95) | FA2 | ≥ 1.50 | yes | 1.29 | 1.95 |" in text
    assert (
        f"| D=64, S=1024, dense | cuDNN | 1.36 | ≥ 1.00 | yes | 1.15 | 0.71 | {rate:.0f} |" in text
    )
    assert f"| D=64, S=1024, dense | split | 1.24 | – | – | – | 0.81 | {rate * 1.1:.0f} |" in text
    assert "| D=64, S=1024, dense | fused | no such kernel |" in text
    errors = "| D=64, S=1024, dense | dk | 1.00e-03 | – | 1.50e-03 | – | 1.00e-03 | 2.00e-03 |"
    assert f"{errors} 4.01e-03 | yes |" in text
    pages.render(tmp_path / "results", path)
    assert path.read_text() == text


def test_a_wrong_algorithm_is_seen_in_the_table_of_errors() -> None:
    one = a_result(ROWS[0], 1.3)
    wrong = tuple(
        replace(e, ours=1.0) if e.tensor == "dk, split" else e for e in one.errors
    )  # fmt: skip
    head, cells = render.error_table([replace(one, errors=wrong)])
    assert head[-1] == "passed" and [line[-1] for line in cells] == ["yes", "NO", "yes"]


def test_a_run_on_the_terminal() -> None:
    heads = [head[0] for head, _ in render.summary_tables(a_run())]
    assert heads == ["row", "burst, TFLOP/s", "row", "of the whole run"]
    assert [head[0] for head, _ in render.summary_tables([])] == ["of the whole run"]


# The command


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command on the CPU: everybody is the textbook, and ours is 1.2 times as fast."""
    _, tools = made(**{OURS: 1e-3, CUDNN: 1.2e-3})
    table = (
        small(name="tiny", best=1.0, bar=0.9, sustained=True),
        small(name="tiny, causal", causal=True, best=1.0, bar=1.5),
    )
    monkeypatch.setattr(rows, "ROWS", table)
    monkeypatch.setattr(card, "require", lambda: None)
    monkeypatch.setattr(power, "Meter", lambda: None)
    monkeypatch.setattr(card.Card, "here", lambda meter: HERE)
    monkeypatch.setattr(Instruments, "of_card", lambda meter: tools)
    monkeypatch.setattr(suite, "Contest", lambda: FAIR)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


COMMAND = ("bench", "hopper-backward", "--rounds", "3", "--sustained-seconds", "0.1")


@pytest.mark.usefixtures("fake_bench")
def test_the_command_writes_and_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*COMMAND)
    assert result.exit_code == 0, result.output  # a bar that is missed is told, and no more
    assert "bar missed: tiny, causal" in words(result.output)
    path = Path("results/made-up-h200/hopper-backward.json")
    assert [r.row.name for r in report.read(path).results] == ["tiny", "tiny, causal"]
    assert report.read(path).settings == Settings(3, 0.02, 0.1)
    assert run("bench", "render").exit_code == 0
    page = Path("docs/performance.md").read_text()
    assert "## Made-up H200, backward" in page and "| tiny, causal |" in page


@pytest.mark.usefixtures("fake_bench")
def test_the_command_holds_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*COMMAND, "--check", "--rows", "tiny").exit_code == 1
    monkeypatch.setattr(rows, "ROWS", rows.ROWS[:1])
    result = run(*COMMAND, "--check", "--rows", "TINY")
    assert result.exit_code == 0 and "nothing written" in result.output, result.output
    result = run(*COMMAND, "--check")
    assert result.exit_code == 1 and "bar not measured: geometric mean" in words(result.output)
    assert run("bench", "hopper-backward", "--check", "--quick").exit_code == 2


@pytest.mark.usefixtures("fake_bench")
def test_the_command_fails_on_a_wrong_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(FAIR, algorithms={"split": spoilt(lambda x: grow(x[2]))})
    monkeypatch.setattr(suite, "Contest", lambda: wrong)
    result = run(*COMMAND, "--rows", "causal")
    assert result.exit_code == 1 and "check failed: tiny, causal" in words(result.output)


@pytest.mark.usefixtures("fake_bench", "on_the_cpu")
def test_a_quick_run_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real contest, but for the kernels: the CPU's backend is in their place. Rows are made
    small twice, for the sake of time."""
    monkeypatch.setattr(rows, "ROWS", tuple(r.quick for r in ROWS))
    monkeypatch.setattr(suite, "Contest", lambda: Contest(algorithms={}))
    monkeypatch.setattr(report, "source", lambda: (None, False))
    output = tmp_path / "quick.json"
    result = run(*COMMAND, "--quick", "--output", str(output))
    assert result.exit_code == 0, result.output
    found = report.read(output).results
    assert [r.row.name for r in found] == [r.name for r in ROWS]
    assert all(
        r.passed and OURS in r.sides(BURST) and set(r.refusals) == {CUDNN, FA2} for r in found
    )


@pytest.mark.usefixtures("fake_bench")
def test_a_run_that_is_stopped_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM, as `timeout` sends it, in the second row."""

    def stopped(row: Row, *_: Any) -> RowResult:
        if row.causal:
            os.kill(os.getpid(), signal.SIGTERM)
        return RowResult(row, refusals={OURS: "no"})

    monkeypatch.setattr(suite, "run_row", stopped)
    output = tmp_path / "backward.json"
    result = run("bench", "hopper-backward", "--output", str(output))
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    assert not output.exists()
    kept = report.read(tmp_path / "backward.part.json")
    assert [r.row.name for r in kept.results] == ["tiny"]


def test_without_a_card_the_command_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    result = run("bench", "hopper-backward", "--quick")
    assert result.exit_code == 2
    assert "a benchmark of Hopper kernels cuda: no CUDA device is here" in words(result.output)


# Variants


def test_variants_are_walks_of_the_tables_with_changes() -> None:
    for one in ablations.ROWS:
        found, refusals = ablations.contest(one, FAIR)
        names = [v.name for v in ablations.VARIANTS_OF[one.head_dim, one.head_dim_v]]
        assert len(set(names)) == len(names) and not refusals
        assert list(found.algorithms) == names and found.others is FAIR.others
    wide = ablations.options(row("D=128, S=4096, dense"), ablations.VARIANTS_OF[128, 128][5])
    assert wide["algorithm"] == "split" and wide["split"].queries.block == 128
    assert wide["split"].keys.block == 64


@pytest.mark.parametrize(
    ("walk", "changes", "why"),
    [
        ("fused", {"colour": "red"}, "colour"),
        ("keys", {"slots": 99}, "no kernel for"),
    ],
)
def test_a_variant_that_cannot_be_is_told(
    walk: str, changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ablations.ROWS[0]
    monkeypatch.setitem(ablations.VARIANTS_OF, (64, 64), (ablations.Variant("odd", walk, changes),))
    found, refusals = ablations.contest(one, FAIR)
    assert not found.algorithms and why in refusals["odd"]


@pytest.mark.parametrize("walk", ["fused", "keys"])
def test_a_walk_that_heads_have_not_is_told(walk: str) -> None:
    with pytest.raises(ValueError, match="columns"):
        ablations.options(row("D=256, S=4096, dense"), ablations.Variant("none", walk, {}))


def test_variants_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher, replaced here, is told the walk."""
    _, tools = made()
    one, asked = ablations.ROWS[0].quick, []

    def launched(inputs: Inputs, saved: Any, **options: Any) -> Gradients:
        asked.append(options)
        wrong = options["algorithm"] == "split"
        right = FAIR.ours(inputs)()
        return tuple(2 * x for x in right) if wrong else right

    both = (ablations.Variant("first", "fused", {}), ablations.Variant("second", "keys", {}))
    monkeypatch.setitem(ablations.VARIANTS_OF, (64, 64), both)
    monkeypatch.setattr(ablations, "launched", launched)
    monkeypatch.setattr(ablations, "user", lambda inputs: Passes(lambda: None, lambda saved: ()))
    result = run_row(one, SHORT, tools, contest=FAIR)
    assert {x["algorithm"] for x in asked} == {"fused", "split"} and not result.passed
    assert "first" in result.sides(BURST) and "second" not in result.sides(BURST)
    table = render.variant_table([result])[1]
    assert [line[1] for line in table] == result.sides(BURST)
