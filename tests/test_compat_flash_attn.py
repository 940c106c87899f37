"""FlashAttention-2's functions against attention written out with loops for the mask.

`expected` is independent of the package: explicit scores, softmax and products in the dtype of its
inputs. In float64 it is the exact value, in the dtype under test the yardstick of the tolerance.
"""

import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anyflash.compat import flash_attn
from anyflash.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from anyflash.errors import InvalidInput, Unsupported
from anyflash.numerics import accumulation_dtype, max_error, tolerance


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv_of(batch, sq, sk, heads, heads_k, dim=16, dim_v=None, dtype=torch.float32):
    shapes = (sq, heads, dim), (sk, heads_k, dim), (sk, heads_k, dim_v or dim)
    return [draw(batch, *s, dtype=dtype, seed=n) for n, s in enumerate(shapes)]


def seen_by(sq, sk, left, right):
    """(Sq, Sk): key j is seen iff −left ≤ j − (i + Sk − Sq) ≤ right; −1 is no bound."""
    left, right = (math.inf if side == -1 else side for side in (left, right))
    rows = [[-left <= j - (i + sk - sq) <= right for j in range(sk)] for i in range(sq)]
    return torch.tensor(rows, dtype=torch.bool).reshape(sq, sk)


def expected(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0,
             alibi_slopes=None):  # fmt: skip
    """out (B, Sq, H, Dv) and lse (B, H, Sq) of (B, S, H, D) tensors."""
    sq, sk, heads = q.shape[1], k.shape[1], q.shape[2]
    # Head h of the queries goes with head h // (H / Hk) of the keys: picked one by one.
    pick = [h * k.shape[2] // heads for h in range(heads)]
    q, k, v = q.transpose(1, 2), k[:, :, pick].transpose(1, 2), v[:, :, pick].transpose(1, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    s = q @ k.mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        distance = [[abs(i + sk - sq - j) for j in range(sk)] for i in range(sq)]
        slopes = alibi_slopes.to(s.dtype).reshape(-1, heads, 1, 1)
        s = s - slopes * torch.tensor(distance, dtype=s.dtype).reshape(sq, sk)
    seen = seen_by(sq, sk, window_size[0], 0 if causal else window_size[1])
    some = seen.any(-1, keepdim=True)
    masked = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(masked.to(accumulation_dtype(s.dtype)), -1)
    p = torch.softmax(torch.where(some, masked, s), -1) * some
    return (p @ v).transpose(1, 2), lse


def gradients(outputs, leaves):
    """Of one scalar that weighs every output, all of lse that is finite included."""
    out, lse = outputs
    loss = (out.double() * draw(*out.shape, dtype=torch.float64, seed=5)).sum()
    weights = draw(*lse.shape, dtype=torch.float64, seed=6)
    finite = torch.isfinite(lse)
    loss = loss + (torch.where(finite, lse, 0).double() * weights).sum()
    return torch.autograd.grad(loss, leaves)


def check(actual, exact, plain, softcap=False):
    allowed = tolerance(plain, exact, softcap=softcap)
    error = max_error(actual, exact)
    assert error <= allowed, f"error {error:.3g}, {allowed:.3g} allowed"


def leaves_of(tensors, dtype=None):
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def compare(run, reference, tensors, softcap=False):
    """out, lse and gradients of `run(*tensors)` against `reference`, by the tolerance rule."""
    results = []
    for function, dtype in ((run, None), (reference, torch.float64), (reference, None)):
        leaves = leaves_of(tensors, dtype)
        outputs = function(*leaves)[:2]
        found = gradients(outputs, leaves)
        results.append([*(x.detach() for x in outputs), *found])
    for actual, exact, plain in zip(*results, strict=True):
        assert actual.shape == exact.shape
        check(actual, exact, plain, softcap)
    assert results[0][0].dtype == tensors[0].dtype


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, **options, return_attn_probs=True)


FUNCTIONS = {
    flash_attn_func: "q k v",
    flash_attn_kvpacked_func: "q kv",
    flash_attn_qkvpacked_func: "qkv",
    flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    flash_attn_varlen_kvpacked_func: "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    flash_attn_varlen_qkvpacked_func: "qkv cu_seqlens max_seqlen",
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_signature_is_that_of_flash_attn(function):
    defaults = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip
    if function is flash_attn_varlen_func:
        defaults["block_table"] = None
    empty = inspect.Parameter.empty
    wanted = [(name, empty) for name in FUNCTIONS[function].split()] + list(defaults.items())
    parameters = inspect.signature(function).parameters.values()
    assert [(p.name, p.default) for p in parameters] == wanted
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    assert function.__name__ in flash_attn.__all__


OPTIONS = (
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"window_size": (-1, 2)},
    {"window_size": (4, -1)},
    {"window_size": (5, 9), "causal": True},
    {"window_size": (0, 0)},
    {"softcap": 2.0},
    {"softcap": 1.5, "causal": True},
    {"softmax_scale": 0.3},
    {"softmax_scale": -0.3, "causal": True},
    {"softmax_scale": 0.0},
)
LENGTHS = ((1, 1), (5, 5), (64, 65), (9, 70), (70, 9), (1, 130))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(lengths, options):
    heads_k = {0: 4, 1: 2, 2: 1}[sum(lengths) % 3]
    tensors = qkv_of(2, *lengths, 4, heads_k)
    compare(
        lambda *t: dense(*t, **options),
        lambda *t: expected(*t, **options),
        tensors,
        "softcap" in options,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS[:3] + OPTIONS[7:8], ids=str)
def test_dense_dtypes(dtype, options):
    compare(
        lambda *t: dense(*t, **options),
        lambda *t: expected(*t, **options),
        qkv_of(2, 33, 40, 4, 2, 24, dtype=dtype),
        "softcap" in options,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("lengths", [(20, 20), (7, 30), (30, 7)], ids=str)
def test_alibi(shape, lengths, causal):
    slopes = draw(*shape).abs()
    options = {"alibi_slopes": slopes, "causal": causal, "window_size": (11, -1)}
    compare(
        lambda *t: dense(*t, **options),
        lambda *t: expected(*t, **options),
        qkv_of(2, *lengths, 4, 2),
    )


def test_values_of_another_width():
    compare(dense, expected, qkv_of(2, 9, 12, 4, 2, 16, 24))


class LargestResult(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def test_nothing_of_size_s_by_s_is_made():
    q, k, v = qkv_of(1, 300, 300, 2, 2, 8)
    with LargestResult() as watch:
        flash_attn_func(q, k, v, causal=True, window_size=(50, 0), alibi_slopes=draw(2))
    assert 0 < watch.elements <= q.numel()


@pytest.fixture
def calls(monkeypatch):
    """What reaches anyflash's own functions: three tensors and the keywords."""
    seen = []
    for name in ("attention", "attention_varlen"):
        original = getattr(flash_attn, name)

        def record(*args, original=original, **kwargs):
            seen.append((args[:3], kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(flash_attn, name, record)
    return seen


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def test_dense_packed_variants_are_views_of_the_same(calls):
    qkv, q, kv = draw(2, 12, 3, 4, 16), draw(2, 5, 4, 16), draw(2, 12, 2, 2, 16)
    for packed, run, unpacked in (
        ((qkv,), flash_attn_qkvpacked_func, lambda x: x.unbind(2)),
        ((q, kv), flash_attn_kvpacked_func, lambda x, y: (x, *y.unbind(2))),
    ):
        leaves, twins = leaves_of(packed), leaves_of(packed)
        out, lse, _ = run(*leaves, causal=True, return_attn_probs=True)
        storages = {x.untyped_storage().data_ptr() for x in leaves}
        assert {x.untyped_storage().data_ptr() for x in calls[-1][0]} == storages
        wanted = dense(*unpacked(*twins), causal=True)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
        found = gradients((out, lse), leaves)
        for gradient, other in zip(found, gradients(wanted[:2], twins), strict=True):
            assert torch.equal(gradient, other)


def test_varlen_packed_variants_are_views_of_the_same(calls):
    cu_q, cu = offsets(2, 0, 3), offsets(5, 4, 3)
    qkv, q, kv = draw(12, 3, 4, 16), draw(5, 4, 16), draw(12, 2, 2, 16)
    for packed, run, unpacked, sizes in (
        ((qkv,), flash_attn_varlen_qkvpacked_func, lambda x: x.unbind(1), (cu, 5)),
        (
            (q, kv),
            flash_attn_varlen_kvpacked_func,
            lambda x, y: (x, *y.unbind(1)),
            (cu_q, cu, 3, 5),
        ),
    ):
        leaves, twins = leaves_of(packed), leaves_of(packed)
        out, lse, _ = run(*leaves, *sizes, causal=True, return_attn_probs=True)
        storages = {x.untyped_storage().data_ptr() for x in leaves}
        assert {x.untyped_storage().data_ptr() for x in calls[-1][0]} == storages
        both = (cu, cu, 5, 5) if len(sizes) == 2 else sizes
        wanted = flash_attn_varlen_func(
            *unpacked(*twins), *both, causal=True, return_attn_probs=True
        )
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
        found = gradients((out, lse), leaves)
        for gradient, other in zip(found, gradients(wanted[:2], twins), strict=True):
            assert torch.equal(gradient, other)


def test_positional_arguments_arrive_where_they_belong():
    q, k, v = qkv_of(2, 9, 12, 4, 2)
    slopes = draw(4).abs()
    named = {
        "dropout_p": 0.0, "softmax_scale": 0.3, "causal": True, "window_size": (4, -1),
        "softcap": 2.0, "alibi_slopes": slopes, "deterministic": True, "return_attn_probs": True,
    }  # fmt: skip
    wanted = flash_attn_func(q, k, v, **named)
    kv = torch.stack([k, v], 2)
    qkv = torch.stack([q, q.flip(1), q.flip(2)], 2)
    single = flash_attn_func(*qkv.unbind(2), **named)
    cu_q, cu_k = offsets(9, 9), offsets(12, 12)
    flat = [x.flatten(0, 1) for x in (q, k, v, kv, qkv)]
    options = tuple(named.values())
    for found, right in (
        (flash_attn_func(q, k, v, *options), wanted),
        (flash_attn_kvpacked_func(q, kv, *options), wanted),
        (flash_attn_qkvpacked_func(qkv, *options), single),
        (flash_attn_varlen_func(*flat[:3], cu_q, cu_k, 9, 12, *options, None), wanted),
        (flash_attn_varlen_kvpacked_func(flat[0], flat[3], cu_q, cu_k, 9, 12, *options), wanted),
        (flash_attn_varlen_qkvpacked_func(flat[4], cu_q, 9, *options), single),
    ):
        out = right[0] if found[0].ndim == 4 else right[0].flatten(0, 1)
        lse = right[1] if found[1].ndim == 3 else right[1].transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(found[0], out)
        torch.testing.assert_close(found[1], lse)


def expected_varlen(q, k, v, cu_q, cu_k, **options):
    """One sequence after another through `expected`."""
    outs, lses = [], []
    slopes = options.pop("alibi_slopes", None)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        mine = slopes[b] if slopes is not None and slopes.ndim == 2 else slopes
        out, lse = expected(
            q[None, rows], k[None, keys], v[None, keys], **options, alibi_slopes=mine
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


VARLEN = (
    ((3, 1, 8), (3, 1, 8)),
    ((4, 70, 2), (9, 66, 2)),
    ((0, 5, 0, 3), (4, 0, 0, 6)),
    ((1, 1, 1), (7, 130, 1)),
)


@pytest.mark.parametrize("options", [*OPTIONS[:6], *OPTIONS[8:10], {"alibi_slopes": 1}, {
    "alibi_slopes": 2, "causal": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", VARLEN, ids=str)
def test_varlen(lengths, options):
    (q_lengths, k_lengths), options = lengths, dict(options)
    cu_q, cu_k = offsets(*q_lengths), offsets(*k_lengths)
    if "alibi_slopes" in options:
        shape = (4,) if options["alibi_slopes"] == 1 else (len(q_lengths), 4)
        options["alibi_slopes"] = draw(*shape).abs()
    total_q, total_k = sum(q_lengths), sum(k_lengths)
    tensors = draw(total_q, 4, 16), draw(total_k, 2, 16, seed=1), draw(total_k, 2, 16, seed=2)
    sizes = cu_q, cu_k, max(q_lengths), max(k_lengths)
    compare(
        lambda *t: flash_attn_varlen_func(*t, *sizes, **options, return_attn_probs=True),
        lambda *t: expected_varlen(*t, cu_q, cu_k, **options),
        tensors,
        "softcap" in options,
    )


def test_results_with_and_without_return_attn_probs():
    q, k, v = qkv_of(2, 9, 12, 4, 2, dtype=torch.bfloat16)
    out, lse, s_dmask = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == (2, 9, 4, 16) and out.is_contiguous()
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    assert s_dmask.shape == (0,) and s_dmask.dtype == torch.bfloat16
    assert torch.equal(flash_attn_func(q, k, v), out)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    sizes = offsets(9, 9), offsets(12, 12), 9, 12
    out, lse, s_dmask = flash_attn_varlen_func(*flat, *sizes, return_attn_probs=True)
    assert out.shape == (18, 4, 16) and lse.shape == (4, 18) and lse.dtype == torch.float32
    assert s_dmask.shape == (0,)
    assert torch.equal(flash_attn_varlen_func(*flat, *sizes), out)


def test_attention_probabilities_with_dropout_are_refused():
    q, k, v = qkv_of(1, 4, 4, 2, 2)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(Unsupported, match="return_attn_probs=True with dropout") as caught:
        flash_attn_func(q, k, v, 0.1, return_attn_probs=True)
    assert "return_lse=True" in str(caught.value)
    with pytest.raises(Unsupported, match="return_attn_probs=True with dropout"):
        flash_attn_varlen_func(*flat, offsets(4), offsets(4), 4, 4, 0.1, return_attn_probs=True)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout(packed):
    """Equal scores and V = 1: out shows which weights were kept, and dV must be of the same."""
    size, p = 128, 0.25
    q = torch.zeros(2, size, 4, 16)
    k = torch.zeros(2, size, 2, 16)
    v = torch.eye(size).view(1, size, 1, size).repeat(2, 1, 2, 1).requires_grad_()

    def run(dropout):
        if not packed:
            return flash_attn_func(q, k, v, dropout)
        cu = offsets(size, size)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        return flash_attn_varlen_func(*flat, cu, cu, size, size, dropout).view(2, size, 4, size)

    torch.manual_seed(3)
    first, second = run(p), run(p)
    torch.manual_seed(3)
    assert torch.equal(run(p), first) and not torch.equal(first, second)
    kept = first.detach() != 0
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 / (size * (1 - p))))
    count = kept.numel()
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / count)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[:, :, 0], kept[:, :, 1])
    dout = draw(2, size, 4, size)
    (dv,) = torch.autograd.grad(first, v, dout)
    weights = first.detach().permute(0, 2, 3, 1) @ dout.transpose(1, 2)  # (B, H, Sk, Dv)
    torch.testing.assert_close(dv, weights.unflatten(1, (2, 2)).sum(2).transpose(1, 2))
    assert run(1.0).eq(0).all()


def test_deterministic_gradients_are_equal_and_right(calls):
    leaves = leaves_of(qkv_of(2, 70, 130, 4, 2))
    first, second = (
        gradients(dense(*leaves, causal=True, deterministic=True)[:2], leaves) for _ in range(2)
    )
    plain = gradients(dense(*leaves, causal=True)[:2], leaves)
    for a, b, c in zip(first, second, plain, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)
    flat, cu = [x.flatten(0, 1) for x in leaves], (offsets(70, 70), offsets(130, 130))
    flash_attn_varlen_func(*flat, *cu, 70, 130, deterministic=True)
    assert [keywords["deterministic"] for _, keywords in calls] == [True, True, False, True]


def compiled_calls():
    q, k, v = qkv_of(2, 9, 12, 4, 2)
    kv, qkv = torch.stack([k, v], 2), draw(2, 12, 3, 4, 16)
    slopes = draw(4).abs()
    cu_q, cu_k = offsets(9, 9), offsets(12, 12)
    flat = [x.flatten(0, 1) for x in (q, k, v, kv, qkv)]
    sizes = cu_q, cu_k, 9, 12
    options = {"causal": True, "window_size": (5, 0)}
    bent = {"softcap": 2.0, "alibi_slopes": slopes}
    return {
        "dense": (flash_attn_func, (q, k, v), {**options, **bent}),
        "kvpacked": (flash_attn_kvpacked_func, (q, kv), options),
        "qkvpacked": (flash_attn_qkvpacked_func, (qkv,), options),
        "varlen": (flash_attn_varlen_func, (*flat[:3], *sizes), {**options, **bent}),
        "varlen_kvpacked": (flash_attn_varlen_kvpacked_func, (flat[0], flat[3], *sizes), options),
        "varlen_qkvpacked": (flash_attn_varlen_qkvpacked_func, (flat[4], cu_k, 12), options),
    }


@pytest.mark.parametrize("name", compiled_calls())
def test_compiles_to_one_graph(name):
    function, arguments, options = compiled_calls()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        leaves = [
            x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
            for x in arguments
        ]
        outputs = run(*leaves, **options, return_attn_probs=True)[:2]
        grown = [x for x in leaves if torch.is_tensor(x) and x.requires_grad]
        results.append([*outputs, *gradients(outputs, grown)])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other) and eager.stride() == other.stride()


def test_compiles_once_for_many_lengths_and_takes_a_symbolic_window():
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (10, 13, 17):
            q, k, v = qkv_of(2, size, size, 4, 2)
            found = compiled(q, k, v, causal=True, window_size=(3, -1))
            wanted = flash_attn_func(q, k, v, causal=True, window_size=(3, -1))
            assert torch.equal(found, wanted)


def test_block_table_is_refused():
    q, k, v = (x.flatten(0, 1) for x in qkv_of(1, 4, 4, 2, 2))
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(Unsupported, match=r"block_table \(a key/value cache in pages\)"):
        flash_attn_varlen_func(q, k, v, offsets(4), offsets(4), 4, 4, block_table=table)


@pytest.mark.parametrize(
    ("run", "argument", "form"),
    [
        (lambda x: flash_attn_func(x[0], x, x), "q", "(batch, seqlen, nheads, headdim)"),
        (lambda x: flash_attn_func(x, x, x[..., 0]), "v", "(batch, seqlen, nheads, headdim)"),
        (lambda x: flash_attn_func(x.long(), x, x), "q", "float16"),
        (lambda x: flash_attn_func(None, x, x), "q", "torch.Tensor"),
        (lambda x: flash_attn_qkvpacked_func(x), "qkv", "(batch, seqlen, 3, nheads, headdim)"),
        (lambda x: flash_attn_qkvpacked_func(draw(1, 4, 2, 2, 8)), "qkv", "3, nheads"),
        (lambda x: flash_attn_kvpacked_func(x, draw(1, 4, 3, 2, 8)), "kv", "2, nheads_k"),
        (lambda x: flash_attn_varlen_func(x, x, x, offsets(4), offsets(4), 4, 4), "q", "(total,"),
        (lambda x: flash_attn_varlen_qkvpacked_func(x[0], offsets(4), 4), "qkv", "(total, 3,"),
        (
            lambda x: flash_attn_varlen_kvpacked_func(x[0], x[0], *[offsets(4)] * 2, 4, 4),
            "kv",
            "(total, 2,",
        ),
        (lambda x: flash_attn_func(x, x, x, softcap=-1.0), "softcap", "finite number > 0"),
        (lambda x: flash_attn_func(x, x, x, 1.5), "dropout", "probability"),
        (lambda x: flash_attn_func(x, x, x, alibi_slopes=draw(3)), "alibi slopes", "(2,)"),
    ],
)
def test_malformed_arguments_are_named(run, argument, form):
    with pytest.raises(InvalidInput) as caught:
        run(draw(1, 4, 2, 8))
    assert caught.value.argument == argument and form in caught.value.expected


# Public bug reports that concern these functions.


@pytest.mark.parametrize("compiled", [False, True])
def test_b011_batch_of_zero(compiled):
    run = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    q, k, v = leaves_of([draw(0, 3952, 10, 64), draw(0, 16, 10, 64), draw(0, 16, 10, 64)])
    out = (run if compiled else flash_attn_func)(q, k, v)
    assert out.shape == q.shape
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape


def test_b014_single_queries_and_sequences_of_none():
    cu_q = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    cu_k = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    tensors = draw(2, 9, 64), draw(8, 3, 64, seed=1), draw(8, 3, 64, seed=2)
    compare(
        lambda *t: flash_attn_varlen_func(
            *t, cu_q, cu_k, 1, 5, causal=True, return_attn_probs=True
        ),
        lambda *t: expected_varlen(*t, cu_q, cu_k, causal=True),
        tensors,
    )


def test_b015_fewer_tokens_than_sequences():
    cu = torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32)
    q, k, v = (draw(1, h, 120, dtype=torch.bfloat16, seed=h) for h in (21, 7, 7))
    out = flash_attn_varlen_func(q, k, v, cu, cu, 1, 1)
    assert torch.equal(out, v.repeat_interleave(3, 1))


@pytest.mark.parametrize("lengths", [(32, 1024), (1024, 32), (32, 32)], ids=str)
def test_b020_causal_is_aligned_bottom_right(lengths):
    q, k, v = qkv_of(4, *lengths, 12, 12, 64, dtype=torch.float16)
    out, lse, _ = dense(q, k, v, causal=True)
    exact = expected(q.double(), k.double(), v.double(), causal=True)
    plain = expected(q, k, v, causal=True)
    check(out, exact[0], plain[0])
    check(lse, exact[1], plain[1])
    # The last query sees every key, whatever the lengths.
    check(out[:, -1:], expected(q[:, -1:].double(), k.double(), v.double())[0], plain[0][:, -1:])


@pytest.mark.parametrize("keys", [129, 32])
def test_b023_rows_whose_window_lies_outside_the_keys(keys):
    tensors = qkv_of(1, 129, keys, 2, 2)
    options = {"window_size": (32, 64)}
    compare(lambda *t: dense(*t, **options), lambda *t: expected(*t, **options), tensors)
    out, lse, _ = dense(*tensors, **options)
    empty = torch.tensor([i + keys - 129 + 64 < 0 for i in range(129)])
    assert empty.sum().item() == {129: 0, 32: 33}[keys]
    assert out[:, empty].eq(0).all() and lse[..., empty].eq(-math.inf).all()
    assert lse[..., ~empty].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(-1, -3), (-2, -1), (-3, 4), (1.0, 2), (True, 1), (3,), 3, "33"])
def test_b025_other_negative_windows_are_refused(size, causal):
    q, k, v = qkv_of(1, 4, 4, 2, 2)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(InvalidInput, match=r"window_size: got .*−1 or None for no bound"):
        flash_attn_func(q, k, v, causal=causal, window_size=size)
    with pytest.raises(ValueError, match="window_size"):
        flash_attn_varlen_func(*flat, offsets(4), offsets(4), 4, 4, causal=causal, window_size=size)


def test_b025_unbounded_is_minus_one_or_none():
    q, k, v = qkv_of(1, 9, 9, 2, 2)
    for size in ((None, None), [-1, -1], (-1, None)):
        assert torch.equal(flash_attn_func(q, k, v, window_size=size), flash_attn_func(q, k, v))


@pytest.mark.parametrize("left", [0, 1, 3])
def test_b026_a_left_window_counts_the_key_itself_in_addition(left):
    size = 10
    q, k = torch.zeros(1, size, 1, 16), torch.zeros(1, size, 1, 16)
    v = torch.eye(size).view(1, size, 1, size)
    weights = flash_attn_func(q, k, v, causal=True, window_size=(left, -1))[0, :, 0]
    for i in range(size):
        keys = list(range(max(0, i - left), i + 1))
        assert weights[i].nonzero().flatten().tolist() == keys and len(keys) == min(i, left) + 1
    if left == 0:
        v = draw(1, size, 1, 16)
        assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=(0, -1)), v)


