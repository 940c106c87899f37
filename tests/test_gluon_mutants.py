"""The Gluon emulator catches planted faults in real kernels: see gluon_mutants.py."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from gluon_emulator import NotEmulated
from gluon_gradients import CHECKS as GRADIENTS
from gluon_mutants import Mutant, Result, Subject, caught, mutants, patches
from gluon_plans import MaskFlags, Order, Plan
from gluon_subjects import (
    LONG,
    PANELS,
    PANELS_OF_V,
    REGISTERS,
    SHARED,
    THREE,
    THREE_TURNS,
    TURNS,
    Hopper,
    Packed,
    backward,
    forward,
    fp8,
)

# A fault may hide from this many schedules before it counts as missed. What is no fault meets
# fewer, since it meets them all.
SEEDS = range(12)
SEEDS_OF_SURVIVORS = range(1)

KERNELS, PATCHES = "tests/gluon_kernels/", "tests/gluon_patches/"
FORWARD = (
    "launch", "operands", "forward", "products", "schedule", "pipeline", "masking", "softmax",
    "dropout",
)  # fmt: skip
BACKWARD = (
    "launch_backward", "launch_stored", "algorithms", "backward", "stored", "query_gradient",
    "statistics", "pipeline", "masking", "dropout",
)  # fmt: skip
SUBJECTS = {
    "forward": Subject(
        (KERNELS + "forward.py",),
        (
            partial(forward, sizes=(1, 200, 260, 64), masked=True, pingpong=True),
            partial(forward, sizes=(2, 230, 200, 64), masked=False, pingpong=True, programs=2),
            partial(forward, sizes=(2, 260, 130, 64), masked=True, programs=1),
            partial(forward, sizes=(1, 200, 330, 64), masked=False, consumers=3, stages=3),
        ),
        PATCHES + "forward.txt",
    ),
    "backward": Subject(
        (KERNELS + "backward.py",),
        (
            partial(backward, sizes=(1, 200, 260, 64), masked=True),
            partial(backward, sizes=(2, 200, 130, 64), masked=False, ds_stages=1),
            partial(backward, sizes=(1, 260, 130, 128), masked=True, stages=1),
            partial(backward, sizes=(1, 70, 70, 64), masked=False, low=True),
        ),
        PATCHES + "backward.txt",
    ),
    "fp8": Subject(
        (KERNELS + "fp8.py",),
        (
            partial(fp8, sizes=(1, 128, 384, 64), polynomial=50),
            partial(fp8, sizes=(2, 256, 192, 64), stages=1, peak=True, out_dtype=torch.float32),
        ),
        PATCHES + "fp8.txt",
    ),
    "hopper forward": Subject(
        tuple(f"src/anyflash/kernels/hopper/{name}.py" for name in FORWARD),
        (
            # One program draws three blocks. The first block sees one key of its last tile.
            Hopper((1, 2, 1, 200, 137), programs=1, right=0),
            # The ends of a window fall on those of tiles, or one key before or after.
            Plan(640, 1024, left=320, right=128),
            Plan(640, 1024, left=321, right=129),
            Plan(640, 1024, left=319, right=191),
            Plan(640, 1024, left=318, right=190),
            Plan(200, 128),
            Plan(640, 1024, left=319, right=191, rows=64, whole=192),
            Plan(640, 1024, left=318, right=190, rows=64, whole=192),
            # The second block sees one key of its first tile.
            Hopper((1, 1, 1, 200, 200), REGISTERS, programs=1, left=65, right=70),
            # A block each. The first full tile ends one key after what the first row sees.
            Hopper((1, 1, 1, 200, 198), THREE, right=0, scale=-0.125),
            # Whole blocks without keys.
            Hopper((1, 2, 1, 200, 70), SHARED, (80, 48), right=0, sink=(-math.inf, 0.5)),
            # One row of the second consumer does not see the first key of a tile.
            Hopper((1, 1, 1, 200, 200), left=62, scale=0.0),
            # Nothing is seen at all: the window ends before it begins; no intervals are given.
            Hopper((1, 1, 1, 200, 200), THREE, left=-100, right=0),
            # Columns of Q and K, or of V, as boxes side by side.
            Hopper((1, 2, 1, 100, 137), PANELS, (96, 50), programs=1, right=0),
            Hopper((1, 1, 1, 140, 137), PANELS_OF_V, (64, 96), programs=1, sink=(1.0,)),
            # Scores that grow from tile to tile by more than a weight may, in some of the rows.
            Hopper((1, 1, 1, 190, 390), THREE_TURNS, scale=3.0),
            # Tiles that need a mask apart, and none but those.
            Hopper((1, 1, 1, 140, 128), THREE, left=20),
            Hopper((1, 1, 1, 70, 200), THREE, intervals=("nothing",)),
            Hopper((1, 1, 1, 70, 200), PANELS_OF_V, (64, 96), scale=3.0),
            # Scores beyond which the exponent's slope is a power of two.
            Hopper((1, 1, 1, 70, 130), scale=1e8, dtype=torch.bfloat16),
            # Heads share a tile: two of the six, which have one key head; none under dropout.
            Hopper((1, 6, 1, 5, 70)),
            Hopper((1, 2, 1, 20, 70), dropout=0.6),
            # Intervals of each batch element, of each sequence, of all batch elements.
            Hopper((2, 2, 2, 140, 200), dims=(64, 50), intervals=("documents", "band")),
            Packed(
                (20, 0, 140),
                (90, 5, 150),
                (60, 0, 130),
                (1, 1),
                intervals="some rows",
                dropout=0.6,
            ),
            Hopper((2, 1, 1, 100, 470), intervals=("first keys",)),
            Hopper((2, 1, 1, 140, 470), THREE, intervals=("last keys", "first keys")),
            Hopper((1, 1, 1, 70, 192), THREE, intervals=("to the end",)),
            Hopper(
                (2, 4, 2, 100, 128), TURNS, section=3, softcap=2.0, share=1, dtype=torch.bfloat16
            ),
            # Tile maps of each head, of each batch element; heads that would share a tile; tiles of
            # which one consumer sees all or nothing; blocks that need none, or not the last ones.
            Hopper((2, 2, 1, 140, 200), tile_map="random", programs=3),
            Hopper((2, 4, 1, 20, 137), tile_map="random, of all heads"),
            Hopper((2, 1, 1, 200, 137), THREE, tile_map="every other granule", programs=1),
            Hopper((1, 2, 1, 300, 400), LONG, tile_map="blocks", programs=1),
            Hopper((1, 1, 1, 330, 200), LONG, tile_map="rows that see nothing", programs=1),
            Hopper((1, 1, 1, 140, 300), LONG, tile_map="all but one score", programs=1),
            Hopper((1, 1, 1, 330, 200), tile_map="one score", programs=1),
            # The sequences between have no blocks. The first one sees some of its keys.
            Packed(
                (70, *[0] * 300, 150),
                (90, *[0] * 300, 130),
                (40, *[0] * 300, 110),
                left=40,
                right=2**31 - 1,
            ),
            # Both heads with one key head share a tile, or two of four do.
            Packed((70, 0, 100), (90, 5, 130), (40, 0, 110), (4, 2), left=40, right=20, share=2),
            Hopper((2, 4, 1, 80, 70), right=0, share=2, sink=(0.5, -1.0, 2.0, -3.0)),
            Hopper((1, 1, 1, 140, 137), right=20, dropout=0.6),
            Plan(159, 700, intervals=1, rows=4),
            Plan(219, 700, intervals=2, rows=4),
            # Sections of one head, of two, of all; sections without halves.
            Order(1, 3, 1, 7, MaskFlags(False, True, 0)),
            Order(2, 2, 3, 2, MaskFlags(True, True, 0)),
        ),
        PATCHES + "hopper_forward.txt",
    ),
    "hopper backward": Subject(
        tuple(f"src/anyflash/kernels/hopper/{name}.py" for name in BACKWARD),
        GRADIENTS,
        PATCHES + "hopper_backward.txt",
    ),
}
# What is no fault, or none that the emulator can see, and why. `barrier()` in a kernel is for the
# reader: what the compiler adds by itself is tested in test_gluon_compiler.py.
BEFORE_ARRIVE = "the compiler lets the threads of a partition meet before each arrive"
BEFORE_TMA = "the compiler lets the threads meet before TMA reads a tile that they have written"
AFTER_STORE_WAIT = "the compiler lets the threads meet after `store_wait`"
LATER_K = (
    "before it overwrites this K, the producer waits for the V of the tile before, and consumers"
    " release that after a wait for all products"
)
NO_PROXY = "not seen: in the emulator, TMA reaches barriers through no proxy of its own"
SLOT_OF_A_TICKET = (
    "whose slot it is, the block before the last, is taken: since then the producer has waited for"
    " each consumer to release the Q of that block"
)
SURVIVORS = {
    "forward": {
        "producer: barrier(): dropped": BEFORE_ARRIVE,
        "consumer: barrier(): dropped": BEFORE_TMA,
        "consumer: barrier() #2: dropped": BEFORE_ARRIVE,
        "a later K is released before the wait for its product": LATER_K,
        "the output's fence comes after the barrier": (
            "a proxy fence may stand anywhere between the stores and the copy"
        ),
        "the last rows go out by TMA, clipped": "TMA drops what lies beyond the tensor's edge",
        "ping-pong barriers of 128 threads": (
            "each consumer alone completes them, so turns are not taken; no memory depends on turns"
        ),
        "Q is waited for twice": "the second wait meets a phase that is over",
    },
    "backward": {
        "consumer: barrier(): dropped": BEFORE_TMA,
        "query_gradient: barrier(): dropped": AFTER_STORE_WAIT,
        "query_gradient: barrier() #2: dropped": BEFORE_TMA,
        "lse beyond the end is 0": (
            "rows of dO and delta beyond the end are 0 as well, so what P multiplies there is 0"
        ),
    },
    "fp8": {"consumer: barrier(): dropped": BEFORE_TMA},
    "hopper forward": {
        "consumer: barrier(): dropped": AFTER_STORE_WAIT,
        "consumer: barrier() #2: dropped": BEFORE_TMA,
        "forward_kernel: fence_async_shared(): dropped": NO_PROXY,
        "give: mbarrier.wait(self.empty.index(slot), phase ^ 1): dropped": SLOT_OF_A_TICKET,
        "a ticket is said to be read before it is": SLOT_OF_A_TICKET,
        "the slope is never a power of two": (
            "not seen: in the emulator, both products of s · slope − reference · slope are rounded"
        ),
        "take: barrier(): dropped": BEFORE_ARRIVE,
        "a later K is released before the wait for its product": LATER_K,
    },
}

SURVIVORS["hopper backward"] = {
    "consumer: barrier(): dropped": AFTER_STORE_WAIT,
    "consumer: barrier() #2: dropped": BEFORE_TMA,
    "keep: barrier(): dropped": AFTER_STORE_WAIT,
    "keep: barrier() #2: dropped": BEFORE_TMA,
    "multiply_scores: barrier(): dropped": AFTER_STORE_WAIT,
    "multiply_scores: barrier() #2: dropped": BEFORE_TMA,
    "stored_kernel: fence_async_shared(): dropped": NO_PROXY,
    "add: barrier(): dropped": AFTER_STORE_WAIT,
    "add: barrier() #2: dropped": BEFORE_TMA,
    "backward_kernel: fence_async_shared(): dropped": NO_PROXY,
    "statistics_kernel: fence_async_shared(): dropped": NO_PROXY,
}
MUTANTS = {name: mutants(subject) for name, subject in SUBJECTS.items()}
EACH = [pytest.param(s, m, id=f"{s}-{m.name}") for s, ms in MUTANTS.items() for m in ms]


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("seed", SEEDS[:4])  # the kernels' own tests take more
def test_kernels_as_they_are_pass(subject: str, seed: int) -> None:
    assert caught(SUBJECTS[subject], None, [seed]) is None


@pytest.mark.parametrize(("subject", "mutant"), EACH)
def test_a_planted_fault_is_caught(subject: str, mutant: Mutant) -> None:
    reason = SURVIVORS.get(subject, {}).get(mutant.name)
    if reason is None:
        assert caught(SUBJECTS[subject], mutant, SEEDS), "missed: a hole, or no fault?"
    else:
        found = caught(SUBJECTS[subject], mutant, SEEDS_OF_SURVIVORS)
        assert found is None, f"said to live: {reason}; caught: {found}"


def test_tables_are_true() -> None:
    """Names are unique, no reason is left over from a mutant that is gone, faults are many."""
    assert SURVIVORS.keys() <= SUBJECTS.keys()
    for subject, ms in MUTANTS.items():
        names = {m.name for m in ms}
        assert len(names) == len(ms)
        assert SURVIVORS.get(subject, {}).keys() <= names
        assert len(ms) >= len(list(patches(SUBJECTS[subject]))) + 20, "few statements were found"
    assert len(EACH) - sum(map(len, SURVIVORS.values())) >= 60


# The machinery itself.


def two_files(folder: Path, patch: str | None = None) -> Subject:
    """A kernel whose channel is an aggregate in another file."""
    if patch is not None:
        (folder / "patch.txt").write_text(patch)
    for name, text in (("mutant_kernel", KERNEL), ("mutant_channel", CHANNEL)):
        (folder / f"{name}.py").write_text(text)

    def check(module: ModuleType) -> list[Result]:
        numbers = torch.arange(3.0).repeat_interleave(32)
        return [Result("numbers", module.numbers(3).float(), numbers, numbers)]

    files = (str(folder / "mutant_kernel.py"), str(folder / "mutant_channel.py"))
    return Subject(files, (check,), patch and str(folder / "patch.txt"))


CHANNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anyflash.kernels.hopper.compat import aggregate


@aggregate
class Channel:
    tile: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tile, full, empty):
        self.tile = tile
        self.full = full
        self.empty = empty

    @gluon.jit
    def put(self, value, phase):
        mbarrier.wait(self.empty, phase ^ 1)
        self.tile.store(value)
        mbarrier.arrive(self.full, count=1)

    @gluon.jit
    def get(self, phase):
        mbarrier.wait(self.full, phase)
        return self.tile

    @gluon.jit
    def release(self):
        mbarrier.arrive(self.empty, count=1)


@gluon.jit
def make_channel():
    tile = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    return Channel(tile, full, empty)
"""
KERNEL = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mutant_channel import make_channel


