"""Operators under everything PyTorch does to them: opcheck, derivatives, compile, transforms."""

import copy
import math

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import anyflash as af
from anyflash import ops
from anyflash.numerics import max_error, tolerance

DOUBLE = torch.float64


def tensors(*shapes, dtype=DOUBLE, grad=True):
    return [torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes]


def qkv(batch=2, heads=4, heads_kv=2, queries=9, keys=7, dim=5, dim_v=3, **kwargs):
    shapes = (
        (batch, heads, queries, dim),
        (batch, heads_kv, keys, dim),
        (batch, heads_kv, keys, dim_v),
    )
    return tensors(*shapes, **kwargs)


def plain(q, k, v, visible=None):
    """The textbook in plain PyTorch; query heads share key heads in order."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    return (s if visible is None else s.masked_fill(~visible, -torch.inf)).softmax(-1) @ v


def arguments(q, k, v, **given):
    """The operator's arguments in schema order."""
    names = ops.Arguments._fields
    values = dict.fromkeys(names)
    values |= {
        "mask_leaves": [],
        "mask": "",
        "softcap": 0.0,
        "dropout": 0.0,
        "deterministic": False,
        "gradient": False,
    }
    values |= {"q": q, "k": k, "v": v} | given
    return tuple(values[name] for name in names)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


MASK = (af.causal() | af.prefix(2)) & af.padding(torch.tensor([7, 4]))
FEATURES = {
    "plain": lambda: {},
    "mask": lambda: {"mask": MASK.text, "mask_leaves": list(MASK.leaves)},
    "bias sink softcap": lambda: {
        "bias": torch.randn(1, 4, 1, 7, dtype=DOUBLE, requires_grad=True),
        "sink": torch.randn(4, dtype=DOUBLE, requires_grad=True),
        "softcap": 2.0,
    },
    "dropout": lambda: {"dropout": 0.5, "seed": torch.tensor([7])},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_opcheck_forward(feature):
    given = arguments(*qkv(), **FEATURES[feature]())
    torch.library.opcheck(torch.ops.anyflash.attention_forward.default, given)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    "needs", [[True] * 5, [True, False, True, False, False]], ids=["all", "q v"]
)
def test_opcheck_backward(feature, needs):
    given = arguments(*qkv(), **FEATURES[feature]())
    out, lse = (x.detach() for x in ops.attention_forward(*given))
    dout, dlse = torch.randn_like(out).requires_grad_(), torch.randn_like(lse).requires_grad_()
    if feature == "dropout":
        dlse = None
    call = (dout, dlse, out, lse, needs, *given)
    torch.library.opcheck(torch.ops.anyflash.attention_backward.default, call)


def test_opcheck_packed():
    q, k, v = tensors((9, 4, 5), (7, 2, 5), (7, 2, 3))
    starts_q, starts_k = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 7, 7]).int()
    given = arguments(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, mask="Window(None,0)")
    torch.library.opcheck(torch.ops.anyflash.attention_forward.default, given)


@pytest.mark.parametrize("order", ["(B, H, S, D)", "(B, S, H, D)", "fused", "expanded"])
def test_fake_strides_are_the_real_ones(order):
    """B097: a fake kernel that reports other strides breaks compiled graphs."""
    q, k, v = qkv(dim_v=5, queries=8, keys=8, heads=2, grad=False)
    if order == "(B, S, H, D)":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif order == "fused":
        q, k, v = torch.randn(2, 8, 3, 2, 5, dtype=DOUBLE).permute(2, 0, 3, 1, 4)
    elif order == "expanded":
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    given = arguments(*(x.requires_grad_() for x in (q, k, v)), mask="Window(None,0)")
    torch.library.opcheck(torch.ops.anyflash.attention_forward.default, given)


def everything(q, k, v, bias, sink):
    return af.attention(q, k, v, bias=bias, sink=sink, mask=MASK, softcap=2.0, return_lse=True)


def test_first_and_second_derivatives_of_everything():
    leaves = (*qkv(), *tensors((1, 4, 1, 7), (4,)))
    assert torch.autograd.gradcheck(everything, leaves)
    assert torch.autograd.gradgradcheck(everything, leaves)


def test_second_derivatives_with_dropout():
    def f(q, k, v):
        torch.manual_seed(3)
        return af.attention(q, k, v, dropout=0.4, causal=True)

    assert torch.autograd.gradgradcheck(f, qkv())


def test_second_derivatives_when_only_some_inputs_need_them():
    q, k, v = qkv()
    assert torch.autograd.gradgradcheck(lambda q: af.attention(q, k.detach(), v.detach()), (q,))
    assert torch.autograd.gradgradcheck(lambda v: af.attention(q.detach(), k.detach(), v), (v,))


