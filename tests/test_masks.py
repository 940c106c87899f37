"""Masks: what they mean, what is refused, pictures, how they travel, and calls with them.

`test_masks_forms.py` has what kernels read. Random expressions come from `mask_cases.py`, each with
an independent formula.
"""

import copy
import gc
import io
import multiprocessing
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyflash import (
    InvalidInput,
    attention,
    attention_varlen,
    causal,
    documents,
    from_function,
    from_tensor,
    padding,
    prefix,
    window,
)
from anyflash.masks import expression, intervals, tiles
from anyflash.masks.algebra import Window
from anyflash.numerics import max_error, tolerance
from mask_cases import Stripes, cases, offsets, packed_cases, packed_truth, thorough, truth

# What an expression means


@thorough(300)
@given(cases())
def test_materialise_is_the_formula(case):
    extent, drawn = case
    seen = drawn.mask.materialise(*extent)
    assert seen.dtype == torch.bool and seen.shape == torch.Size(extent)
    assert seen.is_contiguous()
    np.testing.assert_array_equal(seen.numpy(), truth(drawn, extent))


@thorough(200)
@given(cases())
def test_text_and_leaves_are_the_whole_expression(case):
    extent, drawn = case
    again = expression.from_text(drawn.mask.text, drawn.mask.leaves)
    assert again.text == drawn.mask.text
    pairs = zip(again.leaves, drawn.mask.leaves, strict=True)
    assert all(a is b for a, b in pairs)
    np.testing.assert_array_equal(again.materialise(*extent).numpy(), truth(drawn, extent))


@thorough(200)
@given(cases())
def test_bound_follows_the_rule(case):
    _, drawn = case
    assert drawn.mask.interval_bound() == drawn.bound
    assert (~drawn.mask).interval_bound() == drawn.inverse


def test_the_strategy_draws_every_kind():
    """Else a property above would hold for want of examples."""
    drawn = set()

    @thorough(300)
    @given(cases())
    def collect(case):
        extent, drawn_node = case
        for kind in expression.NODES:
            if f"{kind}(" in drawn_node.mask.text:
                drawn.add(kind)
        if "#" in drawn_node.mask.text:
            drawn.update(("Function", "Compiled"))  # both travel by number
        drawn.add(("bound", drawn_node.bound))
        seen = truth(drawn_node, extent)
        drawn.add(("empty rows", bool(seen.size and (~seen.any(-1)).any() and seen.any())))

    collect()
    missing = set(expression.NODES) - drawn - {"Packed", "Everything"}
    assert not missing
    assert {("bound", n) for n in (None, 1, 2, 3, 4)} <= drawn
    assert ("empty rows", True) in drawn


def test_none_is_no_expression():
    assert expression.from_text("", []) is None


def test_windows_merge():
    """An intersection of windows stays arithmetic for kernels."""
    merged = window(5, 3) & causal() & window(None, 9) & window(2, None)
    assert isinstance(merged, Window)
    assert (merged.left, merged.right) == (2, 0)


def test_double_negation_is_the_mask_itself():
    mask = prefix(3)
    assert ~~mask is mask


def test_causal_by_hand():
    below = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal().materialise(1, 1, 3, 3)[0, 0].int().tolist() == below
    last = [[1, 1, 1, 0], [1, 1, 1, 1]]  # two queries: the last ones
    assert causal().materialise(1, 1, 2, 4)[0, 0].int().tolist() == last
    assert causal().materialise(1, 1, 3, 1)[0, 0].int().tolist() == [[0], [0], [1]]


def test_window_by_hand():
    expected = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]
    assert window(2, 1).materialise(1, 1, 4, 4)[0, 0].int().tolist() == expected
    itself = torch.eye(4, dtype=torch.bool)
    assert torch.equal(window(0, 0).materialise(1, 1, 4, 4)[0, 0], itself)


@pytest.mark.parametrize("reach", [2**31 - 1, 2**31, 2**62, sys.maxsize])
def test_reaches_beyond_every_length(reach):
    """People write infinity so; no form may overflow."""
    pairs = [
        (window(reach, reach), window()),
        (window(reach, 0), causal()),
        (window(0, reach), window(0, None)),
        (prefix(reach), prefix(5)),
    ]
    for mask, same in pairs:
        expected = same.materialise(1, 1, 4, 5)
        assert torch.equal(mask.materialise(1, 1, 4, 5), expected)
        assert torch.equal(mask.compile(1, 1, 4, 5).materialise(1, 1, 4, 5), expected)


