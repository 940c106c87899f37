"""PyTorch's signature: against PyTorch's own function, and against attention written out.

In float64 all three must agree closely. In other dtypes the written-out one, `expected`, is the
yardstick of the tolerance: in float64 the exact value, in the dtype under test what PyTorch does.
"""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

from anyflash.compat import sdpa
from anyflash.compat.sdpa import scaled_dot_product_attention
from anyflash.errors import InvalidInput
from anyflash.masks import causal
from anyflash.numerics import max_error, tolerance

CLOSE = 1e-11  # two float64 results of the same sums in another order


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def expected(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Explicit scores in the dtype of the inputs; no mask or shape code of the package."""
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        pick = [h // group for h in range(query.shape[-3])]
        key, value = key[..., pick, :, :], value[..., pick, :, :]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    s = query @ key.mT * scale
    if is_causal:
        rows = [[j <= i for j in range(s.shape[-1])] for i in range(s.shape[-2])]
        attn_mask = torch.tensor(rows).reshape(s.shape[-2:])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        s = s + attn_mask.to(s.dtype)
    empty = (s == -math.inf).all(-1, keepdim=True)
    p = torch.where(empty, 0, torch.softmax(torch.where(empty, 0, s), -1))
    return p @ value


def run(function, tensors, dtype, options):
    """The result and the gradients of query, key, value and a float mask."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    options, grown = dict(options), list(leaves)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.detach().to(dtype).requires_grad_()
        grown.append(options["attn_mask"])
    out = function(*leaves, **options)
    weights = draw(*out.shape, dtype=torch.float64, seed=9)
    return [out.detach(), *torch.autograd.grad((out.double() * weights).sum(), grown)]


def agrees_with_torch(tensors, **options):
    ours = run(scaled_dot_product_attention, tensors, torch.float64, options)
    torchs = run(F.scaled_dot_product_attention, tensors, torch.float64, options)
    exact = run(expected, tensors, torch.float64, options)
    for a, b, c in zip(ours, torchs, exact, strict=True):
        assert a.shape == b.shape == c.shape
        assert max_error(a, c) < CLOSE and max_error(a, b) < CLOSE


def within_tolerance(tensors, dtype, **options):
    tensors = [t.to(dtype) for t in tensors]
    ours = run(scaled_dot_product_attention, tensors, dtype, options)
    exact = run(expected, tensors, torch.float64, options)
    plain = run(expected, tensors, dtype, options)
    assert ours[0].dtype == dtype
    for a, b, c in zip(ours, exact, plain, strict=True):
        assert a.shape == b.shape
        assert max_error(a, b) <= tolerance(c, b)


def tensors_of(lead, queries, keys, width=16, width_v=None, lead_k=None):
    """query, key and value with the leading dimensions `lead`, those of key and value `lead_k`."""
    lead_k = lead if lead_k is None else lead_k
    shapes = (*lead, queries, width), (*lead_k, keys, width), (*lead_k, keys, width_v or width)
    return [draw(*s, seed=n) for n, s in enumerate(shapes)]


def test_signature_is_that_of_torch():
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    assert [(p.name, p.default, p.kind) for p in parameters] == [
        ("query", empty, either),
        ("key", empty, either),
        ("value", empty, either),
        ("attn_mask", None, either),
        ("dropout_p", 0.0, either),
        ("is_causal", False, either),
        ("scale", None, keyword),
        ("enable_gqa", False, keyword),
    ]
    q, k, v = tensors_of((2, 4), 9, 12)
    found = scaled_dot_product_attention(q, k, v, None, 0.0, True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, None, 0.0, True))


LENGTHS = ((1, 1), (5, 5), (64, 65), (9, 70), (70, 9), (1, 130), (3, 0), (0, 3))


