"""Public reports: large magnitudes, scales, compilation, autocast, functorch, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support import Packing, assert_close, assert_same, attend, judge, randn, usual
from torch.utils.checkpoint import checkpoint

import anyflash as af

# Large magnitudes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_b087_one_key_of_133120(device: str, dtype: torch.dtype) -> None:
    """x·scale − max(x·scale) under a fused multiply-add was not 0."""
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=dtype, device=device)
    for arguments in ({}, {"causal": True}, {"scale": 0.3}):
        assert_same("out", attend(x, x, x, **arguments).out, x)


def test_b088_scores_far_below_zero(device: str) -> None:
    """A running maximum that starts at −5e4 would drop all of them."""
    q, k = (
        torch.full((1, 2, n, 128), x, dtype=usual(device), device=device)
        for n, x in ((3, 448.0), (4, -300.0))
    )
    v = torch.randint(-8, 8, (1, 2, 4, 16), generator=torch.Generator().manual_seed(0))
    v = v.to(device, q.dtype)
    for arguments in ({}, {"mask": torch.ones(3, 4, dtype=torch.bool, device=device)}):
        out = attend(q, k, v, **arguments).out
        mean = v.mean(2, keepdim=True).expand_as(out)
        if out.is_cuda:  # weights are rounded to 16 bits, their sum is not
            torch.testing.assert_close(out, mean, rtol=2**-10, atol=0)
        else:
            assert_same("mean", out, mean)


def test_b090_scores_beyond_float16(device: str) -> None:
    """256 · 256 · 64 / 8 is 524288, beyond 65504."""
    x = torch.full((1, 2, 8, 64), 256.0, dtype=torch.float16, device=device)
    for arguments in ({}, {"causal": True}, {"softcap": 1e6}):
        assert_same("out", attend(x, x, x, **arguments).out, x)


def test_b091_exponents_that_need_the_maximum(device: str) -> None:
    """exp(151) is beyond float32."""
    q, k, v = randn((1, 2, 10, 128), *[(1, 2, 20, 128)] * 2, device=device)
    q, k = torch.ones_like(q), 1 + 0.01 * k
    found = judge(q, k, v, backward=False, scale=151 / 128)
    assert found.out.isfinite().all() and (found.lse > 140).all()
    # Not judged: backward computes the scores anew, and where its product rounds differently from
    # forward's, an absolute 1e-5 in a score of 151 is a relative 1e-5 in every probability.
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = attend(*leaves, torch.ones(1, 2, 10, 128, device=device), scale=151 / 128)
    assert all(x.isfinite().all() for x in (found.dq, found.dk, found.dv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_b092_the_gradient_of_a_single_key(device: str, dtype: torch.dtype) -> None:
    q, k, v, dout = (3 * x for x in randn(*[(1, 1, 1, 16)] * 4, dtype=dtype, device=device))
    found = attend(q, k, v, dout)
    assert_same("dq", found.dq, torch.zeros_like(q))
    assert_same("dk", found.dk, torch.zeros_like(k))
    assert_same("dv", found.dv, dout)


# Scales.


def test_b094_a_scale_of_zero_is_not_none(device: str) -> None:
    q, k = randn((1, 2, 3, 16), (1, 2, 4, 16), device=device)
    v = torch.arange(2 * 4 * 8.0, device=device).view(1, 2, 4, 8).to(q.dtype)
    out = attend(q, k, v, scale=0.0).out
    assert_same("uniform", out, v.mean(2, keepdim=True).expand_as(out))
    assert_same("default", attend(q, k, v).out, attend(q, k, v, scale=0.25).out)
    assert not torch.equal(attend(q, k, v).out, out)


def test_b095_the_scale_is_used_everywhere(device: str) -> None:
    q, k, v = randn((1, 2, 9, 16), *[(1, 2, 11, 16)] * 2, device=device)
    for arguments in ({}, {"causal": True}, {"softcap": 20.0}, {"backend": "reference"}):
        found = [judge(q, k, v, scale=s, **arguments).out for s in (None, 0.125, 0.5)]
        assert min((found[a] - found[b]).abs().max() for a, b in ((0, 1), (0, 2), (1, 2))) > 1e-3


# torch.compile. `tests/test_ops.py` has the rest.


def test_b096_dynamic_shapes_keep_the_default_scale(device: str) -> None:
    run = torch.compile(lambda q, k, v: af.attention(q, k, v), backend="aot_eager", dynamic=True)
    for length, dim in ((298, 128), (157, 128), (157, 72)):
        q, k, v = randn(*[(1, 2, length, dim)] * 3, device=device)
        assert_same(f"length {length}", run(q, k, v), af.attention(q, k, v))


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "sliced", "transposed"])
def test_b097_the_fake_kernel_has_the_real_strides(device: str, layout: str) -> None:
    (x,) = randn((2, 12, 2, 16), device=device)
    q = {
        "contiguous": x,
        "permuted": x.transpose(1, 2),
        "sliced": x[:, ::2, :, 4:12],
        "transposed": x.mT,
    }[layout]
    arguments = [q, q, q, *[None] * 7, [], "", None, 0.0, 0.0, None, None, False, None, None, False]
    torch.library.opcheck(
        torch.ops.anyflash.attention_forward.default, arguments, test_utils=("test_faketensor",)
    )
    fake = torch.compile(af.attention, backend="aot_eager")(q, q, q)
    assert fake.stride() == af.attention(q, q, q).stride()


def test_b099_one_graph_for_all_lengths() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    run = torch.compile(lambda q: af.attention(q, q, q, causal=True), backend=counter, dynamic=True)
    for length in range(100, 121):
        (q,) = randn((1, 2, length, 8))
        assert run(q).shape == q.shape
    assert counter.frame_count <= 2


@pytest.mark.parametrize("packed", [False, True])
def test_b100_no_graph_break(packed: bool) -> None:
    q, k, v = randn(*[(40, 2, 16)] * 3)
    starts = torch.tensor([0, 15, 40], dtype=torch.int32)

    def step(q, k, v):
        if packed:
            return af.attention_varlen(q, k, v, starts, starts, causal=True) * 2
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return af.attention(q * 2, k, v, mask=af.window(5, 0), return_lse=True)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same("out", compiled(q, k, v), step(q, k, v))


# Autocast and dtypes.


def test_b106_a_float32_bias_under_autocast(device: str) -> None:
    """q becomes bfloat16, the bias stays: near 300, bfloat16 has only even numbers."""
    q, k, v = randn((64, 1, 1, 256), *[(64, 1, 2, 256)] * 2, device=device)
    bias = torch.tensor([300.0, 301.25], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = af.attention(0 * q, k, v, bias=bias, return_lse=True)
    assert out.dtype == torch.bfloat16
    exact = torch.logsumexp(bias.double(), 0).expand(64, 1, 1)
    assert_close("lse", lse, exact.float(), exact)


def test_b107_mixed_dtypes(device: str) -> None:
    q, k, v = randn(*[(1, 2, 5, 16)] * 3, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match=r"q torch\.float32, k torch\.float32, v torch\.bfloat16"):
        af.attention(q, k, v.bfloat16())
    with torch.autocast(device, dtype=torch.bfloat16):
        out = af.attention(q, k, v.bfloat16())
    assert_same("cast", out, af.attention(*(x.bfloat16() for x in (q, k, v))))


# Transforms, double backward, checkpoints, pickles.


def test_b108_functorch() -> None:
    """What works is right, what does not is refused by name."""
    q, k, v = randn(*[(1, 2, 5, 8)] * 3)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return af.attention(q, k, v, causal=True).sum()

    gradient = torch.func.grad(loss)(q)
    assert_same("grad", gradient, attend(q, k, v, torch.ones_like(q), causal=True).dq)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.jvp"):
        torch.func.jvp(loss, (q,), (torch.ones_like(q),))
    stack = torch.stack([q, 2 * q])
    each = torch.func.vmap(torch.func.grad(loss))(stack)
    for n in range(2):
        alone = torch.func.grad(loss)(stack[n])
        assert_close(f"vmap {n}", each[n], alone, alone.double())


def test_b110_a_gradient_penalty() -> None:
    q, k, v = (x.requires_grad_() for x in randn(*[(1, 2, 3, 4)] * 3, dtype=torch.float64, seed=2))
    assert torch.autograd.gradgradcheck(lambda *x: af.attention(*x, causal=True), (q, k, v))
    out = af.attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    dq.square().sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b111_checkpoints_recompute_the_same_dropout(dropout: float, use_reentrant: bool) -> None:
    q, k, v = randn(*[(1, 2, 40, 16)] * 3)

    def gradients(keep: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def step(*qkv: torch.Tensor) -> torch.Tensor:
            return af.attention(*qkv, dropout=dropout, causal=True)

        out = step(*leaves) if keep else checkpoint(step, *leaves, use_reentrant=use_reentrant)
        torch.rand(7)  # someone else draws before backward
        return (
            list(torch.autograd.grad(out.square().sum(), leaves))
            if not use_reentrant
            else (_backward(out, leaves))
        )

    for x, y in zip(gradients(True), gradients(False), strict=True):
        assert_same("gradient", y, x)


def _backward(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    out.square().sum().backward()  # reentrant checkpoints do not work with autograd.grad
    return [x.grad for x in leaves]


def every_third(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + j) % 3 == 0


def _masks() -> dict[str, af.Mask]:
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    return {
        "causal": af.causal(),
        "expression": (af.window(3, 1) | af.prefix(2)) & ~af.documents(ids),
        "padding": af.padding(torch.tensor([4])),
        "tensor": af.from_tensor(torch.arange(36).view(6, 6) ** 2 % 7 < 3),
        "function": af.from_function(every_third),
        "compiled": af.from_function(lambda b, h, i, j: (i + j) % 2 == 0).compile(1, 1, 6, 6),
        "at": af.causal().at(torch.arange(6), torch.arange(6)),
    }


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(_masks())

    def __getitem__(self, n: int) -> tuple[str, af.Mask]:
        return list(_masks().items())[n]


def _copies(mask: af.Mask) -> list[af.Mask]:
    buffer = io.BytesIO()
    torch.save(mask, buffer)
    buffer.seek(0)
    return [
        copy.deepcopy(mask),
        copy.copy(mask),
        pickle.loads(pickle.dumps(mask)),
        torch.load(buffer, weights_only=False),
    ]


@pytest.mark.parametrize("name", _masks())
def test_b112_masks_are_copied_and_pickled(name: str) -> None:
    mask = _masks()[name]
    before = mask.materialise(1, 1, 6, 6)
    q, k, v = randn(*[(1, 1, 6, 8)] * 3)
    for twin in _copies(mask):
        assert torch.equal(twin.materialise(1, 1, 6, 6), before)
        assert_same("out", af.attention(q, k, v, mask=twin), af.attention(q, k, v, mask=mask))


def test_b112_masks_pass_between_processes() -> None:
    loader = torch.utils.data.DataLoader(
        Samples(), num_workers=1, batch_size=None, multiprocessing_context="fork"
    )
    found = dict(loader)
    assert found.keys() == _masks().keys()
    for name, mask in _masks().items():
        assert torch.equal(found[name].materialise(1, 1, 6, 6), mask.materialise(1, 1, 6, 6)), name


def test_b112_errors_are_pickled() -> None:
    for error in (
        af.InvalidInput("k", "nothing", "something", "try harder"),
        af.Unsupported("this", {"cpu": "not today"}, "wait"),
    ):
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is type(error) and str(twin) == str(error)


def test_packing_of_support() -> None:
    """`judge` with a packing keeps sequences apart: with another packing it finds a difference."""
    q, k, v = randn(*[(6, 1, 8)] * 3)
    a = attend(q, k, v, packing=Packing([0, 3, 6], [0, 3, 6])).out
    b = attend(q, k, v, packing=Packing([0, 2, 6], [0, 2, 6])).out
    assert not torch.equal(a, b)
