"""The Gluon emulator: shared and global memory, asynchronous operations, races, the scheduler.

Each kernel takes the line that keeps it right as a constexpr, so that the same source is run with
it and without it: right at every seed, or found out.

Annotations are evaluated in this file: Triton 3.6 wants those of a record as objects.
"""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from triton.experimental import gluon as g
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflash.kernels.hopper import compat
from gluon_emulator import Deadlock, EmulatorError, NotEmulated, Poison, Race, run

SEEDS = range(6)
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
HAS_FULL_WAIT = hasattr(tma, "async_atomic_add")  # Triton 3.8


def descriptor(x: torch.Tensor, block: list[int], padding: str = "zero") -> TensorDescriptor:
    kind = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor.from_tensor(x, block, layout, padding)


def verdicts(check: Any) -> list[type | None]:
    """Of each seed: what kind of error it ended in, or None."""
    found: list[type | None] = []
    for seed in SEEDS:
        try:
            check(seed)
            found.append(None)
        except EmulatorError as error:
            found.append(type(error))
    return found


# TMA, between memory and shared memory of one program.


@g.jit
def copies(source, target, row, column, n):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.block_type.nbytes, pred=n > 1)
    mbarrier.expect(bar, source.block_type.nbytes, pred=n > 0)
    compat.async_load(source, [row, column], bar, tile, pred=n > 0)
    compat.async_load(source, [row, column], bar, tile, pred=n > 1)
    mbarrier.wait(bar, 0, pred=n > 0)
    compat.async_store(target, [row, column], tile)
    tma.store_wait(0)


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("at", [(0, 0), (32, 16), (-8, 0), (4, -16), (200, 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_tma_copies_what_lies_in_the_tensor(padding: str, at: tuple[int, int], seed: int) -> None:
    rows, columns = 40, 32
    x = torch.randn(rows, columns)
    y = torch.full((rows, columns), 7.0)
    blocks = [descriptor(t, [16, 32], padding) for t in (x, y)]
    run(copies, (1,), (*blocks, *at, 1), seed=seed)
    r, c = (slice(max(a, 0), max(a + n, 0)) for a, n in zip(at, (16, 32), strict=True))
    expected = torch.full_like(y, 7.0)
    expected[r, c] = x[r, c]
    assert torch.equal(y, expected)


@g.jit
def fills(source, out, row, column):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.block_type.nbytes)
    compat.async_load(source, [row, column], bar, tile)
    mbarrier.wait(bar, 0)
    x = tile.load(LAYOUT)
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] * 32 + columns[None, :], x)


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("at", [(0, 0), (32, 16), (-8, 0), (4, -16), (200, 0)])
def test_what_tma_reads_beyond_the_tensor(padding: str, at: tuple[int, int]) -> None:
    x = torch.randn(40, 32)
    out = torch.full((16, 32), 7.0)
    run(fills, (1,), (descriptor(x, [16, 32], padding), out, *at))
    around = torch.full((40 + 512, 32 + 512), 0.0 if padding == "zero" else float("nan"))
    around[256:296, 256:288] = x
    expected = around[256 + at[0] :, 256 + at[1] :][:16, :32]
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_predicates_of_barriers_and_copies() -> None:
    x, y = torch.randn(16, 32), torch.full((16, 32), 7.0)
    with pytest.raises(Poison, match="were never written"):
        run(copies, (1,), (descriptor(x, [16, 32]), descriptor(y, [16, 32]), 0, 0, 0))
    # Two copies into one tile that nothing orders.
    with pytest.raises(EmulatorError, match=r"not ordered|more than its count"):
        run(copies, (1,), (descriptor(x, [16, 32]), descriptor(y, [16, 32]), 0, 0, 2))


@g.jit
def not_waited_for(source):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.block_type.nbytes)
    compat.async_load(source, [0, 0], bar, tile)


def test_a_copy_that_nobody_waits_for() -> None:
    x = descriptor(torch.zeros(16, 32), [16, 32])
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=r"waited for the TMA load|before the TMA load"):
            run(not_waited_for, (1,), (x,), seed=seed)


@g.jit
def barrier_of(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=COUNT)
    mbarrier.arrive(bar, count=ARRIVALS)


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (1, -1), (1, 2)])
def test_counts_that_no_barrier_has(counts: tuple[int, int]) -> None:
    with pytest.raises(EmulatorError, match=r"count|arrivals"):
        run(barrier_of, (1,), counts)


