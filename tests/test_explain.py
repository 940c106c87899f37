"""`explain` says what `attention` would do, without doing it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

import anyflash
from anyflash import devices, explanation
from anyflash.backends import cpu
from anyflash.dispatch import ORDER, select
from anyflash.errors import InvalidInput
from anyflash.masks import tiles


def operands(
    batch: int = 1, heads: int = 4, queries: int = 200, keys: int = 200, heads_kv: int = 2
) -> tuple[torch.Tensor, ...]:
    q, k = torch.zeros(batch, heads, queries, 16), torch.zeros(batch, heads_kv, keys, 16)
    return q, k, k


def test_chosen_is_what_dispatch_selects() -> None:
    found = anyflash.explain(*operands(), causal=True, softcap=2.0)
    assert found.chosen == select(found.problem).name == "cpu"
    assert tuple(found.refusals) == ORDER
    assert found.refusals["cpu"] is None and "by name" in (found.refusals["reference"] or "")
    assert found.problem.mask == "window" and found.problem.features == {"softcap"}
    assert anyflash.explain(*operands(), backend="reference").chosen == "reference"


def test_what_nothing_serves_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "it is its day off"
    monkeypatch.setattr(cpu, "refusal", lambda problem, device: sentence)
    found = anyflash.explain(*operands())
    assert found.chosen is None and found.refusals["cpu"] == sentence
    assert "served by: nothing" in str(found) and sentence in str(found)


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices.probe.cache_clear()
    try:
        found = anyflash.explain(*operands(), device="cuda:1")
        assert devices.probe("cuda") == devices.Device("cuda", "not present", frozenset())
    finally:
        devices.probe.cache_clear()
    assert found.problem.device == "cuda:1"
    assert "cuda" in (found.refusals["cpu"] or "")


def test_a_card_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: asked.append(device) or "a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    devices.probe.cache_clear()
    try:
        assert devices.probe("cuda:2") == devices.Device("cuda", "not present", frozenset())
        assert "wgmma" in devices.probe("cuda:1").features and asked == ["cuda:1"]
    finally:
        devices.probe.cache_clear()


def test_nothing_runs_and_no_random_number_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any) -> None:
        raise AssertionError("explain ran a kernel")

    monkeypatch.setattr(cpu, "forward", run)
    before = torch.get_rng_state()
    huge = torch.zeros(()).expand(4, 64, 1 << 20, 128)
    found = anyflash.explain(huge, huge, huge, causal=True, dropout=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.mask_form == explanation.MaskForm(
        "window (arithmetic)", note="too many tiles to count here"
    )


def test_a_call_that_is_wrong_is_refused_alike() -> None:
    q, k, v = operands()
    for keywords in ({"scale": float("nan")}, {"mask": torch.ones(3, 3)}, {"backend": "nope"}):
        with pytest.raises(InvalidInput) as explained:
            anyflash.explain(q, k, v, **keywords)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput) as called:
            anyflash.attention(q, k, v, **keywords)  # type: ignore[arg-type]
        assert str(explained.value) == str(called.value)


IDS = torch.arange(200) // 70
RANDOM = torch.rand(2, 1, 200, 200, generator=torch.Generator().manual_seed(0)) < 0.01
LENGTHS = torch.tensor([64, 150])
FORMS: dict[str, tuple[Callable[[], anyflash.Mask], str]] = {
    "causal": (anyflash.causal, "window (arithmetic)"),
    "window": (lambda: anyflash.window(70, 3), "window (arithmetic)"),
    "documents": (lambda: anyflash.documents(IDS) & anyflash.causal(), "row intervals"),
    "two intervals": (lambda: anyflash.prefix(3) | anyflash.window(5, 0), "row intervals"),
    "padding": (lambda: anyflash.padding(LENGTHS), "row intervals"),
    "nothing": (lambda: anyflash.prefix(0), "row intervals"),
    "tensor": (lambda: anyflash.from_tensor(RANDOM), "tile map"),
    "function": (lambda: anyflash.from_function(lambda b, h, i, j: (i ^ j) < 100), "tile map"),
    "compiled": (lambda: anyflash.causal().compile(2, 4, 200, 200), "row intervals"),
}


@pytest.mark.parametrize("name", FORMS)
def test_mask_form_counts_what_is_there(name: str) -> None:
    make, kind = FORMS[name]
    mask = make()
    form = anyflash.explain(*operands(batch=2), mask=mask).mask_form
    assert form.kind == kind
    # All batch elements and heads, of which the form stores those that differ.
    seen = mask.materialise(2, 4, 200, 200)
    kinds = []
    for part in seen.flatten(0, 1):
        kinds += [t for row in part.split(64) for t in row.split(64, dim=1)]
    counts = [
        sum(not t.any() for t in kinds),
        sum(bool(t.all()) for t in kinds),
        sum(bool(t.any() and not t.all()) for t in kinds),
    ]
    stored = (form.skip or 0) + (form.full or 0) + (form.partial or 0)
    times = len(kinds) // stored
    assert [form.skip, form.full, form.partial] == [c // times for c in counts]
    assert form.attended == pytest.approx(seen.double().mean().item())
    assert (form.bytes == 0) == (kind == "window (arithmetic)")


def test_no_mask_has_no_form() -> None:
    assert str(anyflash.explain(*operands()).mask_form) == "none"


def test_a_large_tile_map_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "CHEAP", 10_000)
    monkeypatch.setattr(tiles, "build", lambda *a: pytest.fail("built"))
    form = anyflash.explain(*operands(batch=2), mask=RANDOM).mask_form
    assert form.kind == "tile map" and form.bytes is None and "80,000" in form.note


def test_packed() -> None:
    q = torch.zeros(200, 4, 16)
    starts = torch.tensor([0, 50, 200], dtype=torch.int32)
    found = anyflash.explain(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    assert found.problem.packed and found.problem.batch == 2 and found.problem.keys == 150
    assert found.mask_form.kind == "row intervals"
    triangles = 50 * 51 // 2 + 150 * 151 // 2
    assert found.mask_form.attended == pytest.approx(triangles / 200**2)


def test_text_and_table() -> None:
    found = anyflash.explain(*operands(), mask=anyflash.documents(IDS), bias=torch.zeros(200))
    text = str(found)
    console = Console(width=200, file=io.StringIO())
    console.print(found)
    table = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("bias", "row intervals", "skipped", "cpu", "reference", "by name"):
        assert word in text and word in table
