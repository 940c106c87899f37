"""Channels: tiles on their way from TMA to the warpgroups that multiply them.

A channel is a set of slots in shared memory with two barriers each. The producer fills a slot once
all consumers have released it; a consumer reads it once it is full. Who goes round through a ring
of slots takes slot and phase from a count of steps by `place`.

Annotations are evaluated in this file: Triton 3.6 wants those of an aggregate as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anyflash.kernels.hopper.compat import aggregate, async_load


@gluon.jit
def place(step, SLOTS: gl.constexpr):
    """Slot and phase of the step-th tile in a ring."""
    return step % SLOTS, (step // SLOTS) & 1


@gluon.jit
def matrix(tile):
    """A box of TMA [1…, rows, columns] as a matrix."""
    RANK: gl.constexpr = len(tile.shape)
    rows: gl.constexpr = tile.shape[RANK - 2]
    columns: gl.constexpr = tile.shape[RANK - 1]
    return tile.reshape([rows, columns])


@aggregate
class Channel:
    tiles: gl.shared_memory_descriptor  # [slots, 1…, rows, columns], as TMA fills them
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
        return matrix(self.tiles.index(slot))

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