# Between partitions.


@g.jit
def reader(tile, ready, empty, out, n, WAIT: gl.constexpr, PARITY: gl.constexpr):
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    for i in range(n):
        if WAIT:
            mbarrier.wait(ready, (i & 1) ^ PARITY)
        x = tile.load(LAYOUT)
        mbarrier.arrive(empty, count=1)
        gl.store(out + i * 512 + rows[:, None] * 32 + columns[None, :], x)


@g.jit
def writer(tile, ready, empty, source, n, FREE: gl.constexpr):
    for i in range(n):
        if FREE:
            mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(ready, source.block_type.nbytes)
        compat.async_load(source, [i * 16, 0], ready, tile)


@g.jit
def hands_over(source, out, n, WAIT: gl.constexpr, FREE: gl.constexpr, PARITY: gl.constexpr,
               COUNT: gl.constexpr):  # fmt: skip
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    mbarrier.init(ready, count=1)
    mbarrier.init(empty, count=COUNT)
    gl.warp_specialize([
        (reader, (tile, ready, empty, out, n, WAIT, PARITY)),
        (writer, (tile, ready, empty, source, n, FREE)),
    ], [1], [24])  # fmt: skip


def hand_over(seed: int, races: bool = True, **lines: Any) -> None:
    x, out = torch.randn(64, 32), torch.full((64, 32), float("nan"))
    keep = {"WAIT": True, "FREE": True, "PARITY": 0, "COUNT": 1} | lines
    run(hands_over, (1,), (descriptor(x, [16, 32]), out, 4), keep, seed=seed, races=races)
    if not torch.equal(out, x):
        raise Poison("wrong values")


def test_a_ring_of_one_stage() -> None:
    assert verdicts(hand_over) == [None] * len(SEEDS)


@pytest.mark.parametrize("races", [True, False], ids=["order", "values alone"])
@pytest.mark.parametrize("fault", [{"WAIT": False}, {"FREE": False}, {"PARITY": 1}, {"COUNT": 2}])
def test_a_ring_with_a_fault(fault: dict, races: bool) -> None:
    found = verdicts(lambda seed: hand_over(seed, races, **fault))
    assert all(found) if races else any(found)


def test_reports_name_both_lines_the_buffer_and_what_is_missing() -> None:
    said: dict[type, str] = {}
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as found:
            hand_over(seed, WAIT=False)
        said[type(found.value)] = str(found.value)
    at, program = r"at test_gluon_order\.py:\d+ by", r"of program \(0, 0, 0\)"
    copy, load = f"TMA load into tile {at} writer {program}", f"load of tile {at} reader {program}"
    for part in (copy, load, "is not ordered after"):
        assert re.search(part, said[Race])
    assert re.match(f"{load}: 512 of 512 elements of tile were never written", said[Poison])


def test_a_deadlock_says_who_waits_for_what() -> None:
    with pytest.raises(Deadlock) as found:
        hand_over(0, COUNT=2)
    text = str(found.value)
    assert "writer of program (0, 0, 0) for parity 0 of empty[0] (phase 0, 1 of 2 arrived" in text
    assert "reader of program (0, 0, 0) for parity" in text


def test_a_seed_fixes_everything() -> None:
    def trace(seed: int) -> Any:
        x, out = torch.ones(64, 32), torch.zeros(64, 32)
        keep = {"WAIT": True, "FREE": True, "PARITY": 0, "COUNT": 1}
        return run(
            hands_over, (3,), (descriptor(x, [16, 32]), out, 4), keep, seed=seed, races=False
        )

    assert trace(5) == trace(5)
    assert len({trace(seed).schedule for seed in range(8)}) == 8


# wgmma.


