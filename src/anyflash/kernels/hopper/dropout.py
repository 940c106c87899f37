"""Which weights dropout keeps: Philox-4x32-10, the bits of `anyflash.rng`.

A wgmma gives a thread rows i and i + 8 and columns j and j + 1 of the scores: the four that one
draw of four words serves.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROUNDS = gl.constexpr(10)
MULTIPLIER_0 = gl.constexpr(0xD2511F53)
MULTIPLIER_1 = gl.constexpr(0xCD9E8D57)
WEYL_0 = gl.constexpr(0x9E3779B9)
WEYL_1 = gl.constexpr(0xBB67AE85)


class Dropout(NamedTuple):
    """What DROPOUT needs."""

    seed: Any  # int64 (1,) in global memory
    threshold: Any  # words below it, unsigned, are dropped; its 32 bits as an int32


@gluon.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of a counter and a key, all uint32. Source: Salmon et al., 2011, section 3.3."""
    for _ in gl.static_range(ROUNDS):
        high_0 = gl.umulhi(c0, gl.full_like(c0, MULTIPLIER_0))
        high_1 = gl.umulhi(c2, gl.full_like(c2, MULTIPLIER_1))
        low_0 = c0 * MULTIPLIER_0
        low_1 = c2 * MULTIPLIER_1
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + WEYL_0
        k1 = k1 + WEYL_1
    return c0, c1, c2, c3


@gluon.jit
def draw(head, row_pair, key_pair, dropout):
    """Four words for each pair of rows and of keys: of the first row and key, the first row and the
    second key, the second row and so on. `head` is batch · heads + head."""
    zero = (row_pair + key_pair).to(gl.uint32) * 0
    seed = gl.load(dropout.seed)
    k0 = seed.to(gl.uint32)
    k1 = (seed >> 32).to(gl.uint32)
    head = head.to(gl.uint32) + zero
    row_pair = row_pair.to(gl.uint32) + zero
    key_pair = key_pair.to(gl.uint32) + zero
    return philox(head, row_pair, key_pair, zero, k0, k1)


@gluon.jit
def drop(p, head, row, key, dropout):
    """The weights [64, keys] of a tile that begins at `row`, a multiple of 16, and `key`, an even
    number, with 0 where one is dropped."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    halves = p.reshape([ROWS // 16, 2, 8, KEYS // 2, 2]).permute((0, 2, 3, 1, 4))
    even, odd = halves.split()
    p0, p2 = even.split()
    p1, p3 = odd.split()
    layout: gl.constexpr = p0.type.layout
    by_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    by_key: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    warps = gl.arange(0, ROWS // 16, layout=by_warp)[:, None, None]
    rows = gl.arange(0, 8, layout=by_row)[None, :, None]
    keys = gl.arange(0, KEYS // 2, layout=by_key)[None, None, :]
    w0, w1, w2, w3 = draw(head, warps * 8 + rows + row // 2, keys + key // 2, dropout)
    threshold = dropout.threshold.to(gl.uint32)
    even = gl.join(gl.where(w0 >= threshold, p0, 0.0), gl.where(w2 >= threshold, p2, 0.0))
    odd = gl.join(gl.where(w1 >= threshold, p1, 0.0), gl.where(w3 >= threshold, p3, 0.0))
    kept = gl.join(even, odd).permute((0, 3, 1, 2, 4)).reshape([ROWS, KEYS])
    return gl.convert_layout(kept, p.type.layout)


@gluon.jit
def drop_turned(p, head, row, key, dropout):
    """`drop` of weights held the other way round, [64 keys, rows]. A thread has rows i and i + 8,
    and one of two neighbouring keys: of each draw it uses two words."""
    KEYS: gl.constexpr = p.shape[0]
    ROWS: gl.constexpr = p.shape[1]
    low, high = p.reshape([KEYS, ROWS // 16, 2, 8]).permute((0, 1, 3, 2)).split()
    layout: gl.constexpr = low.type.layout
    by_key: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    by_group: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    keys = key + gl.arange(0, KEYS, layout=by_key)[:, None, None]
    groups = gl.arange(0, ROWS // 16, layout=by_group)[None, :, None]
    rows = gl.arange(0, 8, layout=by_row)[None, None, :]
    w0, w1, w2, w3 = draw(head, groups * 8 + rows + row // 2, keys // 2, dropout)
    threshold = dropout.threshold.to(gl.uint32)
    first = (keys + 0 * (groups + rows)) % 2 == 0
    low = gl.where(gl.where(first, w0, w1) >= threshold, low, 0.0)
    high = gl.where(gl.where(first, w2, w3) >= threshold, high, 0.0)
    kept = gl.join(low, high).permute((0, 1, 3, 2)).reshape([KEYS, ROWS])
    return gl.convert_layout(kept, p.type.layout)
