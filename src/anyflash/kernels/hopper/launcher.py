"""Launching kernels: Triton compiles, once for each kind of arguments; then C is called directly.

    key = device, options, constants, and of each argument what its compiled code depends on
    if key was launched before:
        replace descriptors by tensor maps, pointers by addresses
        call the C function of the compiled kernel
    else:
        kernel[grid](...)                      Triton looks at everything, compiles and launches
        remember what it compiled, under key

Triton's own launch does the second each time: it specialises every argument, compares the globals
that the kernel uses with what they were, and encodes each descriptor anew. It still is what runs
where somebody watches launches (`compat.watched`), where `JITFunction.run` was replaced since, for
tensors that are on no card, and on a Triton whose C functions are not known here.

The key is at least as fine as Triton's own: dtypes, which pointers are multiples of 16 and which
integers 1 or multiples of 16 (unless the kernel declares that it does not care), which arguments
are None. Constants are compared by ==, as Triton does; that a global has changed, nobody notices
here. What is remembered for a key is no more than what Triton keeps; tensor maps are kept for MAPS
addresses. No tensor is kept.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.errors import PTXASError

from anyflash.errors import NotCompiled
from anyflash.kernels.hopper.compat import Direct, Encoding, current_stream, direct, watched

T = TypeVar("T")

# The least recently used is forgotten. A map with its key takes about 1 KiB; a model of 80 layers
# needs a few hundred.
MAPS = 4096

# Arguments.


@dataclass(frozen=True, eq=False)
class Box:
    """What TMA moves at once, and how it lies in shared memory. Two are equal if they are one
    object, which makes them quick keys: `box` gives the same one for the same description."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Any  # gl.NVMMASharedLayout


# As many as kernels have been written for: no bound is needed.
box = functools.cache(Box)


@dataclass(frozen=True, eq=False)
class View:
    """A tensor as TMA sees it, but for its address. Compared by identity, like `Box`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    box: Box

    def descriptor(self, base: Any) -> TensorDescriptor:
        shape, strides, boxed = list(self.shape), list(self.strides), list(self.box.shape)
        return TensorDescriptor(base, shape, strides, boxed, self.box.layout)


class Operand(NamedTuple):
    """A tensor that a kernel moves by TMA: it arrives there as a tensor descriptor."""

    base: Tensor
    view: View


class _Address(NamedTuple):
    """What a descriptor asks of its tensor, without the tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=MAPS)
def _mapped(address: int, view: View, encoding: Encoding) -> tuple[Any, ...]:
    return encoding.arguments(view.descriptor(_Address(address, view.box.dtype)))


def _kind(x: Any, special: bool = True, aligned: bool = True) -> Any:
    """What compiled code depends on in an argument. `special`, `aligned`: whether it may depend on
    the value of an integer, and on the alignment of a pointer."""
    kind = type(x)  # the usual ones first: this is much of what a launch costs
    if kind is int:
        size = int if -(2**31) <= x < 2**31 else "64 bits" if x < 2**63 else "unsigned"
        return (size, x == 1, x % 16 == 0) if special else size
    if kind is Operand:
        return x.view.box
    if x is None or kind is float or kind is bool:
        return kind
    if isinstance(x, Tensor):
        return x.dtype, aligned and x.data_ptr() % 16 == 0
    if isinstance(x, tuple):  # Triton specialises what is in it, whatever the kernel declares
        return kind, *map(_kind, x)
    raise TypeError(f"a kernel's argument of type {kind.__name__}")


def _device(args: Sequence[Any]) -> int:
    """The index of the card that the first tensor is on, −1 for none."""
    for x in args:
        tensor = x.base if isinstance(x, Operand) else x
        if isinstance(tensor, Tensor):
            return tensor.get_device()
    return -1


# Launches.


class _Known(NamedTuple):
    """What the first launch of a kind left behind."""

    direct: Direct
    operands: tuple[int, ...]  # where they stand, the last one first
    pointers: tuple[int, ...]
    through: Any  # the function of Triton's that launched it

    def launch(self, programs: int, stream: int, args: Sequence[Any], constants: list[Any]) -> None:
        given = [*args, *constants]
        for i in self.pointers:
            given[i] = given[i].data_ptr()  # C would ask for it, and then the driver about it
        for i, encoding in zip(self.operands, self.direct.encodings[::-1], strict=True):
            base, view = given[i]
            given[i : i + 1] = _mapped(base.data_ptr(), view, encoding)
        self.direct.launch(programs, stream, tuple(given))