@g.jit
def multiplies(a_desc, out, WAIT: gl.constexpr, FENCE: gl.constexpr, EARLY: gl.constexpr,
               OTHER: gl.constexpr):  # fmt: skip
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    a = gl.allocate_shared_memory(a_desc.dtype, [64, 64], a_desc.layout)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, acc_layout))
    ones = gl.full([64, 64], 1.0, gl.bfloat16, acc_layout)
    a.store(ones)
    if FENCE:
        fence_async_shared()
    zero = gl.zeros([64, 64], gl.float32, acc_layout)
    acc = warpgroup_mma(a, a.permute((1, 0)), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(a, a, acc, is_async=True)
    if EARLY:
        a.store(ones)
    if OTHER:
        acc = warpgroup_mma_wait(1, [acc])
    if WAIT:
        acc = warpgroup_mma_wait(0, [acc])
    gl.store(out + rows[:, None] * 64 + columns[None, :], acc)


def multiply(seed: int, **lines: Any) -> None:
    keep = {"WAIT": True, "FENCE": True, "EARLY": False, "OTHER": False} | lines
    a, out = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64)
    run(multiplies, (1,), (descriptor(a, [64, 64]), out), keep, seed=seed)
    assert (out == 128).all()


def test_wgmma() -> None:
    assert verdicts(multiply) == verdicts(lambda s: multiply(s, OTHER=True)) == [None] * len(SEEDS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"WAIT": False}, "before warpgroup_mma_wait has returned it"),
        ({"WAIT": False, "OTHER": True}, "before warpgroup_mma_wait has returned it"),
        ({"FENCE": False}, "read by the wgmma .a x a. of a .* there must be a proxy fence"),
        ({"EARLY": True}, "store to a .* is not ordered after the read by the wgmma"),
    ],
)
def test_wgmma_with_a_fault(fault: dict, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message):
            multiply(seed, **fault)


@g.jit
def one_thread_says_so(a, ready, source, MEET: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
    )
    mbarrier.wait(ready.index(0), 0)
    acc = warpgroup_mma(a, a, gl.zeros([64, 64], gl.float32, layout), is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    if MEET:
        mbarrier.arrive(ready.index(1), count=1)
    else:
        mbarrier.expect(ready.index(1), 0)


@g.jit
def loads_again(a, ready, source):
    mbarrier.expect(ready.index(0), source.block_type.nbytes)
    compat.async_load(source, [0, 0], ready.index(0), a)
    mbarrier.wait(ready.index(1), 0)
    mbarrier.expect(ready.index(2), source.block_type.nbytes)
    compat.async_load(source, [0, 0], ready.index(2), a)
    mbarrier.wait(ready.index(2), 0)


@g.jit
def reloads(source, MEET: gl.constexpr):
    a = gl.allocate_shared_memory(source.dtype, [64, 64], source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    gl.warp_specialize([
        (one_thread_says_so, (a, ready, source, MEET)), (loads_again, (a, ready, source)),
    ], [1], [24])  # fmt: skip


@pytest.mark.parametrize(("meet", "expected"), [(True, None), (False, Race)])
def test_expect_says_nothing_of_the_products_of_other_warps(meet: bool, expected: Any) -> None:
    x = descriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64])
    assert verdicts(lambda s: run(reloads, (1,), (x, meet), seed=s)) == [expected] * len(SEEDS)


# Views of shared memory.


