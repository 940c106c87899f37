"""What kernels read of a mask: row intervals, tile maps, and the cache that keeps them."""

import gc
import itertools
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyflash import (
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
from anyflash.masks import compiled, intervals, tiles
from anyflash.masks.algebra import Everything
from anyflash.masks.index import Extent, Rows
from anyflash.masks.places import Compiled, Packed
from anyflash.masks.tiles import FULL, PARTIAL, SKIP
from mask_cases import Stripes, cases, offsets, packed_cases, packed_truth, thorough, truth

CPU = torch.device("cpu")


def scores(form):
    """A form as every reader sees it: bool (B, H, Sq, Sk)."""
    return Compiled(type(form).__name__, *form.extent, *form.tensors).materialise(*form.extent)


def padded(seen):
    """Scores to whole tiles, as bool (B, H, Tq, 64, Tk, 64); and which of those scores exist."""
    pads = [(0, 0), (0, 0), *((0, -size % 64) for size in seen.shape[2:])]
    whole, exists = np.pad(seen, pads), np.pad(np.ones_like(seen), pads)
    shape = (*seen.shape[:2], whole.shape[2] // 64, 64, whole.shape[3] // 64, 64)
    return whole.reshape(shape), exists.reshape(shape)


def bits_of(words):
    """int64 (n,) → bool (n, 64), by numpy."""
    return (words.numpy().view(np.uint64)[..., None] >> np.arange(64, dtype=np.uint64)) & 1 == 1


# Tile maps


def check_tiles(form, seen):
    """Every field of a tile map, against the scores themselves."""
    batch, heads, queries, keys = seen.shape
    stored_batch, stored_heads = form.kinds.shape[:2]
    assert stored_batch in (1, batch) and stored_heads in (1, heads)
    assert form.kinds.shape[2:] == form.numbers.shape[2:] == (-(-queries // 64), -(-keys // 64))
    assert form.kinds.dtype == torch.uint8
    assert form.numbers.dtype == torch.int32
    whole, exists = padded(seen)
    some = whole.any((3, 5))
    every = (whole | ~exists).all((3, 5))
    kinds = np.where(every, FULL, np.where(some, PARTIAL, SKIP))
    shape = (batch, heads, *form.kinds.shape[2:])
    np.testing.assert_array_equal(np.broadcast_to(form.kinds.numpy(), shape), kinds)
    np.testing.assert_array_equal(form.numbers.numpy() >= 0, form.kinds.numpy() == PARTIAL)
    check_bits(form, whole)
    check_list(form.query_offsets, form.query_list, form.kinds.numpy())
    check_list(form.key_offsets, form.key_list, form.kinds.numpy().swapaxes(2, 3))
    filled = np.broadcast_to(form.filled.numpy(), (batch, heads, queries))
    np.testing.assert_array_equal(filled, seen.any(-1))
    for rows, columns, by_key in ((128, 64, False), (192, 128, False), (128, 64, True)):
        check_blocks(form, rows, columns, by_key)


def check_blocks(form, rows, columns, by_key):
    """Each block's tiles, and what they are read by."""
    found = form.blocks(rows, columns, by_key)
    assert form.blocks(rows, columns, by_key) is found
    kinds, numbers, bits = form.kinds, form.numbers, form.bits
    if by_key:
        kinds, numbers, bits = kinds.mT, numbers.mT, form.bits_by_key
    assert torch.equal(found.numbers, numbers) and found.numbers.is_contiguous()
    assert torch.equal(found.bits.flatten(1), bits.view(torch.int32))
    assert torch.equal(numbers < 0, kinds != PARTIAL) and torch.equal(numbers == -1, kinds == FULL)
    assert found.columns.dtype == found.counts.dtype == torch.int32
    high, wide = rows // 64, columns // 64
    for b, h in np.ndindex(*kinds.shape[:2]):
        needed = kinds[b, h] != SKIP
        blocks = [x.split(wide, 1) for x in needed.split(high)] if needed.numel() else []
        for n, row in enumerate(blocks):
            expected = [t for t, tile in enumerate(row) if tile.any()][::-1]
            assert found.counts[b, h, n] == len(expected)
            padding = [-1] * (len(row) - len(expected))
            assert found.columns[b, h, n].tolist() == expected + padding


def test_blocks_of_parts_of_a_tile():
    form = tiles.build(
        from_function(lambda b, h, i, j: i != j), Extent(1, 1, 70, 70), torch.device("cpu")
    )
    with pytest.raises(ValueError, match="no multiples of 64"):
        form.blocks(128, 32)


def check_bits(form, whole):
    """Each partial tile's bits, both ways, no tile stored twice and none that nobody has."""
    assert form.bits.dtype == form.bits_by_key.dtype == torch.int64
    by_query, by_key = bits_of(form.bits), bits_of(form.bits_by_key)
    assert by_query.shape[1:] == (64, 64)
    np.testing.assert_array_equal(by_key, by_query.swapaxes(1, 2))
    used = set()
    shape = (*whole.shape[:3], whole.shape[4])
    numbers = np.broadcast_to(form.numbers.numpy(), shape)
    for b, h, q, k in np.argwhere(numbers >= 0):
        number = numbers[b, h, q, k]
        np.testing.assert_array_equal(by_query[number], whole[b, h, q, :, k, :])
        used.add(int(number))
    assert used == set(range(len(form.bits)))
    assert len({tile.tobytes() for tile in form.bits.numpy()}) == len(form.bits)


def check_list(starts, listed, kinds):
    """Exactly the tiles that are not skipped, row by row, in order."""
    assert starts.dtype == listed.dtype == torch.int32
    rows = kinds.reshape(int(np.prod(kinds.shape[:-1])), kinds.shape[-1])
    expected = [np.flatnonzero(row != SKIP).tolist() for row in rows]
    starts = starts.tolist()
    assert len(starts) == len(rows) + 1
    assert starts[0] == 0 and starts[-1] == len(listed)
    found = [listed[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert found == expected


@thorough(300)
@given(cases())
def test_tile_map_is_the_formula(case):
    extent, drawn = case
    form = tiles.build(drawn.mask, extent, CPU)
    seen = truth(drawn, extent)
    check_tiles(form, seen)
    np.testing.assert_array_equal(scores(form).numpy(), seen)


@thorough(60)
@given(cases(), st.sampled_from([1, 64 * 64, 64 * 64 * 3, 1 << 15]))
def test_tile_map_does_not_depend_on_how_much_is_evaluated_at_a_time(case, evaluate):
    extent, drawn = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "EVALUATE", evaluate)
        form = tiles.build(drawn.mask, extent, CPU)
    check_tiles(form, truth(drawn, extent))


LENGTHS = (0, 1, 63, 64, 65, 127, 128, 200)


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", LENGTHS)
def test_edges(queries, keys):
    """Lengths around tiles: everything, nothing, and all but the very last score."""
    extent = Extent(1, 1, queries, keys)
    shape = (1, 1, queries, keys)
    last = np.ones(shape, dtype=bool)
    last[:, :, -1:, -1:] = False
    for seen in (np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool), last, ~last):
        form = tiles.build(from_tensor(torch.tensor(seen)), extent, CPU)
        check_tiles(form, seen)
        np.testing.assert_array_equal(scores(form).numpy(), seen)
        if queries and keys and seen.all():
            assert (form.kinds == FULL).all() and not len(form.bits)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (causal(), (1, 1)),
        (padding(torch.tensor([9, 70])), (2, 1)),
        (from_tensor(torch.rand(1, 3, 130, 130) < 0.5), (1, 3)),
        (from_function(Stripes(0, 1, 1, 1, 3, False)), (1, 3)),
        (from_function(Stripes(1, 0, 1, 1, 3, False)) & causal(), (2, 1)),
        (from_function(Stripes(1, 1, 1, 1, 3, False)), (2, 3)),
    ],
)
def test_what_does_not_vary_is_stored_once(mask, shape):
    form = tiles.build(mask, Extent(2, 3, 130, 130), CPU)
    assert form.kinds.shape[:2] == form.filled.shape[:2] == shape


def test_equal_tiles_are_stored_once():
    """A period of 64 rows and keys: one tile, or four with ragged edges."""
    periodic = from_function(Stripes(0, 0, 1, 1, 64, False))
    form = tiles.build(periodic, Extent(2, 3, 1024, 2048), CPU)
    assert (form.kinds == PARTIAL).all() and form.kinds.shape == (1, 1, 16, 32)
    assert len(form.bits) == 1
    form = tiles.build(periodic, Extent(1, 1, 1000, 2000), CPU)
    assert len(form.bits) == 4
    form = tiles.build(causal(), Extent(1, 1, 4096, 4096), CPU)
    assert len(form.bits) == 1


def test_equal_tiles_are_found_across_steps(monkeypatch):
    monkeypatch.setattr(tiles, "EVALUATE", 1)
    form = tiles.build(from_function(Stripes(0, 0, 1, 1, 64, False)), Extent(1, 1, 512, 512), CPU)
    assert len(form.bits) == 1


@pytest.fixture
def sorts(monkeypatch):
    """How many times whole tiles were sorted, the slow way."""
    calls = []
    real = torch.unique

    def spy(*arguments, **options):
        if options.get("dim") is not None:
            calls.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "unique", spy)
    return calls


def test_tiles_that_share_a_hash_stay_apart(monkeypatch):
    """Should two different tiles ever hash alike, they are sorted instead."""
    seen = torch.rand(256, 256) < 0.5
    seen[:64, :64] = seen[64:128, 64:128]  # one that is there twice
    real = torch.unique
    sorted_whole = []

    def unique(values, **options):
        if options.get("dim") is not None:
            sorted_whole.append(len(values))
            return real(values, **options)
        return values[:1], torch.zeros(len(values), dtype=torch.int64)  # all alike

    monkeypatch.setattr(torch, "unique", unique)
    form = tiles.build(from_tensor(seen), Extent(1, 1, 256, 256), CPU)
    assert sorted_whole
    assert len(form.bits) == 15
    check_tiles(form, seen[None, None].numpy())


def test_tiles_that_differ_hash_apart(sorts):
    """Each a tile that a mask easily has beside another: complements, shifts, single scores."""
    causal_tile = torch.ones(64, 64).tril().bool()
    some = [causal_tile, torch.rand(64, 64) < 0.5, torch.zeros(64, 64).bool()]
    some[2][0, 0] = True
    family = [*some, *(~x for x in some), *(x.mT for x in some), *(x.roll(1, 0) for x in some)]
    family += [x.roll(1, 1) for x in some] + [x.roll(32, 1) for x in some]
    single = torch.eye(64 * 64, dtype=torch.bool)[::13].view(-1, 64, 64)
    words = tiles.pack(torch.cat([torch.stack(family), single])).squeeze(-1)
    distinct, number = tiles._distinct(words)
    assert len(distinct) == len({word.numpy().tobytes() for word in words})
    assert torch.equal(distinct[number], words)
    assert not sorts


def test_window_edges_hash_apart(sorts):
    """The two edges of a window of 128 keys are complements of each other, score for score."""
    form = tiles.build(window(127, 0), Extent(1, 1, 512, 512), CPU)
    assert len(form.bits) == 2
    assert not sorts


@thorough(50)
@given(
    st.lists(st.integers(0, 3), max_size=3), st.integers(0, 3), st.integers(0, 2**16), st.booleans()
)
def test_pack_and_unpack(shape, words, seed, transposed):
    rng = np.random.default_rng(seed)
    seen = torch.tensor(rng.random((*shape, 64 * words)) < 0.5)
    if transposed and seen.ndim > 1:
        seen = seen.mT.contiguous().mT
    packed = tiles.pack(seen)
    assert packed.dtype == torch.int64 and packed.shape == (*shape, words)
    expected = bits_of(packed).reshape(seen.shape)
    np.testing.assert_array_equal(expected, seen.numpy())
    unpacked = tiles.unpack(packed)
    assert unpacked.dtype == torch.bool and torch.equal(unpacked, seen)
    assert torch.equal(tiles.pack(unpacked), packed)


def test_pack_puts_key_j_at_bit_j():
    for j in (0, 1, 7, 8, 31, 62, 63):
        seen = torch.zeros(64, dtype=torch.bool)
        seen[j] = True
        assert int(tiles.pack(seen)) & (2**64 - 1) == 1 << j


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 3)])
def test_building_never_holds_the_whole_matrix(batch, heads):
    """S = 16384: a function sees a small part at a time, and the result is small too."""
    length = 16384 if batch == 1 else 4096
    largest = 0

    def periodic(b, h, i, j):
        nonlocal largest
        seen = (i - 64 * (b + h)) & 127 == j & 127
        largest = max(largest, seen.numel())
        return seen

    mask = from_function(periodic)
    form = tiles.build(mask, Extent(batch, heads, length, length), CPU)
    assert form.kinds.shape[:2] == (batch, heads)
    assert 0 < largest <= tiles.EVALUATE
    assert length * length * batch * heads >= 4 * tiles.EVALUATE
    assert len(form.bits) == 1
    held = sum(x.numel() * x.element_size() for x in form.tensors)
    assert held <= length * length * batch * heads / 200


