"""dQ of the backward pass that is called fused: dS K, added up in global memory by TMA.

Consumers write dS^T, keys × queries, into shared memory, from where it is multiplied transposed: by
a role of its own, `adder`, or by the consumers, each for a panel of columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflash.kernels.hopper.compat import async_atomic_add, barrier
from anyflash.kernels.hopper.pipeline import get, matrix, place
from anyflash.kernels.hopper.schedule import END, corner, read_block

NOTE = gl.constexpr(2)  # numbers that the producer says of a tile


class Adding(NamedTuple):
    """What dQ is made with, under DS."""

    desc: Any  # over its float32 sums, boxes of BLOCK rows; or over dS^T that is stored
    places: Any  # in shared memory, from where they are added
    notes: Any  # of each slot of dS
    layout: Any  # of dS^T that is stored
    scale: Any  # of what is added


PLACES = gl.constexpr(2)  # of a role that makes dQ


@gluon.jit
def give(ds, channel, slot, WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    """A consumer's part of dS^T, into a slot that it has acquired."""
    channel.tiles.index(slot * CONSUMERS + WHO).store(ds)
    fence_async_shared()  # a product reads it, through another proxy
    mbarrier.arrive(channel.full.index(slot), count=1)


@gluon.jit
def gradient_of_queries(
    ds, slot, own, PANEL: gl.constexpr, CONSUMERS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """dS K of a panel of columns, started: a product for the keys of each consumer."""
    BLOCK: gl.constexpr = ds.tiles.type.shape[2]
    WIDTH: gl.constexpr = own.tiles.type.shape[len(own.tiles.type.shape) - 1]
    dq = gl.zeros([BLOCK, WIDTH], gl.float32, layout)
    for w in gl.static_range(CONSUMERS):
        of_keys = ds.tiles.index(slot * CONSUMERS + w).permute((1, 0))
        dq = warpgroup_mma(of_keys, own.panel(w, PANEL), dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def add(dq, adding, place, at, COLUMN: gl.constexpr, MINE: gl.constexpr):
    """dQ += dq, by TMA, from one of MINE places that I use in turn: the addition before has left it
    once no more than MINE − 1 are on their way."""
    tma.store_wait(MINE - 1)
    barrier()  # only threads that have issued one have waited
    matrix(adding.places.index(place)).store(dq * adding.scale)
    fence_async_shared()  # TMA reads it, through another proxy
    barrier()  # all threads have stored what some of them hand to TMA
    async_atomic_add(adding.desc, at + (COLUMN,), adding.places.index(place))  # noqa: RUF005


@gluon.jit
def where_queries_are(note, head, block, heads, BLOCK: gl.constexpr, FLAGS: gl.constexpr):
    """Of a tile, seen from the keys: for TMA, on all axes but the last."""
    head -= block.batch * heads.heads
    return corner(block, head, (note >> 2) * BLOCK, FLAGS.PACKED, False)


@gluon.jit
def adder(work, adding, lengths, CONSUMERS: gl.constexpr, FLAGS: gl.constexpr):
    """Makes dQ of all consumers' dS^T."""
    _, channels, _, draw, _, heads, _ = work
    own = channels.own
    ds = channels.ds
    SLOTS: gl.constexpr = ds.full.type.shape[0]
    BLOCK: gl.constexpr = ds.tiles.type.shape[2]
    WIDTH: gl.constexpr = own.tiles.type.shape[len(own.tiles.type.shape) - 1]
    COUNT: gl.constexpr = 7 if FLAGS.PACKED else 3
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    own_length, other_length = lengths
    turn = 0
    step = 0
    block = read_block(draw.take(turn, COUNT), own_length, other_length, FLAGS)
    while block.row != END:
        last = 0
        while last == 0:
            slot, phase = place(step, SLOTS)
            ds.wait(slot, phase)  # and so K is there: who has written dS has waited for it
            note, head = get(adding.notes, slot * NOTE, NOTE)
            last = note & 1
            at = where_queries_are(note, head, block, heads, BLOCK, FLAGS)
            for n in gl.static_range(own.PANELS):
                dq = gradient_of_queries(ds, slot, own, n, CONSUMERS, layout)
                dq = warpgroup_mma_wait(0, [dq])
                if n == own.PANELS - 1:
                    ds.release(slot)
                number = (step * own.PANELS + n) % PLACES
                add(dq, adding, number, at, n * WIDTH, PLACES)
            step += 1
        for w in gl.static_range(CONSUMERS):
            own.release(w)
        turn += 1
        block = read_block(draw.take(turn, COUNT), own_length, other_length, FLAGS)
    tma.store_wait(0)  # shared memory is gone when the program ends
