"""Random masks for tests, each with its meaning written a second time, in numpy: `Node`."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st

from anyflash import causal, documents, from_function, from_tensor, padding, prefix, window
from anyflash.masks import Mask
from anyflash.masks.index import Extent


def thorough(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=slow,
    )


class Node(NamedTuple):
    """A mask, and independently of it what it means."""

    mask: Mask
    seen: Callable[..., Any]  # (b, h, i, j, Sk − Sq) → bool on numpy index arrays that broadcast
    bound: int | None  # intervals per row by the documented rule
    inverse: int | None  # the same of ~mask: one more, but ~~m is m


def node(mask, seen, bound, inverse="one more"):
    if inverse == "one more":
        inverse = None if bound is None else bound + 1
    return Node(mask, seen, bound, inverse)


class Stripes:
    """For from_function: the same arithmetic on torch and on numpy integers."""

    def __init__(self, b: int, h: int, i: int, j: int, modulus: int, flat: bool) -> None:
        self.factors, self.modulus, self.flat = (b, h, i, j), modulus, flat

    def __call__(self, b, h, i, j):
        terms = zip(self.factors, (b, h, i, j), strict=True)
        total = sum(factor * index for factor, index in terms if factor)
        seen = total % self.modulus != 0
        # "May leave a dimension that it does not depend on at size 1", or leave it out.
        return seen[0, 0] if self.flat and isinstance(seen, torch.Tensor) else seen


@st.composite
def extents(draw, sizes, batches=3, heads=3):
    size = st.sampled_from(sizes)
    batch, head = draw(st.integers(1, batches)), draw(st.integers(1, heads))
    return Extent(batch, head, draw(size), draw(size))


def ids_of(rng, shape, contiguous):
    if not contiguous or not shape[-1]:
        return rng.integers(0, 4, shape)
    flat = np.zeros((int(np.prod(shape[:-1])), shape[-1]), dtype=np.int64)
    for row in flat:
        names = iter(rng.permutation(9))  # each name once: a name that comes back is scattered
        cuts = np.sort(rng.integers(0, len(row) + 1, rng.integers(0, 4)))
        for part in np.split(row, cuts):
            part[:] = next(names)
    return flat.reshape(shape)


def in_runs(ids):
    rows = ids.reshape(-1, ids.shape[-1]).tolist() if ids.size else []
    return all(sum(a != b for a, b in itertools.pairwise(row)) + 1 == len(set(row)) for row in rows)


def draw_documents(draw, extent, rng):
    batch, _, queries, keys = extent
    contiguous = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.int32, torch.int64, torch.uint8]))
    ids_q = ids_of(rng, (batch, queries) if draw(st.booleans()) else (queries,), contiguous)
    own = queries != keys or draw(st.booleans())
    ids_k = ids_q
    if own:
        ids_k = ids_of(rng, (batch, keys) if draw(st.booleans()) else (keys,), contiguous)
    given_k = torch.tensor(ids_k, dtype=dtype) if own else None
    mask = documents(torch.tensor(ids_q, dtype=dtype), given_k)

    def seen(b, h, i, j, offset):
        of_query = ids_q[i] if ids_q.ndim == 1 else ids_q[b, i]
        return of_query == (ids_k[j] if ids_k.ndim == 1 else ids_k[b, j])

    return node(mask, seen, 1 if in_runs(ids_k) else None)


def draw_tensor(draw, extent, rng):
    shape = [size if draw(st.booleans()) else 1 for size in extent]
    values = rng.random(shape) < rng.choice([0.02, 0.5, 0.98])
    if draw(st.booleans()):  # whole tiles that are empty or full
        values[:, :, : shape[2] // 2] = rng.random() < 0.5
    given_values = torch.tensor(values)
    if draw(st.booleans()):
        given_values = given_values.mT.contiguous().mT
    while given_values.ndim and given_values.shape[0] == 1 and draw(st.booleans()):
        given_values = given_values[0]

    def seen(b, h, i, j, offset):
        index = (b, h, i, j)
        places = zip(index, shape, extent, strict=True)
        return values[tuple(x if size == full else 0 * x for x, size, full in places)]

    return node(from_tensor(given_values), seen, None)


def draw_function(draw, extent, rng):
    b, h = (draw(st.sampled_from([0, 0, 1, 3])) for _ in range(2))
    i, j = (draw(st.sampled_from([0, 1, 2])) for _ in range(2))
    if not (b or h or i or j):
        j = 1
    f = Stripes(
        b, h, i, j, draw(st.sampled_from([1, 2, 3, 64])), not (b or h) and draw(st.booleans())
    )
    return node(from_function(f), lambda b, h, i, j, offset: f(b, h, i, j), None)


def draw_padding(draw, extent, rng):
    per_batch = draw(st.booleans())
    lengths = rng.integers(0, extent.keys + 3, extent.batch if per_batch else 1)

    def seen(b, h, i, j, offset):
        return j < (lengths[b] if per_batch else lengths[0])

    return node(padding(torch.tensor(lengths)), seen, 1)


def draw_window(draw, extent, rng):
    reach = st.one_of(st.none(), st.integers(0, 5), st.integers(0, extent.keys + 70))
    left, right = draw(reach), draw(reach)

    def seen(b, h, i, j, offset):
        here = i + offset
        after = True if left is None else j >= here - left
        before = True if right is None else j <= here + right
        return (j == j) & (i == i) & after & before

    return node(window(left, right), seen, 1)


def draw_at(draw, extent, rng, depth):
    """A chunk, a strided shard, or any rows and keys of a square problem of `whole`."""
    whole = draw(st.sampled_from([1, 17, 64, 150]))
    inner = draw(nodes(extent._replace(queries=whole, keys=whole), depth))
    places = []
    for length in (extent.queries, extent.keys):
        kind = draw(st.sampled_from(["chunk", "strided", "any"]))
        step = 1 if kind == "chunk" else 3
        if kind == "any" or (length - 1) * step >= whole:
            place = rng.integers(0, whole, length)
        else:
            place = rng.integers(0, whole - (length - 1) * step) + step * np.arange(length)
        places.append(place.astype(np.int64))
    q, k = places
    strided = torch.tensor(np.repeat(k, 2))[::2]  # a view with a stride
    mask = inner.mask.at(torch.tensor(q), strided)
    increasing = all(a < b for a, b in itertools.pairwise(k.tolist()))

    def seen(b, h, i, j, offset):
        return inner.seen(b, h, q[i], k[j], 0)

    return node(mask, seen, inner.bound if increasing else None)


def draw_compiled(draw, extent, rng, depth):
    inner = draw(nodes(extent, depth))
    few = inner.bound is not None and inner.bound <= 2
    there = extent.keys - extent.queries

    def seen(b, h, i, j, offset):
        return inner.seen(b, h, i, j, there)

    return node(inner.mask.compile(*extent), seen, inner.bound if few else None)


def draw_not(draw, extent, rng, depth):
    inner = draw(nodes(extent, depth))
    seen = lambda *index: ~inner.seen(*index)  # noqa: E731
    return node(~inner.mask, seen, inner.inverse, inner.bound)


def draw_and(draw, extent, rng, depth):
    a, b = draw(nodes(extent, depth)), draw(nodes(extent, depth))
    bound = None if None in (a.bound, b.bound) else a.bound + b.bound - 1
    return node(a.mask & b.mask, lambda *index: a.seen(*index) & b.seen(*index), bound)


def draw_or(draw, extent, rng, depth):
    a, b = draw(nodes(extent, depth)), draw(nodes(extent, depth))
    bound = None if None in (a.bound, b.bound) else a.bound + b.bound
    return node(a.mask | b.mask, lambda *index: a.seen(*index) | b.seen(*index), bound)


def draw_causal(draw, extent, rng):
    return node(causal(), lambda b, h, i, j, offset: j <= i + offset, 1)


def draw_prefix(draw, extent, rng):
    n = draw(st.integers(0, extent.keys + 3))
    return node(prefix(n), lambda b, h, i, j, offset: j < n, 1)


LEAVES = (
    draw_causal, draw_window, draw_prefix, draw_padding, draw_documents, draw_tensor, draw_function,
)  # fmt: skip
INTERVAL_LEAVES = (draw_causal, draw_window, draw_prefix, draw_padding, draw_documents)
OPERATIONS = (draw_not, draw_and, draw_or, draw_and, draw_or, draw_at, draw_compiled)


@st.composite
def nodes(draw, extent, depth=3):
    """A random expression for a problem of this extent."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        leaves = INTERVAL_LEAVES if draw(st.booleans()) else LEAVES
        return draw(st.sampled_from(leaves))(draw, extent, rng)
    return draw(st.sampled_from(OPERATIONS))(draw, extent, rng, depth - 1)