def test_prefix_lm_by_hand():
    expected = [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert (causal() | prefix(2)).materialise(1, 1, 3, 3)[0, 0].int().tolist() == expected


def test_at_by_hand():
    """Two ranks of a ring with zigzag rows: rank 0 has rows 0 and 3, rank 1 has keys 1 and 2."""
    chunk = causal().at(torch.tensor([0, 3]), torch.tensor([1, 2]))
    assert chunk.materialise(1, 1, 2, 2)[0, 0].int().tolist() == [[0, 0], [1, 1]]


# What cannot be written


@pytest.mark.parametrize(
    ("make", "argument", "got", "expected"),
    [
        (lambda: window(-1), "window(left)", "-1", "integer ≥ 0"),
        (lambda: window(0, -2), "window(right)", "-2", "integer ≥ 0"),
        (lambda: window(True), "window(left)", "True", "integer ≥ 0"),
        (lambda: window(None, 1.0), "window(right)", "1.0", "integer ≥ 0"),
        (lambda: prefix(-1), "prefix(n)", "-1", "integer ≥ 0"),
        (lambda: prefix(False), "prefix(n)", "False", "integer ≥ 0"),
        (lambda: prefix(None), "prefix(n)", "None", "integer ≥ 0"),
        (lambda: documents(torch.zeros(3)), "documents(ids_q)", "float32", "integer tensor"),
        (lambda: documents([0, 1]), "documents(ids_q)", "list", "integer tensor"),
        (
            lambda: documents(torch.zeros(3).int(), torch.zeros(3).bool()),
            "documents(ids_k)", "bool", "integer tensor",
        ),
        (lambda: documents(torch.zeros(1, 1, 3).int()), "documents(ids_q)", "(1, 1, 3)", "2-D"),
        (lambda: padding(torch.zeros(2)), "padding(lengths_k)", "float32", "integer tensor"),
        (lambda: padding(torch.zeros(2, 2).int()), "padding(lengths_k)", "(2, 2)", "1-D"),
        (lambda: padding(3), "padding(lengths_k)", "int", "integer tensor"),
        (lambda: from_tensor(torch.zeros(2, 2)), "mask", "float32", "boolean"),
        (lambda: from_tensor(np.ones((2, 2), bool)), "mask", "ndarray", "boolean"),
        (lambda: from_tensor(torch.ones(1, 1, 1, 2, 2).bool()), "mask", "(1, 1, 1, 2, 2)", "4 dim"),
        (lambda: from_function(3), "from_function(f)", "int", "callable"),
        (lambda: causal() & torch.ones(2, 2).bool(), "mask &", "Tensor", "another mask"),
        (lambda: causal() | None, "mask |", "NoneType", "another mask"),
        (
            lambda: causal().at(torch.zeros(2), torch.zeros(2).int()),
            "at(q_positions)", "float32", "integer tensor",
        ),
        (
            lambda: causal().at(torch.zeros(2).int(), torch.zeros(2, 2).int()),
            "at(k_positions)", "(2, 2)", "1-D",
        ),
        # A position before the first has no meaning, and the two forms would read it differently.
        (
            lambda: causal().at(torch.arange(3), torch.arange(3) - 1).compile(1, 1, 3, 3),
            "at(k_positions)", "-1", "≥ 0",
        ),
        (
            lambda: causal().at(torch.arange(3) - 2, torch.arange(3)).compile(1, 1, 3, 3),
            "at(q_positions)", "-2", "≥ 0",
        ),
    ],
)  # fmt: skip
def test_malformed_makers_are_named(make, argument, got, expected):
    with pytest.raises(InvalidInput) as caught:
        make()
    error = caught.value
    assert argument in error.argument
    assert got in str(error.got)
    assert expected in error.expected


def test_float_mask_names_bias():
    with pytest.raises(InvalidInput, match="bias="):
        from_tensor(torch.zeros(2, 2))


IDS = torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("mask", "extent", "argument", "numbers"),
    [
        (documents(IDS), (1, 1, 5, 6), "documents", ("5", "6")),
        (documents(IDS), (1, 1, 4, 4), "documents", ("5", "4")),
        (documents(IDS, IDS[:3]), (1, 1, 5, 4), "documents", ("3", "4")),
        (documents(IDS.expand(2, 5)), (3, 1, 5, 5), "documents", ("2", "3")),
        (padding(IDS[:2]), (3, 1, 5, 5), "padding", ("2", "3")),
        (from_tensor(torch.ones(5, 5).bool()), (1, 1, 5, 6), "mask", ("5", "6")),
        (from_tensor(torch.ones(2, 1, 5, 5).bool()), (3, 1, 5, 5), "mask", ("2", "3")),
        (from_tensor(torch.ones(9, 9).bool()), (1, 1, 5, 5), "mask", ("9", "5")),
        (causal().at(IDS, IDS), (1, 1, 5, 6), "at(k_positions)", ("5", "6")),
        (causal().at(IDS, IDS), (1, 1, 4, 5), "at(q_positions)", ("5", "4")),
        (causal() & ~(prefix(2) | padding(IDS[:2])), (3, 1, 5, 5), "padding", ("2", "3")),
        (causal().compile(1, 2, 3, 4), (1, 2, 3, 5), "mask", ("(1, 2, 3, 4)", "(1, 2, 3, 5)")),
        (
            from_function(Stripes(0, 0, 1, 1, 2, False)).compile(1, 2, 3, 4), (2, 2, 3, 4), "mask",
            ("(1, 2, 3, 4)", "(2, 2, 3, 4)"),
        ),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_named(mask, extent, argument, numbers):
    for use in (mask.materialise, mask.compile):
        with pytest.raises(InvalidInput) as caught:
            use(*extent)
        assert argument in caught.value.argument
        assert all(number in str(caught.value) for number in numbers)


def test_at_names_positions_beyond_its_operand():
    beyond = documents(IDS).at(torch.tensor([0, 5]), torch.tensor([0, 1]))
    with pytest.raises(InvalidInput, match="documents"):
        beyond.compile(1, 1, 2, 2)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 1, 1), (5, 1, 1, 1)])
