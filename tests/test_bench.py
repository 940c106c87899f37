"""The benchmarks measure what is right, only that, and lose no number on the way to a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from torch import Tensor

from anyflash import api
from anyflash.bench import console, memory, peers, render, report, suite, timing
from anyflash.bench.cases import (
    BOOLEAN,
    BOTH,
    CPU,
    FORWARD,
    MASKS,
    MEMORY,
    NOT_CALLED,
    PLAIN,
    Case,
    Workload,
    select,
)
from anyflash.bench.check import Check, CheckFailed, Error, check, plain
from anyflash.bench.suite import CaseResult, Settings
from anyflash.errors import AttentionError, InvalidInput, Unsupported
from anyflash.masks import as_mask
from anyflash.masks import causal as causal_mask
from anyflash.masks.compiled import compiled
from anyflash.masks.index import Extent

QUICK = Settings(rounds=2, seconds=0.0, quick=True)
SMALL = Case("small", 96, 16, 0.5, BOOLEAN, mask="window", heads=2, window=20, direction=BOTH)


# Cases


def test_cases_are_distinct_and_hold_their_bars() -> None:
    assert len({c.name for c in CPU}) == len(CPU)
    # A case without a mask, told otherwise, would compare different things.
    assert all((c.peer == PLAIN) == (c.mask == "none" and not c.causal) for c in CPU)
    assert [c.name for c in CPU if c.measure == MEMORY and c.bar == 200]


@pytest.mark.parametrize("field", ["peer", "mask", "direction", "measure"])
def test_a_case_with_an_unknown_word_is_refused(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field}.*small.*expected one of"):
        replace(SMALL, **{field: "typo"})


def test_select() -> None:
    assert [c.name for c in select(CPU, "DOCUMENTS")] == [
        "8 documents, causal",
        "8 documents, causal, training",
    ]
    assert select(CPU, None) == list(CPU)
    with pytest.raises(InvalidInput, match="'dense, D=64'"):
        select(CPU, "nothing of that name")


REAL_MASKS = [mask for mask in MASKS if mask != "none"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", REAL_MASKS)
def test_both_spellings_of_a_mask_agree(name: str, causal: bool) -> None:
    case = Case("c", 150, 8, 1, BOOLEAN, mask=name, causal=causal, heads=3, window=11)
    work = Workload.of(case)
    mask, rows = as_mask(work.mask), slice(64, 140)
    seen = work.allowed(rows)
    assert mask is not None and seen is not None
    whole = mask & causal_mask() if causal else mask
    expected = whole.materialise(1, 3, 150, 150)[0, :, rows]
    assert torch.equal(seen.expand(expected.shape), expected)


@pytest.mark.parametrize("name", REAL_MASKS)
def test_a_new_mask_is_not_found_in_the_cache(name: str) -> None:
    work = Workload.of(Case("c", 150, 8, 1, BOOLEAN, mask=name, window=11))
    extent, cpu = Extent(1, 8, 150, 150), torch.device("cpu")
    masks = [as_mask(w.mask) for w in (work, work.with_new_mask(1), work.with_new_mask(2))]
    forms = [compiled(mask, extent, cpu) for mask in masks if mask is not None]
    assert len({id(form) for form in forms}) == 3
    if name != "window":
        first, *others = (m.materialise(1, 8, 150, 150) for m in masks if m is not None)
        assert all(torch.equal(first, other) for other in others)


def test_inputs_follow_the_seed_and_have_no_zeros() -> None:
    first, again, other = Workload.of(SMALL), Workload.of(SMALL), Workload.of(SMALL, seed=1)
    assert torch.equal(first.dout, again.dout) and not torch.equal(first.q, other.q)
    narrow = Workload.of(replace(SMALL, dtype="bfloat16"))
    assert torch.equal(narrow.k, first.k.bfloat16())
    assert all(x.all() for x in (first.q, first.k, first.v, first.dout))


# Checks


def test_plain_in_parts_is_plain_in_one() -> None:
    """Rows in blocks and keys cut to what is seen change nothing."""
    case = replace(SMALL, length=600)
    work = Workload.of(case)
    q, k, v = (x.double().requires_grad_() for x in (work.q, work.k, work.v))
    seen = work.allowed(slice(0, 600))
    assert seen is not None
    out = (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    expected = (out, *torch.autograd.grad(out, (q, k, v), work.dout.double()))
    for a, b in zip(plain(work, torch.float64), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", CPU, ids=lambda case: case.name)
def test_every_case_is_right(case: Case) -> None:
    work = Workload.of(case.quick)
    found = check(work, peers.ours(work)(), None)
    found.require()
    assert len(found.errors) == (4 if case.direction == BOTH else 1)


def wrong_everywhere(out: Tensor) -> Tensor:
    return out * 1.001


def wrong_in_one_place(out: Tensor) -> Tensor:
    out = out.clone()
    out[0, 1, -1, 3] += 1e-3
    return out


def not_a_number(out: Tensor) -> Tensor:
    return out.masked_fill(torch.arange(out.shape[2]).view(-1, 1) == 5, torch.nan)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.001


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], Tensor]) -> None:
    monkeypatch.setattr(peers, "attention", lambda *a, **k: fault(api.attention(*a, **k)))


def plant_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peers,
        "attention",
        lambda q, k, v, **keywords: api.attention(q, k, WrongGradient.apply(v), **keywords),
    )


@pytest.mark.parametrize("fault", [wrong_everywhere, wrong_in_one_place, not_a_number])
def test_a_wrong_kernel_is_not_timed(
    fault: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, fault)
    monkeypatch.setattr(timing, "compare", lambda *a, **k: pytest.fail("timed"))
    result = suite.run_case(replace(SMALL, direction=FORWARD), QUICK)
    assert not result.passed and result.timing is None and result.met is None
    assert render.verdict(result) == "CHECK FAILED"


@pytest.mark.parametrize("measure", ["time", "memory"])
def test_a_wrong_gradient_is_not_measured(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_wrong_gradient(monkeypatch)
    monkeypatch.setattr(timing, "compare", lambda *a, **k: pytest.fail("timed"))
    monkeypatch.setattr(memory, "measure", lambda *a, **k: pytest.fail("measured"))
    result = suite.run_case(replace(SMALL, measure=measure), QUICK)
    assert [e.tensor for e in result.errors if not e.passed] == ["dv"]
    assert result.timing is None and result.memory is None


def test_missing_gradients_do_not_pass() -> None:
    work = Workload.of(SMALL)
    with pytest.raises(CheckFailed, match="1 results, expected out, dq, dk, dv"):
        check(work, peers.ours(work)()[:1])


@pytest.mark.parametrize(
    "errors", [(), (Error("out", 2e-5, 0.0, 0.0, 1e-5),), (Error("out", torch.nan, 0, 0, 1),)]
)
def test_the_timer_itself_refuses(errors: tuple[Error, ...]) -> None:
    def never() -> None:
        pytest.fail("called")

    with pytest.raises(CheckFailed, match="'small' is not timed"):
        timing.compare(Check("small", errors), never, never, rounds=1, seconds=0)


# Timing

GOOD = Check("good", (Error("out", 0.0, 0.0, 0.0, 1e-5),))


def test_rounds_interleave_both_sides_and_drift_cancels() -> None:
    now, order = 0.0, ""

    def side(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now, order
            now += seconds * (1 + 9 * min(1.0, now / 50))  # a machine that becomes ever slower
            order += name

        return call

    def on_round() -> None:
        nonlocal order
        order += " "

    found = timing.compare(
        GOOD, side("o", 0.1), side("p", 0.2), rounds=20, seconds=1.0,
        on_round=on_round, clock=lambda: now,
    )  # fmt: skip
    assert found.ratio == pytest.approx(2, rel=0.1)
    assert max(found.ours) > 5 * min(found.ours)
    rounds = order[2 * timing.WARM_UP :].split()
    assert [r.count("o") for r in rounds] == list(found.calls_ours)
    assert [r.count("p") for r in rounds] == list(found.calls_peer)
    # Each side in one piece, as often as it takes to fill the round, and not always the same first.
    assert {"".join(sorted(set(r), key=r.index)) for r in rounds} == {"op", "po"}
    assert all("opo" not in r and "pop" not in r for r in rounds)
    assert found.calls_ours[0] > found.calls_ours[-1] >= 1


def test_a_round_has_one_call_at_least() -> None:
    calls: list[int] = []
    found = timing.compare(
        GOOD, lambda: calls.append(1), lambda: calls.append(2), rounds=3, seconds=0
    )
    assert found.calls_ours == found.calls_peer == (1, 1, 1)
    assert len(calls) == 2 * (timing.WARM_UP + 3)


def test_a_measured_case() -> None:
    rounds: list[int] = []
    result = suite.run_case(SMALL, QUICK, on_round=lambda: rounds.append(1))
    assert result.passed and result.timing is not None and len(rounds) == 2
    assert result.backend == "cpu" and result.peer_kernel == "flash_attention"
    assert result.mask is not None and result.mask.form == "window (arithmetic)"
    assert result.met == (result.timing.ratio >= 0.5)
    assert result.error_ratio == max(e.ours / e.peer for e in result.errors if e.peer)


def test_an_error_bar_counts() -> None:
    errors = (Error("out", 2e-3, 1e-3, 1e-3, 1.0),)
    timed = timing.Timing((1.0,), (3.0,), (1,), (1,))
    case = replace(SMALL, bar=2, error_bar=2.5)
    assert CaseResult(case, errors, "cpu", timing=timed).met
    assert not CaseResult(replace(case, error_bar=1.9), errors, "cpu", timing=timed).met
    assert not CaseResult(replace(case, bar=4), errors, "cpu", timing=timed).met


# Memory

LONG = Case(
    "long", 65536, 64, 100, NOT_CALLED, mask="window", heads=1, window=16, measure=MEMORY
)  # fmt: skip


@pytest.mark.skipif(not memory.STATUS.exists(), reason="memory is read from /proc")
def test_memory_of_a_fresh_process() -> None:
    found = memory.measure(LONG, threads=1)
    result = 65536 * 64 * 4 / 1e6
    assert result < found.over_inputs < 12 * result  # the output is in it, and no S×S matrix


def test_memory_is_not_measured_without_proc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    with pytest.raises(Unsupported, match="on Linux"):
        memory.measure(SMALL, 1)
    result = suite.run_case(replace(SMALL, measure=MEMORY), QUICK)
    assert result.met is None and "on Linux" in result.note
    assert render.verdict(result) == "not measured"


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "executable", "/bin/false")
    with pytest.raises(AttentionError, match=r"'small'.*exit code 1"):
        memory.measure(SMALL, 1)


# Result files and the page


def a_report(**changes: Any) -> report.Report:
    errors = (Error("out", 3e-7, 4e-7, 5e-7, 1.1e-5),)
    fast = timing.Timing((1.0, 2.0, 1.0), (3.0, 5.0, 2.9), (3, 2, 3), (1, 1, 1))
    cost = suite.MaskCost("tile map", 12.5)
    results = (
        CaseResult(SMALL, errors, "cpu", "flash_attention", cost, fast),
        CaseResult(replace(SMALL, name="slow", bar=9), errors, "cpu", None, None, fast),
        CaseResult(replace(SMALL, name="wrong"), (replace(errors[0], ours=1.0),), "cpu"),
        CaseResult(LONG, errors, "cpu", memory=memory.Memory(100.0, 150.25)),
    )
    return replace(report.Report.of("cpu", Settings(), results, report.source()), **changes)


def test_a_result_file_comes_back_as_it_was(tmp_path: Path) -> None:
    made = a_report()
    path = tmp_path / "machine" / "cpu.json"
    report.write(made, path)
    assert report.read(path) == made
    assert report.read(path).to_json() == path.read_text()


def test_what_a_result_file_holds() -> None:
    text = a_report().to_json()
    data = json.loads(text)
    assert set(data) == {
        "format", "suite", "date", "commit", "dirty", "machine", "versions", "settings", "results",
    }  # fmt: skip
    # No field for a host or a user, and no path.
    assert set(data["machine"]) == {"cpu", "features", "cores", "threads", "memory_gb", "system"}
    assert not {str(Path.home()), str(Path.cwd()), str(Path(__file__).parent)} & set(
        text.split('"')
    )
    assert {"python", "torch", "anyflash"} <= set(data["versions"])
    assert data["results"][0]["derived"]["ratio"] == 2.9
    assert data["results"][0]["derived"]["bar_met"] is True


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(format=0),
        lambda data: data.pop("machine"),
        lambda data: data.update(extra=1),
        lambda data: data["results"][0].pop("case"),
        lambda data: data["results"][0]["timing"].pop("ours"),
        lambda data: data["results"][0]["case"].update(mask="typo"),
    ],
)
def test_a_spoilt_result_file_is_refused(
    spoil: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    data = json.loads(a_report().to_json())
    spoil(data)
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match=r"cpu\.json: got"):
        report.read(path)


def test_a_folder_can_be_named_after_any_machine() -> None:
    names = {
        "Intel(R) Xeon(R) Platinum 8488C": "intel-xeon-platinum-8488c-2-threads",
        "AMD EPYC 9654 96-Core Processor": "amd-epyc-9654-96-core-processor-2-threads",
        "Apple M4 Max": "apple-m4-max-2-threads",
        "": "cpu-2-threads",
    }
    for cpu, slug in names.items():
        assert replace(report.Machine.here(), cpu=cpu, threads=2).slug == slug


def test_rendering_is_idempotent_and_keeps_what_is_written_around(tmp_path: Path) -> None:
    results, path = tmp_path / "results", tmp_path / "docs" / "performance.md"
    report.write(a_report(), results / "b" / "cpu.json")
    assert len(render.render(results, path)) == 1
    first = path.read_text()
    path.write_text("Before.\n" + first.replace("| small |", "| typed by hand |") + "After.\n")
    render.render(results, path)
    assert path.read_text() == f"Before.\n{first}After.\n"
    report.write(a_report(dirty=True, commit="0123456789abcdef"), results / "a" / "cpu.json")
    render.render(results, path)
    assert path.read_text().count("### Time") == 2
    assert "commit 0123456789ab, with changes" in path.read_text()


def test_what_the_page_says() -> None:
    text = render.page(render.PAGE, [a_report(commit=None)])
    rows = {
        line.split(" | ")[0].strip("| "): line for line in text.splitlines()[::-1] if "|" in line
    }
    assert "2.90 (2.50–3.00) | ≥ 0.5 | yes |" in text
    assert "2.90 (2.50–3.00) | ≥ 9 | NO |" in text
    assert "– | – | – | ≥ 0.5 | CHECK FAILED |" in rows["wrong"]
    assert "| 50.2 | ≤ 100 MB | yes | VmHWM" in text
    assert "| small | tile map | 12.5 | 1.00 | 0.24 |" in text
    assert "| wrong | out | 1.00e+00 | 4.00e-07 | 5.00e-07 | 1.10e-05 | NO |" in text
    assert "no commit known" in text


def test_a_page_without_results_says_so(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    assert render.render(tmp_path / "none", path) == []
    assert render.NONE_YET in path.read_text()


@pytest.mark.parametrize("text", ["no markers", render.END + render.BEGIN, 2 * render.PAGE])
def test_a_page_without_its_markers_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="markers"):
        render.render(tmp_path, path)
    assert path.read_text() == text


def test_results_survive_a_case_that_raises() -> None:
    class Named(NamedTuple):
        name: str

    def run(case: Named, on_round: Callable[[], None]) -> str:
        if case.name == "second":
            raise RuntimeError("the card is gone")
        return case.name

    results: list[str] = []
    cases = [Named("first"), Named("second"), Named("third")]
    with pytest.raises(RuntimeError, match="the card is gone"):
        console.measure(cases, run, 1, Console(quiet=True), results=results)
    assert results == ["first"]
