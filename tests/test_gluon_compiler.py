"""What the emulator of Gluon kernels assumes of the compiler, read off the PTX that it makes.

The emulator runs a partition (the warps of one role) as one program, so it has to know where the
compiler itself makes the threads of a partition wait for each other, which accesses an instruction
orders, and what the numbers do. Each test below is one such assumption: a small kernel, compiled
for sm_90a, and the order of its instructions. Nothing here runs on a GPU.

`make test` runs this file under the newest and under the oldest Triton supported; where the two
differ, the test says so, and a kernel has to be right under both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch

if sys.platform != "linux":  # on Linux a missing Triton is an error, not a reason to skip
    pytest.skip("Triton exists only on Linux", allow_module_level=True)

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflash.kernels.hopper.compat import async_atomic_add, async_load, async_store, barrier
from gluon_compile import Compiled, compile_kernel

OLD = triton.__version__.startswith("3.6.")

# Instructions, as patterns that match at the start of one without its predicate.
SHARED_STORE = r"st\.shared|stmatrix"
SHARED_LOAD = r"ld\.shared|ldmatrix"
FENCE = r"fence\.proxy\.async\.shared::cta"
ARRIVE = r"mbarrier\.arrive\.shared"
EXPECT = r"mbarrier\.arrive\.expect_tx"
WAIT = r"mbarrier\.try_wait\.parity"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global"
TMA_STORE = r"cp\.async\.bulk\.tensor\.2d\.global\.shared"
TMA_ADD = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add"
STORE_WAIT = r"cp\.async\.bulk\.wait_group"
MMA = r"wgmma\.mma_async"
ATOMIC = r"atom\.global"
ALL_THREADS = "bar.sync 0"  # of a kernel without partitions
HANDOVER = "barrier.sync 1"  # all threads of all partitions, where they start and end


class Code(list[str]):
    """The instructions of a kernel in the order of its text, without labels and directives.

    The kernels here have no loops, so within a partition that is the order of execution.
    """

    @classmethod
    def of(cls, compiled: Compiled) -> Code:
        body = re.sub(r"//.*", "", compiled.ptx[compiled.ptx.index(".entry") :])
        statements = (re.sub(r"\s+", " ", s).strip() for s in re.split(r"[;\n]", body))
        return cls(s for s in statements if re.match(r"(@\S+ )?[a-z][^:]", s) and s[-1] != ":")

    def all(self, pattern: str) -> Code:
        """Instructions that match, with or without a predicate."""
        return Code(i for i in self if re.match(rf"(@!?%?\w+ )?(?:{pattern})", i))

    def only(self, pattern: str) -> str:
        found = self.all(pattern)
        assert len(found) == 1, f"{pattern} matches {found} of\n" + "\n".join(self)
        return found[0]

    def between(self, first: str, second: str) -> Code:
        """What stands between a `second` and the last `first` before it; both must be there."""
        last = None
        for at, instruction in enumerate(self):
            if last is not None and Code([instruction]).all(second):
                return Code(self[last + 1 : at])
            if Code([instruction]).all(first):
                last = at
        raise AssertionError(f"no {second} after {first} in\n" + "\n".join(self))

    def after(self, pattern: str) -> Code:
        """What stands behind the first instruction that matches."""
        return Code(self[self.index(self.all(pattern)[0]) + 1 :])

    def conditions(self, instruction: str) -> set[str]:
        """The predicates that must all be true for this instruction to be executed."""
        found = set(re.findall(r"^@(%p\d+)", instruction))
        for conjunction in reversed(self.all(r"and\.pred")):
            result, *parts = re.findall(r"%p\d+", conjunction)
            found.update(parts if result in found else ())
        return found


def code_of(kernel: Any, *arguments: Any) -> Code:
    return Code.of(compile_kernel(kernel, arguments))


def tile_in_memory() -> TensorDescriptor:
    """64×64 tiles of a 256×64 tensor."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    return TensorDescriptor.from_tensor(
        torch.empty(256, 64, dtype=torch.bfloat16), [64, 64], layout
    )