def truth(of: Node, extent: Extent) -> np.ndarray:
    """What the mask means at every score, bool (B, H, Sq, Sk)."""
    index = np.ogrid[tuple(slice(0, size) for size in extent)]
    return np.broadcast_to(of.seen(*index, extent.keys - extent.queries), extent)


SIZES = (0, 1, 2, 5, 63, 64, 65, 100, 127, 128, 129, 200)


@st.composite
def cases(draw, sizes=SIZES, **most):
    extent = draw(extents(sizes, **most))
    drawn = draw(nodes(extent))
    note(f"{extent}: {drawn.mask.text}")
    return extent, drawn


@st.composite
def packed_cases(draw):
    """Sequences (rows, keys, keys in use) and a mask for their largest extent."""
    size = st.sampled_from([0, 1, 3, 64, 70])
    sequence = st.tuples(size, size, st.integers(0, 2))
    sequences = draw(st.lists(sequence, min_size=1, max_size=3))
    sequences = [(rows, keys, max(0, keys - unused)) for rows, keys, unused in sequences]
    heads = draw(st.integers(1, 2))
    longest = max(r for r, _, _ in sequences), max(k for _, k, _ in sequences)
    drawn = draw(nodes(Extent(len(sequences), heads, *longest), depth=2))
    note(f"{sequences}: {drawn.mask.text}")
    return sequences, heads, longest, drawn


def packed_truth(sequences, heads, drawn):
    """bool (1, H, total rows, total keys): each sequence's own mask, nothing across."""
    total_q, total_k = sum(r for r, _, _ in sequences), sum(k for _, k, _ in sequences)
    seen = np.zeros((1, heads, total_q, total_k), dtype=bool)
    row = key = 0
    for n, (rows, keys, used) in enumerate(sequences):
        b, h, i, j = np.ogrid[n : n + 1, :heads, :rows, :used]
        seen[:, :, row : row + rows, key : key + used] = drawn.seen(b, h, i, j, used - rows)
        row, key = row + rows, key + keys
    return seen


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
