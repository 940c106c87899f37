"""The device that a public report is tested on: the CPU always, a GPU with -m gpu."""

from collections.abc import Iterator

import pytest
import torch

import anyflash as af


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """On a GPU a test ends where it asks for what nothing serves there yet, and says so."""
    try:
        return (yield)
    except af.Unsupported as refused:
        if pyfuncitem.get_closest_marker("gpu") is None:
            raise
        pytest.skip(str(refused))


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """torch fills what it allocates with NaN (integers: their largest) in this mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