class Kernel:
    """Launches a @gluon.jit function whose constants are its last parameters."""

    def __init__(self, function: Any) -> None:
        parameters = function.params
        self._function = function
        given = [p for p in parameters if not p.is_constexpr]
        if given != parameters[: len(given)]:
            raise TypeError(f"{function.__name__}: a constant before other parameters")
        self._constants = [p.name for p in parameters[len(given) :]]
        self._declared = (
            [not p.do_not_specialize for p in given],
            [not p.do_not_specialize_on_alignment for p in given],
        )
        self._known: dict[tuple[Any, ...], _Known] = {}

    def __call__(
        self, programs: int, args: Sequence[Any], constants: Mapping[str, Any], *,
        num_warps: int = 4, maxnreg: int | None = None,
    ) -> None:  # fmt: skip
        """Run the kernel.

        Args:
            programs: how many.
            args: in order, all parameters but the constants: `Operand`s (not inside a tuple),
                tensors, numbers, None, tuples of them. Tensors are on one card, current or not.
            constants: by name, all of them; hashable.
            num_warps, maxnreg: as in a launch through Triton.

        It runs on that card's current stream. No call but the first of its kind allocates device
        memory, waits for the device or loads code, so that it can be captured into a graph.

        Raises:
            NotCompiled: there is no compiler, it fails, or nowhere to write to.
        """
        device = _device(args)
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, args, constants, num_warps=num_warps, maxnreg=maxnreg)
        elif device < 0 or watched(self._function):
            self._through_triton(programs, args, constants, num_warps, maxnreg)
        else:
            key, values = self._key(device, args, constants, num_warps, maxnreg)
            known = self._find(key)
            if known is not None:
                known.launch(programs, current_stream(device), args, values)
                return
            through = type(self._function).run
            compiled = self._through_triton(programs, args, constants, num_warps, maxnreg)
            found = direct(compiled)
            operands = [i for i, x in enumerate(args) if isinstance(x, Operand)]
            pointers = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
            if found is not None and len(found.encodings) == len(operands):
                self._known[key] = _Known(found, tuple(operands[::-1]), tuple(pointers), through)

    def prepare(
        self, programs: int, args: Sequence[Any], constants: Mapping[str, Any], *,
        num_warps: int = 4, maxnreg: int | None = None,
    ) -> Prepared | None:  # fmt: skip
        """The same launch for other tensors of the same kinds; the arguments are those of a call,
        without tensors in tuples. It keeps none of them. None where they are on no card."""
        device = _device(args)
        if device < 0:
            return None
        key, values = self._key(device, args, constants, num_warps, maxnreg)
        return Prepared(self, device, key, programs, [*args, *values])

    def _key(
        self, device: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
        maxnreg: int | None,
    ) -> tuple[tuple[Any, ...], list[Any]]:  # fmt: skip
        """What a launch is remembered by, and the constants in their order."""
        values = [constants[name] for name in self._constants]
        kinds = map(_kind, args, *self._declared)
        return (device, num_warps, maxnreg, len(args), *kinds, *values), values

    def _find(self, key: tuple[Any, ...]) -> _Known | None:
        known = self._known.get(key)
        return known if known is not None and known.through is type(self._function).run else None

    def _through_triton(
        self, programs: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int,
        maxnreg: int | None,
    ) -> Any:  # fmt: skip
        given = [x.view.descriptor(x.base) if isinstance(x, Operand) else x for x in args]
        options = {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})
        name = self._function.__name__
        return compiling(name, lambda: self._function[(programs,)](*given, **constants, **options))