@gluon.jit
def writer(channel, out, count):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(count):
        channel.put(gl.full([32], i, gl.int32, layout), i & 1)


@gluon.jit
def reader(channel, out, count):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(count):
        x = channel.get(i & 1).load(layout)
        channel.release()
        gl.store(out + i * 32 + gl.arange(0, 32, layout), x)


@gluon.jit
def kernel(out, count):
    channel = make_channel()
    args = (channel, out, count)
    gl.warp_specialize([(writer, args), (reader, args)], [4], [64])


def numbers(count):
    out = torch.empty(count * 32, dtype=torch.int32)
    kernel[(1,)](out, count, num_warps=4)
    return out
"""


def test_helpers_in_another_file_are_attacked(tmp_path: Path) -> None:
    subject = two_files(tmp_path)
    found = {m.name: caught(subject, m, SEEDS) for m in mutants(subject)}
    assert {
        "writer: channel.put(gl.full([32], i, gl.int32, layout), i & 1): dropped",
        "writer: channel.put(gl.full([32], i, gl.int32, layout), i & 1): other phase",
        "reader: channel.get(i & 1): does not synchronise",
        "reader: channel.release(): dropped",
        "get: mbarrier.wait(self.full, phase): dropped",
        "make_channel: mbarrier.init(full, count=1): count + 1",
        "kernel: make_channel(): does not synchronise",
    } <= found.keys()
    assert all(found.values()), found
    assert caught(subject, None, SEEDS) is None


def test_a_patch_must_fit(tmp_path: Path) -> None:
    for number, patch in enumerate(("gone\n-no such text\n+x\n", "twice\n-count=1\n+count=2\n")):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ValueError, match="times, not once"):
            mutants(two_files(folder, patch=patch))
    folder = tmp_path / "form"
    folder.mkdir()
    with pytest.raises(ValueError, match="neither old nor new"):
        mutants(two_files(folder, patch="a name\nand no sign\n"))


@pytest.mark.parametrize(
    ("new", "error"), [("await_barrier(", NameError), ("gl.histogram(", NotEmulated)]
)
def test_what_is_no_legal_kernel_is_not_caught(tmp_path: Path, new: str, error: type) -> None:
    patch = f"a mistake\n-mbarrier.wait(self.full\n+{new}self.full\n"
    subject = two_files(tmp_path, patch=patch)
    with pytest.raises(error):
        caught(subject, next(patches(subject)), SEEDS)


def statistics() -> None:
    """How much each net catches: `PYTHONPATH=tests python tests/test_gluon_mutants.py`."""
    for name, subject in SUBJECTS.items():
        by_hand = len(list(patches(subject)))
        found = {m.name: caught(subject, m, SEEDS) for m in MUTANTS[name]}
        values = [caught(subject, m, SEEDS, races=False) for m in MUTANTS[name]]
        print(
            f"{name}: {len(found) - by_hand} mechanical, {by_hand} by hand;"
            f" caught {sum(map(bool, found.values()))},"
            f" at the first seed {sum(c is not None and c.seed == 0 for c in found.values())},"
            f" without vector clocks {sum(map(bool, values))};"
            f" {dict(Counter(c.error for c in found.values() if c))}"
        )
        print(*(f"  lives: {m}" for m, c in found.items() if c is None), sep="\n")
        print(*(f"  late: {m} {c}" for m, c in found.items() if c and c.seed > 0), sep="\n")


if __name__ == "__main__":
    statistics()
