"""The Gluon emulator: several programs side by side, and global memory between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from triton.experimental import gluon as g
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from anyflash.kernels.hopper import compat
from gluon_emulator import Deadlock, EmulatorError, Race, emulate, run
from test_gluon_order import HAS_FULL_WAIT, LAYOUT, SEEDS, descriptor, verdicts

FINE = [None] * len(SEEDS)


# A persistent loop over a counter of tiles.


@g.jit
def persistent(counter, out, tiles, SEMANTICS: gl.constexpr):
    tile = gl.atomic_add(counter, 1, sem=SEMANTICS)
    while tile < tiles:
        i = tile * 8 + gl.arange(0, 8)
        gl.store(out + i, gl.load(out + i) + gl.program_id(0) + 1)
        tile = gl.atomic_add(counter, 1, sem=SEMANTICS)


@pytest.mark.parametrize("semantics", ["relaxed", "acq_rel"])
def test_a_tile_counter(semantics: str) -> None:
    orders = set()
    for seed in SEEDS:
        out, counter = torch.zeros(80, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        args = {"SEMANTICS": semantics}
        run(persistent, (3,), (counter, out, 10), args, seed=seed)
        assert (out > 0).all() and (out <= 3).all()
        assert counter.item() == 13  # each program draws one too many
        orders.add(tuple(out.tolist()))
    assert len(orders) > 1


@g.jit
def overlapping(out, WIDTH: gl.constexpr):
    gl.store(out + gl.program_id(0) * 8 + gl.arange(0, WIDTH), 1.0)


def test_programs_that_store_to_the_same_place() -> None:
    def check(width: int) -> list:
        args = ((torch.zeros(64),), {"WIDTH": width})
        return verdicts(lambda seed: run(overlapping, (4,), *args, seed=seed))

    assert check(8) == FINE
    assert check(16) == [Race] * len(SEEDS)


@g.jit
def strided(out, ROWS: gl.constexpr):
    """Rows of one program lie between those of another."""
    rows = gl.arange(0, ROWS) * 4 + gl.program_id(0)
    gl.store(out + rows, 1.0)


def test_interleaved_stores_are_told_apart() -> None:
    out = torch.zeros(64)
    assert verdicts(lambda s: run(strided, (4,), (out,), {"ROWS": 16}, seed=s)) == FINE
    assert (out == 1).all()


# A message from one program to another.


@g.jit
def passes_on(flag, data, out, RELEASE: gl.constexpr, ACQUIRE: gl.constexpr, MEET: gl.constexpr,
              SCOPE: gl.constexpr):  # fmt: skip
    i = gl.arange(0, 8)
    if gl.program_id(0) == 0:
        gl.store(data + i, i * 3)
        if MEET:
            compat.barrier()
        gl.atomic_xchg(flag, 1, sem=RELEASE, scope=SCOPE)
    else:
        while gl.atomic_add(flag, 0, sem=ACQUIRE, scope=SCOPE) == 0:
            pass
        gl.store(out + i, gl.load(data + i))


def pass_on(
    seed: int, release: str, acquire: str, meet: bool = True, resident: int = 2, scope: str = "gpu"
) -> None:
    flag, data, out = (torch.zeros(8, dtype=torch.int32) for _ in range(3))
    lines = {"RELEASE": release, "ACQUIRE": acquire, "MEET": meet, "SCOPE": scope}
    run(passes_on, (2,), (flag, data, out), lines, seed=seed, resident=resident)
    assert out.tolist() == list(range(0, 24, 3))


def test_release_and_acquire() -> None:
    assert verdicts(lambda seed: pass_on(seed, "release", "acquire")) == FINE
    assert verdicts(lambda seed: pass_on(seed, "acq_rel", "acq_rel")) == FINE


@pytest.mark.parametrize(
    "lines",
    [
        ("relaxed", "acquire"),
        ("release", "relaxed"),
        ("release", "acquire", False),
        ("release", "acquire", True, 2, "cta"),
    ],
    ids=["no release", "no acquire", "the stores of other threads", "within a program"],
)
def test_a_message_with_a_fault(lines: tuple) -> None:
    assert verdicts(lambda seed: pass_on(seed, *lines)) == [Race] * len(SEEDS)


def test_a_program_that_waits_for_one_that_cannot_start() -> None:
    found = verdicts(lambda seed: pass_on(seed, "release", "acquire", resident=1))
    assert set(found) == {None, Deadlock}  # by which of the two is first
    with pytest.raises(EmulatorError, match="semantics 'sequential'"):
        pass_on(0, "sequential", "acquire")


# The same through TMA.


@g.jit
def posts(flag, source, data, out, FULL: gl.constexpr, FENCE: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    mbarrier.init(bar, count=1)
    if gl.program_id(0) == 0:
        mbarrier.expect(bar, source.block_type.nbytes)
        compat.async_load(source, [0, 0], bar, tile)
        mbarrier.wait(bar, 0)
        compat.async_store(data, [0, 0], tile)
        if FULL:
            tma.store_wait(0, read_only=False)
        else:
            tma.store_wait(0)
        gl.atomic_xchg(flag, 1, sem="release")
    else:
        while gl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        if FENCE:
            gl.inline_asm_elementwise(
                "fence.proxy.async; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        mbarrier.expect(bar, data.block_type.nbytes)
        compat.async_load(data, [0, 0], bar, tile)
        mbarrier.wait(bar, 0)
        compat.async_store(out, [0, 0], tile)
        tma.store_wait(0)


def post(seed: int, full: bool, fence: bool = True) -> None:
    x, data, out = torch.randn(16, 32), torch.zeros(16, 32), torch.zeros(16, 32)
    flag = torch.zeros(1, dtype=torch.int32)
    lines = {"FULL": full, "FENCE": fence}
    tensors = (flag, *(descriptor(t, [16, 32]) for t in (x, data, out)))
    run(posts, (2,), tensors, lines, seed=seed, resident=2)
    assert torch.equal(out, x)


@pytest.mark.skipif(not HAS_FULL_WAIT, reason="Triton 3.6 cannot wait for a write to be visible")
def test_a_tma_store_is_visible_after_the_full_wait() -> None:
    assert verdicts(lambda seed: post(seed, full=True)) == FINE


@pytest.mark.skipif(not HAS_FULL_WAIT, reason="Triton 3.6 cannot wait for a write to be visible")
def test_tma_of_two_programs_needs_a_proxy_fence() -> None:
    assert verdicts(lambda seed: post(seed, full=True, fence=False)) == [Race] * len(SEEDS)


def test_a_tma_store_is_not_visible_after_its_source_is_read() -> None:
    assert verdicts(lambda seed: post(seed, full=False)) == [Race] * len(SEEDS)


# What one thread does for a partition: here, TMA after stores of all threads.


@g.jit
def stores_then_loads(source, pointer, out, MEET: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    mbarrier.init(bar, count=1)
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    place = rows[:, None] * 32 + columns[None, :]
    gl.store(pointer + place, gl.full([16, 32], 3.0, gl.float32, LAYOUT))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    if MEET:
        compat.barrier()
    mbarrier.expect(bar, source.block_type.nbytes)
    compat.async_load(source, [0, 0], bar, tile)
    mbarrier.wait(bar, 0)
    gl.store(out + place, tile.load(LAYOUT))


@pytest.mark.parametrize(("meet", "expected"), [(True, None), (False, Race)])
def test_tma_by_one_thread_after_stores_by_all(meet: bool, expected: Any) -> None:
    def check(seed: int) -> None:
        x, out = torch.zeros(16, 32), torch.zeros(16, 32)
        run(stores_then_loads, (1,), (descriptor(x, [16, 32]), x, out, meet), seed=seed)
        assert (out == 3).all()

    assert verdicts(check) == [expected] * len(SEEDS)


# Sums from several programs.


@g.jit
def adds(target, tiles, FENCE: gl.constexpr, WAIT: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, target.block_shape, target.layout)
    for i in range(tiles):
        x = gl.full([16, 32], 1.0, gl.float32, LAYOUT) / (gl.program_id(0) * tiles + i + 1)
        if WAIT:
            tma.store_wait(0)
        tile.store(x)
        if FENCE:
            fence_async_shared()
        compat.async_atomic_add(target, [0, 0], tile)
    tma.store_wait(0)


def add(seed: int, **lines: bool) -> torch.Tensor:
    total = torch.zeros(16, 32)
    keep = {"FENCE": True, "WAIT": True} | lines
    run(adds, (4,), (descriptor(total, [16, 32]), 4), keep, seed=seed)
    torch.testing.assert_close(total, torch.full_like(total, sum(1 / n for n in range(1, 17))))
    return total


def test_reduce_adds_come_in_any_order() -> None:
    assert verdicts(add) == FINE
    assert len({add(seed)[0, 0].item() for seed in range(12)}) > 1
    assert torch.equal(add(3), add(3))


@pytest.mark.parametrize("fault", [{"FENCE": False}, {"WAIT": False}])
def test_reduce_adds_with_a_fault(fault: dict) -> None:
    assert verdicts(lambda seed: add(seed, **fault)) == [Race] * len(SEEDS)


@g.jit
def adds_and_reads(target, out, total):
    tile = gl.allocate_shared_memory(gl.float32, target.block_shape, target.layout)
    tile.store(gl.full([16, 32], 1.0, gl.float32, LAYOUT))
    fence_async_shared()
    compat.async_atomic_add(target, [0, 0], tile)
    tma.store_wait(0)
    gl.store(out + gl.program_id(0), gl.load(total))


def test_a_sum_is_not_read_while_others_add() -> None:
    total = torch.zeros(16, 32)
    args = (descriptor(total, [16, 32]), torch.zeros(2), total)
    found = verdicts(lambda seed: run(adds_and_reads, (2,), args, seed=seed))
    assert found == [Race] * len(SEEDS)


# The launch.


def test_emulate_takes_over_every_launch(capsys: Any) -> None:
    out = torch.zeros(64)
    with emulate(seed=1) as launches:
        overlapping[(4,)](out, WIDTH=8, num_warps=4)
        overlapping[lambda given: (given["WIDTH"],)](out, 8)
    assert [(x.kernel, x.programs) for x in launches] == [("overlapping", 4), ("overlapping", 8)]
    with pytest.raises(EmulatorError, match="CPU tensors, not on meta"), emulate():
        overlapping[(1,)](out.to("meta"), 8)


def test_what_a_launch_does_not_know_is_refused() -> None:
    for kwargs in ({"WIDTH": 8, "WIDHT": 8}, {"WIDTH": 8, "num_ctas": 2}):
        with pytest.raises((TypeError, EmulatorError), match=r"WIDHT|a cluster of 2"):
            run(overlapping, (1,), (torch.zeros(64),), kwargs)


@g.jit
def two_types(words, chars):
    """Of each four bytes the second is one program's, the word before it the other's."""
    i = gl.arange(0, 8)
    if gl.program_id(0) == 0:
        gl.store(words + i * 2, 7)
    else:
        gl.store(chars + i * 8 + 5, (i * 0 + 1).to(gl.int8))


def test_views_of_two_types_over_one_storage() -> None:
    words = torch.zeros(16, dtype=torch.int32)
    chars = words.view(torch.int8)
    assert verdicts(lambda seed: run(two_types, (2,), (words, chars), seed=seed)) == FINE
    assert words[::2].tolist() == [7] * 8 and (words[1::2] == 256).all()
    found = verdicts(lambda seed: run(two_types, (2,), (words[1:], chars), seed=seed))
    assert found == [Race] * len(SEEDS)


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(Race):
        run(overlapping, (4,), (torch.zeros(64),), {"WIDTH": 16})
    run(overlapping, (4,), (torch.zeros(64),), {"WIDTH": 8})
