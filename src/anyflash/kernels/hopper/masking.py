"""Which keys a block of query rows sees, and how a tile of scores is masked.

A query row i stands at key position i + Sk − Sq. Under LEFT it sees keys from `left` positions
before its own, under RIGHT up to `right` after it; causal is RIGHT with 0. That is arithmetic: no
memory is read. Under INTERVALS, which is 1 or 2, it sees the keys of so many intervals [lo, hi)
that are read from memory, 8 bytes each; the lower one comes first, empty ones lie at the end.

Under MAP there is a tile map: a number for each granule of 64 queries and keys, which says that all
or nothing of it is seen, or where its bits are. The producer reads the numbers, and each consumer
gets those of its own 64 rows with the tile of keys.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GRANULE = gl.constexpr(64)  # of queries and of keys, in what a mask is compiled to
ALL = gl.constexpr(-1)  # in the place of a granule's number: all of it is seen
NOTHING = gl.constexpr(-2)


class Block(NamedTuple):
    """Some query rows of one head, or, under HEADS, of as many heads that have one key head."""

    batch: Any  # batch element, or sequence of a packed batch
    head: Any  # or, under HEADS, so many groups of heads come before
    row: Any  # the first one, counted from the sequence's first; END if there is no block
    queries: Any  # length of the sequence
    keys: Any
    q_start: Any  # where the sequence begins among all rows of a packed batch; else 0
    k_start: Any


class Limits(NamedTuple):
    """What rows see, for all blocks; what FLAGS do not name is not looked at."""

    left: Any  # distances from a row's own position
    right: Any
    bounds: Any  # int32 (1 or B, Sq, INTERVALS, 2), or (1, total_q, INTERVALS, 2) of a packed batch
    bounds_rows: Any  # rows from one batch element to the next: 0 or Sq
    v_rows: Any  # rows of v from one batch element to the next; not of a packed batch


class Map(NamedTuple):
    """A tile map, seen from the queries: `masks.tiles.TileMap` and its `blocks`. Matrices of it are
    those of all batch elements and heads, or of what they have in common."""

    numbers: Any  # int32 (matrices, granules of queries, granules of keys)
    bits: Any  # int32 (N, GRANULE, 2): of each query 32 keys, then 32 more
    columns: Any  # int32 (matrices, blocks, tiles)
    counts: Any  # int32 (matrices, blocks)
    first: Any  # matrix: of a part of a batch, see launch_stored.py
    of_batch: Any  # matrices from one batch element to the next
    of_head: Any


class Ranges(NamedTuple):
    """Under INTERVALS, which queries need which keys: `RowIntervals.query_tiles`."""

    pointer: Any  # int32 (1 or B, tiles of GRANULE keys, 2)
    rows: Any  # tiles from one batch element to the next
    ends: Any  # int32 (B,): one past the last key that any query sees; or of each sequence


class Tiles(NamedTuple):
    """The key tiles of a block, which takes them from the last one down, but for the gap."""

    last: Any  # one past the last tile
    count: Any  # how many there are; at least 1
    clear_begin: Any  # from this one, at least 1, to `clear_end`, all rows see all keys of a tile:
    clear_end: Any  # these need no mask
    gap_end: Any  # one past the last tile between two intervals, which no row sees
    gap: Any  # how many there are; only under two INTERVALS


@gluon.jit
def plan(block, limits, ROWS: gl.constexpr, BLOCK_KV: gl.constexpr, FLAGS: gl.constexpr):
    """The tiles for ROWS rows of a block, and one past the last key that any of them sees. At least
    one tile, so that rows without keys need no path of their own; the first one is masked."""
    gap_begin = 0
    gap_end = 0
    if FLAGS.INTERVALS > 0:
        low, high, clear_low, clear_high = hull(block, limits, 0, ROWS, FLAGS)
        if FLAGS.INTERVALS > 1:
            low_2, high_2, clear_low_2, clear_high_2 = hull(block, limits, 1, ROWS, FLAGS)
            gap_begin = (high + BLOCK_KV - 1) // BLOCK_KV
            both = (low < high) & (low_2 < high_2)
            gap_end = gl.where(both, low_2 // BLOCK_KV, 0)
            gap_end = gl.maximum(gap_end, gap_begin)
            low = gl.minimum(low, low_2)
            high = gl.maximum(high, high_2)
            # Clear is what all rows see in the same one of their intervals.
            longer = clear_high_2 - clear_low_2 > clear_high - clear_low
            clear_low = gl.where(longer, clear_low_2, clear_low)
            clear_high = gl.where(longer, clear_high_2, clear_high)
    else:
        position = block.row + block.keys - block.queries
        low = 0
        high = block.keys
        clear_low = 0
        clear_high = block.keys
        if FLAGS.LEFT:
            low = gl.maximum(position - limits.left, 0)
            clear_low = gl.maximum(position + ROWS - 1 - limits.left, 0)
        if FLAGS.RIGHT:
            high = gl.minimum(high, position + ROWS + limits.right)
            clear_high = gl.minimum(high, position + limits.right + 1)
    # Quotients round towards zero: what may be negative is cut off before.
    first = gl.minimum(low, block.keys - 1) // BLOCK_KV
    last = gl.maximum((gl.maximum(high, 0) + BLOCK_KV - 1) // BLOCK_KV, first + 1)
    end = gl.minimum(gl.maximum(gl.maximum(clear_high, 0) // BLOCK_KV, first), last)
    begin = gl.minimum(gl.maximum((clear_low + BLOCK_KV - 1) // BLOCK_KV, first), end)
    gap = gap_end - gap_begin
    clear = end - begin
    end = gl.where(clear == 0, first, end)  # all of them come before
    all_clear_above = (end == last).to(gl.int32)
    end -= all_clear_above
    clear -= all_clear_above
    above = last - end - gl.where(gap_end > end, gap, 0)
    tiles = Tiles(last, last - first - gap, above, above + clear, gap_end, gap)
    return tiles, gl.maximum(high, 0)


@gluon.jit
def with_row(block, row):
    """The block with another first row."""
    return Block(
        block.batch, block.head, row, block.queries, block.keys, block.q_start, block.k_start
    )


@gluon.jit
def own_tiles(
    tiles, block, row, limits, ROWS: gl.constexpr, BLOCK_KV: gl.constexpr, FLAGS: gl.constexpr
):  # fmt: skip
    """(tiles, begin): of the block's tiles, numbered as before, those that ROWS of its rows need,
    from `row` on: from `begin` to `tiles.count`. Under INTERVALS all.

    Causal at D = 256, 4 K, it is 1.37 instead of 1.32 of cuDNN, under load 1.16 instead of 1.11. In
    a window of 1024 keys, where it is 17 of 20 tiles of 64 for each 64 of 192 rows, it is the same
    speed: a tile takes two consumers nearly as long as three.
    """
    if FLAGS.INTERVALS > 0 or not (FLAGS.LEFT or FLAGS.RIGHT):
        return tiles, 0
    else:
        mine, _ = plan(with_row(block, row), limits, ROWS, BLOCK_KV, FLAGS)
        before = tiles.last - mine.last
        # Rows that see nothing have a tile that need not be one of the block's.
        begin = gl.minimum(gl.maximum(before, 0), tiles.count - 1)
        end = tiles.count
        if FLAGS.LEFT:
            end = gl.maximum(gl.minimum(before + mine.count, end), begin + 1)
        clear_begin = gl.minimum(gl.maximum(before + mine.clear_begin, begin + 1), end)
        clear_end = gl.minimum(gl.maximum(before + mine.clear_end, begin + 1), end)
        return Tiles(tiles.last, end, clear_begin, clear_end, 0, 0), begin


@gluon.jit
def hull(block, limits, INTERVAL: gl.constexpr, ROWS: gl.constexpr, FLAGS: gl.constexpr):
    """Of one interval of the rows: the first key that any row sees, one past the last, the first
    and one past the last that all rows see. By one warp."""
    WHOLE: gl.constexpr = 256  # ROWS need not be a power of two
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = gl.arange(0, WHOLE, layout=lanes)
    exists = (rows < ROWS) & (block.row + rows < block.queries)
    lo, hi = interval(block, limits, block.row + rows, exists, INTERVAL, FLAGS)
    some = exists & (lo < hi)
    low = gl.min(gl.where(some, lo, block.keys), 0)
    high = gl.max(gl.where(some, hi, 0), 0)
    clear_low = gl.max(gl.where(exists, lo, 0), 0)
    clear_high = gl.min(gl.where(exists, hi, block.keys), 0)
    return low, high, clear_low, clear_high


@gluon.jit
def interval(block, limits, rows, exists, INTERVAL: gl.constexpr, FLAGS: gl.constexpr):
    """(lo, hi) of rows, counted from the first key of their sequence."""
    at = block.batch.to(gl.int64) * limits.bounds_rows + block.q_start + rows
    pointer = limits.bounds + at * (2 * FLAGS.INTERVALS) + 2 * INTERVAL
    lo = gl.load(pointer, mask=exists, other=0) - block.k_start
    hi = gl.load(pointer + 1, mask=exists, other=0) - block.k_start
    return lo, gl.minimum(hi, block.keys)


@gluon.jit
def nth_tile(j, tiles, FLAGS: gl.constexpr):
    """The j-th tile, from 0 on."""
    tile = tiles.last - 1 - j
    if FLAGS.INTERVALS > 1:
        tile -= gl.where(tile < tiles.gap_end, tiles.gap, 0)
    return tile


@gluon.jit
def needs_mask(j, tiles, FLAGS: gl.constexpr):
    """Whether the j-th tile does."""
    masked = j < tiles.clear_begin
    if FLAGS.LEFT or FLAGS.INTERVALS > 0:  # else there is nothing to hide below the clear ones
        masked = masked | (j >= tiles.clear_end)
    return masked


@gluon.jit
def mask_scores(s, key, rows, block, limits, FLAGS: gl.constexpr):
    """−inf where a row does not see a key of the tile that begins at `key`."""
    BLOCK_KV: gl.constexpr = s.shape[1]
    keys = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, s.type.layout))[None, :]
    # Limits are counted from `key`, so that a thread compares its columns with constants.
    if FLAGS.INTERVALS > 0:
        # Read again for each tile: from L1, and no registers are kept for the clear tiles.
        exists = rows < block.queries
        lo, hi = interval(block, limits, rows, exists, 0, FLAGS)
        seen = (keys >= (lo - key)[:, None]) & (keys < (hi - key)[:, None])
        if FLAGS.INTERVALS > 1:
            lo, hi = interval(block, limits, rows, exists, 1, FLAGS)
            seen = seen | ((keys >= (lo - key)[:, None]) & (keys < (hi - key)[:, None]))
    else:
        position = rows + (block.keys - block.queries - key)
        high = rows * 0 + (block.keys - key)
        if FLAGS.RIGHT:
            high = gl.minimum(high, position + (limits.right + 1))
        seen = keys < high[:, None]
        if FLAGS.LEFT:
            seen = seen & (keys >= (position - limits.left)[:, None])
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def matrix_of(block, head, tile_map):
    number = tile_map.first + block.batch * tile_map.of_batch + head * tile_map.of_head
    return number.to(gl.int64)


@gluon.jit
def mapped_tiles(block, head, tile_map, ROWS: gl.constexpr, BLOCK_KV: gl.constexpr):
    """The tiles that ROWS of a block need of a head of queries, and where it is written which these
    are: `mapped_tile`. At least one, as in `plan`."""
    matrix = matrix_of(block, head, tile_map)
    at = matrix * gl.cdiv(block.queries, ROWS) + block.row // ROWS
    count = gl.maximum(gl.load(tile_map.counts + at), 1)
    columns = tile_map.columns + at * gl.cdiv(block.keys, BLOCK_KV)
    return Tiles(0, count, count, count, 0, 0), columns


@gluon.jit
def mapped_tile(columns, j):
    """The j-th of `mapped_tiles`."""
    return gl.maximum(gl.load(columns + j), 0)  # −1 where none is needed


@gluon.jit
def numbers_of_granules(
    tile, block, head, tile_map, CONSUMERS: gl.constexpr, GRANULES: gl.constexpr
):  # fmt: skip
    """Of each consumer's rows, those of a tile of GRANULES granules: what `granules` is told."""
    matrix = matrix_of(block, head, tile_map)
    rows = gl.cdiv(block.queries, GRANULE)
    columns = gl.cdiv(block.keys, GRANULE)
    found = ()
    for w in gl.static_range(CONSUMERS):
        for n in gl.static_range(GRANULES):
            row = block.row // GRANULE + w
            column = tile * GRANULES + n
            pointer = tile_map.numbers + (matrix * rows + row) * columns + column
            exists = (row < rows) & (column < columns)
            found = found + (gl.load(pointer, mask=exists, other=NOTHING),)  # noqa: RUF005
    return found


