"""Edges that a review found, each a wrong result, a leak or an error once."""

import gc

import pytest
import torch

import anyflash as af
from anyflash import attention
from anyflash.backends import cpu
from anyflash.masks import compiled
from anyflash.numerics import max_error, tolerance

DOUBLE = torch.float64


def qkv(*shape, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for _ in range(3)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def agrees(*tensors, **arguments):
    """cpu and the reference in the same dtype, forward and backward, in the tolerance."""
    found = []
    for backend in ("cpu", "reference"):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = attention(*leaves, return_lse=True, backend=backend, **arguments)
        loss = out.double().square().sum() + torch.where(lse.isinf(), 0, lse.double()).sum()
        found.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*found, strict=True):
        assert max_error(a, b) <= 1e-4  # twice the floor of the tolerance, and sums of squares


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [DOUBLE, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_of_bias_and_sink_beside_every_dtype_of_q(dtype, other):
    """float64 q once read a float32 bias as if it were wider."""
    q, k, v = qkv(1, 2, 65, 16, dtype=dtype)
    bias, sink = torch.randn(1, 2, 65, 65).to(other), torch.randn(2).to(other)
    out, lse = attention(q, k, v, bias=bias, sink=sink, return_lse=True)
    exact = [x.double() for x in (q, k, v)]
    ref, ref_lse = attention(
        *exact, bias=bias.double(), sink=sink.double(), return_lse=True, backend="reference"
    )
    plain = attention(q, k, v, bias=bias, sink=sink, backend="reference")
    assert max_error(out, ref) <= tolerance(plain, ref)
    scores = (q @ k.mT / 4).to(dtype) + bias.to(dtype)
    logits = torch.cat([scores, sink.to(dtype).view(1, 2, 1, 1).expand(1, 2, 65, 1)], -1)
    assert max_error(lse, ref_lse) <= tolerance(logits.logsumexp(-1), ref_lse)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_autocast_ends_at_the_operator(backend):
    """Scores of 16-bit inputs are float32 whether autocast is on or not."""
    q, k, v = qkv(1, 2, 70, 32, dtype=torch.bfloat16)
    expected = attention(q, k, v, softcap=20.0, return_lse=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(q, k, v, softcap=20.0, return_lse=True, backend=backend)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("scale", [1e-50, 1e-40, 1e-38, -1e-50])
def test_a_scale_that_float32_cannot_hold(scale):
    agrees(*qkv(1, 2, 33, 8), causal=True, scale=scale)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sink_of_minus_infinity_is_no_sink(backend):
    q, k, v = qkv(1, 2, 5, 8, dtype=DOUBLE)
    mask = torch.rand(5, 5) < 0.6
    mask[2] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sink = torch.full((2,), -torch.inf, dtype=DOUBLE, requires_grad=True)
    found = attention(*leaves, mask=mask, sink=sink, return_lse=True, backend=backend)
    expected = attention(*leaves, mask=mask, return_lse=True, backend=backend)
    for a, b in zip(found, expected, strict=True):
        assert max_error(a, b) <= 1e-12
    grads = torch.autograd.grad(found[0].sum(), (*leaves, sink))
    assert all(g.isfinite().all() for g in grads) and not grads[-1].any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_nan_that_one_row_sees_stays_with_it(backend, softcap):
    """In backward too: dq of other rows and dv of keys that the row does not see are finite."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 4, 8))
    with torch.no_grad():
        k[0, 0, 0] = torch.nan
    mask = torch.eye(4, dtype=torch.bool) | (torch.arange(4)[:, None] == 3)
    mask[3, 0] = False
    out = attention(q, k, v, mask=mask, softcap=softcap, backend=backend)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert out[0, 0, 0].isnan().all() and out[0, 0, 1:].isfinite().all()
    assert dq[0, 0, 1:].isfinite().all() and dk[0, 0, 1:].isfinite().all()
    assert dv[0, 0, 1:].isfinite().all()


def test_at_checks_batch_heads_and_nested_positions():
    p = torch.arange(4)
    x = torch.randn(2, 2, 4, 8)
    for mask in (
        af.padding(torch.tensor([1])).at(p, p),  # one length for all is fine
        af.documents(torch.arange(4)).at(p, p),
    ):
        attention(x, x, x, mask=mask)
    for mask in (
        af.documents(torch.arange(4).repeat(2, 1)).at(p, p),
        af.padding(torch.tensor([1, 2])).at(p, p),
    ):
        with pytest.raises(af.InvalidInput):
            attention(torch.cat([x, x]), torch.cat([x, x]), torch.cat([x, x]), mask=mask)
    four = x.repeat(1, 2, 1, 1)
    with pytest.raises(af.InvalidInput):
        attention(four, four, four, mask=af.from_tensor(torch.ones(1, 3, 4, 4).bool()).at(p, p))
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(af.InvalidInput):
        af.documents(torch.arange(4)).at(one + 10, one + 10).at(one, one).compile(1, 1, 1, 1)
    with pytest.raises(af.InvalidInput, match="≥ 0"):
        af.causal().at(one - 1, one).at(one, one).compile(1, 1, 1, 1)


def test_a_mask_over_inference_tensors_is_compiled_once_a_call(monkeypatch):
    built = []
    original = compiled.compile_mask
    monkeypatch.setattr(compiled, "compile_mask", lambda *a: built.append(1) or original(*a))
    with torch.inference_mode():
        ids = torch.arange(1024) // 100
        x = torch.randn(1, 2, 1024, 8)
        attention(x, x, x, mask=af.documents(ids) & af.causal())
    assert len(built) == 1


def test_empty_rows_do_not_cost_a_second_forward(monkeypatch):
    monkeypatch.setattr(cpu.isolation, "forward", lambda *a: pytest.fail("isolated"))
    q, k, v = qkv(1, 2, 9, 8)
    out, lse = attention(q, k[:, :, :4], v[:, :, :4], causal=True, return_lse=True)
    assert lse[0, 0, 0] == -torch.inf and not out[0, 0, 0].any()


def test_forms_go_with_their_masks():
    x = torch.randn(1, 1, 130, 8)
    for n in range(5):
        mask = af.from_function(lambda b, h, i, j, n=n: (i + j) % (n + 2) == 0)
        attention(x, x, x, mask=mask)
        attention(x, x, x, mask=mask.compile(1, 1, 130, 130))
        del mask
    gc.collect()
    assert not [key for key in compiled._cache if "#" in key[0]]


def test_a_bias_without_dimensions_compiles():
    q, k, v = qkv(1, 2, 16, 8)
    bias = torch.tensor(0.5, requires_grad=True)
    f = torch.compile(
        lambda b: attention(q, k, v, bias=b).sum(), fullgraph=True, backend="aot_eager"
    )
    (gradient,) = torch.autograd.grad(f(bias), bias)
    assert gradient.shape == () and gradient.abs() <= 1e-4  # a constant cancels


@pytest.mark.parametrize("transform", ["hessian", "jvp of grad", "jvp of vmap"])
def test_forward_mode_refuses_at_any_depth(transform):
    q, k, v = qkv(1, 1, 3, 4)

    def f(q):
        return attention(q, k, v).square().sum()

    with pytest.raises(af.Unsupported, match="forward-mode"):
        if transform == "hessian":
            torch.func.hessian(f)(q)
        elif transform == "jvp of grad":
            torch.func.jvp(torch.func.grad(f), (q,), (q,))
        else:
            torch.func.jvp(torch.func.vmap(f), (q[None],), (q[None],))


def test_alibi_slopes_do_not_lose_their_gradient_in_silence():
    with pytest.raises(af.InvalidInput, match="detach"):
        af.alibi(torch.ones(2, requires_grad=True))


def test_another_default_device_changes_nothing():
    x = torch.randn(1, 2, 100, 8)
    mask = af.from_tensor(torch.rand(100, 100) < 0.5)
    expected = attention(x, x, x, mask=mask & af.causal(), dropout=0.0)
    with torch.device("meta"):
        found = attention(x, x, x, mask=mask & af.causal(), dropout=0.0)
        mask.compile(1, 2, 100, 100, "cpu")
    assert torch.equal(found, expected)