@pytest.mark.parametrize("scale", [None, 0.3, -0.2, 0.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_plain_and_causal(lengths, is_causal, scale):
    tensors = tensors_of((2, 3), *lengths, 16, 24 if scale is None else 16)
    options = {"is_causal": is_causal, "scale": scale}
    within_tolerance(tensors, torch.float32, **options)
    # torch gives NaN for causal with a scale of 0, and is wrong for a negative one.
    if not (is_causal and scale is not None and scale <= 0):
        agrees_with_torch(tensors, **options)


MASKS = (
    (9, 12),
    (1, 12),
    (9, 1),
    (1, 1),
    (3, 9, 12),
    (3, 1, 1),
    (1, 9, 12),
    (2, 1, 1, 12),
    (1, 3, 9, 1),
    (2, 3, 9, 12),
    (1, 1, 1, 12),
)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(shape, kind):
    mask = draw(*shape, seed=4)
    mask = mask > -0.5 if kind == "bool" else mask
    tensors = tensors_of((2, 3), 9, 12)
    agrees_with_torch(tensors, attn_mask=mask)
    within_tolerance(tensors, torch.float32, attn_mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_take_part_in_nothing_give_zero(kind):
    mask = draw(2, 1, 9, 12, seed=4) > -0.5
    mask[0, :, 3] = False
    mask[1, :, 8] = False
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    tensors = tensors_of((2, 3), 9, 12)
    agrees_with_torch(tensors, attn_mask=mask)
    out = scaled_dot_product_attention(*tensors, mask)
    assert out[0, :, 3].eq(0).all() and out[1, :, 8].eq(0).all() and out[1, :, 3].ne(0).any()


SHAPES = {
    "2-D": ((), ()),
    "3-D": ((3,), (3,)),
    "5-D": ((2, 3, 4), (2, 3, 4)),
    "6-D": ((2, 1, 3, 2), (2, 1, 3, 2)),
    "batch of key broadcast": ((2, 3), (1, 3)),
    "batch of query broadcast": ((1, 3), (2, 3)),
    "heads of key broadcast": ((2, 3), (2, 1)),
    "heads of query broadcast": ((2, 1), (2, 3)),
    "fewer dimensions": ((2, 3), (3,)),
    "more dimensions": ((), (2, 3)),
    "5-D broadcast": ((2, 1, 3), (1, 4, 3)),
    "5-D and 3-D": ((2, 4, 3), (1,)),
    "no batch": ((0, 3), (0, 3)),
    "no heads": ((2, 0), (2, 0)),
    "no outer batch": ((0, 2, 3), (1, 1, 3)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lead", SHAPES.values(), ids=SHAPES)
def test_leading_dimensions(lead, is_causal):
    agrees_with_torch(tensors_of(lead[0], 9, 12, lead_k=lead[1]), is_causal=is_causal)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("lead", "shape"),
    [
        ((), (9, 12)),
        ((3,), (3, 9, 12)),
        ((3,), (1, 1, 12)),
        ((2, 4, 3), (9, 12)),
        ((2, 4, 3), (3, 1, 12)),
        ((2, 4, 3), (4, 1, 1, 12)),
        ((2, 4, 3), (1, 1, 3, 9, 12)),
        ((2, 4, 3), (2, 1, 1, 9, 12)),
        ((2, 4, 3), (2, 4, 3, 9, 12)),
    ],
    ids=str,
)
def test_masks_of_other_ranks(lead, shape, kind):
    mask = draw(*shape, seed=4)
    mask = mask > -0.5 if kind == "bool" else mask
    agrees_with_torch(tensors_of(lead, 9, 12), attn_mask=mask)


def test_value_with_leading_dimensions_of_its_own():
    q, k, v = tensors_of((2, 4), 9, 12)
    agrees_with_torch([q, k, v[:, :1]])
    agrees_with_torch([q, k, v[:1]])
    agrees_with_torch([q, k[:1, :1], v])


@pytest.mark.parametrize("lead", [(2, 4), (4,), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_query_heads(lead, heads):
    tensors = tensors_of(lead, 9, 12, lead_k=(*lead[:-1], heads))
    agrees_with_torch(tensors, enable_gqa=True)
    agrees_with_torch(tensors, enable_gqa=True, attn_mask=draw(4, 9, 12) > -0.5)
    agrees_with_torch(tensors, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(65, 65), (80, 41), (41, 80)], ids=str)
def test_half_precision(lengths, dtype):
    tensors = tensors_of((2, 4), *lengths, 24, lead_k=(2, 2))
    within_tolerance(tensors, dtype, enable_gqa=True)
    within_tolerance(tensors, dtype, enable_gqa=True, is_causal=True)
    mask = draw(2, 1, *lengths)
    within_tolerance(tensors, dtype, enable_gqa=True, attn_mask=mask > -0.5)
    within_tolerance(tensors, dtype, enable_gqa=True, attn_mask=mask)


def test_float_masks_of_another_dtype_are_added_in_float32():
    q, k, v = (x.bfloat16() for x in tensors_of((2, 3), 9, 12))
    mask = draw(9, 12)
    exact = expected(q.double(), k.double(), v.double(), mask.double())
    plain = F.scaled_dot_product_attention(q, k, v, mask)
    allowed = tolerance(plain, exact)
    assert max_error(scaled_dot_product_attention(q, k, v, mask), exact) <= allowed
    assert max_error(scaled_dot_product_attention(q, k, v, mask.double()), exact) <= allowed
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q.float(), k.float(), v.float(), mask)
    assert out.dtype == torch.bfloat16 and max_error(out, exact) <= allowed


@pytest.mark.parametrize("lengths", [(9, 9), (9, 12), (12, 9)], ids=str)
@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # torch's, not ours
def test_causal_bias_objects(corner, lengths):
    q, k, v = tensors_of((2, 3), *lengths)
    bias = corner(*lengths)
    found = scaled_dot_product_attention(q, k, v, bias)
    wanted = F.scaled_dot_product_attention(q, k, v, bias)  # NaN where a row sees nothing
    torch.testing.assert_close(found, torch.nan_to_num(wanted))
    with pytest.raises(InvalidInput, match="attn_mask: got a CausalBias for lengths"):
        scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:], bias)


def test_parameters_are_ordinary_masks():
    mask = torch.nn.Parameter(draw(9, 12))
    agrees_with_torch(tensors_of((2, 3), 9, 12), attn_mask=mask)


class LargestResult(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return result


@pytest.mark.parametrize("lengths", [(300, 300), (200, 300), (300, 200)], ids=str)
def test_causal_makes_nothing_of_size_s_by_s(lengths):
    tensors = tensors_of((1, 2), *lengths, 8)
    with LargestResult() as watch:
        scaled_dot_product_attention(*tensors, is_causal=True)
    assert 0 < watch.elements <= max(t.numel() for t in tensors)


@pytest.fixture
def calls(monkeypatch):
    """What reaches `anyflash.attention`: its three tensors and its keywords."""
    seen = []
    original = sdpa.attention

    def record(*args, **kwargs):
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(sdpa, "attention", record)
    return seen


@pytest.mark.parametrize("is_causal", [False, True])
def test_inputs_are_not_copied(calls, is_causal):
    for lead, lead_k in SHAPES.values():
        if lead == (
            2,
            1,
            3,
        ):  # two batch dimensions, each broadcast over the other: no view is both
            continue
        tensors = tensors_of(lead, 9, 12, lead_k=lead_k)
        scaled_dot_product_attention(*tensors, is_causal=is_causal)
        for given, arrived in zip(tensors, calls[-1][0], strict=True):
            assert given.untyped_storage().data_ptr() == arrived.untyped_storage().data_ptr()


def test_one_key_head_is_not_expanded(calls):
    scaled_dot_product_attention(*tensors_of((2, 3), 9, 12, lead_k=(2, 1)))
    assert [x.shape[1] for x in calls[0][0]] == [3, 1, 1]


def test_dropout():
    """Equal scores and value = 1: out shows which weights were kept, and dV must be of the same."""
    size, p = 128, 0.25
    q, k = torch.zeros(2, 3, size, 16), torch.zeros(2, 3, size, 16)
    v = torch.eye(size).repeat(2, 3, 1, 1).requires_grad_()
    torch.manual_seed(3)
    first, second = (scaled_dot_product_attention(q, k, v, dropout_p=p) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=p), first)
    assert not torch.equal(first, second)
    kept = first.detach() != 0
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 / (size * (1 - p))))
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation
    dout = draw(*first.shape)
    (dv,) = torch.autograd.grad(first, v, dout)
    torch.testing.assert_close(dv, first.detach().mT @ dout)
    assert scaled_dot_product_attention(q, k, v, dropout_p=1.0).eq(0).all()