def test_building_many_heads_stays_within_its_bound(monkeypatch):
    """However many heads: a tile row of one key tile is still cut to what may be evaluated."""
    monkeypatch.setattr(tiles, "EVALUATE", 1 << 16)
    sizes = []

    def per_head(b, h, i, j):
        seen = (i + j + h) % 3 == 0
        sizes.append(seen.numel())
        return seen

    tiles.build(from_function(per_head), Extent(1, 40, 128, 128), CPU)
    assert max(sizes) <= tiles.EVALUATE


# Row intervals


def decoded(lo, hi, keys):
    """(B, Sq, n) bounds → bool (B, 1, Sq, Sk)."""
    j = np.arange(keys)
    return ((j >= lo[..., None]) & (j < hi[..., None])).any(-2)[:, None]


def check_lists_of_intervals(lo, hi, keys):
    """Sorted, disjoint, inside [0, keys); unused ones are empty, last, and stand at `keys`."""
    assert ((lo >= 0) & (hi <= keys) & (lo <= hi)).all()
    empty = lo == hi
    assert (lo[empty] == keys).all()
    assert (hi[..., :-1] <= lo[..., 1:]).all()


@thorough(300)
@given(cases())
def test_intervals_are_the_formula(case):
    """Of any number per row; never more than the bound."""
    extent, drawn = case
    if drawn.bound is None:
        return
    batch, row = torch.arange(extent.batch)[:, None], torch.arange(extent.queries)[None]
    rows = Rows(batch, row, extent.keys - extent.queries, extent.keys)
    lo, hi = (x.numpy() for x in drawn.mask.intervals(rows))
    assert lo.shape == hi.shape and lo.shape[2] == drawn.bound
    seen = truth(drawn, extent)
    shape = (extent.batch, extent.queries, drawn.bound)
    lo, hi = np.broadcast_to(lo, shape), np.broadcast_to(hi, shape)
    check_lists_of_intervals(lo, hi, extent.keys)
    np.testing.assert_array_equal(np.broadcast_to(decoded(lo, hi, extent.keys), extent), seen)


