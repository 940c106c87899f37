"""The command line: every command runs, and every error is one message and an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import anyflash
from anyflash import devices
from anyflash.bench import cases, peers, render
from anyflash.bench.report import read
from anyflash.cli import app
from anyflash.dispatch import ORDER

TINY = (
    cases.Case("tiny", 32, 8, 1e-9, cases.PLAIN, heads=1),
    cases.Case("tiny window", 32, 8, 1e9, cases.BOOLEAN, mask="window", heads=1, window=4),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def words(text: str) -> str:
    """Text without the frames of tables and the line breaks in their cells."""
    return " ".join(text.replace("│", " ").replace("┃", " ").split())


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "doctor", "explain", "bench"):
        assert command in result.output


def test_commands_load_lazily() -> None:
    code = "import anyflash.cli, sys; print([m for m in sys.modules if 'anyflash.bench' in m])"
    path = str(Path(anyflash.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=path, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# doctor


def test_doctor() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    text = words(result.output)
    assert torch.__version__ in text and devices.probe("cpu").name in text
    for name in ORDER:
        assert f"cpu {name} " in text
    assert "cpu cpu yes, by default" in text
    assert "cpu reference no it is unfused" in text


# explain


def test_explain() -> None:
    result = run(
        "explain", "--batch", "2", "--heads", "6", "--heads-kv", "3", "--queries", "100",
        "--keys", "300", "--head-dim", "40", "--head-dim-v", "24", "--dtype", "float16",
        "--device", "cpu", "--causal", "--window", "50,", "--softcap", "3", "--dropout", "0.5",
        "--sink", "--bias", "--deterministic",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    text = words(result.output)
    problem = "q (2, 6, 100, 40), k (2, 3, 300, 40), Dv=24 [float16, cpu, mask=window, bias, "
    assert problem + "deterministic, dropout, sink, softcap]" in text
    assert "window (arithmetic)" in text and "served by: cpu" in text


def test_explain_for_a_device_that_is_not_here() -> None:
    result = run("explain", "--device", "mps", "--documents", "3")
    assert result.exit_code == 0, result.output
    text = words(result.output)
    assert "[bfloat16, mps, mask=intervals]" in text and "row intervals" in text
    assert "tensors are on mps" in text


@pytest.mark.parametrize("flag", ["--varlen", "--packed"])
def test_explain_packed(flag: str) -> None:
    result = run("explain", flag, "--batch", "3", "--queries", "70", "--alibi", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "q (3, 8, 70, 64), k (3, 8, 70, 64), Dv=64 [float32, cpu, mask=none, packed, alibi]" in (
        words(result.output)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nope"], "error: backend: got 'nope', expected one of 'hopper', 'cpu'"),
        (["--heads", "8", "--heads-kv", "3"], "got 8 query heads and 3 key heads"),
        (["--precision", "int3"], "error: precision: got 'int3'"),
        (["--window", "5"], "expected LEFT,RIGHT"),
        (["--window", "a,b"], "expected LEFT,RIGHT"),
        (["--dtype", "float17"], "expected a name such as float16"),
        (["--bias", "--alibi"], "exclude each other"),
    ],
)
def test_an_error_is_one_message(arguments: list[str], message: str) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert message in words(result.output)
    assert "Traceback" not in result.output


# bench


def test_bench_writes_what_render_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CPU", TINY)
    results, page = tmp_path / "results", tmp_path / "performance.md"
    output = results / "here" / "cpu.json"
    result = run("bench", "cpu", "--quick", "--output", str(output))
    assert result.exit_code == 0, result.output  # a bar that is missed is told, and no more
    assert "bar missed: tiny window" in result.output
    written = read(output)
    assert [r.case.name for r in written.results] == ["tiny", "tiny window"]
    assert written.settings.quick and len(json.loads(output.read_text())["results"]) == 2
    result = run("bench", "render", "--results", str(results), "--page", str(page))
    assert result.exit_code == 0 and "1 result files" in result.output
    assert "| tiny window |" in page.read_text()


def test_bench_writes_only_whole_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "CPU", TINY)
    monkeypatch.chdir(tmp_path)
    assert run("bench", "cpu", "--quick").exit_code == 0
    assert "nothing written" in run("bench", "cpu", "--only", "window", "--rounds", "1").output
    assert list(tmp_path.iterdir()) == []
    assert run("bench", "cpu", "--rounds", "1").exit_code == 0
    (path,) = tmp_path.glob("results/*/cpu.json")
    assert path.parent.name == read(path).machine.slug


def test_bench_check_holds_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CPU", TINY)
    output = str(tmp_path / "cpu.json")
    one = ("bench", "cpu", "--check", "--rounds", "1", "--output", output, "--only")
    assert run(*one, "tiny").exit_code == 1
    monkeypatch.setattr(cases, "CPU", TINY[:1])
    assert run(*one, "tiny").exit_code == 0
    result = run("bench", "cpu", "--check", "--quick")
    assert result.exit_code == 2 and "leave out --quick" in words(result.output)


def test_bench_fails_on_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CPU", TINY)
    monkeypatch.setattr(peers, "attention", lambda q, k, v, **keywords: torch.zeros_like(q))
    output = tmp_path / "cpu.json"
    result = run("bench", "cpu", "--quick", "--output", str(output))
    assert result.exit_code == 1 and "check failed: tiny; tiny window" in result.output
    assert all(r.timing is None for r in read(output).results)
    assert "CHECK FAILED" in render.section(read(output))


def test_bench_of_no_case() -> None:
    result = run("bench", "cpu", "--only", "no such case")
    assert result.exit_code == 2 and "error: --only: got 'no such case'" in result.output


# demo


def test_demo_is_passed_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    fake = types.ModuleType("anyflash.demo")
    fake.run = lambda **keywords: seen.update(keywords) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "anyflash.demo", fake)
    monkeypatch.setattr(anyflash, "demo", fake, raising=False)
    result = run("demo", "--quick", "--output", str(tmp_path))
    assert result.exit_code == 3
    assert seen == {"output": tmp_path, "quick": True}


def test_a_run_that_is_stopped_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM, as `timeout` sends it, in the second row."""
    from anyflash.bench.hopper import card, power, suite
    from anyflash.bench.hopper.results import RowResult
    from anyflash.bench.hopper.rows import ROWS
    from anyflash.bench.machine import Machine

    here = card.Card("Made-up H200", 132, 150.0, 700.0, 1980, "1.2", "13.0", Machine.here())
    meter = types.SimpleNamespace(read=None, clock=None)
    rest = iter(ROWS[:1])

    def run_row(row: Any, *_: Any) -> RowResult:
        if next(rest, None) is None:
            os.kill(os.getpid(), signal.SIGTERM)
        return RowResult(row, refusals={"anyflash": "no"})

    monkeypatch.setattr(card, "require", lambda: None)
    monkeypatch.setattr(power, "Meter", lambda: meter)
    monkeypatch.setattr(card.Card, "here", lambda meter: here)
    monkeypatch.setattr(suite, "run_row", run_row)
    before = signal.getsignal(signal.SIGTERM)
    try:
        output = tmp_path / "forward.json"
        result = CliRunner().invoke(app, ["bench", "hopper-forward", "--output", str(output)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    assert not output.exists()
    assert [r.row for r in read(tmp_path / "forward.part.json").results] == [ROWS[0]]