COMPILED = {
    "plain": (((2, 4), 9, 12), {}),
    "causal": (((2, 4), 9, 9), {"is_causal": True}),
    "causal, more keys": (((2, 4), 9, 12), {"is_causal": True}),
    "causal, more queries": (((2, 4), 12, 9), {"is_causal": True}),
    "bool mask": (((2, 4), 9, 12), {"attn_mask": draw(2, 1, 1, 12) > -0.5}),
    "float mask": (((2, 4), 9, 12), {"attn_mask": draw(4, 9, 12)}),
    "5-D": (((2, 3, 4), 9, 12), {"attn_mask": draw(3, 1, 9, 12), "scale": 0.3}),
    "3-D": (((4,), 9, 12), {"is_causal": True}),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_graph(name):
    shapes, options = COMPILED[name]
    tensors = tensors_of(*shapes)
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    eager = run(scaled_dot_product_attention, tensors, torch.float32, options)
    found = run(compiled, tensors, torch.float32, options)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


def test_compiles_once_for_many_lengths():
    for more in ((0, 0), (0, 4), (4, 0)):
        torch._dynamo.reset()
        compiled = torch.compile(
            scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager"
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for size in (10, 13, 17):
                tensors = tensors_of((2, 4), size + more[0], size + more[1])
                found = compiled(*tensors, is_causal=True)
                assert torch.equal(found, scaled_dot_product_attention(*tensors, is_causal=True))


def test_deterministic_mode_reaches_the_call(calls):
    tensors = tensors_of((2, 4), 9, 12)
    scaled_dot_product_attention(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        scaled_dot_product_attention(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [keywords["deterministic"] for _, keywords in calls] == [False, True]


def test_mask_together_with_is_causal_is_refused():
    tensors = tensors_of((2, 4), 9, 9)
    for mask in (draw(9, 9), draw(9, 9) > 0, causal_upper_left(9, 9)):
        with pytest.raises(InvalidInput, match="is_causal: got True with an attn_mask"):
            scaled_dot_product_attention(*tensors, mask, is_causal=True)


# Public bug reports that concern this function.


def test_b011_batch_of_zero():
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for function in (scaled_dot_product_attention, compiled):
        leaves = [x.requires_grad_() for x in tensors_of((0, 10), 3952, 16, 64)]
        out = function(*leaves)
        assert out.shape == (0, 10, 3952, 64)
        found = torch.autograd.grad(out.sum(), leaves)
        assert [g.shape for g in found] == [x.shape for x in leaves]


@pytest.mark.parametrize("lengths", [(32, 1024), (1024, 32), (32, 32)], ids=str)
def test_b020_is_causal_is_aligned_top_left(lengths):
    tensors = tensors_of((4, 12), *lengths, 64)
    within_tolerance(tensors, torch.float16, is_causal=True)
    q, k, v = (x.half() for x in tensors)
    # The first query sees the first key alone, whatever the lengths.
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (4, 2)])
def test_b056_head_counts_that_do_not_fit(heads):
    tensors = tensors_of((1, heads[0]), 4, 4, lead_k=(1, heads[1]))
    with pytest.raises(InvalidInput, match=rf"\({heads[0]},\), \({heads[1]},\).*enable_gqa=True"):
        scaled_dot_product_attention(*tensors)
    if heads[0] % heads[1]:
        message = f"{heads[0]} query heads and {heads[1]} key heads"
        with pytest.raises(InvalidInput, match=message):
            scaled_dot_product_attention(*tensors, enable_gqa=True)


def test_b141_true_takes_part():
    q, k, v = tensors_of((2, 3), 5, 12)
    mask = torch.zeros(5, 12, dtype=torch.bool)
    mask[:, :4] = True
    found = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4]))
    found = scaled_dot_product_attention(q, k, v, ~mask)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k[:, :, 4:], v[:, :, 4:]))
    assert "True takes part" in (scaled_dot_product_attention.__doc__ or "")