def test_function_of_a_wrong_shape_is_named(shape):
    mask = from_function(lambda b, h, i, j: torch.ones(shape, dtype=torch.bool))
    with pytest.raises(InvalidInput, match="from_function"):
        mask.compile(2, 1, 7, 8)


@pytest.mark.parametrize("result", [1, torch.ones(7, 8)])
def test_function_of_a_wrong_type_is_named(result):
    mask = from_function(lambda b, h, i, j: result)
    with pytest.raises(InvalidInput, match="from_function"):
        mask.compile(2, 1, 7, 8)


@pytest.mark.parametrize(
    "mask",
    [
        padding(torch.zeros(0, dtype=torch.int64)),
        documents(torch.zeros(0, 4, dtype=torch.int64)),
        from_tensor(torch.zeros(0, 1, 4, 4, dtype=torch.bool)),
        from_function(Stripes(1, 0, 1, 1, 2, False)),
        causal(),
    ],
    ids=["padding", "documents", "tensor", "function", "causal"],
)
def test_empty_batch(mask):
    for each in (mask, ~mask & causal()):
        assert each.materialise(0, 1, 4, 4).shape == (0, 1, 4, 4)
        assert each.compile(0, 1, 4, 4).materialise(0, 1, 4, 4).shape == (0, 1, 4, 4)


# Pictures


def test_show_causal():
    assert causal().show(256, 256) == "▒···\n█▒··\n██▒·\n███▒"


def test_show_aligns_bottom_right():
    assert causal().show(64, 192) == "██▒"
    assert causal().show(128, 64) == "·\n▒"


def test_show_a_ragged_edge():
    """The last tile is full if every score that exists is seen."""
    assert prefix(70).show(65, 70) == "██\n██"
    assert prefix(69).show(65, 70) == "█▒\n█▒"


def test_show_single_scores():
    assert window(1, 0).show(3, 4, tile=1) == "██··\n·██·\n··██"


def test_show_documents():
    mask = documents(torch.tensor([0] * 64 + [1] * 96)) & causal()
    assert mask.show(160, 160) == "▒··\n·▒·\n·█▒"


def test_show_one_head_of_one_batch_element():
    tensor = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    tensor[1, 2, 0, 1] = True
    mask = from_tensor(tensor)
    assert mask.show(2, 2, batch=1, head=2, tile=1) == "·█\n··"
    assert mask.show(2, 2, batch=1, head=2) == "▒"
    assert padding(torch.tensor([1, 2])).show(1, 2, batch=0, tile=1) == "█·"
    assert padding(torch.tensor([1, 2])).show(1, 2, batch=1, tile=1) == "██"


def test_show_nothing():
    assert causal().show(0, 5) == ""
    assert causal().show(2, 0, tile=1) == "\n"


