"""Channels: tiles on their way from TMA to the warpgroups that multiply them.

A channel is a set of slots in shared memory with two barriers each. The producer fills a slot once
all consumers have released it; a consumer reads it once it is full. Who goes round through a ring
of slots takes slot and phase from a count of steps by `place`.

Annotations are evaluated in this file: Triton 3.6 wants those of an aggregate as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anyflash.kernels.hopper.compat import aggregate, async_load, barrier


@gluon.jit
def place(step, SLOTS: gl.constexpr):
    """Slot and phase of the step-th tile in a ring."""
    return step % SLOTS, (step // SLOTS) & 1


@aggregate
class Channel:
    tiles: gl.shared_memory_descriptor  # [slots, 1, 1, rows, columns], as TMA fills them
    full: gl.shared_memory_descriptor  # [slots, 1]
    empty: gl.shared_memory_descriptor  # [slots, 1]

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def fill(self, desc, coordinates, slot, phase):
        """Producer: waits until the readers have released the slot, then starts a copy into it."""
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        mbarrier.expect(self.full.index(slot), desc.block_type.nbytes)
        async_load(desc, coordinates, self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def wait(self, slot, phase):
        """Reader: waits for the producer's copy; the tile [rows, columns]."""
        mbarrier.wait(self.full.index(slot), phase)
        rows: gl.constexpr = self.tiles.type.shape[3]
        columns: gl.constexpr = self.tiles.type.shape[4]
        return self.tiles.index(slot).reshape([rows, columns])

    @gluon.jit
    def release(self, slot):
        """Reader: the producer, who waits for all readers, may overwrite the tile."""
        mbarrier.arrive(self.empty.index(slot), count=1)


@gluon.jit
def channel(desc, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A channel for the boxes of `desc`; `READERS` release each tile."""
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Channel(tiles, full, empty)


@aggregate
class Tickets:
    """Numbers that one warp, the producer, hands to all readers."""

    numbers: gl.shared_memory_descriptor  # [slots, 32] int32: one number, in all lanes
    full: gl.shared_memory_descriptor  # [slots, 1]
    empty: gl.shared_memory_descriptor  # [slots, 1]

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def give(self, number, slot, phase):
        """Producer: waits until all readers have taken what was in the slot."""
        mbarrier.wait(self.empty.index(slot), phase ^ 1)
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.numbers.index(slot).store(gl.full([32], number, gl.int32, lanes))
        barrier()  # one lane arrives, after all lanes have stored
        mbarrier.arrive(self.full.index(slot), count=1)

    @gluon.jit
    def take(self, slot, phase):
        """Reader: waits for the producer's number."""
        mbarrier.wait(self.full.index(slot), phase)
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        number = gl.max(self.numbers.index(slot).load(lanes), 0)
        barrier()  # one thread arrives, after all threads have loaded
        mbarrier.arrive(self.empty.index(slot), count=1)
        return number


@gluon.jit
def tickets(SLOTS: gl.constexpr, READERS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 32], layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Tickets(numbers, full, empty)
