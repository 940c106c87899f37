"""Which block of query rows comes next, and where it and its keys lie in memory.

The producer finds the blocks and their tiles of keys and hands them to the consumers as a ticket,
so that these need no arithmetic of their own. Blocks are numbered; a program has the one of its own
number first and draws the others from a counter in global memory, so that whoever is done early
takes more.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anyflash.kernels.hopper.compat import aggregate, barrier
from anyflash.kernels.hopper.masking import Block, Tiles
from anyflash.kernels.hopper.pipeline import get, place, put, room_for_numbers

SLOTS = gl.constexpr(2)  # so that the next block can be given before all have taken the last
FIELDS = gl.constexpr(13)  # the most numbers of a ticket
END = gl.constexpr(-1)


class Schedule(NamedTuple):
    """The blocks of all heads in the order of their numbers.

    Heads come in sections, whose keys and values stay in L2 while they are read. In a section the
    head runs fastest and blocks go from the last, which under a causal mask is the longest, to the
    first, or in a packed batch through its sequences, each from its last block to its first.

    Under a causal mask all heads do the later half of their blocks, then half of what is left, and
    so on: the blocks that even out what programs have done come last, and short, whatever the
    number of sections. The keys of a head are fewer each time by half, and sections twice as large.
    Under LEFT alone it is the first blocks that are long, and all of it is the other way round.
    """

    batch: Any
    heads: Any  # of queries, or, under HEADS, groups of them
    group: Any  # of these have one key head
    section: Any  # as many of batch · heads, packed of heads, are one section
    queries: Any  # of each batch element; not of a packed batch
    keys: Any


class Packing(NamedTuple):
    """Where the sequences of a packed batch lie: int32 arrays in global memory."""

    first_block: Any  # (n + 1,): blocks of one head in all sequences before
    q_starts: Any  # (n + 1,)
    k_starts: Any  # (n + 1,)
    q_used: Any  # (n,): how many queries of each sequence count
    k_used: Any  # (n,): how many keys


@gluon.jit
def split(number, heads, section, blocks):
    """(head, block) of a number, where each head has so many blocks."""
    before = number // (section * blocks) * section
    width = gl.minimum(section, heads - before)
    inside = number - before * blocks
    return before + inside % width, inside // width


@gluon.jit
def dense_block(number, schedule, BLOCK_Q: gl.constexpr, FLAGS: gl.constexpr):
    heads = schedule.batch * schedule.heads
    section = schedule.section
    blocks = gl.cdiv(schedule.queries, BLOCK_Q)
    begin = 0
    end = blocks
    if FLAGS.LEFT != FLAGS.RIGHT:
        begin = end // 2
        while (begin > 0) & (number >= heads * (end - begin)):
            number -= heads * (end - begin)
            end = begin
            begin = end // 2
            section = gl.minimum(2 * section, heads)
    head, block = split(number, heads, section, end - begin)
    block = end - 1 - block
    if FLAGS.LEFT and not FLAGS.RIGHT:
        block = blocks - 1 - block
    batch = head // schedule.heads
    row = block * BLOCK_Q
    return Block(batch, head % schedule.heads, row, schedule.queries, schedule.keys, 0, 0)


@gluon.jit
def packed_block(
    number, total, schedule, packing, BLOCK_Q: gl.constexpr, FLAGS: gl.constexpr,
    WARPS: gl.constexpr = 1,
):  # fmt: skip
    """A partition, of so many warps, looks at 256 sequences at a time; how many of them begin no
    later is the answer."""
    blocks = total // schedule.heads
    head, block = split(number, schedule.heads, schedule.section, blocks)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    n = -1
    for begin in range(0, schedule.batch, 256):
        index = begin + gl.arange(0, 256, layout=lanes)
        starts = gl.load(packing.first_block + index, mask=index < schedule.batch, other=block + 1)
        n += gl.sum((starts <= block).to(gl.int32), 0)
    # Sequences without queries have no blocks: of several with one start the last is meant.
    q_start = gl.load(packing.q_starts + n)
    queries = gl.load(packing.q_used + n)
    keys = gl.load(packing.k_used + n)
    # The longest blocks of a sequence first, as in a dense batch.
    if FLAGS.LEFT and not FLAGS.RIGHT:
        block = block - gl.load(packing.first_block + n)
    else:
        block = gl.load(packing.first_block + n + 1) - 1 - block
    row = block * BLOCK_Q
    return Block(n, head, row, queries, keys, q_start, gl.load(packing.k_starts + n))


@gluon.jit
def numbered_block(
    number, total, schedule, packing, BLOCK_Q: gl.constexpr, FLAGS: gl.constexpr,
    WARPS: gl.constexpr = 1,
):  # fmt: skip
    """The block of a number below `total`, to a partition of so many warps."""
    if FLAGS.PACKED:
        return packed_block(number, total, schedule, packing, BLOCK_Q, FLAGS, WARPS)
    else:
        return dense_block(number, schedule, BLOCK_Q, FLAGS)


@gluon.jit
def next_number(total, counter, FLAGS: gl.constexpr):
    """Of the block that a program does next; `total` if there is none. To be drawn when the last
    tile of a block is on its way: drawn when the block begins, it is one of a program that may be
    the last to come to it (two heads of 16 K queries, causal, 256 blocks: 0.7 of the speed)."""
    if FLAGS.DYNAMIC:
        return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    else:
        return total


@gluon.jit
def number_of_blocks(total, schedule, packing, FLAGS: gl.constexpr):
    """Of all heads: `total`, or of a packed batch what only the device knows."""
    if FLAGS.PACKED:
        return gl.load(packing.first_block + schedule.batch) * schedule.heads
    else:
        return total


@gluon.jit
def corner(block, head, row, RAGGED: gl.constexpr, QUERIES: gl.constexpr):
    """Where TMA finds a row of the block's sequence, of queries and outputs or of keys: on all axes
    but the last."""
    if RAGGED:
        start = block.q_start if QUERIES else block.k_start
        return ragged(start, block.queries if QUERIES else block.keys, head, row)
    else:
        return block.batch, head, row


@gluon.jit
def ragged(start, length, head, row):
    """Where TMA finds a row of the `length` ones that begin at `start`, and zeros for the others.

    The descriptor has two axes more, whose addresses wrap at 2^64: a row is beyond the edge of its
    axis where it is beyond the length. Source: triton/tools/ragged_tma.py.
    """
    return 1 << 30, start + length, head, (1 << 30) - length + row


@gluon.jit
def block_numbers(block, FLAGS: gl.constexpr):
    """What readers have to be told of a block, the row first."""
    numbers = (block.row, block.batch, block.head)
    if FLAGS.PACKED:
        numbers = numbers + (block.queries, block.keys, block.q_start, block.k_start)  # noqa: RUF005
    return numbers


@gluon.jit
def read_block(numbers, queries, keys, FLAGS: gl.constexpr):
    """The block of `block_numbers`; lengths are the batch's unless it is packed."""
    q_start = 0
    k_start = 0
    if FLAGS.PACKED:
        queries = numbers[3]
        keys = numbers[4]
        q_start = numbers[5]
        k_start = numbers[6]
    return Block(numbers[1], numbers[2], numbers[0], queries, keys, q_start, k_start)


