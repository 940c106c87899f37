"""The one battery that every backend passes, forward and gradients.

A backend inherits it in a few lines:

    class TestCpu(Battery):
        backend = "cpu"
        dtypes = (torch.float32, torch.bfloat16)

`matrix.py` has the cases, `plain.py` the reference that they are judged by, `arena.py` the memory
that shows stray reads and writes. Fresh memory is NaN in every test.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import anyflash as af
import arena
import matrix
import plain
from anyflash.devices import probe
from anyflash.dispatch import load
from anyflash.numerics import default_scale
from anyflash.problem import Inputs, Options, Problem
from anyflash.rng import draw_seed
from arena import Arena, Views
from matrix import Row
from plain import Packing, Seen, Terms, assert_close, assert_rounded, assert_same

# The largest error of a few numbers is a matter of luck: a tensor of fewer elements than this is
# judged by the largest of several draws.
FEW, DRAWS = 4096, 7


class Call(NamedTuple):
    """One call: leaves that get gradients, q, k, v as views of them, and what else is passed."""

    leaves: dict[str, Tensor]
    views: Any  # leaves → q, k, v
    arguments: dict[str, Any]  # mask, causal, scale, …, without bias and sink
    seen: Seen | None
    slopes: Tensor | None
    manual_seed: int
    packing: Packing | None
    longest: tuple[int, int]
    arena: Arena


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        return {"out": self.out, "lse": self.lse} | {f"d{n}": x for n, x in self.gradients.items()}


class Battery:
    """Subclass as `Test<Backend>`."""

    backend: str
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    gradients = True  # whether it has a backward pass; if not, a call that needs one is refused
    # Slow machinery (an emulator, an interpreter) takes the first rows of each list, which are the
    # most varied ones.
    most_rows: int | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        rows = {
            "row": [*matrix.dense_rows(), *matrix.score_rows()],
            "packed_row": matrix.packed_rows(),
            "long_row": matrix.LONG_ROWS,
        }
        for name, values in rows.items():
            if name in metafunc.fixturenames:
                named = {f"{_short(self._dtype(r))}-{r}": r for r in values[: self.most_rows]}
                metafunc.parametrize(name, named.values(), ids=named)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes, ids=map(_short, self.dtypes))

    @pytest.fixture(autouse=True)
    def fresh_memory_is_nan(self) -> Iterator[None]:
        """torch fills what it allocates with NaN (integers: their largest) in this mode."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        if not torch.empty(3, device=self.device).isnan().all():
            raise RuntimeError("fresh memory is not poisoned")
        yield
        torch.use_deterministic_algorithms(before)

    # The matrix.

    def test_dense(self, row: Row) -> None:
        self._check(row, self._dense_call)

    @pytest.mark.slow
    def test_long(self, long_row: Row) -> None:
        self._check(long_row, self._dense_call)

    def test_packed(self, packed_row: Row) -> None:
        self._check(packed_row, self._packed_call)

    # Refusals.

    def test_what_is_refused_is_raised_with_its_sentence(self, dtype: torch.dtype) -> None:
        """FP8 and a foreign device: refused by refusal() and by the call, or served by both."""
        call = self._dense_call(Row(), dtype=dtype, batch=1)
        call.arguments["precision"] = "fp8"
        sentence = self._refusal(call)
        if sentence is None:
            assert self._run(call).out.isfinite().all()
            return
        self._assert_raises(call, sentence)

    def test_other_devices_are_refused(self, dtype: torch.dtype) -> None:
        call = self._dense_call(Row(), dtype=dtype, batch=1)
        problem = self._problem(call)
        kinds = [kind for kind in ("cpu", "cuda", "mps") if kind != torch.device(self.device).type]
        for kind in kinds:
            other = Problem(**{**vars(problem), "device": kind})
            device = type(probe("cpu"))(kind, "another machine", frozenset())
            sentence = load(self.backend).refusal(other, device)
            assert sentence is None if self.any_device else self._is_sentence(sentence)

    any_device = False  # whether the backend runs wherever torch does

    def test_what_needs_a_gradient_is_served_or_refused(self, dtype: torch.dtype) -> None:
        """Before forward has run, not when its results are to be differentiated."""
        call = self._dense_call(Row(), dtype=dtype, batch=1)
        problem = replace(self._problem(call), gradient=True)
        sentence = load(self.backend).refusal(problem, probe(self.device))
        assert (sentence is None) == self.gradients
        if sentence is not None:
            self._assert_raises(call, sentence, gradient=True)
            with torch.no_grad():
                self._attend(call, {n: x.requires_grad_() for n, x in call.leaves.items()})

    # Exact results: small integers, in which nothing may be rounded.

    @pytest.mark.parametrize("keys", [1, 2, 8, 64, 128])
    def test_zero_queries_average_exactly(self, dtype: torch.dtype, keys: int) -> None:
        """q = 0 and 2^n keys: every weight is 2^−n. Backward has it as exp(s − lse) with a rounded
        lse: rounded to nearest in 16 bits, and within the tolerance otherwise."""
        q = torch.zeros(1, 2, 5, 16)
        k = self._integers(2, keys, 16, low=-1, high=2)
        v = self._integers(2, keys, 16, low=-1, high=2)
        dout = torch.nn.functional.one_hot(torch.arange(10).view(1, 2, 5) * 3 % 16, 16)
        out, _, gradients = self._exact(dtype, q, k, v, dout, scale=1.0)
        wide_k, wide_v, g = k.double(), v.double(), dout.double()
        assert_same("out", out, wide_v.mean(2, keepdim=True).expand(1, 2, 5, 16).to(dtype))
        if not gradients:
            return
        dq, dk, dv = gradients
        dp = g @ wide_v.mT
        ds = (dp - dp.mean(-1, keepdim=True)) / keys
        self._assert_rounded("dv", dv, (g.sum(2, keepdim=True) / keys).expand(1, 2, keys, 16))
        self._assert_rounded("dq", dq, ds @ wide_k)
        assert_same("dk", dk, torch.zeros_like(dk))

    @pytest.mark.parametrize("form", ["documents", "scattered", "tensor", "function", "window"])
    def test_averages_over_a_mask_exactly(self, dtype: torch.dtype, form: str) -> None:
        """Documents of 1, 2, 4, … 128 keys: each row is the mean of exactly its own."""
        ids = torch.repeat_interleave(torch.arange(8), 2 ** torch.arange(8))
        if form == "scattered":
            ids = ids[torch.randperm(255, generator=torch.Generator().manual_seed(1))]
        if form == "window":  # itself and one neighbour: rows of two keys but for the last
            i, j = torch.arange(255)[:, None], torch.arange(255)
            seen = (j == i) | (j == i + 1)
            mask = af.window(0, 1)
        else:
            seen = ids[:, None] == ids
            on_device = ids.to(self.device)
            mask = {
                "tensor": af.from_tensor(seen.to(self.device)),
                "function": af.from_function(lambda b, h, i, j: on_device[i] == on_device[j]),
            }.get(form, af.documents(on_device))
        q, k = torch.zeros(1, 2, 255, 8), self._integers(2, 255, 8)
        v = self._integers(2, 255, 8, low=0, high=2)
        dout = self._integers(2, 255, 8, low=0, high=2)
        out, _, gradients = self._exact(dtype, q, k, v, dout, mask=mask, needs="v")
        weights = seen.double() / seen.sum(-1, keepdim=True)
        assert_same("out", out, (weights @ v.double()).to(dtype))
        if gradients:
            self._assert_rounded("dv", gradients[2], weights.mT @ dout.double())

    @pytest.mark.parametrize("dims", [(1, 1), (64, 64), (72, 40), (128, 136), (256, 256)])
    def test_one_key_is_copied(self, dtype: torch.dtype, dims: tuple[int, int]) -> None:
        """A single key has weight 1 whatever its score: out = v, dv = Σ dout, dq = dk = 0."""
        q, k = self._integers(3, 2, dims[0]), self._integers(1, 1, dims[0])
        v, dout = self._integers(1, 1, dims[1]), self._integers(3, 2, dims[1], low=-2, high=3)
        out, _, gradients = self._exact(dtype, q, k, v, dout)
        assert_same("out", out, v.expand_as(dout).to(dtype))
        if not gradients:
            return
        dq, dk, dv = gradients
        assert_same("dv", dv, dout.sum((1, 2), keepdim=True).to(dtype))
        assert_same("dq", dq, torch.zeros_like(dq))
        assert_same("dk", dk, torch.zeros_like(dk))

    @pytest.mark.parametrize("mask", [m for m in matrix.MASKS if m != "none"])
    def test_masks_select_exactly(self, dtype: torch.dtype, mask: str) -> None:
        """Every row looks for one key with a score far above all others: it finds v of that key if
        it may see it, never if not, and a row without keys gives 0."""
        queries, keys, dim = 150, 190, 64
        g = torch.Generator().manual_seed(3)
        codes = torch.randint(0, 2, (1, 1, keys, dim), generator=g) * 2 - 1
        sizes = matrix.Sizes(1, 2, queries, keys, self.device)
        case = matrix.MASKS[mask](sizes, g)
        seen = plain.scores(case.seen, *sizes[:4])
        target = torch.randint(0, keys, (1, 2, queries), generator=g)
        q = codes[0, 0][target] * 32.0
        v = self._integers(1, keys, 8, low=1, high=100)
        out, lse, _ = self._exact(dtype, q, codes.float(), v, None, scale=1.0, **case.arguments)
        allowed = seen.gather(-1, target[..., None])
        wanted = v[0, 0][target].to(dtype)
        empty = ~seen.any(-1, keepdim=True)
        out, lse = out.cpu(), lse.cpu()
        assert_same("found", out * allowed, wanted * allowed)
        assert_same("empty rows", out * empty, torch.zeros_like(out))
        assert_same("lse of empty rows", lse == -torch.inf, empty[..., 0])
        hidden = ~allowed & ~empty
        margin = torch.where(seen, q @ codes[0, 0].mT.float(), -torch.inf).sort(-1).values
        clear = hidden[..., 0] & (margin[..., -1] - margin[..., -2] > 800)
        runner_up = torch.where(seen, q @ codes[0, 0].mT.float(), -torch.inf).argmax(-1)
        other = v[0, 0][runner_up].to(dtype)
        assert_same("next best", out * clear[..., None], other * clear[..., None])

    def test_dropping_everything_gives_zeros(self, dtype: torch.dtype) -> None:
        q, k, v, dout = (self._integers(2, 70, 32) for _ in range(4))
        out, lse, gradients = self._exact(dtype, q, k, v, dout, dropout=1.0, causal=True)
        for x in (out, *gradients):
            assert_same("zero", x, torch.zeros_like(x))
        assert lse.isfinite().all()

    def test_float64_is_float64(self) -> None:
        """lse of one integer score needs 31 bits, v 50: float32 anywhere inside would lose them."""
        if torch.float64 not in self.dtypes:
            pytest.skip(f"{self.backend} does not take float64")
        q, k, v = (
            torch.full((1, 1, 1, 1), x, dtype=torch.float64)
            for x in (1, 2.0**30 + 1 + 2.0**-10, 1 + 2.0**-50)
        )
        out, lse, _ = self._exact(torch.float64, q, k, v, None, scale=1.0)
        assert lse.item() == 2.0**30 + 1 + 2.0**-10
        assert out.item() == 1 + 2.0**-50

    # Invariances that are bitwise.

    INVARIANT = ("none", "causal", "window(70,9)", "documents-b", "scattered-b", "tensor-bhij")

    @pytest.mark.parametrize("mask", INVARIANT)
    def test_a_batch_of_one_is_the_row_of_the_batch(self, dtype: torch.dtype, mask: str) -> None:
        q, k, v = self._randn(dtype, (3, 4, 130, 64), (3, 2, 130, 64), (3, 2, 130, 64))
        seen = self._boolean(mask, 3, 4, 130, 130)
        lse = self.lse_ignores_neighbours

        def run(rows: slice) -> Everything:
            given = {"mask": seen[rows]}
            if mask in ("none", "causal", "window(70,9)"):  # the same for each batch element
                given = self._mask_arguments(mask, 3, 4, 130, 130)
            return self._twice(*(x[rows] for x in (q, k, v)), lse=lse, **given)

        whole = run(slice(0, 3))
        for b in range(3):
            one = run(slice(b, b + 1))
            for name, x, y in whole.beside(one):
                assert_same(f"{name} of row {b}", y, x[b : b + 1])

    @pytest.mark.parametrize("mask", INVARIANT)
    def test_negated_queries_with_negated_scale(self, dtype: torch.dtype, mask: str) -> None:
        q, k, v = self._randn(dtype, (2, 2, 130, 64), (2, 2, 130, 64), (2, 2, 130, 64))
        arguments = self._mask_arguments(mask, 2, 2, 130, 130)
        a = self._twice(q, k, v, scale=0.125, **arguments)
        b = self._twice(-q, k, v, scale=-0.125, **arguments)
        for name, x, y in a.beside(b):
            assert_same(name, -y if name == "dq" else y, x)

    @pytest.mark.parametrize("layout", [x for x in matrix.LAYOUTS if x != "plain"])
    def test_a_view_is_its_contiguous_twin(self, dtype: torch.dtype, layout: str) -> None:
        call = self._dense_call(Row(layout=layout, mask="causal"), dtype=dtype)
        views = call.views({n: x.requires_grad_() for n, x in call.leaves.items()})
        a = self._twice(*views, causal=True)
        b = self._twice(*(x.contiguous() for x in views), causal=True)
        for name, x, y in a.beside(b):
            assert_rounded(name, x, y)

    # Whether a NaN in a value stays with the rows that see it even inside a tile that others need.
    keeps_nan_apart = True

    UNSEEN = ("window(20,0)", "padding", "tensor-b11j", "documents")

    @pytest.mark.parametrize("mask", UNSEEN)
    def test_keys_that_nothing_sees_change_nothing(self, dtype: torch.dtype, mask: str) -> None:
        self._check_unseen(dtype, mask, (7.0, -3e4))

    @pytest.mark.parametrize("mask", UNSEEN)
    def test_nan_that_nothing_sees_changes_nothing(self, dtype: torch.dtype, mask: str) -> None:
        """Padding is promised by every backend, what lies between keys in use only by some."""
        if not self.keeps_nan_apart and mask != "padding":
            pytest.skip("tensor cores multiply it by zero; the backend's docstring says so")
        self._check_unseen(dtype, mask, (float("nan"), float("inf"), -float("inf")))

    def _check_unseen(self, dtype: torch.dtype, mask: str, garbage: tuple[float, ...]) -> None:
        """Keys and values that no query sees hold anything: results are the same bit by bit."""
        q, k, v = self._randn(dtype, (2, 4, 60, 64), (2, 2, 200, 64), (2, 2, 200, 64))
        arguments = self._mask_arguments(mask, 2, 4, 60, 200)
        unseen = ~self._boolean(mask, 2, 4, 60, 200).any(2).any(1)  # (B, Sk)
        assert unseen.any() and not unseen.all()
        hole = unseen[:, None, :, None]
        clean = self._twice(q, k.masked_fill(hole, 0), v.masked_fill(hole, 0), **arguments)
        for value in garbage:
            filled = [x.masked_fill(hole, value) for x in (k, v)]
            dirty = self._twice(q, *filled, **arguments)
            for name, x, y in clean.beside(dirty):
                assert_same(f"{name} with {value}", y, x)
                if name in ("dk", "dv"):
                    assert_same(f"{name} there", y * hole, torch.zeros_like(y))

    def test_packed_neighbours_change_nothing(self, dtype: torch.dtype) -> None:
        self._check_neighbours(dtype, (7.0, -3e4))

    def test_nan_in_packed_neighbours_changes_nothing(self, dtype: torch.dtype) -> None:
        self._check_neighbours(dtype, (float("nan"), float("inf"), -float("inf")))

    def _check_neighbours(self, dtype: torch.dtype, garbage: tuple[float, ...]) -> None:
        """A sequence is bitwise what it is beside other neighbours, and unused keys of its own."""
        q, k, v = self._randn(dtype, (100, 2, 64), (120, 2, 64), (120, 2, 64))
        starts_q, starts_k = self._starts([30, 40, 30]), self._starts([50, 40, 30])
        used = torch.tensor([50, 33, 30], dtype=torch.int32, device=self.device)
        mine = slice(30, 70), slice(50, 83), slice(50, 83)

        def run(*qkv: Tensor) -> list[Tensor]:
            leaves = [x.detach().requires_grad_(self.gradients) for x in qkv]
            out, lse = af.attention_varlen(
                *leaves, starts_q, starts_k, seqused_k=used, causal=True, return_lse=True,
                backend=self.backend,
            )  # fmt: skip
            if not self.gradients:
                return [out[30:70], lse[:, 30:70]]
            grads = torch.autograd.grad(out[30:70].float().square().sum(), leaves)
            parts = [x[s] for x, s in zip(grads, mine, strict=True)]
            return [out[30:70], lse[:, 30:70], *parts]

        clean = run(q, k, v)
        for value in garbage:
            dirty = [torch.full_like(x, value) for x in (q, k, v)]
            for x, y, s in zip(dirty, (q, k, v), mine, strict=True):
                x[s] = y[s]
            for n, (x, y) in enumerate(zip(clean, run(*dirty), strict=True)):
                assert_same(f"result {n} beside {value}", y, x)

    @pytest.mark.parametrize("mask", ["causal", "tensor-bhij", "documents"])
    def test_nan_reaches_only_the_rows_that_see_it(self, dtype: torch.dtype, mask: str) -> None:
        if not self.keeps_nan_apart:
            pytest.skip("tensor cores multiply it by zero; the backend's docstring says so")
        q, k, v = self._randn(dtype, (1, 2, 150, 64), (1, 2, 150, 64), (1, 2, 150, 64))
        seen, clean = self._boolean(mask, 1, 2, 150, 150), v.clone()
        v[:, :, 70, 5] = float("nan")
        v[:, :, 71, 6] = float("inf")
        arguments = self._mask_arguments(mask, 1, 2, 150, 150)
        leaf = q.detach().requires_grad_()
        out, _ = self._attention(leaf, k, v, **arguments)
        expected = torch.zeros_like(out, dtype=torch.bool)
        expected[..., 5], expected[..., 6] = seen[..., 70], seen[..., 71]
        assert expected.any() and not expected.all()
        assert torch.equal(~out.isfinite(), expected)
        rest = ~expected.any(-1, keepdim=True)
        dout = torch.ones_like(out) * rest
        dq = torch.autograd.grad(out, leaf, dout)[0]
        terms = Terms(seen=lambda *at: seen.cpu())
        like, exact = (
            self._plain_query(*(x.cpu().to(d) for x in (q, k, clean, dout)), terms)
            for d in (dtype, torch.float64)
        )
        rest = rest.cpu()
        assert_close("out", out.cpu().where(rest, 0), like[0] * rest, exact[0] * rest)
        assert_close("dq", dq.cpu().where(rest, 0), like[1] * rest, exact[1] * rest)

    @staticmethod
    def _plain_query(
        q: Tensor, k: Tensor, v: Tensor, dout: Tensor, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        q = q.detach().requires_grad_()
        out, _ = plain.attention(q, k, v, terms)
        return out.detach(), torch.autograd.grad(out, q, dout)[0]

    @pytest.mark.parametrize("mask", ["causal()", "sink+window", "tensor-bhij"])
    def test_twice_is_the_same(self, dtype: torch.dtype, mask: str) -> None:
        q, k, v = self._randn(dtype, (2, 4, 200, 64), (2, 2, 300, 64), (2, 2, 300, 64))
        given = {"mask": self._boolean(mask, 2, 4, 200, 300), "deterministic": True}
        if mask != "tensor-bhij":
            given |= self._mask_arguments(mask, 2, 4, 200, 300)
        first = self._twice(q, k, v, **given)
        for _ in range(3):
            again = self._twice(q, k, v, **given)
            for name, x, y in first.beside(again):
                assert_same(name, y, x)

    # Gradients of some inputs only.

    SUBSETS = ("q", "k", "v", "bias", "sink", "qk", "kv", "qv", "q-bias", "v-sink", "bias-sink")

    @pytest.mark.parametrize("subset", SUBSETS)
    def test_only_the_gradients_asked_for(self, dtype: torch.dtype, subset: str) -> None:
        if not self.gradients:
            pytest.skip(f"{self.backend} has no backward pass")
        row = Row(lengths=(63, 65), mask="causal", added="1hij", sink=True)
        call = self._dense_call(row, dtype=dtype)
        if (sentence := self._refusal(call)) is not None:
            self._assert_raises(call, sentence)
            if "bias" in subset:
                return
            row = row._replace(added="none")
            call = self._dense_call(row, dtype=dtype)
        full = self._run(call)
        _, exact = self._judges(Row(), call, torch.Generator().manual_seed(0))
        long = [name for name in ("bias", "sink") if name in subset]
        letters = set(subset.replace("bias", "").replace("sink", "")) - {"-"}
        wanted = {n: x for n, x in call.leaves.items() if n in long or n in letters}
        some = self._run(call, wanted=wanted)
        assert some.gradients.keys() == wanted.keys()
        for name, x in some.gradients.items():  # another path may serve, but none is worse
            assert_close(f"d{name}", x, full.gradients[name], exact.gradients[name])

    # How a call is made and judged.

    def _dtype(self, row: Row) -> torch.dtype:
        return self.dtypes[row.dtype % len(self.dtypes)]

    def _dense_call(
        self, row: Row, dtype: torch.dtype | None = None, batch: int | None = None, draw: int = 0
    ) -> Call:
        (queries, keys), (heads, heads_kv), g = row.lengths, row.heads, _generator(row, draw)
        batch = batch or (1 if max(queries, keys) > 200 else 2)
        dtype, place = dtype or self._dtype(row), Arena(self.device)
        q, k, v = (
            torch.randn(batch, h, s, d, generator=g, dtype=torch.float64).to(dtype)
            for h, s, d in (
                (heads, queries, row.head_dim),
                (heads_kv, keys, row.head_dim),
                (heads_kv, keys, row.width_v),
            )
        )
        sizes = matrix.Sizes(batch, heads, queries, keys, self.device)
        return self._call(row, arena.dense(place, row.layout, q, k, v), sizes, place, g, None)

    def _packed_call(self, row: Row, draw: int = 0) -> Call:
        (heads, heads_kv), g = row.heads, _generator(row, draw)
        lengths_q, lengths_k, used = matrix.PACKINGS[row.lengths]
        dtype, place = self._dtype(row), Arena(self.device)
        q, k, v = (
            torch.randn(sum(s), h, d, generator=g, dtype=torch.float64).to(dtype)
            for h, s, d in (
                (heads, lengths_q, row.head_dim),
                (heads_kv, lengths_k, row.head_dim),
                (heads_kv, lengths_k, row.width_v),
            )
        )
        sizes = matrix.Sizes(len(lengths_q), heads, max(lengths_q), max(lengths_k), self.device)
        starts = [self._starts(lengths) for lengths in (lengths_q, lengths_k)]
        at = Packing(*(x.tolist() for x in starts), used)
        return self._call(row, arena.packed(place, row.layout, q, k, v), sizes, place, g, at)

    def _call(
        self, row: Row, views: Views, sizes: matrix.Sizes, place: Arena, g: torch.Generator,
        at: Packing | None,
    ) -> Call:  # fmt: skip
        case, leaves, slopes = matrix.MASKS[row.mask](sizes, g), dict(views.leaves), None
        if row.added.startswith("alibi"):
            shape = (sizes.heads,) if row.added == "alibi-h" else (sizes.batch, sizes.heads)
            slopes = place.put(torch.rand(shape, generator=g) * 0.1)
        elif row.added != "none":
            letters, _, name = row.added.partition(":")
            sides = dict(zip("bhij", sizes[:4], strict=True))
            bias = torch.randn([sides.get(x, 1) for x in letters], generator=g)
            leaves["bias"] = place.put(bias.to(getattr(torch, name or _short(self._dtype(row)))))
        if row.sink:
            leaves["sink"] = place.put(torch.randn(sizes.heads, generator=g))
        arguments = dict(case.arguments, scale=row.scale, softcap=row.softcap, dropout=row.dropout)
        if isinstance(arguments.get("mask"), Tensor) and arguments["mask"].is_contiguous():
            arguments["mask"] = place.put(arguments["mask"])
        return Call(
            leaves, views.qkv, arguments, case.seen, slopes, 1234 + row.dtype, at, sizes[2:4], place
        )

    def _check(self, row: Row, make: Callable[..., Call]) -> None:
        call = make(row)
        sentence = self._refusal(call)
        if sentence is not None:
            self._assert_raises(call, sentence)
            return
        found = self._run(call, row.loss, _generator(row))
        call.arena.check()
        dtype = self._dtype(row)
        assert found.out.dtype == dtype
        assert found.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        like, exact = self._judges(row, call, _generator(row))
        assert found.gradients.keys() == exact.gradients.keys()
        for name, gradient in found.gradients.items():
            assert gradient.dtype == call.leaves[name].dtype
        more: list[tuple[Results, Results]] = []
        for name, actual in found.all().items():
            few = actual.numel() < FEW
            assert_close(
                name, actual, like.all()[name], exact.all()[name],
                softcap=row.softcap is not None,
                others=self._other_draws(row, make, more, name) if few else (),
                terms=call.longest[0] if name == "dk" else 1,
            )  # fmt: skip

    def _judges(self, row: Row, call: Call, g: torch.Generator) -> tuple[Results, Results]:
        """The case in plain PyTorch, in its dtype and in float64."""
        like = self._plain(call, row.loss, g, self.device)
        return like, self._plain(call, row.loss, g, "cpu", torch.float64)

    def _other_draws(
        self, row: Row, make: Callable[..., Call], found: list[tuple[Results, Results]], name: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`_judges` of the same case with other random numbers."""
        for n in range(DRAWS):
            if n == len(found):
                found.append(self._judges(row, make(row, draw=n + 1), _generator(row, n + 1)))
            yield found[n][0].all()[name], found[n][1].all()[name]

    def _run(
        self, call: Call, loss: str = "out+lse", g: torch.Generator | None = None,
        wanted: dict[str, Tensor] | None = None,
    ) -> Results:  # fmt: skip
        names = call.leaves if wanted is None else wanted
        leaves = {
            n: x.detach().requires_grad_(self.gradients) if n in names else x
            for n, x in call.leaves.items()
        }
        torch.manual_seed(call.manual_seed)
        out, lse = self._attend(call, leaves)
        q = call.views(call.leaves)[0]
        if q.numel() and q.stride(-1) == 1 and q.shape[1] > 1 and q.shape[-2] > 1:
            a, b = q.ndim - 3, q.ndim - 2
            assert (q.stride(a) < q.stride(b)) == (out.stride(a) < out.stride(b)), "dimension order"
        chosen = {n: leaves[n] for n in names if self.gradients}
        return _differentiate(out, lse, chosen, loss, g or torch.Generator().manual_seed(0))

    def _attend(self, call: Call, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        extra = {"return_lse": True, "sink": leaves.get("sink"), "backend": self.backend}
        extra["bias"] = leaves.get("bias") if call.slopes is None else af.alibi(call.slopes)
        if call.packing is None:
            return af.attention(*call.views(leaves), **call.arguments, **extra)
        starts_q, starts_k, used = self._offsets(call.packing)
        return af.attention_varlen(
            *call.views(leaves), starts_q, starts_k, seqused_k=used,
            max_seqlen_q=call.longest[0], max_seqlen_k=call.longest[1], **call.arguments, **extra,
        )  # fmt: skip

    def _plain(
        self, call: Call, loss: str, g: torch.Generator, device: str,
        dtype: torch.dtype | None = None,
    ) -> Results:  # fmt: skip
        """The same in plain PyTorch, each leaf in its own dtype or all in the one given."""
        leaves = {
            n: x.detach().to(device, dtype or x.dtype).requires_grad_(self.gradients)
            for n, x in call.leaves.items()
        }
        torch.manual_seed(call.manual_seed)
        seed = draw_seed(self.device).to(device) if call.arguments["dropout"] else None
        slopes = None if call.slopes is None else call.slopes.to(device)
        terms = Terms(
            call.arguments["scale"], call.arguments["softcap"], call.seen, leaves.get("bias"),
            slopes, leaves.get("sink"), call.arguments["dropout"], seed,
        )  # fmt: skip
        q, k, v = call.views(leaves)
        if call.packing is None:
            out, lse = plain.attention(q, k, v, terms)
        else:
            out, lse = plain.packed(q, k, v, terms, call.packing)
        return _differentiate(out, lse, leaves if self.gradients else {}, loss, g)

    def _problem(self, call: Call) -> Problem:
        leaves, arguments = call.leaves, call.arguments
        q, k, v = call.views(leaves)
        mask = arguments.get("mask")
        mask = af.from_tensor(mask) if isinstance(mask, Tensor) else mask
        if arguments.get("causal"):
            mask = af.causal() if mask is None else mask & af.causal()
        seed = draw_seed(self.device) if arguments["dropout"] else None
        starts = (None,) * 3 if call.packing is None else self._offsets(call.packing)
        inputs = Inputs(
            q, k, v, leaves.get("bias"), call.slopes, leaves.get("sink"), seed, *starts, mask
        )
        scale = arguments["scale"]
        options = Options(
            default_scale(q.shape[-1]) if scale is None else scale,
            arguments["softcap"] or 0.0,
            arguments["dropout"],
            *(call.longest if call.packing is not None else (None, None)),
            precision=arguments.get("precision"),
        )
        return Problem.of(inputs, options, self.gradients)

    def _refusal(self, call: Call) -> str | None:
        return load(self.backend).refusal(self._problem(call), probe(self.device))

    def _assert_raises(self, call: Call, sentence: str, gradient: bool | None = None) -> None:
        assert self._is_sentence(sentence)
        needed = self.gradients if gradient is None else gradient
        leaves = {n: x.detach().requires_grad_(needed) for n, x in call.leaves.items()}
        with pytest.raises(af.Unsupported) as caught:
            self._attend(call, leaves)
        assert caught.value.refusals == {self.backend: sentence}
        assert sentence in str(caught.value)

    @staticmethod
    def _is_sentence(sentence: object) -> bool:
        return isinstance(sentence, str) and bool(sentence.strip()) and "\n" not in sentence

    def _offsets(self, at: Packing) -> tuple[Tensor, Tensor, Tensor | None]:
        starts_q, starts_k, used = (
            None if x is None else torch.tensor(x, dtype=torch.int32, device=self.device)
            for x in at
        )
        return starts_q, starts_k, used  # type: ignore[return-value]

    def _starts(self, lengths: list[int]) -> Tensor:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return ends.to(self.device, torch.int32)

    def _integers(self, heads: int, length: int, dim: int, low: int = -3, high: int = 4) -> Tensor:
        g = torch.Generator().manual_seed(heads * 1000 + length * 10 + dim + low)
        return torch.randint(low, high, (1, heads, length, dim), generator=g).float()

    def _randn(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
        g = torch.Generator().manual_seed(len(shapes))
        return [torch.randn(shape, generator=g).to(self.device, dtype) for shape in shapes]

    def _mask_arguments(self, mask: str, *sizes: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(5)
        return matrix.MASKS[mask](matrix.Sizes(*sizes, self.device), g).arguments

    def _boolean(self, mask: str, *sizes: int) -> Tensor:
        case = matrix.MASKS[mask](
            matrix.Sizes(*sizes, self.device), torch.Generator().manual_seed(5)
        )
        if case.seen is None:
            return torch.ones(sizes, dtype=torch.bool, device=self.device)
        return plain.scores(case.seen, *sizes).contiguous().to(self.device)

    def _exact(
        self, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None,
        needs: str = "qkv", **arguments: Any,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """out, lse and the gradients of a call with these numbers; those not needed are empty.
        Without a `dout`, or a backward pass, there are none."""
        leaves = {n: x.to(self.device, dtype) for n, x in zip("qkv", (q, k, v), strict=True)}
        wanted = [leaves[n].requires_grad_() for n in needs if dout is not None and self.gradients]
        out, lse = self._attention(*leaves.values(), **arguments)
        if not wanted or dout is None:
            return out, lse, ()
        found = dict(zip(needs, torch.autograd.grad(out, wanted, dout.to(out)), strict=True))
        return out.detach(), lse.detach(), tuple(found.get(n, out.new_empty(0)) for n in "qkv")

    @staticmethod
    def _assert_rounded(what: str, actual: Tensor, exact: Tensor) -> None:
        """Rounded to nearest, where a value halfway between two may go to either."""
        wide = actual.double().cpu()
        if actual.dtype.itemsize == 2:
            unit = torch.finfo(actual.dtype).eps * 2.0 ** exact.abs().log2().floor()
            float32 = exact.abs() * 2.0**-20  # what the accumulation may be off
            assert ((wide - exact).abs() <= unit / 2 + float32).all(), what
        assert_close(what, actual, exact.to(actual.dtype), exact)

    def _attention(self, *qkv: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """out and lse. A test of what the backend refuses ends here: refused it must be, and with
        its sentence."""
        try:
            return af.attention(*qkv, return_lse=True, backend=self.backend, **arguments)
        except af.Unsupported as refused:
            said = af.explain(*qkv, backend=self.backend, **arguments).refusals[self.backend]
            assert self._is_sentence(said) and refused.refusals == {self.backend: said}
            pytest.skip(f"refused: {said}")

    lse_ignores_neighbours = True  # to the bit, also in its gradient

    def _twice(
        self, q: Tensor, k: Tensor, v: Tensor, *, lse: bool = True, **arguments: Any
    ) -> Everything:
        """Forward and backward with a fixed loss over out and, if `lse`, the log-sum-exp."""
        leaves = [x.detach().requires_grad_(self.gradients) for x in (q, k, v)]
        out, total = self._attention(*leaves, **arguments)
        if not self.gradients:
            return Everything(out, total)
        rows = torch.arange(out.shape[2], device=out.device).view(1, 1, -1, 1)
        columns = torch.arange(out.shape[3], device=out.device)
        dout = ((rows * 3 + columns * 5) % 7 - 3).to(out.dtype).expand_as(out)
        dtotal = (rows[..., 0] % 3 - 1).to(total.dtype).expand_as(total)
        losses = ((out, total), leaves, (dout, dtotal)) if lse else (out, leaves, dout)
        return Everything(out, total, *torch.autograd.grad(*losses))


class Everything(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    def beside(self, other: Everything) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, value here and value there of all that there is."""
        for name, x, y in zip(self._fields, self, other, strict=True):
            assert (x is None) == (y is None), name
            if x is not None and y is not None:
                yield name, x, y


def _differentiate(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], loss: str, g: torch.Generator
) -> Results:
    """The gradients of a loss: of out, of lse or of both, with gradients of several layouts."""
    if not leaves:
        return Results(out.detach(), lse.detach(), {})
    state = g.get_state()
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64).bfloat16()
    weights_lse = torch.randn(lse.shape, generator=g, dtype=torch.float64).bfloat16()
    g.set_state(state)  # the next computation of this case has the same loss
    dout, dlse = weights.to(out), weights_lse.to(lse)
    if loss == "sum":
        dout = torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
    if loss == "strided":
        dout = dout.mT.contiguous().mT
    outputs = {"lse": [lse], "out+lse": [out, lse]}.get(loss, [out])
    given = {"lse": [dlse], "out+lse": [dout, dlse]}.get(loss, [dout])
    found = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    gradients = {
        n: torch.zeros_like(x) if d is None else d
        for (n, x), d in zip(leaves.items(), found, strict=True)
    }
    return Results(out.detach(), lse.detach(), gradients)


def _generator(row: Row, draw: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{row}/{row.dtype}/{draw}".encode()))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