@g.jit
def overlaps(out, FIRST: gl.constexpr, COUNT: gl.constexpr, RESHAPED: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([4, 16, 32], gl.float32)
    tile = gl.allocate_shared_memory(gl.float32, [4, 16, 32], layout)
    a = tile.index(1)
    if RESHAPED:
        b = tile.reshape([64, 32]).slice(FIRST, COUNT)
    else:
        b = tile.slice(FIRST, COUNT)
    gl.warp_specialize([(stores, (a, 16)), (stores_from_afar, (b, COUNT, RESHAPED))], [4], [24])


@g.jit
def stores(tile, ROWS: gl.constexpr):
    tile.store(gl.full([ROWS, 32], 1.0, gl.float32, LAYOUT))


@g.jit
def stores_from_afar(tile, COUNT: gl.constexpr, RESHAPED: gl.constexpr):
    if RESHAPED:
        tile.store(gl.full([COUNT, 32], 2.0, gl.float32, LAYOUT))
    else:
        tile.store(gl.full([COUNT, 16, 32], 2.0, gl.float32, LAYOUT))


@pytest.mark.parametrize(
    ("first", "count", "reshaped", "meets"),
    [(0, 1, False, False), (2, 2, False, False), (0, 2, False, True), (1, 1, False, True),
     (0, 16, True, False), (32, 32, True, False), (15, 2, True, True), (31, 1, True, True)],
)  # fmt: skip
def test_views_overlap_exactly(first: int, count: int, reshaped: bool, meets: bool) -> None:
    lines = {"FIRST": first, "COUNT": count, "RESHAPED": reshaped}
    found = verdicts(lambda seed: run(overlaps, (1,), (torch.zeros(1),), lines, seed=seed))
    assert found == [Race if meets else None] * len(SEEDS)


# Named barriers and other inline assembly.


@g.jit
def says(text: gl.constexpr):
    gl.inline_asm_elementwise(
        text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@g.jit
def meets_at(tile, mine, TEXT: gl.constexpr):
    if mine:
        tile.store(gl.full([16, 32], 1.0, gl.float32, LAYOUT))
    says(TEXT)
    if not mine:
        tile.load(LAYOUT)


@g.jit
def named(TEXT: gl.constexpr, OTHER: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 32], gl.float32)
    tile = gl.allocate_shared_memory(gl.float32, [16, 32], layout)
    gl.warp_specialize(
        [(meets_at, (tile, True, OTHER)), (meets_at, (tile, False, TEXT))], [4], [24]
    )


@g.jit
def pure():
    gl.inline_asm_elementwise(
        "bar.sync 8, 128; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


SYNC = "bar.sync 8, 256; mov.u32 $0, 0;"


def test_named_barriers() -> None:
    def check(text: str, other: str) -> list:
        lines = {"TEXT": text, "OTHER": other}
        return verdicts(lambda seed: run(named, (1,), (), lines, seed=seed))

    fine = [None] * len(SEEDS)
    assert check(SYNC, SYNC) == check(SYNC, SYNC.replace("sync", "arrive")) == fine
    assert all(check(SYNC.replace("sync", "arrive"), SYNC))  # the reader does not wait
    assert check(SYNC, SYNC.replace("8,", "9,")) == [Deadlock] * len(SEEDS)
    for text, other, message in (
        (SYNC.replace("256", "128"), SYNC, "is used with"),
        (SYNC.replace("8,", "3,"), SYNC, "is not the kernel's"),
    ):
        said = []
        for seed in SEEDS:
            with pytest.raises(EmulatorError) as found:
                run(named, (1,), (), {"TEXT": text, "OTHER": other}, seed=seed)
            said.append(str(found.value))
        assert any(message in text for text in said)
    with pytest.raises(EmulatorError, match="needs is_pure=False"):
        run(pure, (1,))
    with pytest.raises(NotEmulated, match="no emulation of the inline assembly 'nanosleep"):
        run(named, (1,), (), {"TEXT": "nanosleep.u32 5;", "OTHER": SYNC})


# @aggregate.


@compat.aggregate
class Slot:
    tile: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    phase: gl.tensor
    ROWS: gl.constexpr

    @g.constexpr_function
    def __init__(self, tile, ready, phase, ROWS):
        self.tile = tile
        self.ready = ready
        self.phase = phase
        self.ROWS = gl.constexpr(ROWS)

    @g.jit
    def fetch(self, source, row):
        mbarrier.expect(self.ready, source.block_type.nbytes)
        compat.async_load(source, [row, 0], self.ready, self.tile)

    @g.jit
    def take(self):
        mbarrier.wait(self.ready, self.phase)
        return self.tile.load(LAYOUT), Slot(self.tile, self.ready, self.phase ^ 1, self.ROWS)


@g.jit
def uses_a_record(source, out, n):
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    slot = Slot(tile, ready, gl.to_tensor(0), 16)
    rows = gl.arange(0, slot.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    for i in range(n):
        slot.fetch(source, i * slot.ROWS)
        x, slot = slot.take()
        gl.store(out + (i * slot.ROWS + rows)[:, None] * 32 + columns[None, :], x)


@g.jit
def mistakes_a_field(source):
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    Slot(tile, 3, gl.to_tensor(0), 16)


def test_records_with_methods() -> None:
    x, out = torch.randn(64, 32), torch.zeros(64, 32)
    launch = run(uses_a_record, (1,), (descriptor(x, [16, 32]), out, 4))
    assert torch.equal(x, out)
    assert launch.shared_bytes == 16 * 32 * 4 + 8
    with pytest.raises(EmulatorError, match="field `ready` of Slot is annotated as"):
        run(mistakes_a_field, (1,), (descriptor(x, [16, 32]),))