class Prepared:
    """A launch of which only the addresses are open."""

    def __init__(
        self, kernel: Kernel, device: int, key: tuple[Any, ...], programs: int, given: list[Any]
    ) -> None:
        self._kernel, self._function = kernel, kernel._function
        self._device, self._key, self._programs = device, key, programs
        self._given: list[Any] = []  # as C takes them: see Encoding.arguments
        self._maps: list[tuple[int, View]] = []
        self._pointers: list[int] = []
        for x in given:
            place = len(self._given)
            if isinstance(x, Operand):
                self._maps.append((place, x.view))
                self._given += [None, *x.view.shape, *x.view.strides]
            elif isinstance(x, Tensor):
                self._pointers.append(place)
                self._given.append(None)
            elif isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x):
                raise TypeError("a launch is prepared without tensors in tuples")
            else:
                self._given.append(x)
        self._known: _Known | None = None

    def ready(self) -> bool:
        """Whether it can launch now: not where another card is current, launches are watched, or
        none of this kind is remembered; a call of the kernel itself does all that."""
        known = self._known
        if known is None or known.through is not type(self._function).run:
            known = self._known = self._kernel._find(self._key)
        return (
            known is not None
            and not watched(self._function)
            and torch.cuda.current_device() == self._device
        )

    def __call__(self, operands: Sequence[int], pointers: Sequence[int]) -> None:
        """Run the kernel, once it is `ready`, with these addresses of operands and tensors, each in
        the order of its parameters; they are as aligned as those that it was prepared with."""
        known = self._known
        if known is None:
            raise RuntimeError("a launch that was not asked whether it is ready")
        given = self._given.copy()
        encodings = known.direct.encodings
        for (i, view), address, encoding in zip(self._maps, operands, encodings, strict=True):
            given[i] = _mapped(address, view, encoding)[0]
        for i, address in zip(self._pointers, pointers, strict=True):
            given[i] = address
        known.direct.launch(self._programs, current_stream(self._device), tuple(given))


# Compiling.


def compiling(kernel: str, run: Callable[[], T]) -> T:
    """The result of `run`, which may make Triton compile `kernel`.

    Where files cannot be written, it runs again with a temporary directory as Triton's cache: all
    that Triton does with files comes before a launch. That is told by a warning, once for each
    directory that cannot be written.

    Raises NotCompiled for what is wrong with the machine, and anything else as it is.
    """
    try:
        try:
            return run()
        except OSError as error:
            return _refuge().run(run, error)
    except Exception as error:
        found = _diagnosis(error)
        if found is None:
            raise
        raise NotCompiled(kernel, *found) from error


def _diagnosis(error: Exception) -> tuple[str, str] | None:
    """The cause and what to do about it, if it is the machine's fault. Triton raises RuntimeError
    and AssertionError too for that; where they come from tells them apart."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if any(frame.f_code.co_name == "libcuda_dirs" for frame in frames):
        return (
            f"Triton does not find the driver's libcuda.so.1: {said}",
            "set TRITON_LIBCUDA_PATH to the directory where it lies",
        )
    if any(frame.f_globals.get("__name__") == "triton.runtime.build" for frame in frames):
        return (
            f"Triton cannot build its launcher, a small C module: {said}",
            "install a C compiler (or name it in CC) and the headers of this Python; on Debian and "
            "Ubuntu: apt install gcc python3-dev",
        )
    if isinstance(error, PTXASError):
        return (
            f"ptxas cannot compile a kernel: {said.removeprefix('PTXAS error: ')}",
            "unset TRITON_PTXAS_PATH, so that the ptxas that comes with Triton is used, or install "
            "Triton again",
        )
    if isinstance(error, OSError):
        return (
            f"Triton cannot compile kernels here: {error}",
            "it needs a cache or a temporary directory that can be written (TRITON_CACHE_DIR, "
            "TMPDIR) and a ptxas that can be executed (TRITON_PTXAS_PATH)",
        )
    return None


class _Refuge:
    """A temporary directory that takes the place of Triton's cache in one process."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._warned: set[str] = set()
        # Triton's settings belong to the process: one thread at a time changes them and back.
        self._lock = threading.Lock()

    def run(self, run: Callable[[], T], error: OSError) -> T:
        with self._lock:
            if self._directory is None:
                self._directory = tempfile.mkdtemp(prefix="anyflash-")
                atexit.register(_remove, self._directory, os.getpid())
            with knobs.cache.scope():
                refused = knobs.cache.dir
                knobs.cache.dir = self._directory
                result = run()
            first = refused not in self._warned
            self._warned.add(refused)
        if first:
            warnings.warn(
                f"{refused} cannot be written ({error}): kernels were compiled into a temporary "
                "directory, and will be again in each process; TRITON_CACHE_DIR names another one",
                RuntimeWarning,
                stacklevel=2,
            )
        return result


# By process: what a fork copies may be locked, and its directory is the parent's to remove.
_REFUGES: dict[int, _Refuge] = {}


def _refuge() -> _Refuge:
    return _REFUGES.setdefault(os.getpid(), _Refuge())


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)