def test_b035_gradient_of_a_transposed_output():
    tensors = leaves_of(qkv_of(2, 32, 32, 4, 1, 128, dtype=torch.float16))
    dout = draw(2, 4, 32, 128, dtype=torch.float16).transpose(1, 2)
    assert not dout.is_contiguous()
    out = flash_attn_func(*tensors)
    found = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    wanted = torch.autograd.grad(out, tensors, dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_b036_gradient_of_a_sum_has_no_strides():
    tensors = leaves_of(qkv_of(1, 5, 5, 2, 2, 8, dtype=torch.bfloat16))
    out = flash_attn_func(*tensors, causal=True)
    found = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    wanted = torch.autograd.grad(out, tensors, torch.ones_like(out).contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (2, 4)])
def test_b056_query_heads_that_key_heads_do_not_divide(heads):
    q, k, v = qkv_of(1, 4, 4, *heads)
    message = f"{heads[0]} query heads and {heads[1]} key heads"
    with pytest.raises(InvalidInput, match=message):
        flash_attn_func(q, k, v)
    with pytest.raises(InvalidInput, match=message):
        flash_attn_kvpacked_func(q, torch.stack([k, v], 2))
    with pytest.raises(InvalidInput, match=message):
        cu = offsets(4)
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 4, 4)


def test_b058_query_head_h_reads_key_head_h_over_the_group():
    compare(dense, expected, qkv_of(1, 256, 256, 64, 8, 128))


def test_b150_heads_before_the_sequence_are_noticed_where_sizes_tell():
    heads, sq, sk = 8, 16, 24
    q, k, v = draw(2, heads, sq, 64), draw(2, heads, sk, 64), draw(2, heads, sk, 64)
    with pytest.raises(InvalidInput, match=r"16 query heads and 24 key heads.*\.transpose\(1, 2\)"):
        flash_attn_func(q, k, v)
    with pytest.raises(InvalidInput, match=r"shape \(2, 24, 8, 64\).*\.transpose\(1, 2\)"):
        flash_attn_func(q, k, v.transpose(1, 2))
    with pytest.raises(InvalidInput, match=r"16 query heads and 24 key heads.*\.transpose\(0, 1\)"):
        flash_attn_varlen_func(q[0], k[0], v[0], offsets(8), offsets(8), 8, 8)
    assert "cannot be told from" in (flash_attn_func.__doc__ or "")
