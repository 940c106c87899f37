"""What differs between Triton 3.6 and 3.9; no other file here knows a version.

`aggregate` makes a class a record of device values. `barrier()` waits for all threads of the
calling partition. `async_load`, `async_store` and `async_atomic_add` are the TMA copies between a
tensor in global memory and a tile in shared memory, as `tma.async_load` and so on of Triton 3.8.

`direct(compiled)` launches a compiled kernel without Triton's Python, where its way is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core
from triton.runtime import driver


def _first(*candidates: tuple[Any, str]) -> Any:
    for module, name in candidates:
        if hasattr(module, name):
            return getattr(module, name)
    names = " or ".join(f"{module.__name__}.{name}" for module, name in candidates)
    raise ImportError(
        f"Triton {triton.__version__} has no {names}: the Hopper kernels need 3.6 to 3.9"
    )


aggregate = _first((gluon, "aggregate"), (core, "_aggregate"))
barrier = _first((gl, "barrier"), (gl, "thread_barrier"))
async_load = _first((tma, "async_load"), (tma, "async_copy_global_to_shared"))
async_store = _first((tma, "async_store"), (tma, "async_copy_shared_to_global"))


@_core.builtin
def _reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """The compiler of Triton 3.6 has the reduction; its language does not name it yet."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


async_atomic_add = getattr(tma, "async_atomic_add", None) or _reduce_add


# Launching.


def watched(function: Any) -> bool:
    """Whether launches of a @gluon.jit function have to pass through Triton: this version of it
    is not known, a hook sees them, or they are to be compiled in another way than usual."""
    runtime = knobs.runtime
    return WAY is None or bool(
        function.pre_run_hooks
        # A chain of hooks that may be empty, or a function, or None.
        or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


def current_stream(device: int) -> int:
    """The handle of the stream that Triton launches on."""
    active: Any = driver.active
    return active.get_current_stream(device)


class Encoding:
    """How a compiled kernel wants the map of one of its descriptors. Compared by identity, which
    makes it a quick key."""

    def __init__(self, fields: Any) -> None:
        self._fields = fields
        self._encode = _nvidia().make_tensordesc_arg
        parameters = inspect.signature(self._encode).parameters
        self._unused = [None] * (len(parameters) - 2)  # Triton 3.8 has one

    def arguments(self, descriptor: Any) -> tuple[Any, ...]:
        """What stands for a TensorDescriptor in a launch: the tensor map, then its shape and its
        strides. Nothing in it refers to the tensor."""
        return tuple(self._encode(descriptor, self._fields, *self._unused))


Launch = Callable[[int, int, Sequence[Any]], None]  # programs, stream, arguments


class Direct(NamedTuple):
    """A compiled kernel as C knows it."""

    launch: Launch
    encodings: tuple[Encoding, ...]  # of its descriptors, in order


def direct(compiled: object) -> Direct | None:
    """How to launch what a launch through Triton returned.

    The arguments are all parameters in order, constants and None included; a descriptor is replaced
    by `Encoding.arguments`, a pointer may be its address. None where it takes more than that, where
    nothing was compiled, or where this Triton's way is not known: then Triton has to do it.
    """
    if WAY is None or not isinstance(compiled, CompiledKernel):
        return None
    run: Any = compiled.run
    more = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if type(run) is not _nvidia().CudaLauncher or any(getattr(run, x, False) for x in more):
        return None
    found = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if not all(found):  # a descriptor taken apart into pointer and strides
        return None
    return Direct(WAY(compiled, run, bool(found)), tuple(map(Encoding, found)))


def _nvidia() -> Any:
    from triton.backends.nvidia import driver as nvidia

    return nvidia


def _own_function(compiled: Any, run: Any, descriptors: bool) -> Launch:
    """A C function for each signature; a Python one around it encodes descriptors."""
    launch = run.launch
    if descriptors:
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl

    def call(programs: int, stream: int, arguments: Sequence[Any]) -> None:
        launch(
            programs, 1, 1, stream, compiled.function, cooperative, pdl, None, None,
            compiled.packed_metadata, None, None, None, *arguments,
        )  # fmt: skip

    return call


def _common_function(compiled: Any, run: Any, descriptors: bool) -> Launch:
    """One C function, which is told the signature."""
    active: Any = driver.active
    launch = active.utils.launch
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    annotations, signature = run.arg_annotations, run.kernel_signature

    def call(programs: int, stream: int, arguments: Sequence[Any]) -> None:
        launch(
            programs, 1, 1, stream, compiled.function, cooperative, pdl, compiled.packed_metadata,
            None, None, None, None, None, annotations, signature, arguments,
        )  # fmt: skip

    return call


_WAYS = {"3.6": _own_function, "3.7": _common_function, "3.8": _common_function}
WAY = _WAYS.get(".".join(triton.__version__.split(".")[:2]))
