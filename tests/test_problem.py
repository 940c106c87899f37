"""Problem: every malformed call is refused by name before any work, and empty ones are valid."""

import dataclasses
import math
import types
import warnings

import numpy as np
import pytest
import torch

from anyflash import (
    InvalidInput,
    Unsupported,
    alibi,
    attention,
    attention_varlen,
    calls,
    causal,
    dispatch,
    documents,
    from_tensor,
    padding,
    window,
)
from anyflash.masks import algebra, compiled
from anyflash.numerics import max_error, tolerance
from anyflash.problem import Inputs, Options, Problem

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6
TOTAL_Q, TOTAL_K = 6, 9
META = torch.device("meta")
NAN, INF = math.nan, math.inf


def tensors():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, HQ, SQ, D, generator=generator)
    k = torch.randn(B, HKV, SK, D, generator=generator)
    v = torch.randn(B, HKV, SK, DV, generator=generator)
    return {"q": q, "k": k, "v": v}


def packed_tensors():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(TOTAL_Q, HQ, D, generator=generator)
    k = torch.randn(TOTAL_K, HKV, D, generator=generator)
    v = torch.randn(TOTAL_K, HKV, DV, generator=generator)
    starts = {"cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 5, 9)}
    return {"q": q, "k": k, "v": v, **starts}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def floats(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def strided_nested(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([floats(2, 8), floats(3, 8)], layout=layout)


def sparse(tensor, layout=torch.sparse_coo):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.to_sparse(layout=layout)


def arange(*shape):
    return torch.arange(math.prod(shape)).view(shape)


# What is changed in a call that is right, what the error names, what was got, what is expected.
KINDS = [
    (lambda: [1.0], "list", "torch.Tensor"),
    (lambda: None, "NoneType", "torch.Tensor"),
    (lambda: np.zeros((2, 4, 5, 8), np.float32), "ndarray", "torch.Tensor"),
    (lambda: floats(2, 4, 5, 8, dtype=torch.int32), "int32", "float16, bfloat16, float32"),
    (lambda: floats(2, 4, 5, 8, dtype=torch.bool), "bool", "float16, bfloat16, float32"),
    (lambda: floats(2, 4, 5, 8, dtype=torch.complex64), "complex64", "float16, bfloat16, float32"),
    (lambda: floats(2, 4, 5, 8).to(torch.float8_e4m3fn), "float8", "float16, bfloat16, float32"),
    (lambda: sparse(floats(2, 4, 5, 8)), "sparse_coo", "strided"),
    (lambda: sparse(floats(5, 8), torch.sparse_csr), "sparse_csr", "strided"),
    (lambda: strided_nested(torch.strided), "nested", "dense"),
    (lambda: strided_nested(torch.jagged), "nested", "dense"),
]  # fmt: skip
EVERY_TENSOR = [
    ({name: make}, name, got, expected)
    for name in ("q", "k", "v", "bias", "sink")
    for make, got, expected in KINDS
    if not (name in ("bias", "sink") and got == "NoneType")
]
SHAPES = [
    ({"q": lambda: floats(4, 5, 8)}, "q", "(4, 5, 8)", "4 dimensions"),
    ({"k": lambda: floats(2, 1, 2, 7, 8)}, "k", "(2, 1, 2, 7, 8)", "4 dimensions"),
    ({"v": lambda: floats()}, "v", "()", "4 dimensions"),
    ({"k": lambda: floats(3, 2, 7, 8), "v": lambda: floats(3, 2, 7, 6)}, "k", "3", "2"),
    ({"v": lambda: floats(3, 2, 7, 6)}, "v", "(3, 2, 7, 6)", "(2, 2, 7)"),
    ({"v": lambda: floats(2, 4, 7, 6)}, "v", "(2, 4, 7, 6)", "(2, 2, 7)"),
    ({"v": lambda: floats(2, 2, 8, 6)}, "v", "(2, 2, 8, 6)", "(2, 2, 7)"),
    ({"k": lambda: floats(2, 2, 7, 9)}, "k", "9", "8"),
    ({"q": lambda: floats(2, 3, 5, 8)}, "q, k", "3 query heads and 2 key heads", "multiple"),
    ({"q": lambda: floats(2, 1, 5, 8)}, "q, k", "1 query heads and 2 key heads", "multiple"),
    (
        {"k": lambda: floats(2, 0, 7, 8), "v": lambda: floats(2, 0, 7, 6)},
        "q, k", "4 query heads and 0 key heads", "multiple",
    ),
    ({"k": lambda: floats(2, 2, 7, 8, dtype=torch.float64)}, "k", "float64", "one dtype"),
    ({"v": lambda: floats(2, 2, 7, 6, dtype=torch.float16)}, "v", "float16", "one dtype"),
    ({"k": lambda: floats(2, 2, 7, 8).to(META)}, "k", "meta", "cpu"),
    ({"v": lambda: floats(2, 2, 7, 6).to(META)}, "v", "meta", "cpu"),
    ({"bias": lambda: floats(5, 7).to(META)}, "bias", "meta", "cpu"),
    ({"sink": lambda: floats(4).to(META)}, "sink", "meta", "cpu"),
    ({"bias": lambda: alibi(floats(4).to(META))}, "alibi", "meta", "cpu"),
    ({"mask": lambda: bools(5, 7).to(META)}, "mask", "meta", "cpu"),
    ({"mask": lambda: padding(ints(3, 3).to(META))}, "mask", "meta", "cpu"),
]  # fmt: skip
EXTRAS = [
    ({"bias": lambda: floats(7, 5)}, "bias", "(7, 5)", "(2, 4, 5, 7)"),
    ({"bias": lambda: floats(2, 2, 5, 7)}, "bias", "(2, 2, 5, 7)", "(2, 4, 5, 7)"),
    ({"bias": lambda: floats(3, 1, 1, 1)}, "bias", "(3, 1, 1, 1)", "(2, 4, 5, 7)"),
    ({"bias": lambda: floats(1, 1, 1, 5, 7)}, "bias", "(1, 1, 1, 5, 7)", "(2, 4, 5, 7)"),
    ({"bias": lambda: 1.0}, "bias", "float", "torch.Tensor"),
    ({"bias": lambda: causal()}, "bias", "Window", "torch.Tensor"),
    ({"bias": lambda: alibi(floats(3))}, "alibi", "(3,)", "(4,)"),
    ({"bias": lambda: alibi(floats(3, 4))}, "alibi", "(3, 4)", "(2, 4)"),
    ({"bias": lambda: alibi(ints(1, 2, 3, 4))}, "alibi", "int32", "float"),
    ({"bias": lambda: alibi(0.5)}, "alibi", "float", "torch.Tensor"),
    ({"sink": lambda: floats(2)}, "sink", "(2,)", "(4,)"),
    ({"sink": lambda: floats(1, 4)}, "sink", "(1, 4)", "(4,)"),
    ({"sink": lambda: floats()}, "sink", "()", "(4,)"),
    ({"sink": lambda: 0.0}, "sink", "float", "torch.Tensor"),
]
MASKS = [
    ({"mask": lambda: bools(7, 5)}, "mask", "7, 5)", "(2, 4, 5, 7)"),
    ({"mask": lambda: bools(2, 5, 7)}, "mask", "2, 5, 7)", "(2, 4, 5, 7)"),
    ({"mask": lambda: bools(10, 10)}, "mask", "10, 10)", "(2, 4, 5, 7)"),
    ({"mask": lambda: bools(2, 4, 4096, 4096)}, "mask", "(2, 4, 4096, 4096)", "(2, 4, 5, 7)"),
    ({"mask": lambda: bools(1, 1, 1, 5, 7)}, "mask", "(1, 1, 1, 5, 7)", "4 dimensions"),
    ({"mask": lambda: floats(5, 7)}, "mask", "float32", "boolean"),
    ({"mask": lambda: floats(5, 7, dtype=torch.uint8)}, "mask", "uint8", "boolean"),
    ({"mask": lambda: bools(5, 7).numpy()}, "mask", "ndarray", "boolean"),
    ({"mask": lambda: [[True]]}, "mask", "list", "boolean"),
    ({"mask": lambda: "causal"}, "mask", "str", "boolean"),
    ({"mask": lambda: True}, "mask", "bool", "boolean"),
    ({"mask": lambda: causal}, "mask", "function", "boolean"),
    ({"mask": lambda: sparse(bools(5, 7))}, "mask", "sparse", "strided"),
    ({"mask": lambda: documents(arange(5))}, "documents", "5", "7"),
    ({"mask": lambda: documents(arange(6), arange(7))}, "documents", "6", "5"),
    ({"mask": lambda: documents(arange(5), arange(3, 7))}, "documents", "(3, 7)", "(2, 7)"),
    ({"mask": lambda: padding(ints(1, 2, 3))}, "padding", "3", "2"),
    (
        {"mask": lambda: ~(causal() & padding(ints(1, 2, 3))), "causal": lambda: True},
        "padding", "3", "2",
    ),
    ({"mask": lambda: causal().at(arange(5), arange(8))}, "k_positions", "8", "7"),
    (
        {"mask": lambda: causal().compile(B, HQ, SQ, SK + 1)},
        "mask", "(2, 4, 5, 8)", "(2, 4, 5, 7)",
    ),
]  # fmt: skip
NUMBERS = [
    ({"scale": lambda: NAN}, "scale", "nan", "finite"),
    ({"scale": lambda: -INF}, "scale", "-inf", "finite"),
    ({"scale": lambda: 10**400}, "scale", "", "finite"),
    ({"scale": lambda: "0.5"}, "scale", "str", "number"),
    ({"scale": lambda: [0.5]}, "scale", "list", "number"),
    ({"scale": lambda: 1j}, "scale", "complex", "number"),
    ({"scale": lambda: floats(3)}, "scale", "Tensor", "number"),
    ({"softcap": lambda: -1.0}, "softcap", "-1.0", "> 0"),
    ({"softcap": lambda: NAN}, "softcap", "nan", "> 0"),
    ({"softcap": lambda: INF}, "softcap", "inf", "> 0"),
    ({"softcap": lambda: "30"}, "softcap", "str", "number"),
    ({"softcap": lambda: (30,)}, "softcap", "tuple", "number"),
    ({"dropout": lambda: -0.1}, "dropout", "-0.1", "[0, 1]"),
    ({"dropout": lambda: 1.5}, "dropout", "1.5", "[0, 1]"),
    ({"dropout": lambda: NAN}, "dropout", "nan", "[0, 1]"),
    ({"dropout": lambda: "0.1"}, "dropout", "str", "[0, 1]"),
    ({"dropout": lambda: None}, "dropout", "None", "[0, 1]"),
    ({"deterministic": lambda: "yes"}, "deterministic", "yes", "bool"),
    ({"causal": lambda: bools(5, 7)}, "causal", "Tensor", "bool"),
    ({"precision": lambda: "fp4"}, "precision", "fp4", "'fp8'"),
    ({"precision": lambda: torch.float16}, "precision", "float16", "'fp8'"),
    ({"precision": lambda: 8}, "precision", "8", "'fp8'"),
]
BAD_CALLS = EVERY_TENSOR + SHAPES + EXTRAS + MASKS + NUMBERS

BAD_PACKED = [
    ({"q": lambda: floats(1, 4, 6, 8)}, "q", "(1, 4, 6, 8)", "3 dimensions"),
    ({"k": lambda: floats(9, 16)}, "k", "(9, 16)", "3 dimensions"),
    ({"v": lambda: floats(8, 2, 6)}, "v", "(8, 2, 6)", "(9, 2)"),
    ({"q": lambda: floats(6, 3, 8)}, "q, k", "3 query heads and 2 key heads", "multiple"),
    ({"k": lambda: floats(9, 2, 4)}, "k", "4", "8"),
    ({"sink": lambda: floats(6)}, "sink", "(6,)", "(4,)"),
    ({"bias": lambda: floats(6, 9)}, "bias", "(6, 9)", "(2, 4, 4, 5)"),
    ({"bias": lambda: alibi(floats(3, 4))}, "alibi", "(3, 4)", "(2, 4)"),
    ({"mask": lambda: bools(6, 9)}, "mask", "6, 9)", "(2, 4, 4, 5)"),
    ({"mask": lambda: documents(arange(4), arange(9))}, "documents", "9", "5"),
    ({"mask": lambda: padding(ints(1, 2, 3))}, "padding", "3", "2"),
    *[
        case
        for name, right, total in (("cu_seqlens_q", 2, 6), ("cu_seqlens_k", 5, 9))
        for case in (
            ({name: lambda r=right, t=total: [0, r, t]}, name, "list", "int32"),
            ({name: lambda: None}, name, "None", "int32"),
            ({name: lambda r=right, t=total: ints(0, r, t).long()}, name, "int64", "int32"),
            ({name: lambda r=right, t=total: ints(0, r, t).float()}, name, "float32", "int32"),
            ({name: lambda r=right, t=total: ints(0, r, t)[None]}, name, "(1, 3)", "(n + 1,)"),
            ({name: lambda: ints()}, name, "(0,)", "(n + 1,)"),
            ({name: lambda r=right, t=total: ints(1, r, t)}, name, "1 at index 0", "0"),
            ({name: lambda t=total: ints(0, t + 1, t)}, name, f"{total} at index 2", "decrease"),
            ({name: lambda t=total: ints(0, -1, t)}, name, "-1 at index 1", "decrease"),
            ({name: lambda r=right, t=total: ints(0, r, t - 1)}, name, f"{total - 1}", f"{total}"),
            ({name: lambda r=right, t=total: ints(0, r, t + 1)}, name, f"{total + 1}", f"{total}"),
            ({name: lambda r=right, t=total: ints(0, r, t).to(META)}, name, "meta", "cpu"),
            ({name: lambda r=right, t=total: sparse(ints(0, r, t))}, name, "sparse", "strided"),
        )
    ],
    ({"cu_seqlens_k": lambda: ints(0, 9)}, "cu_seqlens_k", "2 offsets", "3"),
    ({"cu_seqlens_q": lambda: ints(0, 1, 2, 6)}, "cu_seqlens_k", "3 offsets", "4"),
    ({"max_seqlen_q": lambda: 3}, "cu_seqlens_q", "4 at index 1", "max_seqlen_q = 3"),
    ({"max_seqlen_k": lambda: 4}, "cu_seqlens_k", "5 at index 0", "max_seqlen_k = 4"),
    ({"max_seqlen_q": lambda: -1}, "max_seqlen_q", "-1", "≥ 0"),
    ({"max_seqlen_k": lambda: 5.0}, "max_seqlen_k", "float", "≥ 0"),
    ({"max_seqlen_q": lambda: "4"}, "max_seqlen_q", "str", "≥ 0"),
    ({"seqused_k": lambda: [1, 2]}, "seqused_k", "list", "int32"),
    ({"seqused_k": lambda: ints(1, 2).long()}, "seqused_k", "int64", "int32"),
    ({"seqused_k": lambda: ints(1, 2, 3)}, "seqused_k", "(3,)", "(2,)"),
    ({"seqused_k": lambda: ints(1, 2)[None]}, "seqused_k", "(1, 2)", "(2,)"),
    ({"seqused_k": lambda: ints(-1, 2)}, "seqused_k", "-1 at index 0", "0 to 5"),
    ({"seqused_k": lambda: ints(5, 5)}, "seqused_k", "5 at index 1", "0 to 4"),
    ({"seqused_k": lambda: ints(1, 2).to(META)}, "seqused_k", "meta", "cpu"),
    ({"scale": lambda: NAN}, "scale", "nan", "finite"),
    ({"dropout": lambda: 2.0}, "dropout", "2.0", "[0, 1]"),
]


def name_of(case):
    changes, _, got, _ = case
    return "-".join([*changes, got])


def refuse(function, arguments, case, monkeypatch):
    """The call raises InvalidInput that names everything, and has done nothing before."""
    changes, argument, got, expected = case

    def changed():
        return {**arguments, **{name: make() for name, make in changes.items()}}

    def work(problem, requested=None):
        raise AssertionError(f"{problem} was let through")

    monkeypatch.setattr(calls, "select", work)
    monkeypatch.setattr(compiled, "_cache", type(compiled._cache)())
    random = torch.random.get_rng_state()
    with pytest.raises(InvalidInput) as caught:
        function(**changed())
    error = caught.value
    assert argument in error.argument, error
    assert got in str(error.got), error
    assert expected in error.expected or expected in error.advice, error
    assert str(error.got) in str(error) and error.argument in str(error)
    assert torch.equal(torch.random.get_rng_state(), random), "a random number was drawn"
    assert not compiled._cache


@pytest.mark.parametrize("case", BAD_CALLS, ids=name_of)
def test_malformed_call(case, monkeypatch):
    refuse(attention, tensors(), case, monkeypatch)


@pytest.mark.parametrize("case", BAD_PACKED, ids=name_of)
def test_malformed_packed_call(case, monkeypatch):
    refuse(attention_varlen, packed_tensors(), case, monkeypatch)


@pytest.mark.parametrize("case", SHAPES + EXTRAS + MASKS, ids=name_of)
def test_malformed_call_that_wants_gradients(case, monkeypatch):
    arguments = {name: x.requires_grad_() for name, x in tensors().items()}
    refuse(attention, arguments, case, monkeypatch)


def test_the_calls_that_were_changed_are_right():
    """Else every one of the cases above could be refused for another reason."""
    assert attention(**tensors()).shape == (B, HQ, SQ, DV)
    assert attention_varlen(**packed_tensors()).shape == (TOTAL_Q, HQ, DV)
    more = {
        "bias": floats(1, HQ, 1, SK), "sink": floats(HQ), "softcap": 5, "scale": 1,
        "dropout": 0.5, "causal": True, "deterministic": True, "mask": bools(SQ, 1),
    }  # fmt: skip
    assert attention(**tensors(), **more).shape == (B, HQ, SQ, DV)
    more = {
        "bias": floats(2, HQ, 4, 5), "mask": bools(2, 1, 4, 5), "seqused_k": ints(5, 0),
        "max_seqlen_q": 4, "max_seqlen_k": 5,
    }  # fmt: skip
    assert attention_varlen(**packed_tensors(), **more).shape == (TOTAL_Q, HQ, DV)


def test_float_mask_names_bias():
    with pytest.raises(InvalidInput, match="bias"):
        attention(**tensors(), mask=floats(SQ, SK))


@pytest.mark.parametrize("name", ["cuda", "CPU", "", "anyflash", 3, None.__class__])
def test_unknown_backend(name):
    with pytest.raises(InvalidInput) as caught:
        attention(**tensors(), backend=name)
    assert caught.value.argument == "backend"
    assert repr(name) in str(caught.value)
    assert all(f"'{known}'" in caught.value.expected for known in dispatch.ORDER)


def test_fp8_without_hardware_carries_every_refusal():
    with pytest.raises(Unsupported) as caught:
        attention(**tensors(), precision="fp8")
    error = caught.value
    assert list(error.refusals) == list(dispatch.ORDER)
    for name, sentence in error.refusals.items():
        assert len(sentence.split()) >= 4
        assert f"{name}: {sentence}" in str(error)
    assert "fp8" in error.request


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_fp8_by_name_carries_that_refusal(name):
    with pytest.raises(Unsupported) as caught:
        attention(**tensors(), precision="fp8", backend=name)
    assert list(caught.value.refusals) == [name]
    assert "FP8" in caught.value.refusals[name]


@pytest.mark.parametrize(
    "options", [{"scale": 0.0}, {"scale": -1.0}, {"scale": 2}, {"softcap": 30}, {"dropout": 1}]
)
def test_legal_numbers(options):
    assert attention(**tensors(), **options).shape == (B, HQ, SQ, DV)


def test_malformed_calls_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = {**tensors(), "k": tensors()["k"].half()}
        assert attention(**mixed).dtype == torch.bfloat16  # cast to one dtype, as autocast does
        with pytest.raises(InvalidInput, match="k: got batch"):
            attention(**{**tensors(), "k": floats(3, 2, 7, 8), "v": floats(3, 2, 7, 6)})


def test_shapes_alone_on_the_meta_device():
    """As the fake kernels see them, under torch.compile for one."""
    q, k, v = (x.to(META) for x in tensors().values())
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.device == lse.device == META
    assert out.shape == (B, HQ, SQ, DV) and lse.shape == (B, HQ, SQ)
    with pytest.raises(InvalidInput, match="k: got head dimension"):
        attention(q, k[..., :-1], v)


# Empty calls are valid

BACKENDS = [name for name in dispatch.ORDER if name in ("cpu", "reference")]
EMPTY = {
    "batch": (0, 4, 2, 5, 7, 8, 6),
    "query heads": (2, 0, 2, 5, 7, 8, 6),
    "all heads": (2, 0, 0, 5, 7, 8, 6),
    "queries": (2, 4, 2, 0, 7, 8, 6),
    "keys": (2, 4, 2, 5, 0, 8, 6),
    "queries and keys": (2, 4, 2, 0, 0, 8, 6),
    "D": (2, 4, 2, 5, 7, 0, 6),
    "Dv": (2, 4, 2, 5, 7, 8, 0),
    "D and Dv": (2, 4, 2, 5, 7, 0, 0),
    "everything": (0, 0, 0, 0, 0, 0, 0),
}
WITH = {
    "nothing": {},
    "causal": {"causal": True},
    "mask": {"mask": window(1, None)},
    "tile map": {"mask": from_tensor(torch.ones(1, 1, 1, 1, dtype=torch.bool))},
    "softcap": {"softcap": 3.0},
    "alibi": {"bias": "alibi"},
    "bias": {"bias": "bias"},
    "sink": {"sink": "sink"},
    "dropout": {"dropout": 1.0},
}


def agree(found, exact, leaves, normal):
    """Outputs and gradients have the same shapes and values."""
    cotangents = [normal(*x.shape).detach() for x in exact]
    results = []
    for outputs in (found, exact):
        grads = [None] * len(leaves)
        if any(x.requires_grad for x in outputs):
            grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        pairs = zip(leaves, grads, strict=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in pairs]
        results.append([*(x.detach() for x in outputs), *grads])
    for actual, wanted in zip(*results, strict=True):
        assert actual.shape == wanted.shape
        assert max_error(actual, wanted) <= tolerance(wanted, wanted)


def plain_attention(
    q, k, v, bias=None, sink=None, slopes=None, mask=None, causal=False, softcap=None, dropout=0.0
):
    """Explicit, for one head count; rows that see nothing have no weights."""
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if q.shape[-1] else 1.0)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    if slopes is not None:
        s = s - slopes.view(-1, 1, 1) * distance.abs()
    s = s if bias is None else s + bias
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    seen = seen if mask is None else seen & mask.materialise(*seen.shape)
    seen = seen & (distance <= 0) if causal else seen
    none = torch.full((*s.shape[:3], 1), -INF, dtype=s.dtype)
    extra = none if sink is None else sink.view(-1, 1, 1).expand(none.shape)
    logits = torch.cat([s.masked_fill(~seen, -INF), extra], -1)
    empty = (logits == -INF).all(-1, keepdim=True)
    safe = torch.where(empty, 0, logits)
    lse = torch.where(empty, -INF, safe.logsumexp(-1, keepdim=True)).squeeze(-1)
    weights = torch.where(empty, 0, safe.softmax(-1))[..., :-1]
    return (weights if dropout == 0 else weights * 0) @ v, lse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", WITH)
@pytest.mark.parametrize("size", EMPTY)
def test_empty_call(size, extra, backend):
    """Results and gradients, lse's too, are those of the explicit formula, in shape and value."""
    batch, heads, heads_kv, queries, keys, dim, dim_v = EMPTY[size]
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    q = normal(batch, heads, queries, dim)
    k, v = normal(batch, heads_kv, keys, dim), normal(batch, heads_kv, keys, dim_v)
    options = dict(WITH[extra])
    leaves, own = [q, k, v], dict(options)
    if extra == "bias":
        options["bias"] = own["bias"] = normal(1, heads, queries, keys)
        leaves.append(options["bias"])
    if extra == "sink":
        options["sink"] = own["sink"] = normal(heads)
        leaves.append(options["sink"])
    if extra == "alibi":
        slopes = normal(heads).detach()
        options["bias"] = alibi(slopes)
        own = {"slopes": slopes}
    found = attention(q, k, v, **options, return_lse=True, backend=backend)
    exact = plain_attention(q, k, v, **own)
    agree(found, exact, leaves, normal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_by_hand(backend):
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    k = torch.randn(1, 2, 0, 4, requires_grad=True)
    out, lse = attention(q, k, k, return_lse=True, backend=backend)
    assert not out.any() and (lse == -INF).all()
    (out.sum() + lse.sum()).backward()
    assert not q.grad.any() and k.grad.shape == k.shape
    sink = torch.tensor([1.0, -2.0], requires_grad=True)
    out, lse = attention(q, k, k, sink=sink, return_lse=True, backend=backend)
    assert not out.any()
    assert torch.equal(lse, sink.detach().view(1, 2, 1).expand(1, 2, 3))
    (gradient,) = torch.autograd.grad(lse.sum(), sink)
    assert gradient.tolist() == [3.0, 3.0]  # d lse / d sink is 1 in each of three rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_head_dimension_by_hand(backend):
    """All scores are 0, so that every key weighs the same."""
    q, k = floats(1, 1, 2, 0), floats(1, 1, 4, 0)
    v = torch.arange(8.0).view(1, 1, 4, 2)
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert out[0, 0].tolist() == [[2.0, 3.0], [3.0, 4.0]]
    exact = torch.tensor([3.0, 4.0]).log()
    assert max_error(lse[0, 0], exact) <= tolerance(exact, exact)


PACKED_EMPTY = {
    "no sequences": ([], []),
    "one empty sequence": ([0], [0]),
    "only keys": ([0, 0], [3, 2]),
    "only queries": ([3, 2], [0, 0]),
    "some of each": ([0, 3, 0, 2], [2, 0, 0, 4]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("lengths", PACKED_EMPTY)
def test_empty_packed_call(lengths, has_sink, is_causal, backend):
    lengths_q, lengths_k = PACKED_EMPTY[lengths]
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    total_q, total_k = sum(lengths_q), sum(lengths_k)
    q, k, v = normal(total_q, 4, 3), normal(total_k, 2, 3), normal(total_k, 2, 5)
    sink = normal(4) if has_sink else None
    starts = [ints(0, *np.cumsum(x).tolist()) for x in (lengths_q, lengths_k)]
    found = attention_varlen(
        q, k, v, *starts, sink=sink, causal=is_causal, return_lse=True, backend=backend
    )
    rows, keys = q.split(lengths_q), zip(k.split(lengths_k), v.split(lengths_k), strict=True)
    parts = [
        plain_attention(*(x.transpose(0, 1)[None] for x in (a, *b)), sink=sink, causal=is_causal)
        for a, b in zip(rows, keys, strict=True)
    ]
    out = torch.cat([q.new_zeros(0, 4, 5), *(o[0].transpose(0, 1) for o, _ in parts)])
    lse = torch.cat([q.new_zeros(4, 0), *(x[0] for _, x in parts)], 1)
    agree(found, (out, lse), [q, k, v, *([sink] if has_sink else [])], normal)


# Problem itself


def problem(**changes):
    arguments = tensors()
    options = Options(scale=changes.pop("scale", 0.5), softcap=changes.pop("softcap", 0.0))
    return Problem.of(Inputs(**{**arguments, **changes}), options)


def test_problem_describes_the_call():
    found = problem(bias=floats(SQ, SK), sink=floats(HQ), mask=causal(), softcap=2.0)
    assert (found.batch, found.heads, found.heads_kv) == (B, HQ, HKV)
    assert (found.queries, found.keys) == (SQ, SK)
    assert (found.head_dim, found.head_dim_v) == (D, DV)
    assert found.dtype == torch.float32 and found.device == "cpu"
    assert found.extent == (B, HQ, SQ, SK)
    assert found.features == {"bias", "sink", "softcap"}
    assert found.mask == "window" and not found.packed
    assert found.options.scale == 0.5
    line = found.describe()
    assert "\n" not in line and "gradient" not in line
    assert "gradient" in dataclasses.replace(found, gradient=True).describe()
    for word in ("(2, 4, 5, 8)", "(2, 2, 7, 8)", "Dv=6", "float32", "cpu", "window", "softcap"):
        assert word in line


@pytest.mark.parametrize(
    ("mask", "kind"),
    [(None, "none"), (causal(), "window"), (window(3, 4), "window"), (~causal(), "intervals")],
)
def test_problem_knows_the_kind_of_mask(mask, kind):
    assert problem(mask=mask).mask == kind


TOGETHER, APART = ints(0, 0, 1, 1, 1, 2, 2), ints(0, 1, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: documents(ints(0, 0, 1, 1, 2), TOGETHER), "intervals"),
        (lambda: documents(ints(0, 0, 1, 1, 2), APART), "tiles"),
        (lambda: documents(ints(0, 0, 1, 1, 2), APART).compile(B, HQ, SQ, SK), "tiles"),
        (lambda: padding(ints(3, 7)) & causal(), "intervals"),
        (lambda: ~(window(1, 1) | padding(ints(1, 1))), "tiles"),  # three intervals
        (lambda: causal().compile(B, HQ, SQ, SK), "intervals"),
        (lambda: from_tensor(torch.ones(SQ, SK, dtype=torch.bool)), "tiles"),
        (lambda: causal().at(torch.arange(SQ), torch.arange(SK)), "intervals"),
    ],
)
def test_the_kind_of_a_mask_is_that_of_its_form(make, kind):
    mask = make()
    assert problem(mask=mask).mask == kind
    form = compiled.compiled(mask, problem().extent, torch.device("cpu"))
    assert type(form).__name__ == {"intervals": "RowIntervals", "tiles": "TileMap"}[kind]


def test_contents_of_a_mask_are_read_once(monkeypatch):
    reads, right = [], algebra.Documents.interval_bound
    bound = lambda mask: reads.append(mask) or right(mask)  # noqa: E731
    monkeypatch.setattr(algebra.Documents, "interval_bound", bound)
    ids = TOGETHER.clone()
    for _ in range(3):  # a new mask over the same tensor is the same mask
        assert problem(mask=documents(ints(0, 0, 1, 1, 2), ids)).mask == "intervals"
    first = ints(0, 0, 1, 1, 2)
    reads.clear()
    for _ in range(3):
        assert problem(mask=documents(first, ids)).mask == "intervals"
    assert len(reads) == 1
    ids.copy_(APART)
    assert problem(mask=documents(first, ids)).mask == "tiles"
    assert len(reads) == 2


def test_problem_knows_whether_a_derivative_follows(monkeypatch):
    """From the public functions, by every way on which autograd can be asked."""
    seen = []
    right = calls.select
    spy = lambda problem, backend=None: seen.append(problem.gradient) or right(problem, backend)  # noqa: E731
    monkeypatch.setattr(calls, "select", spy)

    def told(function, *x):
        calls._checked.clear()
        seen.clear()
        function(*x)
        return seen[0]

    q, bias = torch.randn(1, 2, 4, 8), torch.randn(4, 4)
    leaf = q.clone().requires_grad_()
    assert not told(lambda: attention(q, q, q, bias=bias))
    assert told(lambda: attention(leaf, q, q)) and told(lambda: attention(q, q, leaf))
    assert told(lambda: attention(q, q, q, bias=bias.clone().requires_grad_()))
    assert told(lambda: attention(q, q, q, sink=torch.zeros(2, requires_grad=True)))
    with torch.no_grad():
        assert not told(lambda: attention(leaf, leaf, leaf))
    with torch.inference_mode():
        assert not told(lambda: attention(leaf, leaf, leaf))
    loss = lambda q: attention(q, q, q).sum()  # noqa: E731
    assert told(torch.func.grad(loss), q) and told(lambda: torch.func.vjp(loss, q))
    assert told(torch.func.vmap(torch.func.grad(loss)), q[None])
    assert told(torch.func.vmap(loss), leaf[None])
    assert not told(torch.func.vmap(loss), q[None])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert told(compiled, leaf) and not told(compiled, q)


def test_packed_problem_counts_sequences_and_longest():
    arguments = packed_tensors()
    inputs = Inputs(
        arguments["q"], arguments["k"], arguments["v"],
        cu_seqlens_q=arguments["cu_seqlens_q"], cu_seqlens_k=arguments["cu_seqlens_k"],
    )  # fmt: skip
    found = Problem.of(inputs, Options(scale=1.0))
    assert found.packed and (found.batch, found.queries, found.keys) == (2, 4, 5)
    found = Problem.of(inputs, Options(scale=1.0, max_queries=9, max_keys=8))
    assert (found.queries, found.keys) == (9, 8)


def test_offsets_that_are_not_read_are_checked_once(monkeypatch):
    """On an accelerator nothing but shapes decides a packed call."""
    counted, right = [], Problem.of
    monkeypatch.setattr(Problem, "of", lambda *given: counted.append(1) or right(*given))
    arguments = packed_tensors()
    expected = attention_varlen(**arguments)
    attention_varlen(**arguments)
    assert len(counted) == 2
    monkeypatch.setattr(calls, "readable", lambda tensor: False)
    calls._checked.clear()
    for _ in range(3):
        assert torch.equal(attention_varlen(**arguments), expected)
    assert len(counted) == 3
    attention_varlen(**arguments, max_seqlen_k=100)
    assert len(counted) == 4


def test_problem_is_frozen():
    found = problem()
    for field in dataclasses.fields(found):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(found, field.name, None)


def test_problem_is_equal_and_hashes_alike_for_equal_calls():
    first, second = problem(mask=causal()), problem(mask=causal())
    assert first == second and hash(first) == hash(second)
    assert {first: 1}[second] == 1
    other_values = problem(mask=causal(), q=tensors()["q"] + 1)
    other_strides = problem(
        mask=causal(), q=tensors()["q"].transpose(1, 2).contiguous().transpose(1, 2)
    )
    assert first == other_values == other_strides  # tensor-free


DIFFERENT = {
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 1.0},
    "mask": {"mask": causal()},
    "bias": {"bias": floats(1)},
    "sink": {"sink": floats(HQ)},
    "queries": {"q": floats(B, HQ, SQ + 1, D)},
    "heads": {"q": floats(B, 2 * HQ, SQ, D)},
    "values": {"v": floats(B, HKV, SK, DV + 1)},
    "dtype": {n: x.half() for n, x in tensors().items()},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_problem_differs_where_the_call_does(change):
    assert problem(**DIFFERENT[change]) != problem()


def test_problem_holds_no_tensor():
    def values(x):
        if dataclasses.is_dataclass(x):
            x = [getattr(x, f.name) for f in dataclasses.fields(x)]
        if isinstance(x, (tuple, list, frozenset)):
            return [y for part in x for y in values(part)]
        return [x]

    found = values(problem(mask=causal() | padding(ints(1, 2)), bias=floats(1), sink=floats(HQ)))
    assert len(found) > 10
    assert not any(isinstance(x, torch.Tensor) for x in found)


def test_offsets_are_trusted_on_accelerators_unless_asked(monkeypatch):
    """Reading them would synchronise."""
    from anyflash.masks.index import readable

    def on(device):
        return readable(types.SimpleNamespace(device=torch.device(device)))

    monkeypatch.delenv("ANYFLASH_CHECK", raising=False)
    assert on("cpu")
    assert not on("cuda") and not on("mps")
    monkeypatch.setenv("ANYFLASH_CHECK", "0")
    assert not on("cuda")
    monkeypatch.setenv("ANYFLASH_CHECK", "1")
    assert on("cuda")
