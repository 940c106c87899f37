"""The benchmark of the Hopper backend, without a card: rows, checks, timing, bars, tables.

Every time and every watt here is made up, and nothing made up is written outside of tmp_path.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.bench import render as pages
from anyflash.bench import report
from anyflash.bench.check import Check, CheckFailed, Error
from anyflash.bench.hopper import (
    ablations,
    anchors,
    card,
    first,
    goals,
    peers,
    power,
    render,
    rows,
    suite,
    timing,
)
from anyflash.bench.hopper.check import Reference, poisoned, sample
from anyflash.bench.hopper.first import CACHED, COLD, FirstCall
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.peers import Contest, Refused, Run, attempt
from anyflash.bench.hopper.power import Power, Reading, Sampler
from anyflash.bench.hopper.results import BURST, SUSTAINED, RowResult
from anyflash.bench.hopper.rows import CUDNN, FA2, FIRST, HOST, LIBRARY, OURS, ROWS, Inputs, Row
from anyflash.bench.hopper.suite import run_row
from anyflash.bench.hopper.timing import Burst, Side
from anyflash.bench.timing import Timing
from anyflash.errors import InvalidInput, Unsupported
from anyflash.kernels.hopper import tiles
from anyflash.masks import causal, window
from bench_cards import HERE, SHORT, FakeCard, a_load, made, run, words

GOOD = Check("good", (Error("out", 0.0, 0.0, 0.0, 1e-5),))


def small(**changes: Any) -> Row:
    return replace(Row("small", 96, 96, 16, 16, 2, 2), **changes)


def row(name: str) -> Row:
    (found,) = (r for r in ROWS if r.name == name)
    return found


# Rows


def test_the_table_is_the_anchors() -> None:
    table = {(r.head_dim, r.queries, r.causal): r for r in ROWS if r.best is not None}
    assert len(table) == 18 and {key: r.best for key, r in table.items()} == anchors.BEST
    assert all(
        r.batch * r.queries == 16384 and r.heads * r.head_dim == 2048 for r in table.values()
    )
    assert all(r.sustained and r.heads == r.heads_kv for r in table.values())
    bars = {key: r.bar for key, r in table.items()}
    assert bars[64, 1024, False] == 0.90 and bars[64, 1024, True] == 0.85
    assert bars[256, 16384, True] == pytest.approx(0.98 * 1.308)


def test_rows_are_distinct_and_lawful() -> None:
    every = ROWS + ablations.ROWS
    assert len({r.name for r in every}) == len(every)
    assert all(r.quick.flops < r.flops for r in every if r.measure != HOST)
    assert {(r.head_dim, r.head_dim_v) for r in ROWS} >= {(96, 96), (192, 192), (192, 128)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measure": "typo"}, "measure.*small.*expected one of"),
        ({"keys": 100, "causal": True}, "96 queries and 100 keys"),
        ({"keys": 100, "window": 3}, "as many keys as queries"),
    ],
)
def test_a_row_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("D=128, S=4096, dense", 4 * 4 * 16 * 4096**2 * 128),
        ("D=64, S=1024, causal", 4 * 16 * 32 * 1024**2 * 64 / 2),
        ("D=192/128, S=4096, dense", 2 * 4 * 10 * 4096**2 * (192 + 128)),
        ("GQA 32/8, S=8192, causal", 4 * 32 * 8192**2 * 128 / 2),
        ("128 queries on 16384 keys", 4 * 16 * 128 * 16384 * 128),
        ("8192³ product", 2 * 8192**3),
    ],
)
def test_flops(name: str, flops: float) -> None:
    assert row(name).flops == flops


@pytest.mark.parametrize("reach", [0, 11, 95, 200])
def test_what_a_window_attends_is_counted(reach: int) -> None:
    seen = window(reach, 0).materialise(1, 1, 96, 96).sum().item()
    assert small(window=reach).attended == seen
    assert small(window=reach).flops == 2 * 2 * seen * (16 + 16)


def test_packed_lengths() -> None:
    (packed,) = (r for r in ROWS if r.lengths)
    assert packed.lengths == rows.log_uniform(32768, 128, 8192, seed=3)
    assert sum(packed.lengths) == packed.queries == 32768
    assert all(128 <= n <= 8192 for n in packed.lengths)
    assert packed.attended == sum(n * n for n in packed.lengths)
    assert packed.yardstick is not None
    # The dense rate is that of the same heads doing about the same work.
    assert packed.yardstick.heads == packed.heads
    assert packed.yardstick.flops == pytest.approx(packed.flops, rel=0.02)


def test_shapes_say_what_differs() -> None:
    assert row("D=64, S=1024, dense").shape == "(16, 32, 1024, 64)"
    assert row("D=192/128, S=4096, dense").shape == "(4, 10, 4096, 192/128)"
    assert row("GQA 32/8, S=8192, causal").shape == "(1, 32/8, 8192, 128)"
    assert row("128 queries on 16384 keys").shape == "(1, 16, 128/16384, 128)"
    assert row("8192³ product").shape == "8192 × 8192 by 8192 × 8192"
    assert small(queries=9, keys=9, lengths=(4, 5)).shape == "(2 packed, 2, 9, 16)"


@pytest.mark.parametrize("changes", [{"causal": True}, {"window": 11}])
def test_both_spellings_of_a_mask_agree(changes: dict[str, Any]) -> None:
    inputs, picked = Inputs.of(small(**changes), "cpu"), torch.tensor([3, 40, 95])
    mask = causal() if "causal" in changes else window(11, 0)
    expected = mask.materialise(1, 1, 96, 96)[0, 0, picked]
    seen = inputs.seen(picked)
    assert seen is not None and torch.equal(seen, expected)


def test_heads_of_groups_and_of_packed_sequences() -> None:
    grouped = Inputs.of(small(heads=6, batch=2), "cpu")
    assert torch.equal(grouped.head(grouped.k, 1, 4), grouped.k[1, 1])
    assert torch.equal(grouped.head(grouped.q, 1, 4), grouped.q[1, 4])
    packed = Inputs.of(small(queries=70, keys=70, lengths=(30, 40)), "cpu")
    assert packed.offsets is not None and packed.offsets.tolist() == [0, 30, 70]
    assert torch.equal(packed.head(packed.v, 1, 1), packed.v[30:, 1])
    assert len(list(packed.pairs())) == 4


# Checks


def right(inputs: Inputs) -> Run:
    """The textbook in float32, rounded once."""

    def run() -> Tensor:
        out = torch.empty(*inputs.q.shape[:-1], inputs.row.head_dim_v, dtype=inputs.q.dtype)
        for b, h in inputs.pairs():
            q, k, v = (inputs.head(x, b, h).float() for x in (inputs.q, inputs.k, inputs.v))
            seen = inputs.seen(torch.arange(len(q)))
            hidden = torch.zeros(()) if seen is None else torch.where(seen, 0.0, -math.inf)
            weights = (q @ k.T / math.sqrt(q.shape[1]) + hidden).softmax(-1)
            inputs.head(out, b, h).copy_(weights @ v)
        return out

    return run


def spoilt(fault: Callable[[Tensor], Any]) -> peers.Maker:
    def make(inputs: Inputs) -> Run:
        def run() -> Tensor:
            out = right(inputs)()
            fault(out)
            return out

        return run

    return make


def refusing(inputs: Inputs) -> Run:
    def run() -> Tensor:
        raise Unsupported("this", {"hopper": "it is made to refuse"})

    return run


SHAPES = {
    "dense": small(batch=2),
    "causal": small(causal=True),
    "window": small(window=11),
    "grouped": small(heads=4),
    "packed": small(queries=70, keys=70, lengths=(1, 29, 40)),
    "narrow values": small(head_dim_v=8),
    "short queries": small(queries=5),
    "long": small(queries=4200, keys=4200, heads=3, heads_kv=3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_right_passes(name: str) -> None:
    inputs = Inputs.of(SHAPES[name], "cpu")
    with poisoned():
        out = right(inputs)()
    error = Reference(inputs).error(out, out)
    assert error.passed and error.ours == error.peer and 0 < error.ours < error.tolerance


def unwritten(out: Tensor) -> None:
    out.flatten()[-1] = torch.empty(1, dtype=out.dtype)[0]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "fault", [lambda x: x.mul_(1.1), lambda x: x.flatten()[-1:].add_(1), unwritten]
)
def test_what_is_wrong_does_not(name: str, fault: Callable[[Tensor], Any]) -> None:
    inputs = Inputs.of(SHAPES[name], "cpu")
    run = spoilt(fault)(inputs)
    with poisoned():
        out = run()
    assert not Reference(inputs).error(out).passed


def test_nothing_may_be_infinite_where_no_row_is_compared() -> None:
    inputs = Inputs.of(SHAPES["long"], "cpu")
    b, h, compared = sample(inputs)[1]
    rest = next(n for n in range(4200) if n not in compared)
    out = right(inputs)()
    out[b, h, rest, 3] = math.inf
    assert Reference(inputs).error(out).ours == math.inf


def test_every_pair_is_sampled_and_short_ones_as_a_whole() -> None:
    inputs = Inputs.of(small(queries=300, keys=300, heads=12, heads_kv=12, batch=2), "cpu")
    found = {(b, h): chosen for b, h, chosen in sample(inputs)}
    assert list(found) == list(inputs.pairs())
    whole = [pair for pair, chosen in found.items() if chosen == list(range(300))]
    assert 2 < len(whole) <= 4 and {(0, 0), (1, 11)} <= set(whole)
    assert all({0, 299} <= set(chosen) and len(chosen) >= 32 for chosen in found.values())


def test_an_output_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"small.*expected \(1, 2, 96, 16\)"):
        Reference(Inputs.of(small(), "cpu")).error(torch.zeros(1, 2, 96, 8))


def test_poison_is_taken_away() -> None:
    with pytest.raises(ZeroDivisionError), poisoned():
        assert torch.empty(5).isnan().all()
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


# Refusals


class OutOfMemory(RuntimeError):
    pass


def raising(error: Exception) -> Callable[[], Tensor]:
    def function() -> Tensor:
        warnings.warn("too odd a head (Triggered internally at x.cpp:3.)", stacklevel=1)
        raise error

    return function


def test_a_refusal_carries_pytorchs_reasons() -> None:
    with pytest.raises(Refused, match=r"^No available kernel\. too odd a head$"):
        attempt(raising(RuntimeError("No available kernel.\nmore")))
    with pytest.raises(Refused, match=r"^one; two$"):
        attempt(raising(Unsupported("it", {"a": "one", "b": "two"})))


@pytest.mark.parametrize("error", [OutOfMemory("no memory"), ValueError("a mistake")])
@pytest.mark.filterwarnings("ignore:too odd")
def test_a_failure_is_no_refusal(error: Exception) -> None:
    with pytest.raises(type(error)):
        attempt(raising(error))


def test_peers_on_a_machine_without_a_card() -> None:
    inputs = Inputs.of(small(batch=2, causal=True, heads=4), "cpu")
    served, refusals = peers.first_calls(peers.PEERS, inputs)
    assert set(served) == {FA2} and set(refusals) == {CUDNN}  # PyTorch has a flash kernel here
    assert Reference(inputs).error(served[FA2][1]).passed
    _, refusals = peers.first_calls(peers.PEERS, Inputs.of(small(window=3), "cpu"))
    assert set(refusals.values()) == {"scaled_dot_product_attention has no window"}


# Timing


def test_a_sample_is_a_few_graphs_of_a_few_calls() -> None:
    assert timing.plan(1e-3, 0.02) == (20, 1)
    assert timing.plan(30e-6, 0.02) == (32, 21)
    assert timing.plan(1.0, 0.02) == (1, 1)


def test_a_burst_interleaves_all_sides_and_drift_cancels() -> None:
    fake = FakeCard(slow=lambda now: 1 + now)
    sides = [fake.side("a", 1e-3), fake.side("b", 2e-3, calls=5), fake.side("c", 3e-3)]
    ends: list[int] = []
    found = timing.burst(
        GOOD, sides, rounds=30, event=fake.event, on_round=lambda: ends.append(len(fake.order))
    )
    assert found.calls == {"a": 10, "b": 5, "c": 10}
    assert [len(times) for times in found.times.values()] == [30] * 3
    assert max(found.times["a"]) > 2 * min(found.times["a"])
    assert found.ratios("a", "b") == pytest.approx([2] * 30, rel=0.1)
    taken = ["".join(fake.order[n - 3 : n]) for n in ends]
    assert all(sorted(x) == ["a", "b", "c"] for x in taken) and len(set(taken)) == 6


def test_under_load_the_card_never_waits_and_drift_cancels() -> None:
    # A host that answers late: the next sample is enqueued before the last one is done.
    fake = FakeCard(slow=lambda now: 1 + 0.05 * now)
    asked: list[tuple[float, float]] = []

    def read(start: float, stop: float) -> Power:
        asked.append((start, stop))
        return Power(100.0 * len(asked), 1500.0 + len(asked), 1400, 1600)

    sides = [fake.side("a", 1e-3), fake.side("b", 2e-3)]
    found = timing.sustain(GOOD, sides, seconds=2.0, event=fake.event, power=read, clock=fake.clock)
    assert fake.idle == 0
    runs = [name for n, name in enumerate(fake.order) if not n or fake.order[n - 1] != name]
    assert runs == ["a", "b", "a"]  # a b b a
    for load in found.values():
        assert len(load.spans) == 2 and all(1 <= s.seconds < 1.1 for s in load.spans)
        assert sum(s.seconds for s in load.spans) >= 2
    assert found["b"].milliseconds / found["a"].milliseconds == pytest.approx(2, rel=0.02)
    # Clock and energy are those of the very time that counts, after the card settled.
    spans = [found[name].spans[n] for name, n in (("a", 0), ("b", 0), ("b", 1), ("a", 1))]
    for (start, stop), span in zip(asked, spans, strict=True):
        assert stop - start == pytest.approx(span.seconds)
    assert asked[0][0] >= timing.SETTLE
    assert found["a"].watts == pytest.approx((100 + 400) / 2, rel=0.05)
    assert found["a"].mhz == pytest.approx((1501 + 1504) / 2)


@pytest.mark.parametrize("errors", [(), (Error("out", 2e-5, 0.0, 0.0, 1e-5),)])
def test_the_timers_themselves_refuse(errors: tuple[Error, ...]) -> None:
    side = Side("a", lambda: pytest.fail("called"), 1)
    fake, wrong = FakeCard(), Check("small", errors)
    with pytest.raises(CheckFailed, match="'small' is not timed"):
        timing.burst(wrong, [side], rounds=1, event=fake.event)
    with pytest.raises(CheckFailed, match="'small' is not timed"):
        timing.sustain(wrong, [side], seconds=1, event=fake.event, power=Power.of)  # type: ignore[arg-type]


# Power


def test_power_is_taken_from_change_to_change() -> None:
    # The counter moves every 100 ms, by 70 J and what 3 J more of a reading would spoil.
    readings = [Reading(n / 100, 500 + 70.0 * (n // 10), 1400 + 10 * (n % 3)) for n in range(200)]
    found = Power.of(readings, 0.25, 1.85)
    assert found == Power(pytest.approx(700), 1410, 1400, 1420)
    assert Power.of(readings, 0.31, 0.45).watts is None  # one change tells nothing
    assert Power.of(readings, 5, 6) == Power(None, None, None, None)


def test_a_sampler_reads_all_the_time() -> None:
    enough = threading.Event()
    count = 0

    def read() -> Reading:
        nonlocal count
        count += 1
        if count == 20:
            enough.set()
        return Reading(count / 10, 50.0 * count, 1500)

    with Sampler(read, period=0) as sampler:
        assert enough.wait(10)
    assert sampler.power(0.5, 1.5) == Power(pytest.approx(500), 1500, 1500, 1500)


def test_an_error_of_reading_is_told() -> None:
    def read() -> Reading:
        raise OSError("the card fell off")

    with Sampler(read, period=0) as sampler:
        sampler.thread.join(10)
    with pytest.raises(OSError, match="fell off"):
        sampler.power(0, 1)


class FakeNvml(types.ModuleType):
    """NVML of one card; what it cannot do, it says."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.broken = broken

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlSystemGetDriverVersion(self) -> str:
        return "1.2"

    def nvmlDeviceGetEnforcedPowerLimit(self, card: str) -> int:
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, card: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, card: str) -> int:
        if self.broken:
            raise self.NVMLError("Not Supported")
        return 12_500

    def nvmlDeviceGetClockInfo(self, card: str, kind: int) -> int:
        return 1755


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.SimpleNamespace(
        uuid="11-22", name="NVIDIA H200", multi_processor_count=132, total_memory=150e9
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.usefixtures("fake_cuda")
def test_a_meter_reads_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    meter = power.Meter(clock=lambda: 3.0)
    assert meter.card == "GPU-11-22"
    assert meter.read() == Reading(3.0, 12.5, 1755)
    found = card.Card.here(meter)
    assert found.slug == "nvidia-h200" and found.power_limit_watts == 700
    assert (found.clock_mhz, found.driver, found.memory_gb) == (1980, "1.2", 150.0)


@pytest.mark.usefixtures("fake_cuda")
def test_a_card_that_cannot_tell_its_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    with pytest.raises(Unsupported, match="NVML says Not Supported"):
        power.Meter()


# A row as a whole


FAIR = Contest(ours=right, others=peers.PEERS)
BOTH = Contest(ours=right, others={CUDNN: right, FA2: right})


def test_a_measured_row() -> None:
    told: list[int] = []
    _, tools = made(**{OURS: 1e-3, CUDNN: 1.2e-3, FA2: 3e-3})
    anchor = small(best=1.1, bar=1.15, sustained=True)
    result = run_row(anchor, SHORT, tools, lambda: told.append(1), BOTH)
    assert result.passed and len(told) == 3 and not result.refusals
    assert result.ratio(CUDNN) == pytest.approx(1.2) and result.ratio(FA2) == pytest.approx(3)
    assert result.ratio(CUDNN, SUSTAINED) == pytest.approx(1.2)
    assert result.tflops(OURS) == pytest.approx(anchor.flops / 1e-3 / 1e12)
    assert result.over_best() == pytest.approx(1.2 / 1.1) and result.met
    assert set(result.sustained) == {OURS, CUDNN}
    result = run_row(replace(anchor, bar=1.3), SHORT, tools, contest=BOTH)
    assert result.met is False


def test_a_row_is_held_under_load_only_if_asked() -> None:
    _, tools = made()
    assert run_row(small(), SHORT, tools, contest=BOTH).sustained == {}
    calm = replace(SHORT, sustained_seconds=0)
    result = run_row(small(best=1.0, bar=0.5, sustained=True), calm, tools, contest=BOTH)
    assert result.sustained == {} and result.met is None  # one of two figures is missing
    result = run_row(small(best=1.0, bar=5, sustained=True), calm, tools, contest=BOTH)
    assert result.met is False


def test_a_peer_that_refuses_is_told() -> None:
    _, tools = made()
    result = run_row(small(bar=0.5), SHORT, tools, contest=FAIR)
    assert result.sides(BURST) == [OURS, FA2] and set(result.refusals) == {CUDNN}
    assert result.passed and result.met is None and render.verdict(result) == "not measured"


def test_a_peer_that_cannot_be_captured_is_told() -> None:
    _, tools = made()

    def capture(name: str, run: Run, seconds: float) -> Side:
        if name == CUDNN:
            raise RuntimeError("operation not permitted when stream is capturing")
        return tools.capture(name, run, seconds)

    result = run_row(small(), SHORT, replace(tools, capture=capture), contest=BOTH)
    assert result.sides(BURST) == [OURS, FA2]
    assert result.refusals[CUDNN].startswith("not in a CUDA graph: operation not permitted")


def test_a_wrong_kernel_is_not_timed() -> None:
    _, tools = made()
    wrong = Contest(spoilt(lambda x: x.mul_(1.1)), BOTH.others)
    tools = replace(tools, capture=lambda *_: pytest.fail("timed"))
    for one in (small(bar=0.1), row("host cost of a small call")):
        result = run_row(one, SHORT, tools, contest=wrong)
        assert not result.passed and result.met is None and result.burst is result.host is None
        assert render.verdict(result) == "CHECK FAILED"


@pytest.mark.parametrize("one", [small(bar=0.1), row("host cost of a small call")])
def test_a_row_that_we_refuse(one: Row) -> None:
    _, tools = made()
    result = run_row(one, SHORT, tools, contest=Contest(refusing, BOTH.others))
    assert result.refused and result.refusals[OURS] == "it is made to refuse"
    assert render.verdict(result) == "REFUSED"


def test_a_rate_against_our_own() -> None:
    """Half of the work in a little more than half of the time."""
    yardstick = small(name="all", batch=2)
    one = small(bar=0.85, yardstick=yardstick)
    assert one.against == "anyflash on all"
    _, tools = made(**{OURS: 1.1e-3, one.against: 2e-3})
    result = run_row(one, SHORT, tools, contest=BOTH)
    assert [e.tensor for e in result.errors] == ["out", "out on all"]
    assert result.ratio(one.against) == pytest.approx(2 / 1.1 / 2) and result.met
    rate = yardstick.flops / 2e-3 / 1e12
    assert result.tflops(one.against) == pytest.approx(rate)


def test_the_ceiling() -> None:
    _, tools = made(**{LIBRARY: 2e-3})
    result = run_row(row("8192³ product").quick, SHORT, tools)
    assert result.passed and result.sides(BURST) == [LIBRARY]
    assert set(result.sustained) == {LIBRARY}


def test_what_a_call_costs_the_host() -> None:
    _, tools = made()
    ticks = iter(range(10**6))
    synced: list[int] = []
    tools = replace(tools, clock=lambda: next(ticks) / 1000, synchronize=lambda: synced.append(1))
    result = run_row(row("host cost of a small call"), SHORT, tools, contest=BOTH)
    assert result.host is not None and len(synced) == 3
    assert result.host_ratio == pytest.approx(1) and result.met  # every call takes one tick
    slow = replace(result, host=Timing((3.0,), (1.0,), (1,), (1,)))
    assert slow.host_ratio == pytest.approx(3) and slow.met is False


# Variants of the kernel


def test_variants_are_the_tables_tile_with_changes() -> None:
    for one in ablations.ROWS:
        found, refusals = ablations.tiles(one)
        base = found.pop(OURS)
        variants = ablations.VARIANTS_OF[one.head_dim, one.head_dim_v]
        names = {variant.name for variant in variants}
        assert base in [choice.tile for choice in tiles.ROWS]
        assert found.keys() | refusals.keys() == names and not found.keys() & refusals.keys()
        assert len(found) >= 2, f"hardly a variant of {one.name} can be built: {refusals}"
        assert all(tile != base for tile in found.values())


def test_a_variant_that_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = (
        ablations.Variant("no such field", {"colour": "red"}),
        ablations.Variant("too large", {"kv_slots": 99}),
        ablations.Variant("the same", {}),
    )
    monkeypatch.setitem(ablations.VARIANTS_OF, (64, 64), variants)
    found, refusals = ablations.tiles(ablations.ROWS[0])
    assert list(found) == [OURS]
    assert "colour" in refusals["no such field"] and "no kernel" in refusals["too large"]
    assert refusals["the same"] == "it is the table's tile"


def triton_error() -> Exception:
    kind = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    return kind("out of resource: shared memory")


def test_variants_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ablations.ROWS[0].quick
    variants = tuple(
        ablations.Variant(name, {"registers": (168, 8 * n, 24)})
        for n, name in enumerate(("good", "wrong", "too large"), 20)
    )
    monkeypatch.setitem(ablations.VARIANTS_OF, (64, 64), variants)

    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        assert options["scale"] == 1 / 8 and options["right"] is None
        out = F.scaled_dot_product_attention(q, k, v)
        kind = options["tile"].registers[1]
        if kind == 22 * 8:
            raise triton_error()
        return out * (1.1 if kind == 21 * 8 else 1.0), out

    _, tools = made(**{OURS: 1e-3, "good": 2e-3})
    result = run_row(one, SHORT, tools, contest=replace(FAIR, kernel=kernel))
    assert result.sides(BURST) == [OURS, "good"]
    assert [e.tensor for e in result.errors if not e.passed] == ["out, wrong"] and not result.passed
    assert result.refusals["too large"] == "OutOfResources: out of resource: shared memory"
    assert CUDNN in result.refusals
    text = render.variant_table([result])[1]
    assert [line[1:4] for line in text] == [
        ["the table's tile", "1.00 (1.00–1.00)", "–"], ["good", "0.50 (0.50–0.50)", "–"]
    ]  # fmt: skip


def test_an_error_that_is_not_the_compilers_is_raised() -> None:
    def kernel(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        raise KeyError("a mistake")

    _, tools = made()
    with pytest.raises(KeyError):
        run_row(ablations.ROWS[0].quick, SHORT, tools, contest=replace(FAIR, kernel=kernel))


# Bars and goals, over a made-up run


def a_result(one: Row, speed: float, sustained: float | None = None, **changes: Any) -> RowResult:
    """A made-up result: `speed` times as fast as the other side, at 580 instead of 600 W."""
    errors = (Error("out", 1e-3, 1e-3, 2e-3, 4.01e-3),)
    if one.measure == HOST:
        timed = Timing((0.03, 0.03), (0.02, 0.02), (5, 5), (5, 5))
        return replace(RowResult(one, errors, host=timed), **changes)
    if one.measure == FIRST:
        calls = {COLD: FirstCall(0.5, 3.0), CACHED: FirstCall(0.3, 0.125)}
        return replace(RowResult(one, errors, first=calls), **changes)
    side = LIBRARY if one.measure == rows.PRODUCT else OURS
    other = one.against
    work = 1.0 if one.yardstick is None else one.flops / one.yardstick.flops
    times = {side: (work / speed,) * 3, other: (1.0,) * 3}
    load = {} if not one.sustained else {
        side: a_load(1 / (sustained or speed), 580.0), CUDNN: a_load(1.0, 600.0)
    }  # fmt: skip
    burst = Burst(times, {side: 20, other: 20})
    return replace(RowResult(one, errors, {}, burst, load), **changes)


def a_run(over_best: float = 1.06) -> list[RowResult]:
    return [a_result(r, over_best * r.best if r.best else 2.0) for r in ROWS]


def line(results: list[RowResult], what: str) -> goals.Line:
    (found,) = (x for x in goals.lines(results) if x.what.startswith(what))
    return found


def test_the_geometric_mean_is_over_the_whole_table() -> None:
    results = a_run()
    results[1] = a_result(results[1].row, 1.06 * 2 * (results[1].row.best or 0), sustained=1.0)
    expected = 1.06 * 2 ** (1 / 18)
    assert goals.geometric_mean(results, BURST) == pytest.approx(expected)
    assert goals.geometric_mean(results, SUSTAINED) == pytest.approx(1.06 * (1 / 1.06) ** (1 / 18))
    assert goals.geometric_mean(results[:1] + results[2:], BURST) is None
    results[1] = replace(results[1], burst=None)
    assert goals.geometric_mean(results, BURST) is None


def test_a_run_that_meets_everything() -> None:
    results = a_run()
    failures = goals.failures(results, whole=True)
    assert not any(failures.values()), failures
    assert line(results, "geometric mean of ours over the best, burst").figure == "1.06"
    assert (
        line(results, "ours over the best on every row, sus").figure == "18 of 18 rows, worst 1.06"
    )
    energy = line(results, "energy")
    # 580 W at a higher speed than 600 W: the least gain is at the lowest speed.
    assert energy.met and energy.figure == f"12 of 12 rows, worst {580 / 600 / 1.06 / 1.028:.2f}"
    host = line(results, "host cost")
    assert host.figure == "1.50" and host.met and not host.is_bar


def test_a_run_that_misses_bars() -> None:
    slow = goals.failures(a_run(1.02), whole=True)
    assert slow["bar missed"] == [f"geometric mean of ours over the best, {w}" for w in goals.WAYS]
    results = a_run()
    one = results[5]
    results[5] = a_result(one.row, one.row.best or 0, sustained=0.9 * (one.row.best or 0))
    assert goals.failures(results, whole=True)["bar missed"] == [one.row.name]
    results[5] = replace(one, sustained={})
    missing = goals.failures(results, whole=True)["bar not measured"]
    assert missing == [one.row.name, "geometric mean of ours over the best, sustained"]
    results[5] = RowResult(one.row, refusals={OURS: "no"})
    assert goals.failures(results, whole=True)["refused"] == [one.row.name]
    # Of a part, the demands on the whole say nothing.
    assert not any(goals.failures(results[:3], whole=False).values())
    unknown = line(results[:3], "geometric mean of ours over the best, burst")
    assert unknown.met is None and unknown.figure == "–"


def test_slow_first_calls() -> None:
    results = a_run()
    slow = {COLD: FirstCall(1.5, 3.0), CACHED: FirstCall(0.5, 0.1)}
    assert results[-1].row.measure == FIRST
    results[-1] = replace(results[-1], first=slow)
    name = results[-1].row.name
    assert goals.failures(results, whole=True)["bar missed"] == [name, f"{name}, {CACHED}"]
    results[-1] = replace(results[-1], first={})
    assert goals.failures(results, whole=True)["bar not measured"] == [name]


def test_first_calls_are_measured_once_the_call_is_right() -> None:
    calls = {COLD: FirstCall(0.5, 3.0), CACHED: FirstCall(0.3, 0.1)}
    _, tools = made()
    tools = replace(tools, first=lambda row: calls)
    assert run_row(small(measure=FIRST, bar=4.0), SHORT, tools, contest=FAIR).first == calls
    wrong = replace(FAIR, ours=lambda inputs: lambda: right(inputs)() + 1)
    result = run_row(small(measure=FIRST, bar=4.0), SHORT, tools, contest=wrong)
    assert not result.passed and not result.first


def test_first_calls_come_from_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache that is empty, then filled."""
    child = """
import json, os, pathlib, sys
mark = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "compiled")
print(json.dumps([float(sys.argv[3]), 0.5 if mark.exists() else 3.0]))
mark.touch()
"""
    monkeypatch.setattr(first, "CHILD", child)
    found = first.in_new_processes(row("first call, D=128"))
    assert found == {COLD: FirstCall(128.0, 3.0), CACHED: FirstCall(128.0, 0.5)}
    assert found[COLD].total == 131.0


def test_shares_of_the_ceiling() -> None:
    lines = [x for x in goals.lines(a_run()) if "product's rate" in x.what]
    assert [x.what.split(",")[0] for x in lines] == ["D=128", "D=256"] * 2
    product, causal_row = row("8192³ product"), row("D=128, S=16384, causal")
    share = causal_row.flops / product.flops * 1.06 * 1.215 / 2
    assert lines[0].figure == f"{share:.2f}" and lines[0].met == (share >= 0.85)


# Result files and the page


def a_report(
    results: list[RowResult] | None = None, **changes: Any
) -> report.Report[Any, Any, Any]:
    found = a_run() if results is None else results
    whole = report.Report.of(report.HOPPER_FORWARD, Settings(), found, report.source(), HERE)
    return replace(whole, **changes)


def test_a_result_file_comes_back_as_it_was(tmp_path: Path) -> None:
    results = a_run()
    results[2] = replace(results[2], refusals={FA2: "no"}, burst=None)
    results[3] = a_result(results[3].row, 1.0, sustained=1.0)
    results[4] = replace(results[4], sustained={OURS: a_load(1.0, None)})
    whole, path = a_report(results), tmp_path / HERE.slug / "hopper-forward.json"
    report.write(whole, path)
    assert report.read(path) == whole and report.read(path).to_json() == path.read_text()


def test_what_a_result_file_holds() -> None:
    text = a_report().to_json()
    data = json.loads(text)
    assert data["suite"] == "hopper-forward"
    assert set(data["machine"]) == {
        "name", "multiprocessors", "memory_gb", "power_limit_watts", "clock_mhz", "driver", "cuda",
        "host",
    }  # fmt: skip
    first = data["results"][1]["derived"]
    assert first["ratio"] == pytest.approx(1.06) and first["bar_met"] is True
    assert first["watts"] == {OURS: 580.0, CUDNN: 600.0}
    assert data["derived"]["geometric_mean_over_best"][BURST] == pytest.approx(1.06)
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(suite="typo"),
        lambda data: data["results"][1]["burst"].pop("times"),
        lambda data: data["results"][1]["row"].update(measure="typo"),
        lambda data: data["results"][1]["sustained"][OURS]["spans"][0].update(extra=1),
        lambda data: data["machine"].update(host="somebody's"),
    ],
)
def test_a_spoilt_result_file_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(a_report().to_json())
    spoil(data)
    with pytest.raises(InvalidInput, match=r"file: got"):
        report.Report.from_json(json.dumps(data), "file")


def test_what_the_page_says(tmp_path: Path) -> None:
    results = a_run()
    at = [r.row.name for r in results].index("128 queries on 16384 keys")
    results[at] = replace(results[at], refusals={FA2: "too odd"})
    results.append(a_result(ablations.ROWS[0], 2.0))
    report.write(a_report(results), tmp_path / "results" / "made-up.json")
    path = tmp_path / "performance.md"
    pages.render(tmp_path / "results", path)
    text = path.read_text()
    assert "## Made-up H200, forward" in text and anchors.SOURCE in text
    assert "132 multiprocessors, 150 GB, 700 W, at most 1980 MHz; driver 1.2" in text
    lines = {part.split(" | ")[0].strip("| "): part for part in text.splitlines()[::-1]}
    assert "| 1.06 (1.06–1.06) | cuDNN | ≥ 0.90 | yes | 1.06 | – |" in text
    sustained = next(
        part for part in text.splitlines() if part.startswith("| D=64, S=1024, dense | 1.06 | ≥")
    )
    tflops = row("D=64, S=1024, dense").flops / 1e9
    assert f"| {tflops * 1.06:.0f} | {tflops:.0f} | 1500 | 1500 | 580 | 600 |" in sustained
    assert "| host cost of a small call | 1.50 | ≤ 2.00 | yes | 30.0 | 20.0 |" in text
    assert "| first call, D=64 | ≤ 4 s | yes | 0.50 | 3.00 | 0.30 | 0.12 |" in text
    assert "| 128 queries on 16384 keys | FA2 | too odd |" in text
    assert "the table's tile" in text and ablations.PUBLISHED in text
    rate = row("D=128, S=16384, causal").flops / 1e9
    assert f"| anyflash on D=128, S=16384, causal: {rate:.0f} TFLOP/s | ≥ 0.85 | yes |" in text
    assert "window 1024 of 16384" in lines
    first = text
    pages.render(tmp_path / "results", path)
    assert path.read_text() == first


def test_a_page_of_both_suites(tmp_path: Path) -> None:
    published = Path(__file__).resolve().parents[1] / "results"
    cpu = [report.read(file) for file in sorted(published.rglob("cpu.json"))]
    text = pages.page(pages.PAGE, [*cpu, a_report()])
    assert cpu and text.count("\n## ") == len(cpu) + 1
    assert "### Sustained" in text and "### Memory" in text


def test_a_row_in_one_line() -> None:
    results = {r.row.name: render.one_line(r) for r in a_run()}
    assert results["D=64, S=1024, dense"] == (
        "D=64, S=1024, dense: burst 1.06 of cuDNN, sustained 1.06 of cuDNN, bar: yes"
    )
    assert results["host cost of a small call"].endswith("1.50 of FA2's, bar: yes")
    assert "TFLOP/s" in results["8192³ product"]


# The command


def test_without_a_card_the_command_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    result = run("bench", "hopper-forward", "--quick")
    assert result.exit_code == 2
    text = words(result.output)
    assert "a benchmark of Hopper kernels cuda: no CUDA device is here" in text
    assert "compute capability 9.0" in text and "Traceback" not in text


def test_another_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(Unsupported, match=r"NVIDIA A100, compute capability 8\.0"):
        card.require()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    card.require()


def test_without_nvml_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "require", lambda: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    result = run("bench", "hopper-forward")
    assert result.exit_code == 2 and "pip install anyflash[bench]" in words(result.output)


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the CPU: cuDNN is the textbook, and ours is 1.2 times as fast."""
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
    monkeypatch.setattr(suite, "Contest", lambda: BOTH)


COMMAND = ("bench", "hopper-forward", "--rounds", "3", "--sustained-seconds", "0.1")


@pytest.mark.usefixtures("fake_bench")
def test_the_command_writes_and_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*COMMAND)
    assert result.exit_code == 0, result.output  # a bar that is missed is told, and no more
    assert "bar missed: tiny, causal" in words(result.output)
    path = Path("results/made-up-h200/hopper-forward.json")
    assert [r.row.name for r in report.read(path).results] == ["tiny", "tiny, causal"]
    assert report.read(path).settings == Settings(3, 0.02, 0.1)
    assert run("bench", "render").exit_code == 0
    assert "| tiny, causal |" in Path("docs/performance.md").read_text()