def test_second_derivatives_packed():
    q, k, v = tensors((9, 4, 5), (7, 2, 5), (7, 2, 3))
    sink = torch.randn(4, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(2, 1, 5, 7, dtype=DOUBLE, requires_grad=True)
    starts_q, starts_k = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 7, 7]).int()

    def f(q, k, v, bias, sink):
        return af.attention_varlen(q, k, v, starts_q, starts_k, causal=True, bias=bias, sink=sink)

    assert torch.autograd.gradgradcheck(f, (q, k, v, bias, sink))


def test_second_derivatives_across_strips_of_rows(monkeypatch):
    monkeypatch.setattr("anyflash.reference.STRIP", 4)
    assert torch.autograd.gradgradcheck(everything, (*qkv(), *tensors((1, 4, 9, 7), (4,))))


def test_third_derivative_refuses():
    q, k, v = qkv()
    (first,) = torch.autograd.grad(af.attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(af.Unsupported, match="third derivatives"):
        second.sum().backward()


def test_gradient_penalty_trains():
    """The gradient of a gradient's norm, as in WGAN-GP, against plain PyTorch."""
    q, k, v = qkv()

    def penalty(f):
        (g,) = torch.autograd.grad(f(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.norm(), (q, k, v))

    for ours, theirs in zip(penalty(af.attention), penalty(plain), strict=True):
        assert max_error(ours, theirs) <= tolerance(theirs, theirs)


# torch.func


def loss(f):
    return lambda q, k, v: f(q, k, v).square().sum()


def test_func_grad_and_vjp():
    given = qkv(grad=False)
    for n in range(3):
        ours = torch.func.grad(loss(af.attention), argnums=n)(*given)
        assert max_error(ours, torch.func.grad(loss(plain), argnums=n)(*given)) <= 1e-5
    ones = torch.ones((), dtype=DOUBLE)
    ours, theirs = (torch.func.vjp(loss(f), *given)[1](ones) for f in (af.attention, plain))
    assert max(max_error(a, b) for a, b in zip(ours, theirs, strict=True)) <= 1e-5


def test_func_hessian_by_reverse_over_reverse():
    q, k, v = qkv(batch=1, heads=1, heads_kv=1, queries=3, keys=3, grad=False)

    def hessian(f):
        return torch.func.jacrev(torch.func.grad(lambda q: loss(f)(q, k, v)))(q)

    assert max_error(hessian(af.attention), hessian(plain)) <= 1e-5


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (2, 0, 1)])
def test_vmap(in_dims):
    given = []
    for x, dim in zip(qkv(grad=False), in_dims, strict=True):
        given.append(x if dim is None else torch.randn(3, *x.shape, dtype=DOUBLE).movedim(0, dim))
    for f in (lambda *x: af.attention(*x, causal=True), torch.func.grad(loss(af.attention))):
        mapped = torch.func.vmap(f, in_dims)(*given)
        for n in range(3):
            one = f(
                *(x if d is None else x.select(d, n) for x, d in zip(given, in_dims, strict=True))
            )
            assert torch.equal(mapped[n], one)


def test_vmap_of_what_cannot_be_folded():
    q, k, v = qkv(grad=False)
    masks, bias = torch.rand(3, 9, 7) < 0.6, torch.randn(3, 2, 1, 9, 7, dtype=DOUBLE)

    def f(mask, bias):
        return af.attention(q, k, v, mask=mask, bias=bias, return_lse=True)

    out, lse = torch.func.vmap(f)(masks, bias)
    for n in range(3):
        one_out, one_lse = f(masks[n], bias[n])
        assert torch.equal(out[n], one_out) and torch.equal(lse[n], one_lse)


def test_forward_mode_refuses_by_name():
    """B108: under a registered formula forward mode would silently give zeros."""
    q, k, v = qkv(grad=False)
    with pytest.raises(af.Unsupported, match="forward-mode"):
        torch.func.jvp(af.attention, (q, k, v), (q, k, v))
    with pytest.raises(af.Unsupported, match="forward-mode"):
        torch.func.jacfwd(af.attention)(q, k, v)
    with fwd.dual_level(), pytest.raises(af.Unsupported, match="forward-mode"):
        af.attention(q, k, fwd.make_dual(v, v))


# torch.compile


