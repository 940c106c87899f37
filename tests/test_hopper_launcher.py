"""The launcher of Hopper kernels, against Triton's own launches, without a card.

A C file takes the place of the driver's libcuda.so.1: it writes down what it is asked to launch, to
the byte. Everything above it is real: Triton compiles for sm_90a, builds its C launcher and calls
it, once through its own Python and once directly.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import re
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import anyflash
from anyflash import calls, dispatch, ops
from anyflash.backends import hopper
from anyflash.devices import Device
from anyflash.kernels.hopper import compat, launcher
from anyflash.kernels.hopper.compat import async_store, barrier
from anyflash.kernels.hopper.forward import forward_kernel
from anyflash.kernels.hopper.launcher import MAPS, Kernel, Operand, View, box
from gluon_emulator import emulate

DRIVER = r"""
#include <cuda.h>
#include <string.h>

/* What launches wrote down: function, stream, programs, then each parameter. */
int sizes[64], parameters, launches, encoded;
unsigned char written[4096][4096];

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **given, void **extra) {
  unsigned char *to = written[__sync_fetch_and_add(&launches, 1) % 4096];
  unsigned long long head[3] = {(unsigned long long)f, (unsigned long long)c->hStream, c->gridDimX};
  memcpy(to, head, sizeof head);
  to += sizeof head;
  for (int i = 0; i < parameters; to += sizes[i++]) memcpy(to, given[i], sizes[i]);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
    void *address, const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *boxed,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char *to = memset(map, 0, sizeof *map);
  int head[4] = {type, rank, swizzle, fill};
  memcpy(to, head, 16);
  memcpy(to + 16, &address, 8);
  memcpy(to + 24, dims, 8 * rank);
  memcpy(to + 64, strides, 8 * (rank - 1));
  memcpy(to + 96, boxed, 4 * rank);
  encoded++;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  static size_t last;
  *f = (CUfunction)++last;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 1024;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
  *value = 1024;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
  *(CUdeviceptr *)value = address;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = "an error";
  return CUDA_SUCCESS;
}
"""
# What else Triton's C files refer to; all of it succeeds.
OTHERS = """
    cuCtxGetDevice cuCtxGetLimit cuCtxSetCurrent cuCtxSetLimit cuDeviceGet cuDevicePrimaryCtxRetain
    cuDriverGetVersion cuFuncSetAttribute cuFuncSetCacheConfig cuModuleLoadData cuModuleUnload
    cuOccupancyMaxActiveClusters cuTensorMapEncodeIm2col
"""


class OnCard(Tensor):
    """A tensor that says it is on a card."""

    card = 0

    def get_device(self) -> int:
        return self.card


class Card(nvidia.CudaDriver):
    """Triton's driver over that library, with torch's part played here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        self.current = 0
        self.get_device_capability = lambda device: (9, 0)
        self.get_current_device = lambda: self.current
        self.get_current_stream = lambda device: 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, name)

    def expect(self, ptx: str) -> None:
        """Write down the parameters of the kernel in `ptx`."""
        parameter = r"\.param (?:\.align \d+ )?\.[busf](\d+) [^,\[)]*(?:\[(\d+)\])?"
        declared = re.findall(parameter, ptx)
        found = [int(bits) // 8 * int(n or 1) for bits, n in declared]
        sizes = (ctypes.c_int * 64).in_dll(self._library, "sizes")
        sizes[: len(found)] = found
        self.number("parameters").value = len(found)

    def launches(self) -> list[bytes]:
        """What has been launched since the last call."""
        count = self.number("launches")
        written = (ctypes.c_ubyte * 4096 * 4096).in_dll(self._library, "written")
        found = [bytes(written[i]) for i in range(count.value)]
        ctypes.memset(written, 0, ctypes.sizeof(written))
        count.value = 0
        return found


@cache
def library() -> Path:
    """The driver's, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sources, found = [folder / "driver.c", folder / "others.c"], folder / "libcuda.so.1"
    sources[0].write_text(DRIVER)
    sources[1].write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in OTHERS.split()))
    include = Path(nvidia.__file__).parent / "include"
    command = ["gcc", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, *sources, "-o", found], check=True)
    return found


@cache
def one_card() -> Card:
    """One in a process, though tests of other modules may come between those of this one: what was
    compiled with a driver keeps its C functions, which take no tensor maps of another one's."""
    # Loaded once under that name, it is what everything else finds under it.
    return Card(ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL))


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    if torch.cuda.is_available():
        pytest.skip("the real driver is loaded")
    if shutil.which("gcc") is None:
        pytest.skip("Triton builds its launcher with a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_LIBCUDA_PATH", str(library().parent))
        patch.setenv("TRITON_CACHE_DIR", str(library().parent / "cache"))
        nvidia.library_dirs.cache_clear()
        nvidia.libcuda_dirs.cache_clear()
        found = one_card()
        patch.setattr(driver, "_active", found)
        patch.setattr(torch.cuda, "current_device", lambda: found.current)
        patch.setattr(torch.cuda, "device", found.device)
        yield found