def integers() -> torch.Tensor:
    return torch.empty(4096, dtype=torch.int32)


def floats(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(4096, dtype=dtype)


@gluon.jit
def lanes(WARPS: gl.constexpr):
    """One number for each thread of a partition of so many warps."""
    return gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def cells():
    """One number for each element of a 64×64 tile, over 4 warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    return rows[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def new_row():
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [128], layout)


@gluon.jit
def new_barrier():
    return gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())


# --------------------------------------------------------------------- partitions


@gluon.jit
def role(p, shared, WARPS: gl.constexpr, COUNT: gl.constexpr, HOW: gl.constexpr):
    row, full = shared
    part = row.slice(0, 32 * WARPS)
    i = lanes(WARPS)
    if HOW == "read":
        x = part.load(i.type.layout)
        mbarrier.arrive(full, count=COUNT)
        gl.store(p + i, x)
    else:
        part.store(gl.load(p + i))
        if HOW == "write, fence":
            fence_async_shared()
        mbarrier.arrive(full, count=COUNT)


@gluon.jit
def partitions(p, HOW: gl.constexpr, PARTITIONS: gl.constexpr, num_warps: gl.constexpr):
    """Partitions of 4, 4, 2 and 1 warps; they arrive with the counts 10, 11, 12 and 13."""
    row = new_row()
    full = new_barrier()
    mbarrier.init(full, count=99)
    shared = (row, full)
    if PARTITIONS == 2:
        gl.warp_specialize(
            [
                (role, (p, shared, 4, 10, HOW)),
                (role, (p + 128, shared, 4, 11, HOW)),
            ],
            [4],
            [40],
        )
    elif PARTITIONS == 3:
        gl.warp_specialize(
            [
                (role, (p, shared, 4, 10, HOW)),
                (role, (p + 128, shared, 4, 11, HOW)),
                (role, (p + 256, shared, 2, 12, HOW)),
            ],
            [4, 2],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (role, (p, shared, 4, 10, HOW)),
                (role, (p + 128, shared, 4, 11, HOW)),
                (role, (p + 256, shared, 2, 12, HOW)),
                (role, (p + 384, shared, 1, 13, HOW)),
            ],
            [4, 2, 1],
            [40, 40, 40],
        )
    gl.inline_asm_elementwise(
        "nanosleep.u32 77; mov.b32 $0, 0;", "=r,r", [lanes(4)], gl.int32, is_pure=False, pack=1
    )


PARTITION_BARRIERS = {
    10: "bar.sync 0, 128",
    11: "bar.sync 2, 128",
    12: "bar.sync 3, 64",
    13: "bar.warp.sync -1",
}


@pytest.mark.parametrize("count", PARTITION_BARRIERS)
@pytest.mark.parametrize("how", ["write", "read"])
def test_arrive_waits_for_the_threads_of_its_partition(how, count):
    """`mbarrier.arrive` orders all that the partition did before it in shared memory.

    One thread arrives, with the whole count; the compiler makes it wait for the others first. A
    partition of one warp is no exception.
    """
    code = code_of(partitions, integers(), how, 4)
    access = SHARED_STORE if how == "write" else SHARED_LOAD
    arrive = rf"{ARRIVE}\S+ _, \[%r\d+\], {count}$"
    assert code.only(arrive).startswith("@%p")
    assert PARTITION_BARRIERS[count] in code.between(access, arrive)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_named_barriers_of_the_compiler(number):
    """Hardware barriers 8 to 15 are free for a kernel's own inline assembly.

    The compiler takes 0 for the first partition, 1 for starting and ending all of them, and 2 and
    up for the others, as far as they have more than one warp.
    """
    compiled = compile_kernel(partitions, [integers(), "write", number])
    in_ptx = Code.of(compiled).all(r"bar(rier)?\.(?!warp)")
    assert {int(i.split()[1].strip(",")) for i in in_ptx} == set(range(min(number + 1, 4)))
    in_sass = re.findall(r"\bBAR\.\w+(?:\.\w+)*\s+([^,;\s]+)", compiled.sass)
    assert {int(i, 16) for i in in_sass} == set(range(min(number + 1, 4)))


def test_barriers_are_initialised_before_partitions_start():
    """Every partition sees the barriers that the kernel initialised before `warp_specialize`.

    All threads meet between the two; no fence is needed for that, and there is none. They meet
    again before the code behind `warp_specialize`.
    """
    code = code_of(partitions, integers(), "write", 4)
    assert HANDOVER in code.between(r"mbarrier\.init", rf"{ARRIVE}.*, 10$")
    for count in (11, 12, 13):
        assert HANDOVER in code.between("setmaxnreg", rf"{ARRIVE}.*, {count}$")
    assert HANDOVER in code.between(rf"{ARRIVE}.*, 10$", "nanosleep")
    assert not code.all("fence")


# --------------------------------------------------------------------- barriers in memory


@gluon.jit
def init_and_wait(p):
    full = new_barrier()
    mbarrier.init(full, count=5)
    mbarrier.wait(full, 0)
    gl.store(p + lanes(4), lanes(4))


def test_wait_is_done_by_every_thread():
    """`mbarrier.init` is done by one thread, and all see it; `wait` is done by each for itself.

    So what a thread does after a wait comes after the phase, without a barrier.
    """
    code = code_of(init_and_wait, integers())
    assert code.only(r"mbarrier\.init").startswith("@%p")
    assert ALL_THREADS in code.between(r"mbarrier\.init", WAIT)
    assert code.only(WAIT).startswith("mbarrier.try_wait.parity.shared")
    assert code.after(WAIT)[0] == "@!complete bra.uni waitLoop"


@gluon.jit
def read_and_expect(p):
    row = new_row()
    full = new_barrier()
    mbarrier.init(full, count=1)
    row.store(gl.load(p + lanes(4)))
    barrier()
    x = row.load(lanes(4).type.layout)
    mbarrier.expect(full, 512)
    gl.store(p + lanes(4), x)


def test_expect_orders_nothing_in_the_old_version():
    """`mbarrier.expect` is an arrival that does not order earlier accesses to shared memory.

    Triton 3.8 puts a barrier before it as before `arrive`, Triton 3.6 none.
    """
    code = code_of(read_and_expect, integers())
    assert code.only(EXPECT).startswith("@%p")
    assert (ALL_THREADS in code.between(SHARED_LOAD, EXPECT)) is not OLD


@gluon.jit
def conditional(desc, n):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    full = new_barrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, 8192, pred=n > 77)
    async_load(desc, [0, 0], full, tile, pred=n > 77)
    mbarrier.wait(full, 0, pred=n > 77)
    mbarrier.arrive(full, count=1, pred=n > 77)


def test_predicates():
    """With `pred=False`, expect, TMA load, wait and arrive do nothing.

    The barriers that the compiler puts around them stay: all threads have to come by.
    """
    code = code_of(conditional, tile_in_memory(), 1000)
    condition = code.only(r"setp\.gt\.s32 %p\d+, %r\d+, 77").split()[1].strip(",")
    for instruction in (EXPECT, TMA_LOAD, ARRIVE):
        assert condition in code.conditions(code.only(instruction))
    assert code[code.index(code.only(WAIT)) - 1] == f"@!{condition} bra.uni skipWait"
    assert set(code.all(r"bar\.")) == {ALL_THREADS}


# --------------------------------------------------------------------- TMA


@gluon.jit
def store_tile(desc, p, ADD: gl.constexpr, FENCED: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    tile.store(gl.load(p + cells()))
    if FENCED:
        fence_async_shared()
    if ADD:
        async_atomic_add(desc, [64, 0], tile)
    else:
        async_store(desc, [64, 0], tile)
    tma.store_wait(pendings=3)
    gl.store(p + 64 + cells(), tile.load(cells().type.layout))


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_tma_store(add, fenced):
    """A TMA store or reduction reads what all threads of the partition wrote before it.

    One thread issues it after a barrier. Without `fence_async_shared` it may still read what was
    there before the writes: Triton 3.8 adds the missing fence, Triton 3.6 does not.
    """
    instruction = TMA_ADD if add else TMA_STORE
    code = code_of(store_tile, tile_in_memory(), floats(torch.bfloat16), add, fenced)
    assert code.only(instruction).startswith("@%p")
    before = code.between(SHARED_STORE, instruction)
    assert ALL_THREADS in before
    assert len(before.all(FENCE)) == (fenced or not OLD)
    if before.all(FENCE):
        assert ALL_THREADS in before.after(FENCE)  # the writers fence, then one thread issues
    assert code.after(instruction)[0] == "cp.async.bulk.commit_group"


def test_store_wait():
    """`store_wait(n)` returns when the sources of all but n groups have been read.

    The data need not be in global memory by then. The issuing thread's groups count, and the others
    wait for it at a barrier: behind it all may overwrite the source.
    """
    code = code_of(store_tile, tile_in_memory(), floats(torch.bfloat16), False, True)
    assert code.only(STORE_WAIT) == "cp.async.bulk.wait_group.read 3"
    assert ALL_THREADS in code.between(STORE_WAIT, SHARED_LOAD)


@gluon.jit
def store_for_others(desc):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    async_store(desc, [64, 0], tile)
    tma.store_wait(pendings=0, read_only=False)


@pytest.mark.skipif(OLD, reason="Triton 3.6 has no store_wait that waits for the writes")
def test_store_wait_for_writes():
    """`store_wait(n, read_only=False)` returns when the data of all but n groups is written."""
    code = code_of(store_for_others, tile_in_memory())
    assert code.only(STORE_WAIT) == "cp.async.bulk.wait_group 0"
    assert ALL_THREADS in code.after(STORE_WAIT)


@gluon.jit
def load_tile_again(desc, p):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    full = new_barrier()
    mbarrier.init(full, count=1)
    tile.store(gl.load(p + cells()))
    barrier()
    x = tile.load(cells().type.layout)
    async_load(desc, [0, 0], full, tile)
    gl.store(p + cells(), x)


def test_tma_load_over_a_tile_in_use():
    """A TMA load into a tile waits for what its own partition did there, fence included.

    That holds in both versions. Accesses of another partition are ordered by barriers in memory.
    """
    code = code_of(load_tile_again, tile_in_memory(), floats(torch.bfloat16))
    assert code.only(TMA_LOAD).startswith("@%p")
    before = code.between(SHARED_LOAD, TMA_LOAD)
    assert ALL_THREADS in before.after(FENCE)


@gluon.jit
def expect_and_load(desc):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], desc.layout)
    full = new_barrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, desc.block_type.nbytes)
    async_load(desc, [0, 0], full, tile)


def test_expect_comes_before_the_load():
    """The bytes of a TMA load are counted after the `expect` that precedes it."""
    code = code_of(expect_and_load, tile_in_memory())
    assert ALL_THREADS in code.between(r"mbarrier\.init", EXPECT)
    assert code.only(EXPECT).endswith(", 8192")
    assert ALL_THREADS in code.between(EXPECT, TMA_LOAD)


def test_no_fence_before_arrive():
    """Where another partition hands a tile to TMA or wgmma, the writer has to fence it itself.

    The compiler adds nothing there, and leaves a fence where it is: by every thread, before the
    barrier that precedes `arrive`.
    """
    assert not code_of(partitions, integers(), "write", 2).all(FENCE)
    code = code_of(partitions, integers(), "write, fence", 2)
    for count in (10, 11):
        before = code.between(SHARED_STORE, rf"{ARRIVE}.*, {count}$")
        assert not before.only(FENCE).startswith("@")
        assert PARTITION_BARRIERS[count] in before.after(FENCE)


# --------------------------------------------------------------------- matrix products


@gluon.jit
def multiply(p, FENCED: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], layout)
    other = gl.allocate_shared_memory(gl.bfloat16, [64, 64], layout)
    empty = new_barrier()
    mbarrier.init(empty, count=1)
    tile.store(gl.load(p + cells()))
    if FENCED:
        fence_async_shared()
    zero = gl.zeros([64, 64], gl.float32, out_layout)
    one = warpgroup_mma(tile, tile, zero, use_acc=False, is_async=True)
    two = warpgroup_mma(tile, other, zero, use_acc=False, is_async=True)
    one = warpgroup_mma_wait(1, [one])
    gl.store(p + 8192 + gl.convert_layout(cells(), out_layout), one.to(gl.bfloat16))
    two = warpgroup_mma_wait(0, [two])
    mbarrier.arrive(empty, count=1)
    gl.store(p + 8192 + gl.convert_layout(cells(), out_layout), two.to(gl.bfloat16))


@pytest.mark.parametrize("fenced", [False, True])
def test_product_of_a_tile_just_written(fenced):
    """wgmma reads what all threads of the partition wrote to its operands, once it is fenced.

    There is a barrier; Triton 3.8 also adds a missing fence, Triton 3.6 does not.
    """
    before = code_of(multiply, floats(torch.bfloat16), fenced).between(SHARED_STORE, MMA)
    assert ALL_THREADS in before
    assert len(before.all(FENCE)) == (fenced or not OLD)
    if before.all(FENCE):
        assert ALL_THREADS in before.after(FENCE)


def test_products_in_flight():
    """Each `warpgroup_mma` is one group; `warpgroup_mma_wait(n)` leaves the last n in flight.

    An `arrive` behind the wait says that the operands have been read by all four warps.
    """
    code = code_of(multiply, floats(torch.bfloat16), True)
    steps = [re.sub(r"wgmma\.(\w+)\S*( \d)?.*", r"\1\2", i) for i in code.all(r"wgmma\.")]
    product = ["fence", *["mma_async"] * 4, "commit_group"]  # 64 deep, 16 at a time
    assert steps == [*product, *product, "wait_group 1", "wait_group 0"]
    assert code.between(r"wgmma\.wait_group\S* 1", r"wgmma\.wait_group\S* 0").all(r"st\.global")
    assert ALL_THREADS in code.between(r"wgmma\.wait_group\S* 0", ARRIVE)


# --------------------------------------------------------------------- atomics


@gluon.jit
def take_ticket(p, tickets, SEM: gl.constexpr):
    ticket = gl.atomic_add(tickets, 1, sem=SEM)
    gl.store(p + lanes(4), ticket + lanes(4))


@pytest.mark.parametrize("order", ["acq_rel", "release", "acquire", "relaxed", None])
def test_result_of_an_atomic(order):
    """A scalar atomic is done once, by one thread, on the device's scope; all get its result.

    They get it through shared memory and a barrier, so what they do with it comes after.
    """
    code = code_of(take_ticket, integers(), integers(), order)
    atomic = code.only(ATOMIC)
    assert atomic.startswith("@%p")
    assert f"atom.global.gpu.{order or 'acq_rel'}.add.u32" in atomic
    assert code.between(ATOMIC, r"bar\.").only(SHARED_STORE).startswith("@%p")
    assert ALL_THREADS in code.between(SHARED_STORE, SHARED_LOAD)


@gluon.jit
def publish(p, flag, BARRIER: gl.constexpr):
    gl.store(p + lanes(4), lanes(4))
    if BARRIER:
        barrier()
    gl.atomic_add(flag, 1, sem="release")


def test_an_atomic_releases_the_stores_of_its_own_thread_only():
    """What other threads stored to global memory before an atomic is not ordered by it.

    The compiler puts no barrier between; the kernel has to. And where nobody uses the result of an
    atomic, there is no barrier behind it either.
    """
    code = code_of(publish, integers(), integers(), False)
    assert not code.between(r"st\.global", ATOMIC).all(r"bar\.")
    assert not code.after(ATOMIC).all(r"bar\.")
    code = code_of(publish, integers(), integers(), True)
    assert ALL_THREADS in code.between(r"st\.global", ATOMIC)


# --------------------------------------------------------------------- numbers


@gluon.jit
def extremes(p, NAN: gl.constexpr):
    x = gl.load(p + lanes(4))
    y = gl.load(p + 128 + lanes(4))
    gl.store(p + lanes(4), gl.maximum(x, y, propagate_nan=NAN))
    gl.store(p + 128 + lanes(4), gl.minimum(x, y, propagate_nan=NAN))


@gluon.jit
def largest(p):
    gl.store(p, gl.max(gl.load(p + lanes(4)), axis=0))


def test_maximum_drops_nan():
    """`gl.maximum`, `gl.minimum` and `gl.max` on float32 return the operand that is not NaN."""

    def kinds(*arguments: Any) -> set[str]:
        return {i.split()[0] for i in code_of(*arguments).all(r"max\.|min\.")}

    assert kinds(extremes, floats(), tl.PropagateNan.NONE) == {"max.f32", "min.f32"}
    assert kinds(extremes, floats(), tl.PropagateNan.ALL) == {"max.NaN.f32", "min.NaN.f32"}
    assert kinds(largest, floats()) == {"max.f32"}


@gluon.jit
def arithmetic(p, i, j):
    gl.store(p, i // j)
    gl.store(p + 1, i % j)
    gl.store(p + 2, i // 16)
    gl.store(p + 3, i % 16)
    gl.store(p + 4, i // 3)
    gl.store(p + 5, i % 3)
    gl.store(p + 6, i * j)
    gl.store(p + 7, i + j)
    gl.store(p + 8, i - j)


def wrapped(x: int) -> int:
    """As a signed integer of 32 bits."""
    return (x + 2**31) % 2**32 - 2**31


def quotient(a: int, b: int) -> int:
    """Rounded towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a - b * quotient(a, b)


def stored_values(code: Iterable[str], parameters: dict[int, int]) -> list[int]:
    """What scalar integer code stores, given its parameters by position."""
    operations = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mul.hi": lambda a, b: a * b >> 32,
        "mad.lo": lambda a, b, c: a * b + c,
        "div": quotient,
        "rem": remainder,
        "shr": lambda a, n: a >> n,
        "shl": lambda a, n: a << n,
        "and": lambda a, b: a & b,
        "neg": lambda a: -a,
        "mov": lambda a: a,
    }
    values: dict[str, int] = {}
    stored = []
    for instruction in code:
        if loaded := re.match(r"ld\.param\.b32 (%r\d+), \[\w+_param_(\d+)\]", instruction):
            values[loaded[1]] = parameters[int(loaded[2])]
        elif scalar := re.match(r"([a-z.]+)\.([sub])32 (%r\d+), (.*)", instruction):
            operands = scalar[4].split(", ")
            if operands == ["%tid.x"]:
                continue
            if any(o.startswith("%") and o not in values for o in operands):
                continue  # of the thread's number
            numbers = [values[o] if o in values else int(o, 0) for o in operands]
            if scalar[2] == "u":
                numbers = [n % 2**32 for n in numbers]
            values[scalar[3]] = wrapped(operations[scalar[1]](*numbers))
        elif store := re.search(r"st\.global\.b32 .*\{ (%r\d+) \}", instruction):
            stored.append(values[store[1]])
    return stored


@pytest.mark.parametrize(
    ("i", "j"), [(7, 5), (-7, 5), (7, -5), (-7, -5), (-33, 2**31 - 1), (2**31 - 1, 2**31 - 1)]
)
def test_integers(i, j):
    """int32 wraps at 32 bits; `//` rounds towards zero, and `%` has the sign of its left side."""
    code = code_of(arithmetic, integers(), 7, 5)
    expected = [
        quotient(i, j),
        remainder(i, j),
        quotient(i, 16),
        remainder(i, 16),
        quotient(i, 3),
        remainder(i, 3),
        wrapped(i * j),
        wrapped(i + j),
        wrapped(i - j),
    ]
    assert stored_values(code, {1: i, 2: j}) == expected