def agree(f, *leaves, **options):
    """f compiled and f as it is: the same results and gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, **options)
    for run in (1, 2):  # the second call must be as good as the first
        ours, theirs = compiled(*leaves), f(*leaves)
        assert torch.equal(ours, theirs), run
        gradients = [torch.autograd.grad(x.square().sum(), leaves) for x in (ours, theirs)]
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b), run


IDS = torch.arange(64) // 10
DOCUMENTS = af.documents(IDS) & af.causal()
THIRDS = af.from_function(lambda b, h, i, j: (i - j) % 3 == 0)
BOOLEAN = torch.rand(64, 64) < 0.7
KEYWORDS = {
    "plain": lambda: {},
    "causal": lambda: {"causal": True},
    "mask made outside": lambda: {"mask": DOCUMENTS},
    "mask made inside": lambda: {"mask": af.documents(IDS) & af.causal()},
    "function": lambda: {"mask": THIRDS | af.causal()},
    "compiled mask": lambda: {"mask": COMPILED},
    "boolean": lambda: {"mask": BOOLEAN},
    "lots": lambda: {"softcap": 5.0, "scale": 0.3, "bias": BOOLEAN.float(), "sink": torch.ones(4)},
}
COMPILED = THIRDS.compile(2, 4, 64, 64)


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_compile_fullgraph(keywords):
    shapes = [(2, 4, 64, 16)] * 3

    def f(q, k, v):
        return af.attention(q * 1.0, k, v, **KEYWORDS[keywords]()) + 0.0

    agree(f, *tensors(*shapes, dtype=torch.float32))


def test_compile_packed_and_other_layouts():
    starts = torch.tensor([0, 10, 64]).int()

    def packed(q, k, v):
        return af.attention_varlen(q, k, v, starts, starts, max_seqlen_q=54, causal=True)

    agree(packed, *tensors(*[(64, 4, 16)] * 3, dtype=torch.float32))

    def swapped(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return af.attention(q, k, v).transpose(1, 2).reshape(2, 64, -1)

    agree(swapped, *tensors(*[(2, 64, 4, 16)] * 3, dtype=torch.float32))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_with_changing_lengths(dynamic):
    """B099: at most two compilations for any number of lengths. B096: the default scale stays."""
    torch._dynamo.reset()
    counter = CompileCounter()
    f = torch.compile(
        lambda q, k, v: af.attention(q, k, v, causal=True),
        fullgraph=True,
        dynamic=dynamic,
        backend=counter,
    )
    for length in range(100, 121):
        given = tensors(*[(1, 2, length, 8)] * 3, dtype=torch.float32, grad=False)
        assert torch.equal(f(*given), af.attention(*given, causal=True))
    assert counter.frame_count <= 2


def test_compile_with_dropout_draws_anew():
    torch._dynamo.reset()
    given = tensors(*[(2, 4, 64, 16)] * 3, dtype=torch.float32, grad=False)
    f = torch.compile(lambda q, k, v: af.attention(q, k, v, dropout=0.5), fullgraph=True)
    assert not torch.equal(f(*given), f(*given))


# Autocast, checkpointing, copies


def test_autocast_casts_like_sdpa():
    q, k, v = tensors(*[(2, 4, 33, 16)] * 3, dtype=torch.float32)
    bias = torch.randn(33, 33, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = af.attention(q, k.bfloat16(), v, bias=bias)
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert out.dtype == theirs.dtype == torch.bfloat16
    exact = plain_bias(*(x.bfloat16().double() for x in (q, k, v)), bias.double())
    assert max_error(out, exact) <= tolerance(theirs, exact)
    out.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
    assert bias.grad is not None and bias.grad.dtype == torch.float32


def plain_bias(q, k, v, bias):
    return (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v


def test_autocast_leaves_double_alone():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        assert af.attention(q, k, v).dtype == DOUBLE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpoint_recomputes_the_same(dropout):
    """B111: the recomputation must draw the dropout mask of the first pass."""
    leaves = qkv()

    def f(q, k, v):
        return af.attention(q, k, v, dropout=dropout, causal=True).square().sum()

    results = []
    for run in (f, lambda *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(5)
        results.append(torch.autograd.grad(run(*leaves), leaves))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_backward_outlives_the_mask_object():
    """The function of from_function must not die between forward and backward."""
    leaves = qkv()

    def run():
        mask = af.from_function(lambda b, h, i, j: i >= j)
        return af.attention(*leaves, mask=mask)

    out = run()
    visible = torch.arange(9)[:, None] >= torch.arange(7)
    expected = torch.autograd.grad(plain(*leaves, visible).sum(), leaves)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
        assert max_error(a, b) <= tolerance(b, b)


def test_deepcopied_module_with_a_mask():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = af.window(3, 0) | af.prefix(1)
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return af.attention(q, k, v, mask=self.mask)

    model, x = Model(), torch.randn(2, 11, 8)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_changing_an_input_in_place_before_backward_is_noticed():
    q, k, v = qkv()
    q2 = q * 1.0
    out = af.attention(q2, k, v)
    q2.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