@gluon.jit
def granules(numbers, tile_map, mine):
    """(words, all): of 64 rows `mine` the bits of as many granules as there are numbers, 32 keys
    each, and whether all of them are set. What is told by the number alone is not read."""
    words = ()
    everything = numbers[0] == ALL
    for n in gl.static_range(len(numbers)):
        number = numbers[n]
        everything = everything & (number == ALL)
        pointer = tile_map.bits + (number.to(gl.int64) * GRANULE + mine) * 2
        has_bits = (mine >= 0) & (number >= 0)
        other = gl.where(number == ALL, -1, 0)
        for half in gl.static_range(2):
            word = gl.load(pointer + half, mask=has_bits, other=other)
            words = words + (word,)  # noqa: RUF005
    return words, everything


@gluon.jit
def mask_bits(s, words, keys_left):
    """−inf where a bit of `granules` is not set, or no key is left."""
    BLOCK_KV: gl.constexpr = s.shape[1]
    keys = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, s.type.layout))[None, :]
    word = words[0][:, None]
    for n in gl.static_range(1, len(words)):
        word = gl.where(keys < 32 * n, word, words[n][:, None])
    seen = ((word >> (keys % 32)) & 1 != 0) & (keys < keys_left)
    return gl.where(seen, s, -float("inf"))