@gluon.jit
def tile_numbers(tiles, FLAGS: gl.constexpr):
    """What readers have to be told of the block's tiles."""
    numbers = (tiles.last, tiles.count, tiles.clear_begin, tiles.clear_end)
    if FLAGS.INTERVALS > 1:
        numbers = numbers + (tiles.gap_end, tiles.gap)  # noqa: RUF005
    return numbers


@gluon.jit
def read_tiles(numbers, FLAGS: gl.constexpr):
    """The tiles of `tile_numbers`, which stand behind those of a block."""
    AT: gl.constexpr = 7 if FLAGS.PACKED else 3
    gap_end = 0
    gap = 0
    if FLAGS.INTERVALS > 1:
        gap_end = numbers[AT + 4]
        gap = numbers[AT + 5]
    return Tiles(numbers[AT], numbers[AT + 1], numbers[AT + 2], numbers[AT + 3], gap_end, gap)


@aggregate
class Tickets:
    """Numbers that one warp, the producer, hands to all readers."""

    numbers: gl.shared_memory_descriptor  # [SLOTS · FIELDS, 1] int32
    full: gl.shared_memory_descriptor  # [SLOTS, 1]
    empty: gl.shared_memory_descriptor  # [SLOTS, 1]

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def give(self, numbers, turn):
        """Producer: waits until all readers have taken what was in the slot."""
        slot, phase = place(turn, SLOTS)
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        put(self.numbers, slot * FIELDS, numbers)
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def take(self, turn, COUNT: gl.constexpr):
        """Reader: waits for the producer's numbers."""
        slot, phase = place(turn, SLOTS)
        mbarrier.wait(self.full.index(slot), phase)
        numbers = get(self.numbers, slot * FIELDS, COUNT)
        barrier()  # one thread arrives, after all threads have loaded
        mbarrier.arrive(self.empty.index(slot), count=1)
        return numbers


@gluon.jit
def tickets(READERS: gl.constexpr):
    numbers = room_for_numbers(SLOTS * FIELDS)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Tickets(numbers, full, empty)
