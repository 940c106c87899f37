"""What Triton 3.6 to 3.9 call by different names; no other file here knows a version.

`aggregate` makes a class a record of device values. `barrier()` waits for all threads of the
calling partition. `async_load`, `async_store` and `async_atomic_add` are the TMA copies between a
tensor in global memory and a tile in shared memory, as `tma.async_load` and so on of Triton 3.8.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core


def _first(*candidates: tuple[Any, str]) -> Any:
    for module, name in candidates:
        if hasattr(module, name):
            return getattr(module, name)
    names = " or ".join(f"{module.__name__}.{name}" for module, name in candidates)
    raise ImportError(f"this Triton has no {names}: the Hopper kernels need 3.6 to 3.9")


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
