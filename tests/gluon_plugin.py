"""The `gluon` fixture: a test of a Gluon kernel runs in the emulator, and on a card when asked.

A test that takes `gluon` runs once a seed (`--gluon-seeds N`, 3 if not given) with every launch
emulated, and under `-m gpu` once on the card, unchanged: it makes its tensors on `gluon.device`
and launches its kernels as anyone does.

`@pytest.mark.gluon(resident=8)` passes options to the emulator, those of `gluon_emulator.run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

CARD = "card"


@dataclass(frozen=True)
class Gluon:
    device: torch.device
    emulated: bool
    launches: list[Any]  # of gluon_emulator.Launch, one for each so far; empty on a card


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gluon-seeds", type=int, default=3, metavar="N",
        help="how many schedules of the emulator each test of a Gluon kernel meets",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gluon(**options): options of the Gluon emulator")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gluon" in metafunc.fixturenames:
        seeds = range(metafunc.config.getoption("--gluon-seeds"))
        card = pytest.param(CARD, marks=pytest.mark.gpu, id=CARD)
        runs = [*(pytest.param(seed, id=f"seed{seed}") for seed in seeds), card]
        metafunc.parametrize("gluon", runs, indirect=True)


@pytest.fixture
def gluon(request: pytest.FixtureRequest) -> Iterator[Gluon]:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    if request.param == CARD:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            pytest.fail("-m gpu: the tests of Hopper kernels need a card of compute capability 9.x")
        yield Gluon(torch.device("cuda"), False, [])
        return
    from gluon_emulator import emulate

    marker = request.node.get_closest_marker("gluon")
    with emulate(seed=request.param, **(marker.kwargs if marker else {})) as launches:
        yield Gluon(torch.device("cpu"), True, launches)