@thorough(60)
@given(cases(), st.sampled_from([1, 7, 64]), st.data())
def test_show_is_the_formula(case, tile, data):
    extent, drawn = case
    if "Compiled" in drawn.mask.text:  # a compiled mask knows one extent
        return
    batch, head = (
        data.draw(st.integers(0, extent.batch - 1)),
        data.draw(st.integers(0, extent.heads - 1)),
    )
    seen = truth(drawn, extent)[batch, head]
    lines = []
    for i in range(0, extent.queries, tile):
        blocks = [seen[i : i + tile, j : j + tile] for j in range(0, extent.keys, tile)]
        lines.append("".join("█" if b.all() else "▒" if b.any() else "·" for b in blocks))
    expected = "\n".join(lines)
    assert drawn.mask.show(*extent[2:], batch=batch, head=head, tile=tile) == expected


def test_show_names_a_mask_that_does_not_fit():
    with pytest.raises(InvalidInput, match="documents"):
        documents(IDS).show(8, 8)


# How a mask travels


def by_copy(mask):
    return copy.deepcopy(mask)


def by_pickle(mask):
    return pickle.loads(pickle.dumps(mask))


def by_oldest_pickle(mask):
    return pickle.loads(pickle.dumps(mask, protocol=2))


def by_file(mask):
    file = io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["mask"]


@pytest.mark.parametrize("travel", [by_copy, copy.copy, by_pickle, by_oldest_pickle, by_file])
def test_masks_survive(travel):
    @thorough(30)
    @given(cases(sizes=(1, 65, 100)))
    def check(case):
        extent, drawn = case
        again = travel(drawn.mask)
        assert type(again) is type(drawn.mask)
        np.testing.assert_array_equal(again.materialise(*extent).numpy(), truth(drawn, extent))
        assert again.interval_bound() == drawn.bound

    check()


def test_a_deep_copy_owns_its_tensors():
    lengths = torch.tensor([2])
    mask = copy.deepcopy(padding(lengths))
    lengths.fill_(0)
    assert mask.materialise(1, 1, 1, 3).tolist() == [[[[True, True, False]]]]


def module_level(b, h, i, j):
    return (i + j) % 3 == 0


TRAVELLERS = {
    "function": from_function(module_level),
    "mixed": (from_function(module_level) & ~padding(torch.tensor([3, 70]))) | prefix(2),
    "compiled function": from_function(lambda b, h, i, j: (i + j) % 3 == 0).compile(2, 1, 70, 80),
    "compiled intervals": (causal() | prefix(9)).compile(2, 1, 70, 80),
    "at": causal().at(torch.arange(70) * 2, torch.arange(80)),
}


class MaskSet(torch.utils.data.Dataset):
    """Hands out masks that came with it into the worker."""

    def __init__(self) -> None:
        self.masks = TRAVELLERS

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, n):
        return list(self.masks)[n], self.masks[list(self.masks)[n]]


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="workers are forked"
)
def test_masks_survive_a_data_loader():
    loader = torch.utils.data.DataLoader(
        MaskSet(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    arrived = dict(iter(loader))
    assert arrived.keys() == TRAVELLERS.keys()
    for name, mask in TRAVELLERS.items():
        assert arrived[name] is not mask
        expected = mask.materialise(2, 1, 70, 80)
        assert torch.equal(arrived[name].materialise(2, 1, 70, 80), expected), name


def test_a_data_set_that_holds_masks_pickles():
    """As a spawned worker gets it."""
    again = pickle.loads(pickle.dumps(MaskSet()))
    for name, mask in TRAVELLERS.items():
        expected = mask.materialise(2, 1, 70, 80)
        assert torch.equal(again.masks[name].materialise(2, 1, 70, 80), expected), name


def test_a_lambda_does_not_pickle_and_says_why():
    mask = causal() & from_function(lambda b, h, i, j: i > j)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)) as caught:
        pickle.dumps(mask)
    message = str(caught.value)
    assert "lambda" in message
    assert "from_function" in message and "module" in message


def test_a_dead_function_is_named():
    mask = from_function(lambda b, h, i, j: i > j)
    text = mask.text
    assert expression.from_text(text, []) is mask
    del mask
    gc.collect()
    with pytest.raises(InvalidInput, match="no longer exists"):
        expression.from_text(text, [])


