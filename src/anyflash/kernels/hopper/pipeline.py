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


@gluon.jit
def matrix(tile):
    """A box of TMA [1…, heads, rows, columns] as a matrix, one head below the other."""
    RANK: gl.constexpr = len(tile.shape)
    rows: gl.constexpr = tile.shape[RANK - 3] * tile.shape[RANK - 2]
    columns: gl.constexpr = tile.shape[RANK - 1]
    return tile.reshape([rows, columns])


@gluon.jit
def room_for_numbers(COUNT: gl.constexpr):
    """Shared memory for so many numbers, each in a place of its own."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], layout)


@gluon.jit
def put(memory, first, numbers, WARPS: gl.constexpr = 1):
    """One partition, of so many warps: numbers into shared memory, for readers who are told by an
    arrival after this."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    for i in gl.static_range(len(numbers)):
        memory.index(first + i).store(gl.full([1], numbers[i], gl.int32, one))
    barrier()  # one lane arrives, after the lanes that stored


@gluon.jit
def get(memory, first, COUNT: gl.constexpr):
    """Reader: so many numbers of `put`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers = ()
    for i in gl.static_range(COUNT):
        numbers = numbers + (gl.max(memory.index(first + i).load(one), 0),)  # noqa: RUF005
    return numbers


@aggregate
class Channel:
    tiles: gl.shared_memory_descriptor  # [slots · PANELS, 1…, heads, rows, width], for TMA
    full: gl.shared_memory_descriptor  # [slots, 1]
    empty: gl.shared_memory_descriptor  # [slots, 1]
    PANELS: gl.constexpr  # boxes side by side that make up a tile

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, PANELS):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.PANELS = gl.constexpr(PANELS)

    @gluon.jit
    def fill(self, desc, corner, slot, phase):
        """Producer: waits until the readers have released the slot, then starts copies into it.
        `corner` is where the tile begins on all axes but the last."""
        self.acquire(slot, phase)
        self.commit(desc, corner, slot)

    @gluon.jit
    def acquire(self, slot, phase):
        """Producer: waits until the readers have released the slot."""
        mbarrier.wait(self.empty.index(slot), phase ^ 1)

    @gluon.jit
    def commit(self, desc, corner, slot, MORE: gl.constexpr = 0):
        """Producer: starts copies into a slot that it has acquired. Readers wait for MORE bytes as
        well, of copies that are started elsewhere."""
        full = self.full.index(slot)
        mbarrier.expect(full, desc.block_type.nbytes * self.PANELS + MORE)
        WIDTH: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
        for n in gl.static_range(self.PANELS):
            async_load(desc, corner + (n * WIDTH,), full, self.tiles.index(slot * self.PANELS + n))  # noqa: RUF005

    @gluon.jit
    def wait(self, slot, phase):
        """Reader: waits for the producer's copies, or all writers' parts."""
        mbarrier.wait(self.full.index(slot), phase)

    @gluon.jit
    def panel(self, slot, PANEL: gl.constexpr):
        """A box of the tile in the slot, [heads · rows, width]."""
        return matrix(self.tiles.index(slot * self.PANELS + PANEL))

    @gluon.jit
    def release(self, slot):
        """Reader: the producer, who waits for all readers, may overwrite the tile."""
        mbarrier.arrive(self.empty.index(slot), count=1)


@gluon.jit
def channel(desc, SLOTS: gl.constexpr, READERS: gl.constexpr, PANELS: gl.constexpr):
    """A channel for tiles of PANELS boxes of `desc` each; `READERS` release each tile."""
    shape: gl.constexpr = [SLOTS * PANELS] + desc.block_type.shape  # noqa: RUF005
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return ring(tiles, SLOTS, 1, READERS, PANELS)


@gluon.jit
def ring(
    tiles, SLOTS: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr, PANELS: gl.constexpr
):  # fmt: skip
    """A channel of this memory, whose tiles WRITERS announce and READERS release."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(empty.index(i), count=READERS)
    return Channel(tiles, full, empty, PANELS)