def hull(touched):
    """bool (B, n, m) → first and one past the last True of each row; 0, 0 where there is none."""
    found = np.zeros((*touched.shape[:2], 2), dtype=np.int64)
    for b, n in np.ndindex(touched.shape[:2]):
        places = np.flatnonzero(touched[b, n])
        found[b, n] = (places[0], places[-1] + 1) if len(places) else (0, 0)
    return found


def check_intervals(form, seen):
    batch, _, queries, keys = seen.shape
    assert {x.dtype for x in form.tensors} == {torch.int32}
    stored = form.bounds.shape[0]
    assert stored in (1, batch)
    slots = form.bounds.shape[2]
    assert form.bounds.shape == (stored, queries, slots, 2) and 1 <= slots <= 2
    bounds = np.broadcast_to(form.bounds.numpy(), (batch, queries, slots, 2))
    check_lists_of_intervals(bounds[..., 0], bounds[..., 1], keys)
    found = np.broadcast_to(decoded(bounds[..., 0], bounds[..., 1], keys), seen.shape)
    np.testing.assert_array_equal(found, seen)
    touched = padded(seen)[0].any((1, 3, 5))  # (B, Tq, Tk)
    tiles_q, tiles_k = touched.shape[1:]
    key_tiles = np.broadcast_to(form.key_tiles.numpy(), (batch, tiles_q, 2))
    query_tiles = np.broadcast_to(form.query_tiles.numpy(), (batch, tiles_k, 2))
    # From the first to the last tile that some row sees, and nothing beyond.
    np.testing.assert_array_equal(key_tiles, hull(touched))
    # The other way a range may be wider, where rows of one query tile lie on both sides of a key
    # tile that none of them sees; it is never narrower.
    needed = hull(touched.swapaxes(1, 2))
    some = needed[..., 1] > 0
    assert (query_tiles[..., 0] <= query_tiles[..., 1]).all()
    assert (query_tiles[some][:, 0] <= needed[some][:, 0]).all()
    assert (query_tiles[some][:, 1] >= needed[some][:, 1]).all()
    if slots == 1:
        spans, tile = hull(touched), np.arange(tiles_k)
        spanned = (tile >= spans[..., :1]) & (tile < spans[..., 1:])
        np.testing.assert_array_equal(query_tiles, hull(spanned.swapaxes(1, 2)))