def test_b142_boolean_and_float_masks_agree():
    q, k, v = tensors_of((1, 8), 128, 128, 64)
    mask = torch.arange(128) < 100
    wanted = scaled_dot_product_attention(q, k[:, :, :100], v[:, :, :100])
    found = scaled_dot_product_attention(q, k, v, mask.view(1, 1, 1, 128))
    torch.testing.assert_close(found, wanted)
    for low in (-math.inf, torch.finfo(torch.float32).min):
        added = torch.zeros(1, 1, 1, 128).masked_fill(~mask, low)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, added), wanted)


def test_b144_mask_that_is_constant_along_the_keys_changes_nothing():
    q, k, v = tensors_of((1, 8), 1, 64, 64)
    found = scaled_dot_product_attention(q, k, v, draw(8, 1, 1))
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("length", [137, 600, 1000])
def test_b145_mask_of_one_row_counts_past_key_512(length):
    tensors = tensors_of((1, 12), 40, length, 64)
    mask = draw(1, 1, 1, length, seed=3) > 0
    within_tolerance(tensors, torch.float32, attn_mask=mask)
    added = torch.zeros(1, 1, 1, length).masked_fill(~mask, -math.inf)
    found = scaled_dot_product_attention(*tensors, added)
    torch.testing.assert_close(found, scaled_dot_product_attention(*tensors, mask))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_b146_masks_in_any_strides(kind):
    tensors = tensors_of((2, 3), 37, 43)
    mask = draw(43, 37)
    mask = mask > -0.5 if kind == "bool" else mask
    padded = torch.cat([mask, mask], 0).mT[:, 43:]  # rows 86 apart, from the middle
    for view in (mask.mT, mask.contiguous().mT.unsqueeze(0).expand(3, -1, -1), padded):
        assert not view.is_contiguous()
        found = scaled_dot_product_attention(*tensors, view)
        assert torch.equal(found, scaled_dot_product_attention(*tensors, view.contiguous()))
        torch.testing.assert_close(found, F.scaled_dot_product_attention(*tensors, view))