@pytest.mark.usefixtures("fake_bench")
def test_the_command_holds_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*COMMAND, "--check", "--rows", "tiny").exit_code == 1
    monkeypatch.setattr(rows, "ROWS", rows.ROWS[:1])
    result = run(*COMMAND, "--check", "--rows", "TINY")
    assert result.exit_code == 0 and "nothing written" in result.output, result.output
    # All rows are asked for, and 17 of the table are missing: the mean is not known.
    result = run(*COMMAND, "--check")
    assert result.exit_code == 1 and "bar not measured: geometric mean" in words(result.output)
    assert run("bench", "hopper-forward", "--check", "--quick").exit_code == 2


@pytest.mark.usefixtures("fake_bench")
def test_the_command_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(BOTH, ours=spoilt(lambda x: x.mul_(1.1)))
    monkeypatch.setattr(suite, "Contest", lambda: wrong)
    result = run(*COMMAND, "--rows", "causal")
    assert result.exit_code == 1 and "check failed: tiny, causal" in words(result.output)
    assert "--rows: got 'nothing'" in words(run(*COMMAND, "--rows", "nothing").output)


@pytest.mark.usefixtures("fake_bench")
def test_ablations_are_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=options["right"] == 0)
        return out, out

    monkeypatch.setattr(suite, "Contest", lambda: replace(BOTH, kernel=kernel))
    filtered = ("--quick", "--rows", "kernel variants, D=64, S=1024")
    result = run(*COMMAND, "--ablations", *filtered)
    assert result.exit_code == 0, result.output
    assert "the table's tile" in result.output
    assert run(*COMMAND, *filtered).exit_code == 2
