"""Which keys a block of query rows sees, and how a tile of scores is masked.

A query row i stands at key position i + Sk − Sq. Under LEFT it sees keys from `left` positions
before its own, under RIGHT up to `right` after it; causal is RIGHT with 0. It is arithmetic: no
memory is read.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Window(NamedTuple):
    """Distances from a row's own position; what LEFT or RIGHT does not name is not looked at."""

    queries: Any
    keys: Any
    left: Any
    right: Any


@gluon.jit
def key_tiles(first_row, window, ROWS: gl.constexpr, BLOCK_KV: gl.constexpr, FLAGS: gl.constexpr):
    """First tile of keys that any of the rows sees and one past the last; at least one tile, so
    that rows without keys need no path of their own."""
    position = first_row + window.keys - window.queries
    low = 0
    high = window.keys
    if FLAGS.LEFT:
        low = gl.maximum(position - window.left, 0)
    if FLAGS.RIGHT:
        high = gl.minimum(high, position + ROWS + window.right)
    first = gl.minimum(low, window.keys - 1) // BLOCK_KV
    # Both are ≥ 0 where it matters: a quotient rounds towards zero here.
    last = gl.maximum((gl.maximum(high, 0) + BLOCK_KV - 1) // BLOCK_KV, first + 1)
    return first, last


@gluon.jit
def clear_tiles(first_row, window, ROWS: gl.constexpr, BLOCK_KV: gl.constexpr, FLAGS: gl.constexpr):
    """First tile that needs no mask, since all of the rows see all of its keys, and one past the
    last; the range may be empty."""
    position = first_row + window.keys - window.queries
    low = 0
    high = window.keys
    if FLAGS.LEFT:
        low = gl.maximum(position + ROWS - 1 - window.left, 0)
    if FLAGS.RIGHT:
        high = gl.minimum(high, position + window.right + 1)
    return (low + BLOCK_KV - 1) // BLOCK_KV, gl.maximum(high, 0) // BLOCK_KV


@gluon.jit
def mask_scores(s, key, first_row, window, FLAGS: gl.constexpr):
    """−inf where a row does not see a key."""
    ROWS: gl.constexpr = s.shape[0]
    BLOCK_KV: gl.constexpr = s.shape[1]
    keys = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, s.type.layout))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
    # Limits are counted from `key`, so that a thread compares its columns with constants.
    position = rows + (first_row + window.keys - window.queries - key)
    high = rows * 0 + (window.keys - key)
    if FLAGS.RIGHT:
        high = gl.minimum(high, position + (window.right + 1))
    seen = keys[None, :] < high[:, None]
    if FLAGS.LEFT:
        seen = seen & (keys[None, :] >= (position - window.left)[:, None])
    return gl.where(seen, s, -float("inf"))