@gluon.jit(do_not_specialize=["rows"])
def store(
    desc, other_desc, out, spare, pair, rows, step, factor, BLOCK: gl.constexpr, ADD: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout(  # pyright: ignore[reportAssignmentType]
        [1, 8], [8, 4], [gl.num_warps(), 1], [1, 0]
    )
    tile = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)
    if ADD:
        tile.store(gl.full(desc.block_type.shape, 1.0, desc.dtype, layout))
    fence_async_shared()
    barrier()
    row = rows.to(gl.int32)
    async_store(desc, [0, row], tile)
    async_store(other_desc, [0, row], tile)
    tma.store_wait(0)
    value = factor * step + BLOCK
    if spare is not None:
        value += gl.load(spare)
    if pair[0] is not None:
        value += gl.load(pair[0]) + pair[1]
    gl.store(out, value)


class Arguments(NamedTuple):
    desc: Operand
    other_desc: Operand
    out: Tensor
    spare: Tensor | None
    pair: tuple[Tensor | None, int]
    rows: int
    step: int
    factor: float


CONSTANTS = {"BLOCK": 16, "ADD": True}


def tensor(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> OnCard:
    room = torch.zeros(torch.Size(shape).numel() + offset, dtype=dtype)
    return room[offset:].view(shape).as_subclass(OnCard)


def operand(x: Tensor) -> Operand:
    default = gl.NVMMASharedLayout.get_default_for
    layout = default([16, 32], gl.float16)  # pyright: ignore[reportCallIssue]
    return Operand(x, View(tuple(x.shape), x.stride(), box(x.dtype, (16, 32), layout)))


def arguments(**changes: Any) -> Arguments:
    x, y = (operand(tensor(64, 64, dtype=torch.float16)) for _ in range(2))
    return Arguments(x, y, tensor(4), tensor(4), (tensor(4), 3), 5, 6, 1.5)._replace(**changes)


class Launcher:
    """A `Kernel` of its own, and how often it went through Triton."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kernel, self.through_triton = Kernel(store), 0
        real = self.kernel._through_triton

        def counted(*given: Any) -> Any:
            self.through_triton += 1
            return real(*given)

        patch.setattr(self.kernel, "_through_triton", counted)

    def __call__(self, given: Arguments, programs: int = 3, **constants: Any) -> int:
        """Launch; how often that went through Triton."""
        before = self.through_triton
        self.kernel(programs, given, CONSTANTS | constants)
        return self.through_triton - before


@pytest.fixture
def launch(card: Card, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    found = Launcher(monkeypatch)
    found(arguments())
    card.expect(next(iter(store.device_caches[0][0].values())).asm["ptx"])
    card.launches()
    return found


def latest(function: Any = store) -> Any:
    """The last kernel that was compiled."""
    return list(function.device_caches[0][0].values())[-1]


def by_triton(given: Arguments, programs: int = 3, **constants: Any) -> None:
    descriptors = (x.view.descriptor(x.base) for x in given[:2])
    run: Any = store[(programs,)]
    run(*descriptors, *given[2:], **(CONSTANTS | constants), num_warps=4)


CHANGES = {
    "nothing": {},
    "pointers": {"out": tensor(4), "spare": tensor(8), "pair": (tensor(2), 3)},
    "numbers": {"rows": -7, "factor": -0.25},
    "a number that is 1": {"rows": 1},
    "a number divisible by 16": {"rows": 48},
    "another tensor": {"desc": operand(tensor(64, 64, dtype=torch.float16))},
    "other sizes": {"desc": operand(tensor(50, 128, dtype=torch.float16)[:, :72])},
    "the same twice": {
        "desc": (x := operand(tensor(64, 64, dtype=torch.float16))),
        "other_desc": x,
    },
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_the_driver_is_given_what_triton_gives_it(
    card: Card, launch: Launcher, changes: dict[str, Any]
) -> None:
    given = arguments(**changes)
    assert launch(given, programs=7) == 0
    by_triton(given, programs=7)
    direct, through_triton = card.launches()
    assert direct == through_triton
    assert direct[24:152] != bytes(128) and direct[16] == 7


DIFFERENT = {
    "a pointer off by 4 bytes": {"out": tensor(4, offset=1)},
    "one in a tuple": {"pair": (tensor(4, offset=1), 3)},
    "another dtype": {"out": tensor(4, dtype=torch.float64)},
    "None": {"spare": None},
    "None in a tuple": {"pair": (None, 3)},
    "a number that is 1": {"step": 1},
    "a number divisible by 16": {"step": 32},
    "a number in a tuple": {"pair": (tensor(4), 16)},
    "64 bits": {"rows": 2**31},
    "unsigned": {"step": 2**63 + 1},
    "an integer as factor": {"factor": 3},
    "a bool": {"step": True},
    "another box": dict.fromkeys(
        ("desc", "other_desc"), operand(tensor(64, 64, dtype=torch.bfloat16))
    ),
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_is_compiled_differently_goes_through_triton_once(
    card: Card, launch: Launcher, changes: dict[str, Any]
) -> None:
    given = arguments(**changes)
    card.expect("")  # another kernel may have other parameters
    assert launch(given) == 1
    card.expect(latest().asm["ptx"])
    by_triton(given)
    assert launch(given) == 0
    first, through_triton, direct = card.launches()
    assert direct == through_triton and direct[:8] == first[:8]
    card.expect("")
    assert launch(arguments()) == 0
    assert card.launches()[0][:8] != direct[:8]


def test_constants_and_options_make_another_kernel(card: Card, launch: Launcher) -> None:
    given = arguments()
    assert launch(given, BLOCK=32) == 1 and launch(given, ADD=False) == 1
    assert launch(given, ADD=True, BLOCK=32) == 0 and launch(given) == 0
    first, second, again, before = card.launches()
    assert again == first and len({first[:8], second[:8], before[:8]}) == 3
    for options in ({"num_warps": 8}, {"maxnreg": 64}):
        for _ in range(2):
            launch.kernel(3, given, CONSTANTS, **options)
    assert launch.through_triton == 1 + 2 + 2
    with pytest.raises(KeyError, match="ADD"):
        launch.kernel(3, given, {"BLOCK": 16})


def test_hooks_see_every_launch(
    card: Card, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, seen = arguments(), []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    for hook in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, hook, enter)
            assert launch(given) == 1
    chain = knobs.runtime.launch_enter_hook
    chain.add(enter)
    try:
        assert launch(given) == 1
    finally:
        chain.remove(enter)
    assert seen == ["store"] * 3
    store.add_pre_run_hook(lambda *args, **kwargs: seen.append("before"))
    try:
        assert launch(given) == 1
    finally:
        store.pre_run_hooks.clear()
    assert seen[3:] == ["before"] and launch(given) == 0


def test_the_card_of_the_tensors_counts(card: Card, launch: Launcher) -> None:
    given = arguments()
    for x in (given.desc.base, given.other_desc.base, given.out, given.spare, given.pair[0]):
        assert isinstance(x, OnCard)
        x.card = 1
    assert [launch(given), launch(given), launch(arguments())] == [1, 0, 0]
    streams = [int.from_bytes(x[8:16], "little") for x in card.launches()]
    assert streams == [101, 101, 100] and card.current == 0


def test_where_launches_are_replaced(card: Card, launch: Launcher) -> None:
    """As by the emulator: whatever is known, and nothing is remembered."""
    given, calls = arguments(), []
    real = JITFunction.run

    def instead(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        calls.append(grid)

    JITFunction.run = instead
    try:
        launch(given)
        launch(arguments(step=96))
        launch(arguments(step=96))
    finally:
        JITFunction.run = real
    assert calls == [(3,)] * 3 and card.launches() == []
    assert launch(given) == 0


def test_in_the_emulator() -> None:
    x, y, out = (torch.zeros(n) for n in ((64, 64), (64, 64), 4))
    x, y = operand(x.half()), operand(y.half())
    given = Arguments(x, y, out, None, (None, 3), 16, 2, 1.5)
    with emulate() as launches:
        for _ in range(2):
            Kernel(store)(1, given, CONSTANTS)
    assert len(launches) == 2 and out[0] == 19
    assert (x.base[:16, 16:48] == 1).all() and x.base.sum() == 16 * 32


def test_an_unknown_triton_launches_by_itself(
    card: Card, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "WAY", None)
    given = arguments(step=160)
    assert [launch(given), launch(given)] == [1, 1]
    one, other = card.launches()
    assert one == other


def test_debugging_goes_through_triton(
    card: Card, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(arguments()) == 0
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert launch(arguments()) == 1


def test_maps_are_encoded_once_for_an_address(card: Card, launch: Launcher) -> None:
    assert launcher._mapped.cache_info().maxsize == MAPS
    given = arguments()
    before = card.number("encoded").value
    for _ in range(5):
        launch(given)
    assert card.number("encoded").value == before + 2
    launch(given._replace(desc=operand(tensor(64, 64, dtype=torch.float16))))
    assert card.number("encoded").value == before + 3


def test_no_tensor_is_kept(launch: Launcher) -> None:
    given = arguments()
    tensors = (given.desc.base, given.other_desc.base, given.out, given.spare, given.pair[0])
    kept = [weakref.ref(x) for x in tensors]
    launch(given)
    assert launch(given._replace(step=112)) == 1
    del given, tensors
    gc.collect()
    assert [x() for x in kept] == [None] * 5


def test_threads(card: Card, launch: Launcher) -> None:
    """The first launch of a kind, in eight threads at once, and a hundred more in each."""
    everything = [arguments(step=7 * 16, rows=i) for i in range(8)]
    start, faults = threading.Barrier(8), []

    def work(given: Arguments) -> None:
        try:
            start.wait()
            for _ in range(100):
                launch(given, BLOCK=48)
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(x,)) for x in everything]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    found = [x[24:] for x in card.launches()]
    assert len(found) == 800 and launch.through_triton <= 1 + 8
    for given in everything:
        by_triton(given, BLOCK=48)
    assert {x[24:] for x in card.launches()} == set(found)
    assert all(found.count(x) == 100 for x in set(found))


def test_what_no_kernel_takes(launch: Launcher) -> None:
    for wrong in (arguments()[:-1], (*arguments(), 1)):
        with pytest.raises(TypeError, match="argument"):
            launch.kernel(3, wrong, CONSTANTS)
    with pytest.raises(TypeError, match="argument of type list"):
        launcher._kind([1])

    @gluon.jit
    def constant_first(BLOCK: gl.constexpr, out):
        pass

    with pytest.raises(TypeError, match="constant_first: a constant before other parameters"):
        Kernel(constant_first)


# Prepared launches.


ALONE = CONSTANTS | {"BLOCK": 80}  # no other test compiles it


def without_tuples(**changes: Any) -> Arguments:
    """Arguments of a kind of their own, which may be prepared."""
    return arguments(**{"pair": (None, 3)} | changes)


def addresses(given: Arguments) -> tuple[list[int], list[int]]:
    """Of operands and of tensors."""
    operands = [x.base.data_ptr() for x in given if isinstance(x, Operand)]
    return operands, [x.data_ptr() for x in given if isinstance(x, Tensor)]


def test_a_prepared_launch_gives_the_driver_the_same(card: Card, launch: Launcher) -> None:
    sizes = (50, 128)
    wide = [operand(tensor(*sizes, dtype=torch.float16)[:, :72]) for _ in range(2)]
    for changes in ({}, {"rows": -7, "factor": -0.25}, {"desc": wide[0]}):
        card.expect("")
        given = without_tuples(**changes)
        launch(given, **ALONE)
        prepared = launch.kernel.prepare(7, given, ALONE)
        card.expect(latest().asm["ptx"])
        card.launches()
        other = without_tuples(**changes | ({"desc": wide[1]} if "desc" in changes else {}))
        assert prepared is not None and prepared.ready()
        prepared(*addresses(other))
        by_triton(other, programs=7, **ALONE)
        replayed, through_triton = card.launches()
        assert replayed == through_triton and replayed[24:152] != bytes(128)


def test_when_a_prepared_launch_does_nothing(
    card: Card, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = without_tuples(step=7)
    prepared = Kernel(store).prepare(3, given, ALONE)
    assert prepared is not None and not prepared.ready()  # nothing is known yet
    with pytest.raises(RuntimeError, match="not asked"):
        prepared(*addresses(given))
    card.expect("")  # other parameters than those of the kernel before
    assert launch(given, **ALONE) == 1
    prepared = launch.kernel.prepare(3, given, ALONE)
    card.launches()
    assert prepared is not None and prepared.ready()
    prepared(*addresses(given))
    assert len(card.launches()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert not prepared.ready()
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
        assert not prepared.ready()
    with card.device(1):
        assert not prepared.ready()
    assert card.launches() == [] and prepared.ready()


def test_what_cannot_be_prepared(launch: Launcher) -> None:
    with pytest.raises(TypeError, match="without tensors in tuples"):
        launch.kernel.prepare(3, arguments(), ALONE)
    x = operand(torch.zeros(64, 64, dtype=torch.float16))
    nowhere = Arguments(x, x, torch.zeros(4), None, (None, 3), 5, 6, 1.5)
    assert launch.kernel.prepare(3, nowhere, ALONE) is None


def test_a_prepared_launch_keeps_no_tensor(card: Card, launch: Launcher) -> None:
    given = without_tuples()
    card.expect("")
    launch(given, **ALONE)
    prepared = launch.kernel.prepare(3, given, ALONE)
    kept = [weakref.ref(x) for x in (given.desc.base, given.out, given.spare)]
    del given
    gc.collect()
    assert prepared is not None and [x() for x in kept] == [None] * 3


# Whole calls, replayed.


class Calls:
    """`attention` of CPU tensors, taken for those of a card that has three multiprocessors."""

    def __init__(self, card: Card, patch: pytest.MonkeyPatch) -> None:
        self.card, self.counters = card, []
        refuse, zeros = hopper._hardware, torch.zeros
        served = Device("cuda", "played", frozenset({"wgmma"}))
        properties = SimpleNamespace(multi_processor_count=3)

        def counter(*given: Any, **options: Any) -> Tensor:
            self.counters.append(zeros(*given, **options))
            return self.counters[-1]

        patch.setattr(hopper, "_hardware", lambda device: refuse(served))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(launcher, "_device", lambda args: 0)
        patch.setattr(torch, "zeros", counter)

    def __call__(self, ordinary: bool, *qkv: Tensor, **options: Any) -> tuple[bytes, Any]:
        """What the driver is given, with names for the addresses of results, and the results."""
        if ordinary:
            calls._replays.clear()
        with torch.no_grad():
            results = anyflash.attention(*qkv, backend="hopper", return_lse=True, **options)
        (found,) = self.card.launches()
        for name, x in zip(
            ("out", "lse", "counter"), (*results, *self.counters[-1:]), strict=False
        ):
            found = found.replace(x.data_ptr().to_bytes(8, "little"), name.encode().center(8))
        return found, results


@pytest.fixture
def attention(card: Card, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    forget = (dispatch.select.cache_clear, calls._checked.clear, calls._replays.clear)
    for table in forget:
        table()
    card.launches()
    yield Calls(card, monkeypatch)
    for table in forget:
        table()


def heads_inside(batch: int, heads: int, length: int, width: int) -> Tensor:
    return torch.randn(batch, length, heads, width, dtype=torch.bfloat16).transpose(1, 2)


def heads_outside(batch: int, heads: int, length: int, width: int) -> Tensor:
    return torch.randn(batch, heads, length, width, dtype=torch.bfloat16)


def part(batch: int, heads: int, length: int, width: int) -> Tensor:
    """Of a projection to more heads, of sequences that are longer."""
    room = torch.randn(batch, length + 3, 3, heads, width, dtype=torch.float16)
    return room[:, 2:-1, 1].transpose(1, 2)


# Layout, q's and k's shape, Dv, options, and whether programs draw their blocks from a counter.
WHOLE = {
    "D = 128": (heads_outside, (1, 1, 128, 128), (1, 1, 128), 128, {}, False),
    "D = 64, causal": (heads_inside, (2, 4, 300, 64), (2, 2, 300), 64, {"causal": True}, True),
    "D = 256, scale": (part, (1, 2, 128, 256), (1, 1, 70), 256, {"scale": 0.5}, False),
    "softcap": (part, (1, 8, 200, 128), (1, 2, 900), 96, {"softcap": 5.0, "causal": True}, True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_replayed_call_gives_the_driver_the_same(card: Card, attention: Calls, name: str) -> None:
    layout, of_q, of_k, columns, options, counted = WHOLE[name]
    some, others = (
        (layout(*of_q), layout(*of_k, of_q[-1]), layout(*of_k, columns)) for _ in range(2)
    )
    card.expect("")
    attention(True, *some, **options)
    card.expect(latest(forward_kernel).asm["ptx"])
    attention.counters.clear()
    direct = launcher.Prepared.__call__
    for given in (some, others, some):
        ordinary, expected = attention(True, *given, **options)
        with pytest.MonkeyPatch.context() as patch:
            replays = []
            patch.setattr(
                launcher.Prepared,
                "__call__",
                lambda *x, replays=replays: replays.append(direct(*x)),
            )
            replayed, results = attention(False, *given, **options)
        assert replayed == ordinary and len(replays) == 1
        names = [b"  out   ", b"  lse   "] + [b"counter ", b" counter"] * counted
        assert {x in replayed for x in names[:2]} == {True}
        assert any(x in replayed for x in names[2:]) == counted == bool(attention.counters)
        for x, y in zip(results, expected, strict=True):
            assert x.stride() == y.stride() and x.shape == y.shape and x.dtype == y.dtype
            assert x.data_ptr() != y.data_ptr()


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each call that passes through the operator."""
    found, real = [], ops.attention_forward

    def counted(*given: Any) -> tuple[Tensor, ...]:
        found.append(None)
        return real(*given)

    monkeypatch.setattr(ops, "attention_forward", counted)
    return found


def test_when_a_replayed_call_takes_the_ordinary_way(
    card: Card, attention: Calls, ordinary: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card.expect("")
    room = heads_outside(1, 1, 129, 128).flatten()
    odd, even = (room[start:][: 128 * 128].view(1, 1, 128, 128) for start in (1, 8))
    nothing: Any = torch._efficientzerotensor  # type: ignore[attr-defined]
    zero = nothing(even.shape, dtype=even.dtype)
    wanted = 0
    # The first call is of a kind that is replayed, though its own tensors are not aligned.
    for q, k, v in ((odd, odd, odd), (odd, even, even), (even, odd, even), (even, even, odd)):
        attention(False, q, k, v)
        attention(False, even, even, even)
        wanted += 1
        assert len(ordinary) == wanted
    attention(False, even, zero, even)
    assert len(ordinary) == wanted + 1
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        attention(False, even, even, even)
    with card.device(1):
        attention(False, even, even, even)
    assert len(ordinary) == wanted + 3 and card.current == 0
    attention(False, even, even, even)
    assert len(ordinary) == wanted + 3


def test_a_result_that_cannot_be_written_in_place_is_not_replayed(
    card: Card, attention: Calls, ordinary: list[None]
) -> None:
    card.expect("")
    q, k = heads_outside(1, 1, 70, 64), heads_outside(1, 1, 70, 64)
    v = heads_outside(1, 1, 70, 72)[..., :65]  # rows that TMA can read, unlike the result's
    for n in (1, 2):
        _, (out, _) = attention(False, q, k, v)
        assert len(ordinary) == n and out.is_contiguous()
    assert list(calls._replays.values()) == [None]


def test_replays_keep_no_tensor(card: Card, attention: Calls) -> None:
    card.expect("")
    given = [heads_outside(1, 4, 300, 128) for _ in range(3)]
    results = [*attention(True, *given)[1], *attention(False, *given)[1]]
    attention.counters.clear()
    kept = [weakref.ref(x) for x in (*given, *results)]
    del given, results
    gc.collect()
    assert calls._replays and [x() for x in kept] == [None] * 7


# Compiling.


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> str:
    """Triton's cache directory, in which `compile_somewhere` may not write."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/not/for/us")
    monkeypatch.setattr(launcher, "_REFUGES", {})
    return "/not/for/us"


def compile_somewhere() -> str:
    directory = knobs.cache.dir
    if directory == "/not/for/us":
        raise PermissionError(13, "Permission denied", directory)
    time.sleep(0.01)
    return directory


def test_threads_compile_elsewhere(refused: str) -> None:
    with warnings.catch_warnings(record=True) as told, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        found = set(pool.map(lambda _: launcher.compiling("k", compile_somewhere), range(16)))
    assert len(found) == 1 and len(told) == 1
    assert str(told[0].message).startswith(f"{refused} cannot be written ([Errno 13]")
    assert knobs.cache.dir == refused and os.environ["TRITON_CACHE_DIR"] == refused


def test_a_fork_has_a_directory_of_its_own(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = os.getpid()
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        mine = launcher.compiling("k", compile_somewhere)
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert launcher.compiling("k", compile_somewhere) != mine
    launcher._remove(mine, process)
    assert os.path.isdir(mine)
    monkeypatch.undo()
    launcher._remove(mine, process)
    assert not os.path.exists(mine)


def test_nowhere_to_write(refused: str) -> None:
    def run() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(launcher.NotCompiled) as raised:
        launcher.compiling("k", run)
    error = raised.value
    assert str(error).startswith("Triton cannot compile kernels here: [Errno 28] No space left")
    assert isinstance(error.__cause__, OSError) and error.kernel == "k"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="Triton Error") as raised:
        launcher.compiling("k", lambda: exec("raise RuntimeError('Triton Error [CUDA]: x')"))
    assert raised.type is RuntimeError