def test_b149_a_last_stride_other_than_one_is_served():
    tensors = [x.mT.contiguous().mT for x in tensors_of((2, 3), 9, 12)]
    assert all(x.stride(-1) != 1 for x in tensors)
    agrees_with_torch(tensors)
    out = scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(
        out, scaled_dot_product_attention(*(x.contiguous() for x in tensors))
    )


X = draw(2, 3, 9, 16)
MISUSES = {
    "dtype": ((X.int(), X.int(), X.int()), {}, "query: got torch.int32, expected float16"),
    "dtypes": ((X, X.half(), X), {}, "q torch.float32, k torch.float16, v torch.float32"),
    "not a tensor": ((X, X, None), {}, "value: got NoneType, expected a torch.Tensor"),
    "rank": ((X[0, 0, 0], X, X), {}, r"query: got shape \(16,\), expected at least 2 dimensions"),
    "width": ((X, X[..., :8], X), {}, "head dimension 8, expected q's head dimension 16"),
    "batch": ((X, X[:1].expand(3, -1, -1, -1), X), {}, r"batch dimensions \(2,\), \(3,\), \(2,\)"),
    "lengths": ((X, X[:, :, 1:], X), {}, r"v: got shape \(2, 3, 9, 16\), expected k's"),
    "mask's shape": ((X, X, X, X[0, 0]), {}, r"attn_mask: got shape \(9, 16\), expected broad"),
    "mask's rank": ((X, X, X, X[None, ..., :9]), {}, r"attn_mask: got shape \(1, 2, 3, 9, 9\)"),
    "mask's type": ((X, X, X, causal()), {}, r"attn_mask: got Window, .* anyflash\.attention"),
    "mask's dtype": ((X, X, X, torch.ones(9, 9).int()), {}, "attn_mask: got torch.int32"),
    "scale": ((X, X, X), {"scale": math.nan}, "scale: got nan, expected a finite number"),
    "dropout": ((X, X, X, None, -0.1), {}, r"dropout: got -0.1, expected a probability"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_b149_what_is_wrong_is_said(misuse):
    arguments, options, message = MISUSES[misuse]
    with pytest.raises(InvalidInput, match=message):
        scaled_dot_product_attention(*arguments, **options)


def test_b150_a_sequence_before_the_heads_is_noticed_where_sizes_tell():
    q, k = draw(2, 16, 8, 64), draw(2, 24, 8, 64)
    with pytest.raises(InvalidInput, match=r"head counts \(16,\), \(24,\).*\.transpose\(1, 2\)"):
        scaled_dot_product_attention(q, k, k)
