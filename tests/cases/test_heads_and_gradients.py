"""Public reports: grouped heads, softcap, lse, partial gradients, sinks, determinism, dropout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support import (
    assert_all_same,
    assert_close,
    assert_same,
    attend,
    causal,
    child,
    fixed,
    judge,
    randn,
)

import anyflash as af
from anyflash.backends import cpu

# Grouped heads.


@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 2), (33, 2), (2, 4)])
@pytest.mark.parametrize("packed", [False, True])
def test_b056_query_heads_not_a_multiple(heads: int, heads_kv: int, packed: bool) -> None:
    q, k = torch.zeros(1, heads, 4, 8), torch.zeros(1, heads_kv, 4, 8)
    with pytest.raises(ValueError, match=f"{heads} query heads and {heads_kv} key heads"):
        if packed:
            starts = torch.tensor([0, 4], dtype=torch.int32)
            af.attention_varlen(
                q[0].mT.permute(2, 0, 1), *[k[0].transpose(0, 1)] * 2, starts, starts
            )
        af.attention(q, k, k)


def test_b058_which_key_head_a_query_head_has(device: str) -> None:
    """Query head h has key head h // 4: bitwise what it is with that head alone."""
    q, k, v = randn((1, 16, 64, 32), *[(1, 4, 64, 32)] * 2, device=device)
    found = judge(q, k, v)
    for h in range(16):
        own = slice(h // 4, h // 4 + 1)
        alone = attend(q[:, h : h + 1], k[:, own], v[:, own])
        assert_close(f"out of head {h}", found.out[:, h : h + 1], alone.out, alone.out.double())
        assert_close(f"lse of head {h}", found.lse[:, h : h + 1], alone.lse, alone.lse.double())


@pytest.mark.parametrize(("heads", "heads_kv"), [(32, 2), (32, 8)])
def test_b059_decode_around_a_thousand_keys(device: str, heads: int, heads_kv: int) -> None:
    q, k, v = randn(
        (1, heads, 1, 128), *[(1, heads_kv, 1100, 128)] * 2, dtype=torch.bfloat16, device=device
    )
    for keys in (*range(1000, 1050, 3), *range(1018, 1031), 1099, 1100):
        judge(q, k[:, :, :keys], v[:, :, :keys], backward=False)


# Softcap.


def test_b061_softcap_is_cap_tanh(device: str) -> None:
    """cap · tanh(s / cap), and another cap in the same process is another result."""
    q, k, v = randn(*[(1, 2, 20, 16)] * 3, device=device)
    q = q * 8
    found = {cap: judge(q, k, v, softcap=cap) for cap in (15.0, 30.0, 15.0)}
    assert (found[15.0].out - found[30.0].out).abs().max() > 1e-3
    one = torch.full((1, 1, 1, 1), 100.0, device=device)
    lse = attend(one, one, one, softcap=15.0, scale=1.0).lse
    assert 0 < lse.item() <= 15
    cap = torch.full((1, 1, 1), 15 * math.tanh(10 / 15), dtype=torch.float64)
    lse = attend(one / 100, one / 10, one, softcap=15.0, scale=1.0).lse
    assert_close("lse", lse, cap.float(), cap)


def test_b061_softcap_has_its_derivative() -> None:
    q, k, v = (x.requires_grad_() for x in randn(*[(1, 1, 3, 2)] * 3, dtype=torch.float64, seed=4))
    for cap in (0.5, 2.0):
        assert torch.autograd.gradcheck(
            lambda *qkv, cap=cap: af.attention(*qkv, softcap=cap, return_lse=True), (q, k, v)
        )


def test_b063_softcap_backward_ends() -> None:
    said = child(
        """
import torch, anyflash as af
q, k, v = (torch.randn(1, 4, 1024, 128, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
af.attention(q, k, v, causal=True, softcap=10.0).sum().backward()
print(all(x.grad.isfinite().all() for x in (q, k, v)))
""",
        seconds=60,
    )
    assert said.split() == ["True"]


# lse.


def test_b064_the_gradient_of_lse(device: str) -> None:
    """For loss = lse.mean(): dq = scale · P K / n, dk = scale · Pᵀ q / n and dv = 0."""
    q, k, v = randn(*[(2, 2, 64, 32)] * 3, device=device)
    n = 2 * 2 * 64
    dlse = torch.full((2, 2, 64), 1 / n, device=device)
    found = attend(q, k, v, None, dlse, causal=True)

    def by_hand(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        s = (q @ k.mT * 32**-0.5).masked_fill(
            ~torch.ones(64, 64, dtype=torch.bool, device=device).tril(), -torch.inf
        )
        p = s.softmax(-1)
        return [32**-0.5 * p @ k / n, 32**-0.5 * p.mT @ q / n]

    pairs = zip(by_hand(q, k), by_hand(q.double(), k.double()), strict=True)
    for name, x, (y, z) in zip(("dq", "dk"), (found.dq, found.dk), pairs, strict=True):
        assert x.abs().max() > 1e-4
        assert_close(name, x, y, z)
    assert_same("dv", found.dv, torch.zeros_like(v))


def test_b066_lse_without_gradients(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q = torch.randn(1, 2, 5, 8).to(device, dtype)
        with torch.no_grad():
            out, lse = af.attention(q, q, q, return_lse=True)
        assert lse.shape == (1, 2, 5) and lse.dtype == torch.float32 and not lse.requires_grad
        assert out.dtype == dtype
        assert isinstance(af.attention(q, q, q), torch.Tensor)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_b068_lse_is_a_natural_logarithm(backend: str) -> None:
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[0.5, 1.0], [-1.0, 0.25]], dtype=torch.float64)[None, None]
    for arguments in ({}, {"mask": torch.ones(2, 2, dtype=torch.bool)}, {"softcap": 1e6}):
        found = attend(q, k, k, scale=1.0, backend=backend, **arguments)
        exact = torch.exp(q @ k.mT).sum(-1)
        assert_close("exp(lse)", torch.exp(found.lse), exact, exact)


# Gradients of some inputs; bias and sink.


def test_b071_only_the_bias_needs_a_gradient(device: str) -> None:
    """d bias = dS: its rows sum to nothing, since softmax does not see a constant."""
    q, k, v, dout = randn(*[(1, 1, 64, 16)] * 4, device=device)
    (bias,) = randn((1, 1, 64, 64), device=device, seed=7)
    bias.requires_grad_()
    out = af.attention(q, k, v, bias=bias)
    (gradient,) = torch.autograd.grad(out, bias, dout)

    def by_hand(q, k, v, bias, dout):
        p = (q @ k.mT / 4 + bias).softmax(-1)
        dp = dout @ v.mT
        return p * (dp - (p * dp).sum(-1, keepdim=True))

    tensors = (q, k, v, bias.detach(), dout)
    exact = by_hand(*(x.double() for x in tensors))
    assert_close("d bias", gradient, by_hand(*tensors), exact)
    zero = torch.zeros(1, 1, 64, dtype=torch.float64)
    assert_close("row sums", gradient.sum(-1), by_hand(*tensors).sum(-1), zero)
    assert q.grad is None


@pytest.mark.parametrize(
    "wanted", [s for n in (1, 2, 3) for s in itertools.combinations("qkv", n)], ids="".join
)
def test_b072_frozen_inputs_get_no_gradient(
    wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly the gradients asked for, the backend is told which, and their values are the same."""
    tensors = dict(zip("qkv", randn(*[(1, 2, 20, 16)] * 3), strict=True))
    told = []
    right = cpu.backward

    def spy(problem, inputs, saved, needs):
        told.append(needs)
        return right(problem, inputs, saved, needs)

    monkeypatch.setattr(cpu, "backward", spy)
    full = attend(*tensors.values(), torch.ones(1, 2, 20, 16), causal=True)
    leaves = {n: x.clone().requires_grad_(n in wanted) for n, x in tensors.items()}
    af.attention(*leaves.values(), causal=True).sum().backward()
    for name, x in leaves.items():
        if name in wanted:
            assert_same(f"d{name}", x.grad, getattr(full, f"d{name}"))
        else:
            assert x.grad is None
    assert [told[-1].q, told[-1].k, told[-1].v] == [n in wanted for n in "qkv"]
    assert not told[-1].bias and not told[-1].sink


def test_b074_the_gradient_of_a_sink(device: str) -> None:
    """dsink_h = Σ p_sink (dlse − dO·O), with a row that has nothing but the sink."""
    q, k, v, dout = randn(*[(1, 2, 4, 8)] * 4, device=device)
    dlse = randn((1, 2, 4), device=device, seed=3)[0]
    sink = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)
    mask[1] = False
    out, lse = af.attention(q, k, v, mask=mask, sink=sink, return_lse=True)
    (gradient,) = torch.autograd.grad((out, lse), sink, (dout, dlse))
    assert_same("out", out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert_same("lse", lse[0, :, 1], sink.detach())

    def by_hand(q, k, v, dout, dlse, sink):
        s = (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf)
        p = torch.cat([s, sink.view(1, 2, 1, 1).expand(1, 2, 4, 1)], -1).softmax(-1)
        o = p[..., :4] @ v
        return (p[..., 4] * (dlse - (dout * o).sum(-1))).sum((0, 2))

    tensors = (q, k, v, dout, dlse, sink.detach())
    exact = by_hand(*(x.double() for x in tensors))
    assert_close("dsink", gradient, by_hand(*tensors), exact)
    judge(q, k, v, mask=mask, seen=fixed(mask), sink=sink.detach())


# Determinism and dropout.


@pytest.mark.parametrize("heads_kv", [12, 2])
def test_b075_deterministic_gradients_are_equal(device: str, heads_kv: int) -> None:
    q, k, v, dout = randn(
        (2, 12, 100, 64), *[(2, heads_kv, 100, 64)] * 2, (2, 12, 100, 64),
        dtype=torch.float16, device=device,
    )  # fmt: skip
    first = attend(q, k, v, dout, causal=True, deterministic=True)
    for _ in range(29):
        assert_all_same(attend(q, k, v, dout, causal=True, deterministic=True), first)


def test_b079_the_dropout_mask(device: str) -> None:
    """Equal scores and V = 1: out and dv show which weights were kept."""
    n = 128
    q = torch.zeros(2, 2, n, n, device=device)
    eye = torch.eye(n, device=device).expand(2, 2, n, n)

    def kept(seed: int | None, p: float = 0.5) -> torch.Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        found = attend(q, q, eye, eye, dropout=p)
        assert_same("forward and backward", found.dv.mT > 0, found.out > 0)
        values = found.out[found.out > 0]
        if len(values):
            expected = torch.full_like(values, 1 / n / (1 - p))
            assert_close("a kept weight", values * n, expected * n, expected.double() * n)
        return found.out > 0

    a, b, c = kept(1), kept(None), kept(1)
    assert torch.equal(a, c) and not torch.equal(a, b)
    assert not torch.equal(a[0, 0], a[0, 1]) and not torch.equal(a[0], a[1])
    for p, mask in ((0.5, a), (0.1, kept(2, 0.1)), (0.9, kept(3, 0.9))):
        sigma = math.sqrt(p * (1 - p) / mask.numel())
        assert abs(mask.double().mean().item() - (1 - p)) < 3 * sigma
    assert not kept(4, 1.0).any()


def test_b105_threads_do_not_share_a_workspace() -> None:
    """The half of the report that a CPU has: two threads, interleaved calls of one shape."""
    said = child(
        """
import threading, torch, anyflash as af
torch.set_num_threads(1)
inputs = [[torch.randn(1, 2, 70, 32) for _ in "qkv"] for _ in range(2)]
def step(n):
    leaves = [x.clone().requires_grad_() for x in inputs[n]]
    out = af.attention(*leaves, mask=af.window(30, 0), softcap=5.0 if n else None)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
expected = [step(n) for n in range(2)]
wrong = []
def work(n):
    for _ in range(100):
        wrong.extend(not torch.equal(x, y) for x, y in zip(step(n), expected[n]))
threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1, 0, 1)]
for t in threads: t.start()
for t in threads: t.join()
print(len(wrong), sum(wrong))
""",
        seconds=120,
    )
    assert said.split() == [str(4 * 100 * 4), "0"]


def test_causal_of_support_is_used() -> None:
    """`judge(causal=True)` really masks: without the mask its reference is another."""
    q, k, v = randn(*[(1, 1, 4, 8)] * 3)
    with pytest.raises(AssertionError, match="error"):
        judge(q, k, v, seen=causal)
