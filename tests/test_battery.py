"""The battery itself: its matrix is complete, its memory shows stray accesses, its judgement is
strict, and faults planted in a backend are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

import arena
import matrix
from anyflash.backends import reference as backend
from anyflash.backends.base import Needs, Saved
from anyflash.problem import Gradients, Inputs, Problem
from arena import Arena
from battery import Battery
from matrix import Row
from plain import assert_close, assert_same


def test_every_pair_of_values_has_a_row() -> None:
    axes = {"a": (1, 2, 3), "b": "wxyz", "c": (True, False), "d": (None, 0.5)}
    rows = matrix.cover(axes)
    for (a, xs), (b, ys) in combinations(axes.items(), 2):
        for x, y in product(xs, ys):
            assert any(row[a] == x and row[b] == y for row in rows), (a, x, b, y)
    assert len(rows) <= 16  # the largest two axes alone need 12


@pytest.mark.parametrize("rows", [matrix.dense_rows, matrix.score_rows, matrix.packed_rows])
def test_the_matrix_is_varied_and_stable(rows: Callable[[], list[Row]]) -> None:
    found = rows()
    assert len(set(found)) == len(found)
    first = found[: len(found) // 4]
    assert {row.dtype for row in first} == {0, 1, 2, 3}
    assert len({row.layout for row in first}) == len({row.layout for row in found})
    rows.cache_clear()  # type: ignore[attr-defined]
    assert rows() == found


def test_the_dense_matrix_has_every_mask_at_every_head_dimension() -> None:
    found = {(row.mask, row.head_dim) for row in matrix.dense_rows()}
    assert found == set(product(matrix.MASKS, matrix.HEAD_DIMS))
    assert {row.lengths for row in matrix.dense_rows()} == set(matrix.LENGTHS)
    plain = [row for row in matrix.score_rows() if row.added == "none" and not row.dropout]
    assert len(plain) < len(matrix.score_rows()) / 2


@pytest.mark.parametrize("layout", matrix.LAYOUTS)
def test_layouts_hold_what_they_were_given(layout: str) -> None:
    q, k, v = (torch.randn(2, h, s, d) for h, s, d in ((4, 6, 8), (2, 7, 8), (2, 7, 5)))
    if layout == "expanded":
        k, v = k[:1, :1].expand(2, 2, -1, -1), v[:1, :1].expand(2, 2, -1, -1)
    place = Arena("cpu")
    views = arena.dense(place, layout, q, k, v)
    for a, b in zip(views.qkv(views.leaves), (q, k, v), strict=True):
        assert torch.equal(a, b)
    contiguous = all(x.is_contiguous() for x in views.qkv(views.leaves))
    assert contiguous == (layout in ("plain", "odd"))
    assert (views.leaves.get("q", q).data_ptr() % 16 != 0) == (layout == "odd")


def test_memory_around_inputs_is_watched() -> None:
    place = Arena("cpu")
    x = place.put(torch.arange(6.0).view(2, 3))
    place.check()
    after = x.as_strided((1,), (1,), x.storage_offset() + 6)
    before = x.as_strided((1,), (1,), x.storage_offset() - 1)
    assert after.isnan().all() and before.isnan().all()
    for stray in (after, before, x[1, 1:2]):
        kept = stray.clone()
        stray.fill_(5.5)
        with pytest.raises(AssertionError, match="written to"):
            place.check()
        stray.copy_(kept)
    place.check()
    after.view(torch.int32).add_(1)  # another NaN
    with pytest.raises(AssertionError, match="written to"):
        place.check()


def test_the_judgement_is_strict() -> None:
    exact = torch.linspace(-1, 1, 100, dtype=torch.float64)
    plain = exact.half()
    limit = 2 * float((plain.double() - exact).abs().max()) + 1e-5
    assert_close("x", exact + 0.99 * limit, plain, exact)
    wrong = exact.clone()
    wrong[17] += 1.01 * limit
    with pytest.raises(AssertionError, match=r"\(17,\)"):
        assert_close("x", wrong, plain, exact)
    assert_close("x", wrong, plain, exact, softcap=True)
    assert_close("x", wrong, plain, exact, others=[(plain.bfloat16(), exact)])
    wrong[17] = float("nan")
    with pytest.raises(AssertionError):
        assert_close("x", wrong, plain, exact, softcap=True)
    with pytest.raises(ValueError, match="not finite"):  # any error would pass
        assert_close("x", exact, plain / 0, exact)
    with pytest.raises(AssertionError, match="shape"):
        assert_close("x", exact[:50], plain, exact)
    with pytest.raises(AssertionError, match="1 of 100"):
        assert_same("x", torch.where(exact == exact[3], exact + 1e-15, exact), exact)


# Faults, planted in the reference as if it were a backend under test.

Forward = Callable[[Problem, Inputs], tuple[Any, Any]]
FAULTS: dict[str, Callable[[Forward], Forward]] = {}


def _fault(change: Callable[[Forward, Problem, Inputs], tuple[Any, Any]]) -> None:
    FAULTS[change.__name__] = lambda right: lambda problem, inputs: change(right, problem, inputs)


@_fault
def heads_are_interleaved(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    if inputs.packed or problem.heads == problem.heads_kv:
        return right(problem, inputs)
    groups = problem.heads // problem.heads_kv
    k, v = (x.repeat(1, groups, 1, 1) for x in (inputs.k, inputs.v))
    return right(problem, inputs._replace(k=k, v=v))


@_fault
def lse_is_in_base_two(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    out, lse = right(problem, inputs)
    return out, lse / 0.6931471805599453


@_fault
def empty_rows_are_nan(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    out, lse = right(problem, inputs)
    empty = (lse.mT if problem.packed else lse).unsqueeze(-1) == -torch.inf
    return out.masked_fill(empty, float("nan")), lse


@_fault
def the_last_key_is_forgotten(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    if inputs.packed or problem.keys < 2 or inputs.mask or inputs.bias is not None:
        return right(problem, inputs)
    return right(problem, inputs._replace(k=inputs.k[:, :, :-1], v=inputs.v[:, :, :-1]))


@_fault
def the_scale_is_of_a_padded_dimension(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    padded = 2 ** (problem.head_dim - 1).bit_length()
    scale = problem.options.scale * (problem.head_dim / padded) ** 0.5
    return right(replace(problem, options=problem.options._replace(scale=scale)), inputs)


@_fault
def a_row_too_many_is_read(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    if inputs.packed or not inputs.k.is_contiguous() or problem.keys % 2 == 0 or inputs.mask:
        return right(problem, inputs)
    k, v = (
        x.as_strided((*x.shape[:2], x.shape[2] + 1, x.shape[3]), x.stride())
        for x in (inputs.k, inputs.v)
    )
    return right(problem, inputs._replace(k=k, v=v, bias=None))


@_fault
def the_input_is_scaled_in_place(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    result = right(problem, inputs)
    inputs.q.mul_(problem.options.scale)
    return result


@_fault
def the_result_is_uninitialised_memory(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    out, lse = right(problem, inputs)
    fresh = torch.empty_like(out)
    fresh[..., 1:] = out[..., 1:]
    return fresh, lse


@_fault
def sixteen_bits_are_used_inside(right: Forward, problem: Problem, inputs: Inputs) -> Any:
    out, lse = right(problem, inputs)
    return out.bfloat16().to(out.dtype), lse


class Subject(Battery):
    """The battery as the planted faults meet it."""

    backend = "reference"
    dtypes = (torch.float32,)


def _battery_finds_a_fault() -> str:
    subject = Subject()
    for row in matrix.dense_rows()[:60]:
        try:
            subject.test_dense(row)
        except (AssertionError, RuntimeError) as error:
            return str(error)
    return ""


@pytest.fixture
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
def test_without_a_fault_nothing_is_found() -> None:
    assert _battery_finds_a_fault() == ""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_forward_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "forward", FAULTS[fault](backend.forward))
    assert _battery_finds_a_fault() != ""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("what", ["dlse", "k", "v", "q", "sink"])
def test_a_fault_of_backward_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient through lse dropped, or one gradient a percent too large."""
    right = backend.backward

    def wrong(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
        if what == "dlse":
            return right(problem, inputs, saved._replace(dlse=None), needs)
        found = right(problem, inputs, saved, needs)
        gradient = getattr(found, what)
        return found if gradient is None else found._replace(**{what: gradient * 1.01})

    monkeypatch.setattr(backend, "backward", wrong)
    assert _battery_finds_a_fault().startswith("d")


@pytest.mark.usefixtures("poisoned")
def test_refusals_are_held_to_their_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence that no call raises is found, and so is one that is not a sentence."""
    subject = Subject()
    call = subject._dense_call(Row())
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        subject._assert_raises(call, "not on a Monday")
    monkeypatch.setattr(backend, "refusal", lambda problem, device: "")
    with pytest.raises(AssertionError):
        subject._check(Row(), subject._dense_call)
