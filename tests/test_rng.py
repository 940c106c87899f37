"""rng: published vectors, Triton's own Philox, big integers written out, and statistics."""

import importlib.util
import itertools
import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anyflash import rng

SEED = 0x0123456789ABCDEF

# Random123, kat_vectors, philox4x32 with 10 rounds: (counter, key, result).
KNOWN_ANSWERS = {
    "zeros": (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def philox_slow(counter, key):
    """The paper's definition in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 % 2**32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def keep_slow(seed, bh, i, j, dropout, *, swap_bits=False):
    counter = (bh, (i // 16) * 8 + i % 8, j // 2, 0)
    row_bit, key_bit = (i // 8) % 2, j % 2
    if swap_bits:
        row_bit, key_bit = key_bit, row_bit
    words = philox_slow(counter, (seed % 2**32, seed >> 32))
    return words[2 * row_bit + key_bit] >= math.floor(dropout * 2**32)


def mask_slow(seed, heads, rows, keys, dropout, **options):
    return torch.tensor(
        [
            [[keep_slow(seed, h, i, j, dropout, **options) for j in keys] for i in rows]
            for h in heads
        ]
    )


def grid(seed=SEED, heads=3, rows=40, keys=37, dropout=0.5):
    arguments = torch.arange(heads), torch.arange(rows), torch.arange(keys), dropout
    return rng.keep_mask(torch.tensor([seed]), *arguments)


def agreement(a, b):
    """How far from one half the share of equal entries of two masks at dropout 0.5 is, in sigma."""
    return abs((a == b).double().mean().item() - 0.5) / (0.5 / math.sqrt(a.numel()))


# Philox itself


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_known_answers(name, as_tensor):
    counter, key, expected = KNOWN_ANSWERS[name]
    if as_tensor:
        counter, key = map(torch.tensor, counter), map(torch.tensor, key)
    words = rng.philox_4x32(tuple(counter), tuple(key))
    assert tuple(int(word) for word in words) == expected
    assert all(word.dtype == torch.int64 for word in words)
    assert philox_slow(*KNOWN_ANSWERS[name][:2]) == expected


def test_random_counters_match_big_integers():
    source = random.Random(0)
    # The edges of the signed and unsigned ranges, then anything.
    edges = [0, 1, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    inputs = [[source.choice(edges) for _ in range(6)] for _ in range(200)]
    inputs += [[source.randrange(2**32) for _ in range(6)] for _ in range(200)]
    columns = torch.tensor(inputs).unbind(1)
    words = torch.stack(rng.philox_4x32(columns[:4], columns[4:]), dim=1)
    assert words.tolist() == [list(philox_slow(row[:4], row[4:])) for row in inputs]


def test_counters_broadcast_and_take_any_integer_type():
    parts = [torch.arange(5), torch.arange(4)[:, None], torch.arange(3)[:, None, None], 7]
    full = [part.contiguous() for part in torch.broadcast_tensors(*map(torch.as_tensor, parts))]
    expected = rng.philox_4x32(tuple(full), (11, 13))
    narrow = [torch.as_tensor(part).to(torch.int32) for part in parts]
    for counter in (parts, narrow):
        words = rng.philox_4x32(tuple(counter), (torch.tensor(11), torch.tensor(13)))
        assert all(word.shape == (3, 4, 5) and word.dtype == torch.int64 for word in words)
        assert all(map(torch.equal, words, expected))


def test_arguments_are_taken_modulo_2_32_and_left_alone():
    negative = torch.tensor([-1, -(2**31)], dtype=torch.int32)
    words = rng.philox_4x32((negative, -1, 2**32, 0), (-1, 2**40 + 5))
    positive = torch.tensor([2**32 - 1, 2**31])
    expected = rng.philox_4x32((positive, 2**32 - 1, 0, 0), (2**32 - 1, 5))
    assert all(map(torch.equal, words, expected))
    assert negative.tolist() == [-1, -(2**31)]
    assert positive.tolist() == [2**32 - 1, 2**31]


@pytest.mark.parametrize("context", [FakeTensorMode, lambda: torch.device("meta")])
def test_shapes_are_static(context):
    with context():
        seed, rows, keys = rng.draw_seed("cpu"), torch.arange(6), torch.arange(7)
        heads = torch.arange(2)[:, None, None]
        if context is not FakeTensorMode:
            seed = seed.to("meta")
        words = rng.philox_4x32((keys, rows[:, None], heads, 0), (seed, seed))
        kept = rng.keep_elements(seed, heads, rows[:, None], keys, 0.1)
    assert all(word.shape == (2, 6, 7) for word in words)
    assert kept.shape == (2, 6, 7)
    assert kept.dtype == torch.bool


TRITON_PROGRAM = """
import json, sys
import torch, triton
import triton.language as tl

@triton.jit
def offsets(seed, start, out):
    at = tl.arange(0, 64)
    w0, w1, w2, w3 = tl.randint4x(tl.load(seed), start + at)
    tl.store(out + at, w0.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 64 + at, w1.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 128 + at, w2.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 192 + at, w3.to(tl.uint32, bitcast=True).to(tl.int64))

@triton.jit
def quads(seed, row_start, key_start, bh, threshold, out, ROWS: tl.constexpr, KEYS: tl.constexpr):
    # Four words for each pair of pairs; each lands on the score it decides.
    r, c = tl.arange(0, ROWS // 2)[:, None], tl.arange(0, KEYS // 2)[None, :]
    key_pair, row_pair = key_start // 2 + c, row_start // 2 + r
    w0, w1, w2, w3 = tl.philox(tl.load(seed), bh, row_pair, key_pair, 0)
    at = out + ((r // 8) * 16 + r % 8) * KEYS + 2 * c
    limit = threshold.to(tl.uint32)
    tl.store(at, w0.to(tl.uint32, bitcast=True) >= limit)
    tl.store(at + 1, w1.to(tl.uint32, bitcast=True) >= limit)
    tl.store(at + 8 * KEYS, w2.to(tl.uint32, bitcast=True) >= limit)
    tl.store(at + 8 * KEYS + 1, w3.to(tl.uint32, bitcast=True) >= limit)

cases, answers = json.load(sys.stdin), []
for seed, start, row_start, key_start, bh, threshold in cases:
    seed = torch.tensor([seed])
    words = torch.zeros(4, 64, dtype=torch.int64)
    offsets[(1,)](seed, start, words)
    kept = torch.zeros(32, 16, dtype=torch.int8)
    quads[(1,)](seed, row_start, key_start, bh, threshold, kept, ROWS=32, KEYS=16)
    answers.append((words.tolist(), kept.tolist()))
json.dump(answers, sys.stdout)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_bits_are_those_of_triton(tmp_path):
    # (seed, first offset, first row, first key, bh, threshold); offsets above 2^32 are 64-bit.
    cases = [
        (0, 0, 0, 0, 0, rng.keep_threshold(0.5)),
        (SEED, 2**31 - 32, 4096, 512, 77, rng.keep_threshold(0.1)),
        (2**63 - 1, 2**40 + 3, 2**20, 2**24, 2**16 + 1, rng.keep_threshold(0.9)),
    ]
    program = tmp_path / "program.py"  # Triton reads a kernel's source from its file
    program.write_text(TRITON_PROGRAM)
    # A process of its own: the interpreter is a switch for a whole process.
    answer = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(cases),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    for case, (words, kept) in zip(cases, json.loads(answer.stdout), strict=True):
        seed, start, row_start, key_start, bh, threshold = case
        offset = start + torch.arange(64)
        ours = rng.philox_4x32((offset, offset >> 32, 0, 0), (seed, seed >> 32))
        assert torch.equal(torch.stack(ours), torch.tensor(words))
        ours = rng.keep_mask(
            torch.tensor([seed]),
            torch.tensor(bh),
            row_start + torch.arange(32),
            key_start + torch.arange(16),
            threshold / 2**32,
        )
        assert torch.equal(ours, torch.tensor(kept) != 0)


# The layout


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_keep_mask_matches_big_integers(dropout):
    heads = [0, 5]
    rows = [0, 1, 7, 8, 9, 15, 16, 23, 24, 31, 1000, 2**20 + 11]
    keys = [0, 1, 2, 3, 63, 64, 999, 2**20 + 1, 2**31]
    tensors = [torch.tensor(values) for values in (heads, rows, keys)]
    kept = rng.keep_mask(torch.tensor([SEED]), *tensors, dropout)
    assert torch.equal(kept, mask_slow(SEED, heads, rows, keys, dropout))


def test_swapped_bits_are_another_mask():
    heads, rows, keys = range(2), range(16), range(8)
    kept = grid(heads=2, rows=16, keys=8)
    assert torch.equal(kept, mask_slow(SEED, heads, rows, keys, 0.5))
    assert not torch.equal(kept, mask_slow(SEED, heads, rows, keys, 0.5, swap_bits=True))


def test_one_draw_serves_two_rows_and_two_keys():
    seed, head = torch.tensor([SEED]), torch.tensor(3)
    words = rng.philox_4x32((3, 9, 4, 0), (SEED, SEED >> 32))
    for word, (i, j) in zip(words, itertools.product((17, 25), (8, 9)), strict=True):
        # The largest dropout that still keeps it is the word itself; one more drops it.
        at = head, torch.tensor([i]), torch.tensor([j])
        assert rng.keep_mask(seed, *at, int(word) / 2**32).item()
        assert not rng.keep_mask(seed, *at, (int(word) + 1) / 2**32).item()


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
def test_keep_mask_is_keep_elements_on_a_grid(shape):
    generator = torch.Generator().manual_seed(1)
    heads = torch.randint(0, 100, shape, generator=generator)
    rows = torch.randint(0, 3000, (29,), generator=generator)
    keys = torch.randint(0, 3000, (62,), generator=generator)[::2]
    kept = rng.keep_mask(torch.tensor(SEED), heads, rows, keys, 0.3)
    assert kept.shape == (*shape, 29, 31)
    assert kept.dtype == torch.bool
    elements = rng.keep_elements(
        torch.tensor([SEED]), heads[..., None, None], rows[:, None], keys, 0.3
    )
    assert torch.equal(kept, elements)


def test_narrow_indices_and_a_zero_dimensional_seed():
    heads, rows, keys = (torch.arange(n, dtype=torch.int32) for n in (3, 40, 37))
    for function in (
        lambda: rng.keep_mask(torch.tensor(SEED), heads, rows, keys, 0.5),
        lambda: rng.keep_elements(
            torch.tensor(SEED), heads[:, None, None], rows[:, None], keys, 0.5
        ),
    ):
        assert torch.equal(function(), grid())


def test_packed_sequences_see_what_they_see_alone():
    seed, lengths = torch.tensor([SEED]), [3, 17, 5]
    row = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    heads = torch.arange(2)
    packed = rng.keep_elements(
        seed, (sequence * 2 + heads[:, None])[..., None], row[:, None], torch.arange(20), 0.4
    )
    for b, part in enumerate(packed.split(lengths, dim=1)):
        alone = rng.keep_mask(seed, b * 2 + heads, torch.arange(lengths[b]), torch.arange(20), 0.4)
        assert torch.equal(part, alone)


def test_any_part_is_a_slice_of_the_whole():
    whole = grid(heads=4, rows=70, keys=90)
    seed = torch.tensor([SEED])
    ranges = [
        (torch.arange(70), torch.arange(90)),
        (torch.arange(5, 6), torch.arange(89, 90)),
        (torch.arange(9, 53), torch.arange(3, 77)),
        (torch.arange(69, -1, -1), torch.arange(90).flip(0)),
        (torch.tensor([60, 2, 2, 10, 33]), torch.tensor([89, 1, 0, 1, 44, 45])),
        (torch.arange(0, 70, 7), torch.arange(1, 90, 13)),
    ]
    for rows, keys in ranges:
        part = rng.keep_mask(seed, torch.tensor([3, 1]), rows, keys, 0.5)
        assert torch.equal(part, whole[[3, 1]][:, rows][:, :, keys])


@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_empty(sizes):
    assert grid(heads=sizes[0], rows=sizes[1], keys=sizes[2]).shape == sizes


# Statistics


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_keep_rate(dropout):
    kept = grid(heads=4, rows=256, keys=256, dropout=dropout)
    sigma = math.sqrt(dropout * (1 - dropout) / kept.numel())
    assert abs(kept.double().mean().item() - (1 - dropout)) < 4 * sigma
    # The rate holds for each of the four words too.
    for row, key in itertools.product((0, 8), (0, 1)):
        part = kept.unflatten(1, (16, 16))[:, :, row : row + 8, key::2]
        assert abs(part.double().mean().item() - (1 - dropout)) < 4 * 2 * sigma


def test_no_dropout_and_nothing_but_dropout():
    assert grid(dropout=0.0).all()
    assert not grid(dropout=1.0).any()
    assert (rng.keep_threshold(0.0), rng.keep_threshold(1.0)) == (0, 2**32)
    assert rng.keep_threshold(math.nextafter(1.0, 0.0)) == 2**32 - 1


def test_more_dropout_only_drops_more():
    some, more = grid(dropout=0.2), grid(dropout=0.3)
    assert not (more & ~some).any()
    assert not torch.equal(some, more)


def test_heads_rows_keys_and_seeds_are_independent():
    kept = grid(heads=8, rows=64, keys=256)
    for a, b in itertools.combinations(kept, 2):
        assert agreement(a, b) < 4.5
    for distance in (1, 2, 8, 16):
        assert agreement(kept[:, :-distance], kept[:, distance:]) < 4
        assert agreement(kept[..., :-distance], kept[..., distance:]) < 4
    # Row and key, or head and row, must not stand in for each other; the diagonal always agrees.
    i, j = torch.triu_indices(64, 64, offset=1)
    assert agreement(kept[:, i, j], kept[:, j, i]) < 4
    i, j = torch.triu_indices(8, 8, offset=1)
    assert agreement(kept[i, j], kept[j, i]) < 4
    for other in (SEED + 1, SEED ^ 2**32, SEED ^ 2**62):
        assert agreement(kept, grid(other, heads=8, rows=64, keys=256)) < 4


# The seed


def test_seed_is_one_int64_that_uses_all_bits():
    seeds = torch.cat([rng.draw_seed("cpu") for _ in range(64)])
    assert (seeds.dtype, rng.draw_seed("cpu").shape) == (torch.int64, (1,))
    assert (seeds >= 0).all()
    assert seeds.unique().numel() == 64
    ones = (seeds[:, None] >> torch.arange(63)) & 1
    assert ones.any(0).all()
    assert not ones.all(0).any()


def test_seed_on_mps_is_put_together_from_short_draws(monkeypatch):
    parts = torch.tensor([0x155555, 0x0F0F0F, 0x1FFFFF])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: parts)
    seed = rng.draw_seed("mps")
    assert seed.tolist() == [0x155555 << 42 | 0x0F0F0F << 21 | 0x1FFFFF]


def test_seed_follows_the_generator():
    torch.manual_seed(3)
    first, second = rng.draw_seed("cpu"), rng.draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(rng.draw_seed("cpu"), first)
    assert torch.equal(rng.draw_seed("cpu"), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_seed_survives_activation_checkpointing(use_reentrant):
    seen = []

    def layer(x):
        seen.append(rng.draw_seed("cpu"))
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    rng.draw_seed("cpu")
    y.sum().backward()
    first, again = seen
    assert torch.equal(first, again)
