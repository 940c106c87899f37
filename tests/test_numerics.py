"""Numerics: the rule that every other test measures by, and the errors that every module raises."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyflash.errors import AttentionError, InvalidInput, Unsupported
from anyflash.numerics import (
    FLOATS,
    LOG2E,
    accumulation_dtype,
    all_finite,
    default_scale,
    max_error,
    rmse,
    tolerance,
    visible_product,
)

NAN, INF = math.nan, math.inf


def of(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# Constants


def test_accumulation_dtype():
    assert accumulation_dtype(torch.float64) == torch.float64
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert accumulation_dtype(dtype) == torch.float32
    assert set(FLOATS) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def test_default_scale():
    assert default_scale(64) == 0.125
    assert default_scale(96) == 1 / math.sqrt(96)  # not of 128
    assert default_scale(1) == default_scale(0) == 1.0


def test_log2e():
    assert pytest.approx(math.e, rel=4e-16) == 2.0**LOG2E


# Errors of results


def test_max_error_is_the_largest_difference():
    assert max_error(of(1.0, 2.0, -3.0), of(1.0, 2.5, -5.0)) == 2.0
    assert max_error(of(1.0), of(1.0)) == 0.0
    assert max_error(of(-0.0), of(0.0)) == 0.0


def test_max_error_is_taken_in_float64():
    small = torch.tensor([2048.0, 1.0], dtype=torch.float16)
    assert max_error(small, of(2048.5, 1.0)) == 0.5  # float16 has a step of 2 there
    assert max_error(of(1 + 1e-12), of(1.0)) == pytest.approx(1e-12, rel=1e-3)
    assert max_error(torch.tensor([65504.0]).half(), of(-65504.0)) == 131008.0


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (NAN, 1.0, INF),
        (1.0, NAN, INF),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (-INF, -INF, 0.0),
        (INF, -INF, INF),
        (-INF, 0.0, INF),
        (0.0, -INF, INF),
        (NAN, INF, INF),
        (-INF, NAN, INF),
    ],
)
def test_max_error_of_what_is_not_finite(actual, expected, error):
    for dtype in FLOATS:
        among = of(0.0, actual, 0.0, dtype=dtype), of(0.0, expected, 0.25)
        assert max_error(*among) == max(error, 0.25)


def test_max_error_of_nothing():
    assert max_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


@pytest.mark.parametrize("measure", [max_error, rmse])
def test_errors_need_equal_shapes(measure):
    """Broadcasting would compare a wrong shape, or nothing, and be content."""
    for shapes in (((3, 1), (3,)), ((1,), (4,)), ((0,), (1,)), ((2, 0), (2, 3))):
        with pytest.raises((ValueError, RuntimeError)):
            measure(*map(torch.zeros, shapes))


@pytest.mark.parametrize("measure", [max_error, rmse])
def test_errors_take_what_requires_gradients(measure):
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # torch warns once per process of a live tensor read as a number
    try:
        assert measure(of(1.0).requires_grad_(), of(2.0)) == 1.0
    finally:
        torch.set_warn_always(always)


def test_rmse():
    assert rmse(of(1.0, 2.0, 3.0, 4.0), of(1.0, 2.0, 3.0, 2.0)) == 1.0
    half = torch.full((4096,), 100.0, dtype=torch.float16)
    assert rmse(half, torch.full((4096,), 400.0)) == 300.0  # the squares would overflow in float16
    assert math.isnan(rmse(of(NAN), of(1.0)))
    assert rmse(of(), of()) == 0.0


def test_tolerance_is_the_rule():
    plain, exact = of(1.0, 2.25), of(1.0, 2.0)
    assert tolerance(plain, exact) == 2 * 0.25 + 1e-5
    assert tolerance(plain, exact, softcap=True) == 3 * 0.25 + 1e-5
    assert tolerance(exact, exact) == tolerance(exact, exact, softcap=True) == 1e-5


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_tolerance_never_lets_everything_pass(value):
    """Where plain PyTorch overflows, no result could fail an infinite tolerance."""
    try:
        allowed = tolerance(of(value), of(1.0))
    except ValueError:
        return
    assert math.isfinite(allowed)


def test_tolerance_where_both_are_infinite():
    """As lse is on empty rows."""
    assert tolerance(of(-INF, 1.5), of(-INF, 1.0)) == 2 * 0.5 + 1e-5


# Finiteness


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_finite(dtype):
    fine = torch.full((1000,), torch.finfo(dtype).max / 2048, dtype=dtype)
    assert all_finite(fine, fine[:0], -fine)
    assert all_finite()
    for value in (NAN, INF, -INF):
        for place in (0, 499, 999):
            bad = fine.clone()
            bad[place] = value
            assert not all_finite(bad)
            assert not all_finite(fine, bad)
            assert not all_finite(bad, fine)
            assert not all_finite(bad.view(10, 100).t())


def test_all_finite_is_not_fooled_by_cancellation():
    assert not all_finite(of(INF, -INF))
    assert not all_finite(of(INF), of(-INF))


def test_all_finite_does_not_sum_halves_in_halves():
    """65504 · 1000 is far beyond float16."""
    assert all_finite(torch.full((1000,), 65504.0, dtype=torch.float16))


# Masked slots


def leaky(weights, values, visible):
    """Each sum written out: only visible slots count."""
    rows, keys = weights.shape
    out = torch.zeros(rows, values.shape[1], dtype=weights.dtype)
    for r, c in itertools.product(range(rows), range(keys)):
        if visible[r, c]:
            out[r] += weights[r, c] * values[c]
    return out


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3),
    st.integers(0, 2**16), st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)]),
)  # fmt: skip
def test_visible_product_is_the_sum_over_visible_slots(b, h, rows, keys, dim, seed, shared):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    visible_shape = (1 if shared[0] else b, 1 if shared[1] else h, rows, keys)
    visible = torch.rand(visible_shape, generator=generator) < 0.6
    weights = torch.where(visible, normal(b, h, rows, keys), 0)
    values = normal(b, h, keys, dim)
    kinds = torch.tensor([NAN, INF, -INF])
    bad = torch.rand(values.shape, generator=generator) < 0.15
    values[bad] = kinds[torch.randint(0, 3, (int(bad.sum()),), generator=generator)].double()
    found = visible_product(weights, values, visible)
    seen = visible.expand(b, h, rows, keys)
    for place in itertools.product(range(b), range(h)):
        exact = leaky(weights[place], values[place], seen[place])
        assert max_error(found[place], exact) <= tolerance(exact, exact)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)], ids=str)
def test_visible_product_by_hand(lead, value):
    """Row 0 sees only key 0, row 1 both; key 1 is poisoned in its first column."""
    visible = torch.tensor([[True, False], [True, True]])
    weights = of([1.0, 0.0], [0.5, 0.5]).expand(*lead, 2, 2)
    values = of([1.0, 2.0], [value, 4.0]).expand(*lead, 2, 2)
    found = visible_product(weights, values, visible.expand(*lead, 2, 2))
    exact = of([1.0, 2.0], [0.5 + 0.5 * value, 3.0]).expand(*lead, 2, 2)
    assert found.shape == exact.shape
    assert max_error(found, exact) == 0.0


def test_visible_product_keeps_what_is_seen_with_no_weight():
    """0·NaN at a visible slot is NaN, as in any product."""
    visible = torch.ones(1, 1, 2, dtype=torch.bool)
    found = visible_product(of([[1.0, 0.0]]), of([[1.0], [NAN]]), visible)
    assert found.isnan().all()


def test_visible_product_without_a_mask_is_the_product():
    weights, values = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert torch.equal(visible_product(weights, values, None), weights @ values)
    values[0, 0, 0] = NAN
    assert visible_product(weights, values, None)[0, :, 0].isnan().all()


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_visible_product_of_nothing(shape):
    b, rows, keys, dim = shape
    visible = torch.ones(b, rows, keys, dtype=torch.bool)
    found = visible_product(torch.ones(b, rows, keys), torch.ones(b, keys, dim), visible)
    assert torch.equal(found, torch.full((b, rows, dim), float(keys)))


def test_visible_product_leaves_its_inputs_alone():
    weights, values = torch.rand(1, 2, 2), torch.tensor([[[NAN, 1.0], [2.0, 3.0]]])
    visible = torch.tensor([[[True, False], [True, True]]])
    before = [x.clone() for x in (weights, values, visible)]
    visible_product(weights, values, visible)
    for old, new in zip(before, (weights, values, visible), strict=True):
        assert max_error(old, new) == 0.0


# Errors


INVALID = InvalidInput("k", "batch 3", "q's batch 2", "slice it")
UNSUPPORTED = Unsupported(
    "q (1, 2, 3, 4)", {"hopper": "no such card here", "cpu": "there is no FP8"}, "leave it out"
)


def test_invalid_input_says_everything_in_one_line():
    assert str(INVALID) == "k: got batch 3, expected q's batch 2; slice it"
    assert str(InvalidInput("k", 3, "2")) == "k: got 3, expected 2"
    assert (INVALID.argument, INVALID.got) == ("k", "batch 3")
    assert (INVALID.expected, INVALID.advice) == ("q's batch 2", "slice it")


def test_unsupported_lists_every_refusal():
    assert str(UNSUPPORTED).splitlines() == [
        "nothing serves q (1, 2, 3, 4)",
        "  hopper: no such card here",
        "  cpu: there is no FP8",
        "leave it out",
    ]
    assert str(Unsupported("this", {})) == "nothing serves this"
    assert list(UNSUPPORTED.refusals) == ["hopper", "cpu"]


def test_unsupported_keeps_its_own_refusals():
    refusals = {"cpu": "no"}
    error = Unsupported("this", refusals)
    refusals["cpu"] = "changed later"
    assert error.refusals == {"cpu": "no"}


def test_what_callers_catch():
    assert isinstance(INVALID, ValueError) and isinstance(INVALID, AttentionError)
    assert isinstance(UNSUPPORTED, NotImplementedError) and isinstance(UNSUPPORTED, AttentionError)
    assert not isinstance(UNSUPPORTED, ValueError)
    assert not isinstance(INVALID, NotImplementedError)


@pytest.mark.parametrize("error", [INVALID, UNSUPPORTED, InvalidInput("q", torch.int8, "float")])
@pytest.mark.parametrize(
    "travel", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_errors_travel_between_processes(error, travel):
    again = travel(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
