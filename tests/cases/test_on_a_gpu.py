"""Public reports that need a GPU: graph capture, streams, several devices, sizes, repeatability.

What nothing serves there yet (gradients, tile maps) is asked for all the same: the test then says
so and is skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import Packing, assert_all_same, assert_same, attend, judge, randn

import anyflash as af

pytestmark = pytest.mark.gpu
CUDA = "cuda"


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `run`, and the memory in which each replay leaves its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the first call compiles and allocates for good
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


# Graph capture.


def test_b019_offsets_changed_after_capture() -> None:
    """The lengths are read when the graph runs: a replay is the call with the offsets of then."""
    q, k, v = randn(*[(300, 2, 64)] * 3, device=CUDA)
    offsets = [[0, 100, 300], [0, 0, 300], [0, 250, 300], [0, 1, 300]]
    starts = torch.tensor(offsets[0], dtype=torch.int32, device=CUDA)

    def run() -> torch.Tensor:
        return af.attention_varlen(
            q, k, v, starts, starts, max_seqlen_q=300, max_seqlen_k=300, causal=True
        )

    graph, out = captured(run)
    for now in offsets:
        starts.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        assert_same(f"offsets {now}", out.clone(), run())
        judge(q, k, v, packing=Packing(now, now), causal=True, backward=False)


def test_b103_dropout_is_drawn_anew_in_each_replay() -> None:
    """The generator's state used to be read while capturing, which fails."""
    q, k, _ = randn(*[(1, 12, 4096, 64)] * 3, device=CUDA)
    v = torch.ones_like(q)  # a row is the share of its weights that was kept, over 1 − p
    graph, out = captured(lambda: af.attention(q, k, v, dropout=0.1))
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    for n, x in enumerate(found):
        assert abs(x.double().mean().item() - 1) < 0.01 and x.float().std() > 1e-3
        assert not any(torch.equal(x, y) for y in found[:n])


# Devices and streams.


@pytest.mark.parametrize("packed", [False, True])
def test_b104_tensors_on_another_device_than_the_current_one(packed: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes two GPUs, and there is one")
    with torch.cuda.device(0):
        q, k, v = randn((1, 32, 300, 128), *[(1, 32, 2048, 128)] * 2, device="cuda:1")
        arguments: dict = {"causal": True}
        if packed:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            arguments["packing"] = Packing([0, 100, 300], [0, 1000, 2048])
        found = judge(q, k, v, backward=False, **arguments)
        assert found.out.device == found.lse.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        here = attend(*(x.to("cuda:0") for x in (q, k, v)), **arguments)
        assert_same("out", found.out, here.out)


def test_b105_streams_do_not_share_a_workspace() -> None:
    """Two streams, interleaved calls of one shape, with inputs of their own."""
    inputs = [randn(*[(2, 8, 1000, 64)] * 3, device=CUDA, seed=n) for n in range(2)]
    expected = [attend(*qkv, causal=True) for qkv in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(100):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((n, attend(*inputs[n], causal=True)))
    torch.cuda.synchronize()
    for n, x in found:
        assert_all_same(x, expected[n])


# The same bits each time.


@pytest.mark.parametrize(
    ("length", "dim"), [(256, 64), (2048, 64), (8192, 64), (2048, 128), (2048, 256)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_b078_forward_gives_the_same_bits(length: int, dim: int, causal: bool) -> None:
    """For every way in which the kernel cuts up a problem."""
    q, k, v = randn(*[(2, 4, length, dim)] * 3, dtype=torch.bfloat16, device=CUDA)
    first = attend(q, k, v, causal=causal)
    for _ in range(100):
        assert_all_same(attend(q, k, v, causal=causal), first)


@pytest.mark.parametrize(("heads", "heads_kv"), [(12, 12), (16, 2)])
def test_b075_deterministic_on_a_busy_device(heads: int, heads_kv: int) -> None:
    q, k, v, dout = randn(
        (2, heads, 1024, 64), *[(2, heads_kv, 1024, 64)] * 2, (2, heads, 1024, 64), device=CUDA
    )
    (noise,) = randn((4096, 4096), device=CUDA)
    side = torch.cuda.Stream()
    for gradient in (None, dout):
        first = attend(q, k, v, gradient, causal=True, deterministic=True)
        for _ in range(30):
            with torch.cuda.stream(side):  # takes processors away, each time at another moment
                noise @ noise
            again = attend(q, k, v, gradient, causal=True, deterministic=True)
            assert_all_same(again, first)


# Sizes.


def test_b042_a_batch_of_8300_single_queries() -> None:
    """Padded to tiles of 128 rows, offsets of dQ go beyond 2^31. One key: out = v, dv = dout."""
    q, k, v, dout = randn(*[(8300, 16, 1, 128)] * 4, dtype=torch.bfloat16, device=CUDA)
    assert_same("out", attend(q, k, v).out, v)
    found = attend(q, k, v, dout)
    assert_same("dv", found.dv, dout)
    # dP and delta are the same sum of 128 products, in float32 and in different orders.
    for x in (found.dq, found.dk):
        assert float(x.abs().max()) < 1e-5


def _whole_mask(length: int, dim: int) -> None:
    """A causal mask as a tensor of length² bytes, against arithmetic, at the rows at its end."""
    q, k, v = randn(*[(1, 1, length, dim)] * 3, device=CUDA)
    mask = torch.ones(length, length, dtype=torch.bool, device=CUDA).tril_()
    found, expected = attend(q, k, v, mask=mask), attend(q, k, v, causal=True)
    for rows in (slice(0, 64), slice(length // 2, length // 2 + 64), slice(-64, None)):
        assert_same("rows", found.out[:, :, rows], expected.out[:, :, rows])


def test_b044_a_mask_of_65537_squared() -> None:
    """Beyond 2^32 elements, where an unsigned offset of 32 bits is 0 again."""
    _whole_mask(65537, 64)


def test_b045_a_mask_of_46341_squared() -> None:
    """Beyond 2^31 elements."""
    _whole_mask(46341, 64)


@pytest.mark.parametrize("dim", [64, 256])
def test_b047_both_sides_beyond_32768(dim: int) -> None:
    """The length went through 16 bits, and zeros came out as NaN."""
    x = torch.zeros(1, 1, 33728, dim, dtype=torch.bfloat16, device=CUDA)
    for causal in (False, True):
        assert_same("zeros", attend(x, x, x, causal=causal).out, x)