@thorough(300)
@given(cases())
def test_row_intervals_are_the_formula(case):
    extent, drawn = case
    form = compiled.compile_mask(drawn.mask, extent, CPU)
    few = drawn.bound is not None and drawn.bound <= intervals.MOST
    assert type(form) is (intervals.RowIntervals if few else tiles.TileMap)
    seen = truth(drawn, extent)
    if few:
        check_intervals(form, seen)
    np.testing.assert_array_equal(scores(form).numpy(), seen)


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", LENGTHS)
def test_ranges_are_tight(queries, keys):
    """In both directions for the masks whose rows move along with the queries."""
    extent = Extent(2, 1, queries, keys)
    runs = [torch.arange(n) // 50 for n in (queries, keys)]
    masks = (
        causal(), window(), window(70, 3), window(0, 0), prefix(70), documents(*runs),
        documents(*runs) & causal(), padding(torch.tensor([65, 0])) & causal(),
    )  # fmt: skip
    for mask in masks:
        form = compiled.compile_mask(mask, extent, CPU)
        seen = mask.materialise(*extent).numpy()
        check_intervals(form, seen)
        touched = padded(seen)[0].any((1, 3, 5))
        shape = (2, touched.shape[2], 2)
        found = np.broadcast_to(form.query_tiles.numpy(), shape)
        np.testing.assert_array_equal(found, hull(touched.swapaxes(1, 2)))


def test_intervals_take_little_memory():
    """O(S), and once for all batch elements and heads where they do not differ."""
    length = 1 << 15
    form = compiled.compile_mask(causal() | prefix(100), Extent(8, 16, length, length), CPU)
    held = sum(x.numel() * x.element_size() for x in form.tensors)
    assert held <= length * 16 + 2 * (length // 64) * 8


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (causal(), "RowIntervals"),
        (window(5, 5), "RowIntervals"),
        (causal() | prefix(3), "RowIntervals"),
        (window(4, 0) | (causal() & prefix(2)), "RowIntervals"),  # attention sinks
        (~causal(), "RowIntervals"),
        (documents(torch.arange(8) // 3) & causal(), "RowIntervals"),
        (documents(torch.arange(8) % 2), "TileMap"),
        (~window(1, 1) & ~prefix(1), "TileMap"),  # a bound of three
        (from_tensor(torch.ones(8, 8).bool()), "TileMap"),
        (from_function(Stripes(0, 0, 1, 1, 2, False)), "TileMap"),
    ],
)
def test_which_form(mask, form):
    extent = Extent(1, 1, 8, 8)
    assert type(compiled.compile_mask(mask, extent, CPU)).__name__ == form
    assert type(mask.compile(*extent).form).__name__ == form


# Packed sequences


@thorough(150)
@given(packed_cases())
def test_packed_mask_is_the_formula(case):
    """The mask of a packed call, over all packed rows and keys, and both of its forms."""
    sequences, heads, _, drawn = case
    starts_q, starts_k = (
        offsets([r for r, _, _ in sequences]),
        offsets([k for _, k, _ in sequences]),
    )
    used = torch.tensor([u for _, _, u in sequences], dtype=torch.int32)
    mask = Packed(drawn.mask, starts_q, starts_k, used)
    extent = Extent(1, heads, int(starts_q[-1]), int(starts_k[-1]))
    expected = packed_truth(sequences, heads, drawn)
    np.testing.assert_array_equal(mask.materialise(*extent).numpy(), expected)
    assert mask.interval_bound() == drawn.bound
    np.testing.assert_array_equal(scores(tiles.build(mask, extent, CPU)).numpy(), expected)
    if drawn.bound is not None and drawn.bound <= intervals.MOST:
        np.testing.assert_array_equal(scores(intervals.build(mask, extent, CPU)).numpy(), expected)


def test_packed_without_a_mask():
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    mask = Packed(Everything(), starts, starts, starts[1:] - starts[:-1])
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
    assert torch.equal(mask.materialise(1, 1, 5, 5)[0, 0], expected)
    assert mask.interval_bound() == 1


# When a mask is compiled again


@pytest.fixture
def builds(monkeypatch):
    """The texts of the masks that were compiled, with an empty cache."""
    seen = []
    real = compiled.compile_mask

    def spy(mask, extent, device):
        seen.append(mask.text)
        return real(mask, extent, device)

    monkeypatch.setattr(compiled, "compile_mask", spy)
    monkeypatch.setattr(compiled, "_cache", type(compiled._cache)())
    return seen


STRIPES = Stripes(0, 0, 1, 1, 3, False)
EXTENT = Extent(1, 1, 8, 8)


def cached(mask, extent=EXTENT):
    return compiled.compiled(mask, extent, CPU)


def test_cache_hits_for_the_same_tensor(builds):
    tensor = torch.rand(8, 8) < 0.5
    first = cached(from_tensor(tensor))
    assert cached(from_tensor(tensor)) is first
    assert cached(from_tensor(tensor[:, :])) is first  # another view of the same place
    assert len(builds) == 1


def test_cache_hits_for_equal_expressions(builds):
    assert cached(causal() | prefix(3)) is cached(causal() | prefix(3))
    assert cached(causal() | prefix(3)) is not cached(causal() | prefix(4))
    assert cached(causal() | prefix(3)) is not cached(causal() & prefix(3))
    assert len(builds) == 3


def test_cache_hits_for_the_same_function_only(builds):
    mask = from_function(STRIPES)
    assert cached(mask) is cached(mask)
    assert cached(from_function(STRIPES)) is not cached(mask)  # `f` may have state
    assert len(builds) == 2


def test_cache_tells_sizes_apart(builds):
    lengths = torch.tensor([3])
    for extent in (EXTENT, EXTENT._replace(keys=9), EXTENT._replace(queries=7)):
        form = cached(padding(lengths), extent)
        assert form.extent == extent
    assert len(builds) == 3


def test_cache_tells_views_of_one_storage_apart(builds):
    tensor = torch.rand(2, 9, 9) < 0.5
    views = [tensor[0, :8, :8], tensor[1, :8, :8], tensor[0, 1:, 1:], tensor[0, :8, :8].mT]
    for view in views:
        assert torch.equal(scores(cached(from_tensor(view)))[0, 0], view)
    assert len(builds) == len(views)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    as_wider = lengths.view(torch.int64)
    assert cached(padding(lengths[:1])) is not cached(padding(as_wider))


@pytest.mark.parametrize("through_view", [False, True])
def test_cache_misses_after_a_change_in_place(builds, through_view):
    tensor = torch.rand(8, 8) < 0.5
    cached(from_tensor(tensor))
    (tensor[2:3] if through_view else tensor).logical_not_()
    assert torch.equal(scores(cached(from_tensor(tensor)))[0, 0], tensor)
    assert len(builds) == 2


def test_cache_is_not_stale_where_memory_is_used_again(builds):
    memory = bytearray(64)
    for n in range(64):
        memory[:] = bytes(64)
        memory[n] = 1
        tensor = torch.frombuffer(memory, dtype=torch.bool).view(8, 8)  # a new storage, version 0
        assert tensor.data_ptr() == torch.frombuffer(memory, dtype=torch.bool).data_ptr()
        assert int(scores(cached(from_tensor(tensor))).flatten().nonzero()) == n
        del tensor
    assert len(builds) == 64


def test_cache_entries_go_with_their_tensors(builds):
    alive = torch.rand(8, 8) < 0.5
    dead = [torch.rand(8, 8) < 0.5 for _ in range(5)]
    for tensor in (alive, *dead):
        cached(from_tensor(tensor) & ~from_tensor(alive))
    assert len(compiled._cache) == 6
    dead.clear()
    del tensor
    gc.collect()
    cached(causal())  # the next mask to come clears what has died
    assert len(compiled._cache) == 2
    assert cached(from_tensor(alive) & ~from_tensor(alive)) is not None
    assert len(builds) == 7


def test_cache_does_not_keep_tensors_alive(builds):
    freed = threading.Event()

    class Owner(bytearray):
        def __del__(self):
            freed.set()

    tensor = torch.frombuffer(Owner(b"\1\0" * 32), dtype=torch.bool).view(8, 8)
    cached(from_tensor(tensor))
    del tensor
    gc.collect()
    assert freed.is_set()


def test_cache_is_bounded_and_forgets_the_oldest(builds):
    tensors = [torch.tensor([n]) for n in range(compiled.KEEP + 10)]
    first = cached(padding(tensors[0]))
    for tensor in tensors:
        cached(padding(tensor))
        assert cached(padding(tensors[0])) is first  # in use, so that it stays
        assert len(compiled._cache) <= compiled.KEEP
    before = len(builds)
    cached(padding(tensors[-1]))
    assert len(builds) == before
    cached(padding(tensors[1]))
    assert len(builds) == before + 1


def test_cache_takes_inference_tensors(builds):
    """They have no version counter, so nothing may be kept for them."""
    with torch.inference_mode():
        tensor = torch.rand(8, 8) < 0.5
        assert torch.equal(scores(cached(from_tensor(tensor)))[0, 0], tensor)
        tensor.logical_not_()
        assert torch.equal(scores(cached(from_tensor(tensor)))[0, 0], tensor)
        q = torch.randn(1, 1, 8, 4)
        assert attention(q, q, q, mask=tensor).shape == q.shape
    assert not compiled._cache


def test_cache_takes_what_is_compiled_already(builds):
    mask = (causal() | prefix(3)).compile(*EXTENT)
    builds.clear()
    assert cached(mask) is mask.form
    assert not builds


def test_cache_is_thread_safe(builds):
    tensors = [torch.rand(8, 8) < 0.5 for _ in range(compiled.KEEP + 20)]
    wrong = []
    start = threading.Barrier(8)

    def work(seed):
        start.wait()
        rng = np.random.default_rng(seed)
        for n in rng.integers(0, len(tensors), 150):
            passing = tensors[n].clone() if n % 3 == 0 else tensors[n]
            form = cached(from_tensor(passing))
            if not torch.equal(scores(form)[0, 0], tensors[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not wrong
    assert len(compiled._cache) <= compiled.KEEP


def test_calls_use_the_cache(builds):
    q = torch.randn(2, 4, 8, 4, requires_grad=True)
    k = torch.randn(2, 2, 8, 4)
    mask = torch.rand(8, 8) < 0.5
    for _ in range(3):  # two rounds of heads, forward and backward, three times
        attention(q, k, k, mask=mask).sum().backward()
    assert len(builds) == 1


def test_packed_calls_use_the_cache(builds):
    q = torch.randn(8, 4, 4, requires_grad=True)
    k = torch.randn(8, 2, 4)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    for _ in range(3):
        attention_varlen(q, k, k, starts, starts, causal=True).sum().backward()
    assert len(builds) == 1
