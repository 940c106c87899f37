"""Public reports: rows without keys, NaN, empty inputs, causal alignment and windows."""

from __future__ import annotations

import pytest
import torch
from support import (
    Found,
    Packing,
    Terms,
    assert_close,
    assert_same,
    attend,
    causal,
    child,
    fixed,
    judge,
    randn,
    usual,
)

import anyflash as af
import plain

NAN, INF = float("nan"), float("inf")


# Rows that attend nothing; NaN and infinity.


def test_b001_a_row_without_keys(device: str) -> None:
    q, k, v = randn((1, 2, 6, 8), (1, 2, 10, 8), (1, 2, 10, 8), device=device)
    mask = torch.ones(1, 1, 6, 10, dtype=torch.bool, device=device)
    mask[..., -1, :] = False
    found = judge(q, k, v, mask=mask, seen=fixed(mask), scale=0.125)
    assert_same("empty row", found.out[:, :, -1], torch.zeros_like(q[:, :, -1]))
    assert (found.lse[:, :, -1] == -INF).all()
    others = attend(q[:, :, :5], k, v, mask=mask[:, :, :5], scale=0.125)
    limit = others.out, others.out.double()
    assert_close("the other rows", found.out[:, :, :5], *limit)


@pytest.mark.parametrize("loss", ["other rows", "all rows"])
def test_b002_gradients_beside_a_row_without_keys(device: str, loss: str) -> None:
    """0·NaN: the row is out of the loss, and its NaN would come back all the same."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    q, k, v, dout = randn(*[(1, 1, 6, 8)] * 4, dtype=dtype, device=device)
    mask = torch.ones(6, 6, dtype=torch.bool, device=device)
    mask[2] = False
    if loss == "other rows":
        dout[:, :, 2] = 0
    rest = [0, 1, 3, 4, 5]
    found = attend(q, k, v, dout, mask=mask)
    without = attend(q[:, :, rest], k, v, dout[:, :, rest])
    assert_same("dq of the row", found.dq[:, :, 2], torch.zeros_like(q[:, :, 2]))
    assert_close("dk", found.dk, without.dk, without.dk.double())
    assert_close("dv", found.dv, without.dv, without.dv.double())


def test_b004_left_padding_and_causal_over_two_layers(device: str) -> None:
    """Pad rows have no key at all; their NaN would reach real tokens in the second layer."""
    (x,) = randn((2, 2, 33, 16), device=device)
    start = torch.tensor([0, 27], device=device)
    mask = af.causal() & af.from_function(lambda b, h, i, j: j >= start[b])

    def two_layers(x: torch.Tensor, **arguments: object) -> torch.Tensor:
        for _ in range(2):
            x = af.attention(x, x, x, **arguments)
        return x

    padded = two_layers(x, mask=mask)
    alone = two_layers(x[1:, :, 27:], causal=True)
    assert padded.isfinite().all()
    assert_close("real tokens", padded[1:, :, 27:], alone, alone.double())
    assert_same("pad rows", padded[1:, :, :27], torch.zeros_like(x[1:, :, :27]))


def test_b006_the_lowest_finite_bias_is_not_minus_infinity(device: str) -> None:
    """finfo.min absorbs every score: softmax is uniform, and the row is the mean of V.

    Its lse absorbs log 4 too, so that the gradients of this row are finite, but not exact.
    """
    q, k = randn((1, 1, 3, 4), (1, 1, 4, 4), device=device)
    v = torch.arange(16.0, device=device).view(1, 1, 4, 4).to(q.dtype)
    bias = torch.zeros(1, 1, 3, 4, device=device)
    bias[..., 0, :] = torch.finfo(torch.float32).min
    judge(q, k, v, bias=bias, backward=False)
    found = attend(q, k, v, torch.ones_like(q), bias=bias)
    assert_same("row 0", found.out[:, :, 0], v.mean(2))
    assert all(g.isfinite().all() for g in (found.dq, found.dk, found.dv))


@pytest.mark.parametrize("where", ["k", "v", "both"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("form", ["tensor", "padding", "function"])
def test_b007_nan_in_masked_slot(device: str, where: str, value: float, form: str) -> None:
    """One key is visible: out = v, dv = Σ dout and dq = dk = 0, whatever the other slot holds."""
    q, k, v, dout = randn(*[(1, 1, 2, 4)] * 4, device=device)
    for name, x in (("k", k), ("v", v)):
        if where in (name, "both"):
            x[0, 0, 1, 0] = value
    mask = {
        "tensor": torch.tensor([[True, False], [True, False]], device=device),
        "padding": af.padding(torch.tensor([1], device=device)),
        "function": af.from_function(lambda b, h, i, j: (j == 0) & (i >= 0)),
    }[form]
    found = attend(q, k, v, dout, mask=mask)
    cleaned = (x.index_fill(2, torch.tensor([1], device=device), 0) for x in (k, v))
    clean = attend(q, *cleaned, dout, mask=mask)
    for name, x, y in zip(Found._fields, found, clean, strict=True):
        assert_same(name, x, y)
    zero = torch.zeros_like(q)
    assert_same("out", found.out, v[:, :, :1].expand_as(q))
    assert_close("dq", found.dq, zero, zero)  # dP and delta are summed in different orders
    assert_close("dk", found.dk, zero, zero)
    assert_same("dv", found.dv[:, :, 0], dout.sum(2))
    assert_same("dv of the slot", found.dv[:, :, 1], zero[:, :, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_b010_all_heads_are_computed(device: str, dtype: torch.dtype) -> None:
    found = judge(*randn(*[(2, 4, 16, 32)] * 3, dtype=dtype, device=device), causal=True)
    for x in (found.out, *found.gradients):
        assert (x.float().norm(dim=(2, 3)) > 0.1).all()


# Empty and zero-sized inputs.


@pytest.mark.parametrize("compiled", [False, True])
def test_b011_a_batch_of_nothing(device: str, compiled: bool) -> None:
    q, k, v = randn((0, 10, 3952, 64), *[(0, 10, 16, 64)] * 2, dtype=torch.float16, device=device)
    run = torch.compile(af.attention, backend="aot_eager") if compiled else af.attention
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = run(*leaves)
    assert out.shape == q.shape and out.dtype == q.dtype
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert [g.shape for g in gradients] == [x.shape for x in leaves]


def test_b012_every_size_is_zero() -> None:
    """The process died of a floating-point exception."""
    said = child("""