# Seen from the keys: blocks are of keys, and walk over tiles of queries. A window looks the same
# from there, with its sides exchanged; intervals belong to queries.


@gluon.jit
def turned(block):
    """The block with its two sides exchanged."""
    return Block(
        block.batch, block.head, block.row, block.keys, block.queries, block.k_start, block.q_start
    )


@gluon.jit
def query_range(block, ranges, ROWS: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Tiles of queries that a block of keys may need: the first, and how many, at least 1."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    begin = block.q_start + block.row
    granules = begin // GRANULE + gl.arange(0, 32, layout=lanes)
    end = block.q_start + gl.minimum(block.row + ROWS, block.queries)
    pointer = ranges.pointer + (block.batch.to(gl.int64) * ranges.rows + granules) * 2
    first = gl.load(pointer, mask=granules * GRANULE < end, other=0)
    last = gl.load(pointer + 1, mask=granules * GRANULE < end, other=0)
    first = gl.min(gl.where(first < last, first, 1 << 24), 0) * GRANULE - block.k_start
    last = gl.minimum(gl.max(last, 0) * GRANULE - block.k_start, block.keys)
    first = gl.maximum(first, 0) // BLOCK_Q
    last = (gl.maximum(last, 0) + BLOCK_Q - 1) // BLOCK_Q
    none = first >= last
    return gl.where(none, 0, first), gl.where(none, 1, last - first)


@gluon.jit
def sight(block, tile, limits, ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, FLAGS: gl.constexpr):
    """What a tile of queries sees of a block of keys: 0 nothing, 2 all of it, each, else 1."""
    INTERVALS: gl.constexpr = FLAGS.INTERVALS
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = tile * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=lanes)
    exists = rows < block.keys
    end = gl.minimum(block.row + ROWS, block.queries)
    some = rows < 0
    all_keys = rows < 0
    for n in gl.static_range(INTERVALS):
        lo, hi = interval(turned(block), limits, rows, exists, n, FLAGS)
        some = some | ((lo < hi) & (lo < end) & (hi > block.row))
        all_keys = all_keys | ((lo <= block.row) & (hi >= end))
    some = gl.max((exists & some).to(gl.int32), 0)
    return some + some * gl.min((exists & all_keys).to(gl.int32), 0)


@gluon.jit
def mask_columns(s, query, rows, block, limits, FLAGS: gl.constexpr):
    """`mask_scores` of keys × queries under INTERVALS: −inf where a query does not see a key."""
    BLOCK_Q: gl.constexpr = s.shape[1]
    columns = query + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, s.type.layout))
    exists = columns < block.keys
    lo, hi = interval(turned(block), limits, columns, exists, 0, FLAGS)
    seen = (rows[:, None] >= lo[None, :]) & (rows[:, None] < hi[None, :])
    if FLAGS.INTERVALS > 1:
        lo, hi = interval(turned(block), limits, columns, exists, 1, FLAGS)
        seen = seen | ((rows[:, None] >= lo[None, :]) & (rows[:, None] < hi[None, :]))
    return gl.where(seen, s, -float("inf"))