def test_a_function_lives_until_its_backward_pass():
    q = torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    out = attention(q, q, q, mask=from_function(lambda b, h, i, j: i >= j))
    gc.collect()
    (found,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(attention(q, q, q, causal=True).sum(), q)
    assert max_error(found, expected) <= tolerance(expected, expected)


def test_masks_are_immutable():
    mask = window(1, 2)
    for name in ("left", "text", "leaves"):
        with pytest.raises(AttributeError):
            setattr(mask, name, 5)


def test_compiled_masks_combine():
    extent = (2, 1, 70, 80)
    intervals_form = (causal() | prefix(9)).compile(*extent)
    tiles_form = from_function(module_level).compile(*extent)
    assert isinstance(intervals_form.form, intervals.RowIntervals)
    assert isinstance(tiles_form.form, tiles.TileMap)
    both = ~(intervals_form & tiles_form)
    seen = (causal() | prefix(9)) & from_function(module_level)
    assert torch.equal(both.materialise(*extent), ~seen.materialise(*extent))
    assert torch.equal(both.compile(*extent).materialise(*extent), ~seen.materialise(*extent))


# Calls with a mask, end to end


def plain_attention(q, k, v, seen, scale):
    """Explicit scores; rows that see nothing are 0, with an lse of −inf."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    some = seen.any(-1, keepdim=True)
    s = torch.where(seen, q @ k.mT * scale, torch.where(some, -torch.inf, 0))
    lse = torch.where(some, s.logsumexp(-1, keepdim=True), -torch.inf)
    return torch.where(some, s.softmax(-1) @ v, 0), lse.squeeze(-1)


def with_gradients(outputs, inputs, cotangents):
    grads = torch.autograd.grad(outputs, inputs, cotangents)
    return *(x.detach() for x in outputs), *grads


@thorough(250)
@given(cases(sizes=(1, 3, 64, 65, 100, 130), batches=2), st.data())
def test_attention_with_any_mask(case, data):
    extent, drawn = case
    batch, keys = extent.batch, extent.keys
    heads_kv = data.draw(st.sampled_from([n for n in (1, 2, 3) if extent.heads % n == 0]))
    dim, dim_v = data.draw(st.sampled_from([(1, 1), (4, 4), (3, 5), (8, 2)]))
    scale = data.draw(st.sampled_from([0.5, 1.0, -1.0, 0.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = normal(*extent[:3], dim).requires_grad_()
    k, v = (normal(batch, heads_kv, keys, d).requires_grad_() for d in (dim, dim_v))
    cotangents = normal(*extent[:3], dim_v), normal(*extent[:3])
    seen = torch.tensor(truth(drawn, extent))

    def both(outputs):
        return with_gradients(outputs, (q, k, v), cotangents)

    exact = both(attention(q, k, v, mask=seen, scale=scale, return_lse=True, backend="reference"))
    found = both(attention(q, k, v, mask=drawn.mask, scale=scale, return_lse=True, backend="cpu"))
    plain = both(plain_attention(q, k, v, seen, scale))
    for a, p, e in zip(found, plain, exact, strict=True):
        assert max_error(p, e) <= tolerance(e, e)  # the reference is right, to start with
        assert max_error(a, e) <= tolerance(p, e)


@thorough(150)
@given(packed_cases(), st.integers(0, 2**16))
def test_packed_attention_with_any_mask(case, seed):
    sequences, heads, longest, drawn = case
    starts_q, starts_k = (
        offsets([r for r, _, _ in sequences]),
        offsets([k for _, k, _ in sequences]),
    )
    used = torch.tensor([u for _, _, u in sequences], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    total_q, total_k = int(starts_q[-1]), int(starts_k[-1])
    q, k, v = (
        normal(s, heads, d).requires_grad_() for s, d in ((total_q, 4), (total_k, 4), (total_k, 3))
    )
    cotangents = normal(total_q, heads, 3), normal(heads, total_q)
    seen = torch.tensor(packed_truth(sequences, heads, drawn))
    packed = attention_varlen(
        q, k, v, starts_q, starts_k, seqused_k=used, mask=drawn.mask,
        max_seqlen_q=longest[0], max_seqlen_k=longest[1], return_lse=True, backend="cpu",
    )  # fmt: skip
    dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, lse = attention(*dense, mask=seen, return_lse=True, backend="reference")
    exact = out[0].transpose(0, 1), lse[0]
    found, exact = (with_gradients(x, (q, k, v), cotangents) for x in (packed, exact))
    for a, e in zip(found, exact, strict=True):
        assert max_error(a, e) <= tolerance(e, e)
