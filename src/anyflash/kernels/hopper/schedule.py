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
from anyflash.kernels.hopper.masking import Tiles
from anyflash.kernels.hopper.pipeline import place

SLOTS = gl.constexpr(2)  # so that the next block can be given before all have taken the last
FIELDS = gl.constexpr(13)  # the most numbers of a ticket
END = gl.constexpr(-1)


class Block(NamedTuple):
    """Some query rows of one head, or, under HEADS, of as many heads that have one key head."""

    batch: Any  # batch element, or sequence of a packed batch
    head: Any  # or, under HEADS, so many groups of heads come before
    row: Any  # the first one, counted from the sequence's first; END if there is no block
    queries: Any  # length of the sequence
    keys: Any
    q_start: Any  # where the sequence begins among all rows of a packed batch; else 0
    k_start: Any


class Schedule(NamedTuple):
    """The blocks of all heads in the order of their numbers.

    Heads come in sections, whose keys and values stay in L2 while they are read. In a section the
    head runs fastest and blocks go from the last, which under a causal mask is the longest, to the
    first, or in a packed batch through its sequences, each from its last block to its first.

    Under a causal mask all heads do the later half of their blocks, then half of what is left, and
    so on: the blocks that even out what programs have done come last, and short, whatever the
    number of sections. The keys of a head are fewer each time by half, and sections twice as large.
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
    k_used: Any  # (n,): how many keys of each sequence count


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
    begin = 0
    end = gl.cdiv(schedule.queries, BLOCK_Q)
    if FLAGS.RIGHT and not FLAGS.LEFT:
        begin = end // 2
        while (begin > 0) & (number >= heads * (end - begin)):
            number -= heads * (end - begin)
            end = begin
            begin = end // 2
            section = gl.minimum(2 * section, heads)
    head, block = split(number, heads, section, end - begin)
    row = (end - 1 - block) * BLOCK_Q
    batch = head // schedule.heads
    return Block(batch, head % schedule.heads, row, schedule.queries, schedule.keys, 0, 0)


@gluon.jit
def packed_block(number, total, schedule, packing, BLOCK_Q: gl.constexpr):
    """One warp looks at 256 sequences at a time; how many of them begin no later is the answer."""
    blocks = total // schedule.heads
    head, block = split(number, schedule.heads, schedule.section, blocks)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = -1
    for begin in range(0, schedule.batch, 256):
        index = begin + gl.arange(0, 256, layout=lanes)
        starts = gl.load(packing.first_block + index, mask=index < schedule.batch, other=block + 1)
        n += gl.sum((starts <= block).to(gl.int32), 0)
    # Sequences without queries have no blocks: of several with one start the last is meant.
    q_start = gl.load(packing.q_starts + n)
    queries = gl.load(packing.q_starts + n + 1) - q_start
    keys = gl.load(packing.k_used + n)
    # The longest blocks of a sequence first, as in a dense batch.
    row = (gl.load(packing.first_block + n + 1) - 1 - block) * BLOCK_Q
    return Block(n, head, row, queries, keys, q_start, gl.load(packing.k_starts + n))


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
def ticket(block, tiles, FLAGS: gl.constexpr):
    """What consumers have to be told, as numbers; the row comes first."""
    numbers = (block.row, block.batch, block.head)
    numbers = numbers + (tiles.last, tiles.masked, tiles.clear_end, tiles.clear)  # noqa: RUF005
    if FLAGS.INTERVALS > 1:
        numbers = numbers + (tiles.gap_end, tiles.gap)  # noqa: RUF005
    if FLAGS.PACKED:
        numbers = numbers + (block.queries, block.keys, block.q_start, block.k_start)  # noqa: RUF005
    return numbers


@gluon.jit
def read_ticket(numbers, queries, keys, FLAGS: gl.constexpr):
    """Block and tiles of a ticket; lengths are the batch's unless it is packed."""
    gap_end = 0
    gap = 0
    if FLAGS.INTERVALS > 1:
        gap_end = numbers[7]
        gap = numbers[8]
    q_start = 0
    k_start = 0
    if FLAGS.PACKED:
        BEHIND: gl.constexpr = 9 if FLAGS.INTERVALS > 1 else 7
        queries = numbers[BEHIND]
        keys = numbers[BEHIND + 1]
        q_start = numbers[BEHIND + 2]
        k_start = numbers[BEHIND + 3]
    block = Block(numbers[1], numbers[2], numbers[0], queries, keys, q_start, k_start)
    return block, Tiles(numbers[3], numbers[4], numbers[5], numbers[6], gap_end, gap)


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
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        for i in gl.static_range(len(numbers)):
            self.numbers.index(slot * FIELDS + i).store(gl.full([1], numbers[i], gl.int32, one))
        barrier()  # one lane arrives, after the lanes that stored
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def take(self, turn, COUNT: gl.constexpr):
        """Reader: waits for the producer's numbers."""
        slot, phase = place(turn, SLOTS)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        mbarrier.wait(self.full.index(slot), phase)
        numbers = ()
        for i in gl.static_range(COUNT):
            number = self.numbers.index(slot * FIELDS + i).load(one)
            numbers = numbers + (gl.max(number, 0),)  # noqa: RUF005
        barrier()  # one thread arrives, after all threads have loaded
        mbarrier.arrive(self.empty.index(slot), count=1)
        return numbers


@gluon.jit
def tickets(READERS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Tickets(numbers, full, empty)
