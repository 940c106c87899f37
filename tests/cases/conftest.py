"""The device that a public report is tested on: the CPU always, a GPU with -m gpu."""

from collections.abc import Iterator

import pytest
import torch

import anyflash as af

# What no backend of a GPU serves yet: words of its refusals. Anything else that is refused fails.
NOT_YET = (
    "it takes float16 and bfloat16, not float",
    "the kernels add no bias",
    "the kernels add no ALiBi slopes",
    "this mask becomes a tile map",
    "it takes heads of 1 to 256 columns",
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """On a GPU a test ends where it asks for what nothing serves there yet, and says so."""
    try:
        return (yield)
    except af.Unsupported as refused:
        expected = any(words in s for s in refused.refusals.values() for words in NOT_YET)
        if pyfuncitem.get_closest_marker("gpu") is None or not expected:
            raise
        pytest.skip(str(refused))


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """torch fills what it allocates with NaN (integers: their largest) in this mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