import torch, anyflash as af
def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)
for causal in (False, True):
    print(tuple(af.attention(*[empty(0, 2, 0, 0)] * 3, causal=causal).shape))
for shapes in (
    [(0, 2, 0, 0), (0, 13, 0, 0), (0, 13, 0, 0)],
    [(0, 2, 0, 0), (0, 0, 13, 0), (0, 0, 0, 0)],
):
    try:
        print(tuple(af.attention(*[empty(*s) for s in shapes]).shape))
    except af.InvalidInput as error:
        print("refused:", error.argument)
""")
    lines = said.splitlines()
    assert lines[:2] == ["(0, 2, 0, 0)"] * 2
    assert len(lines) == 4 and all(line.startswith(("refused", "(0, ")) for line in lines[2:])


def test_b013_no_keys() -> None:
    """A host crash when causal, an illegal instruction when not."""
    said = child("""
import torch, anyflash as af
for dtype in (torch.float32, torch.bfloat16):
    for causal in (False, True):
        q = torch.randn(2, 4, 5, 64, dtype=dtype, requires_grad=True)
        k, v = (torch.empty(2, 2, 0, 64, dtype=dtype, requires_grad=True) for _ in "kv")
        out, lse = af.attention(q, k, v, causal=causal, return_lse=True)
        assert out.shape == q.shape and (out == 0).all() and (lse == -torch.inf).all()
        dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum().nan_to_num(0), (q, k, v))
        assert (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape
        print("right")
""")
    assert said.split() == ["right"] * 4


def test_b014_packed_single_queries_with_an_empty_sequence(device: str) -> None:
    """The fast path for decode took total_q for the number of sequences."""
    q, k, v = randn((2, 9, 64), (8, 3, 64), (8, 3, 64), device=device)
    packing = Packing([0, 1, 1, 2], [0, 3, 3, 8])
    judge(q, k, v, packing=packing, causal=True, max_seqlen_q=1)


def test_b015_fewer_tokens_than_sequences(device: str) -> None:
    q, k, v = randn((1, 21, 120), *[(1, 7, 120)] * 2, dtype=torch.bfloat16, device=device)
    found = attend(q, k, v, packing=Packing([0, 0, 0, 0, 1], [0, 0, 0, 0, 1]))
    assert_same("out", found.out, v.repeat_interleave(3, 1))


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_b017_gradients_of_keys_that_nothing_sees(device: str) -> None:
    """Top-left causal with more keys than queries: keys 2 to 4 have no row."""
    q, k, v, dout = randn((1, 2, 2, 8), *[(1, 2, 5, 8)] * 2, (1, 2, 2, 8), device=device)
    top_left = torch.ones(2, 5, dtype=torch.bool, device=device).tril()
    found = attend(q, k, v, dout, mask=top_left)
    assert_same("dk", found.dk[:, :, 2:], torch.zeros_like(k[:, :, 2:]))
    assert_same("dv", found.dv[:, :, 2:], torch.zeros_like(v[:, :, 2:]))
    assert found.dk.isfinite().all() and found.dk[:, :, :2].abs().sum() > 0


@pytest.mark.parametrize(
    ("offsets", "longest", "said"),
    [
        ([1, 3, 6], None, "1 at index 0"),
        ([0, 4, 3, 6], None, "3 at index 2"),
        ([0, 3, 5], None, "5 at index 2"),
        ([0, 1, 6], 4, "5 at index 1"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_b019_malformed_offsets(
    offsets: list[int], longest: int | None, said: str, name: str
) -> None:
    q, k, v = randn((6, 2, 8), (6, 2, 8), (6, 2, 8))
    wrong = torch.tensor(offsets, dtype=torch.int32)
    right = torch.linspace(0, 6, len(offsets)).int()
    given = {"cu_seqlens_q": right, "cu_seqlens_k": right} | {name: wrong}
    limits = {} if longest is None else {f"max_seqlen_{name[-1]}": longest}
    with pytest.raises(ValueError, match=said) as caught:
        af.attention_varlen(q, k, v, **given, **limits)
    assert isinstance(caught.value, af.InvalidInput) and caught.value.argument == name


# Alignment of causal masks and windows.


@pytest.mark.parametrize("lengths", [(32, 1024), (1024, 32), (32, 32)])
def test_b020_causal_aligns_bottom_right(device: str, lengths: tuple[int, int]) -> None:
    q, k, v = randn(
        (2, 3, lengths[0], 64), *[(2, 3, lengths[1], 64)] * 2, dtype=torch.float16, device=device
    )
    flag = judge(q, k, v, causal=True)
    assert_same("mask", attend(q, k, v, mask=af.causal()).out, flag.out)
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    count = (j <= i + lengths[1] - lengths[0]).sum(-1)
    assert_same("empty rows", (flag.lse == -INF)[0, 0].cpu(), count == 0)


def test_b021_three_queries_on_a_tile_of_keys(device: str) -> None:
    q, k, v = randn((1, 1, 3, 128), *[(1, 1, 128, 128)] * 2, device=device)
    judge(q, k, v, causal=True)
    # The last query sees every key, the first all but two.
    changed = v.clone()
    changed[:, :, 126:] += 1
    before, after = (attend(q, k, x, causal=True).out for x in (v, changed))
    assert [bool((before[0, 0, i] == after[0, 0, i]).all()) for i in range(3)] == [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("keys", "empty"), [(129, 0), (32, 33), (1, 64)])
def test_b023_rows_outside_of_all_keys(device: str, keys: int, empty: int) -> None:
    """Row i stands at key i + Sk − Sq: with fewer keys the window of the first rows holds none."""
    q, k, v = randn((1, 2, 129, 16), *[(1, 2, keys, 16)] * 2, device=device)

    def seen(b, h, i, j, offset):
        return (j >= i + offset - 32) & (j <= i + offset + 64)

    found = judge(q, k, v, mask=af.window(32, 64), seen=seen)
    assert (found.lse == -INF)[0, 0].sum() == empty
    assert (found.lse[:, :, :empty] == -INF).all()
    assert_same("out", found.out[:, :, :empty], torch.zeros_like(q[:, :, :empty]))


@pytest.mark.parametrize(("left", "right"), [(-1, -3), (5, -3), (-2, None), (None, -1)])
def test_b025_negative_windows(left: int | None, right: int | None) -> None:
    with pytest.raises(ValueError, match="None for no bound"):
        af.window(left, right)


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("form", ["window", "window & causal", "function"])
def test_b026_a_window_counts_the_key_itself(device: str, left: int, form: str) -> None:
    """Equal scores and V = 1: out is the weights, 1/n for the n keys in view."""
    q = torch.zeros(1, 1, 10, 10, dtype=usual(device), device=device)
    v = torch.eye(10, dtype=q.dtype, device=device)[None, None]
    arguments = {
        "window": {"mask": af.window(left, 0)},
        "window & causal": {"mask": af.window(left), "causal": True},
        "function": {"mask": af.from_function(lambda b, h, i, j: (j <= i) & (j >= i - left))},
    }[form]
    out = af.attention(q, q, v, **arguments)[0, 0].cpu()
    for i in range(10):
        keys = (out[i] > 0).nonzero().flatten().tolist()
        assert keys == list(range(i - min(i, left), i + 1))
        exact = torch.full((len(keys),), 1 / len(keys), dtype=torch.float64)
        assert_close("weights", out[i, keys], exact.to(out.dtype), exact)
    if left == 0:
        assert_same("v itself", out, v[0, 0].cpu())


@pytest.mark.parametrize("left", [64, None])
def test_b027_a_finite_right_edge_without_causal(device: str, left: int | None) -> None:
    q, k, v = randn((2, 4, 512, 64), *[(2, 1, 512, 64)] * 2, dtype=torch.bfloat16, device=device)

    def seen(b, h, i, j, offset):
        return (j <= i + 64) & (j >= i - (10**6 if left is None else left))

    judge(q, k, v, mask=af.window(left, 64), seen=seen, backward=False)


def test_b028_keys_outside_the_window_change_nothing(device: str) -> None:
    """There is no plan to disagree with; what is left of the report is its property."""
    q, k, v = randn((1, 2, 8, 32), *[(1, 2, 500, 32)] * 2, device=device)
    other = [x.clone() for x in (k, v)]
    for x in other:
        x[:, :, : 500 - 8 - 100] += 3.0
    mask = af.window(100, 0)
    a, b = attend(q, k, v, mask=mask), attend(q, *other, mask=mask)
    assert_same("out", b.out, a.out)
    assert_same("lse", b.lse, a.lse)
    assert not torch.equal(attend(q, *other, causal=True).out, attend(q, k, v, causal=True).out)


def test_b065_lse_of_a_row_without_keys(device: str) -> None:
    q, k, v = randn((1, 2, 4, 8), *[(1, 2, 6, 8)] * 2, device=device)
    for backend in ("reference", None):
        for arguments in ({"mask": af.prefix(0)}, {"mask": ~af.window()}):
            found = attend(q, k, v, backend=backend, **arguments)
            assert (found.lse == -INF).all() and (found.out == 0).all()
        none = attend(q, k[:, :, :0], v[:, :, :0], backend=backend)
        assert (none.lse == -INF).all() and (none.out == 0).all()
    packed = attend(
        *(x[0].transpose(0, 1) for x in (q, k, v)), packing=Packing([0, 2, 4], [0, 0, 6])
    )
    assert_same("packed", packed.lse == -INF, torch.tensor([[True, True, False, False]] * 2))


def test_b070_an_empty_chunk_merges_as_nothing(device: str) -> None:
    """Two chunks of the context, the second empty for one request: merged by lse as if whole."""
    q, k, v = randn((2, 2, 3, 16), *[(2, 2, 20, 16)] * 2, device=device)
    lengths = torch.tensor([20, 12], device=device)

    def seen(b, h, i, j, offset):
        return j < lengths[b]

    judge(q, k, v, mask=af.padding(lengths), seen=seen)
    first = attend(q, k[:, :, :12], v[:, :, :12])
    second = attend(q, k[:, :, 12:], v[:, :, 12:], mask=af.padding(lengths - 12))
    assert (second.lse[1] == -INF).all() and (second.lse[0] > -INF).all()
    lse = torch.logaddexp(first.lse, second.lse)
    a, b = (torch.exp(x.lse - lse).unsqueeze(-1) * x.out for x in (first, second))
    like, exact = (
        plain.attention(*(x.to(t) for x in (q, k, v)), Terms(seen=seen))
        for t in (q.dtype, torch.float64)
    )
    assert_close("merged", a + b, like[0], exact[0])
    assert_close("lse", lse, like[1], exact[1])
    assert_same("the request with one chunk", (a + b)[1], first.out[1].float())


def test_causal_is_the_formula_of_these_tests() -> None:
    i, j = torch.arange(3)[:, None], torch.arange(5)
    zero = torch.zeros(1, dtype=torch.int64)
    assert causal(zero, zero, i, j, 2).tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]
