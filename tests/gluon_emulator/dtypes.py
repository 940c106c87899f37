"""Types of elements: Gluon's names, torch's, and Triton's rules for mixing them.

Source of the rules: `computation_type_impl` in triton/language/semantic.py. Inside the emulator
a type is torch's; Gluon's appears where a kernel can see it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import triton.experimental.gluon.language as gl

from .errors import EmulatorError, here

TORCH = {
    gl.float64: torch.float64,
    gl.float32: torch.float32,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.float8e5: torch.float8_e5m2,
    gl.int64: torch.int64,
    gl.int32: torch.int32,
    gl.int16: torch.int16,
    gl.int8: torch.int8,
    gl.uint64: torch.uint64,
    gl.uint32: torch.uint32,
    gl.uint16: torch.uint16,
    gl.uint8: torch.uint8,
    gl.int1: torch.bool,
}
GLUON = {t: g for g, t in TORCH.items()}
HALVES = (torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def of_literal(x: Any) -> torch.dtype:
    """The type that a Python number has beside a tensor."""
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        fits = ((31, torch.int32), (32, torch.uint32), (63, torch.int64), (64, torch.uint64))
        signed = {torch.int32, torch.int64}
        return next(t for bits, t in fits if -(2**bits if t in signed else 0) <= x < 2**bits)
    if isinstance(x, float):
        return torch.float32
    raise EmulatorError(f"{here()}: {x!r} is not a number of the kernel")


def _kind(t: torch.dtype) -> int:
    """bool < integer < floating, as Triton's `dtype.kind`."""
    return 2 if t.is_floating_point else int(t is not torch.bool)


def _bits(t: torch.dtype) -> int:
    return 1 if t is torch.bool else 8 * t.itemsize


@cache
def promote(
    a: torch.dtype, a_literal: bool, b: torch.dtype, b_literal: bool, division: bool = False
) -> torch.dtype:
    """The type in which an operation on two operands is done.

    A Python number takes part only if it is of a higher kind than the other operand; a scalar of
    the kernel, such as a float argument, takes part as a tensor does.
    """
    if a_literal != b_literal:
        literal, other = (a, b) if a_literal else (b, a)
        if _kind(literal) <= _kind(other):
            return torch.float32 if division and other in HALVES else other
    pair = (a, b)
    if torch.float64 in pair:
        return torch.float64
    if torch.float32 in pair:
        return torch.float32
    if torch.float16 in pair:
        return torch.float32 if division else torch.float16
    if torch.bfloat16 in pair:
        return torch.bfloat16 if a is b and not division else torch.float32
    if a.is_floating_point or b.is_floating_point:
        raise EmulatorError(f"{here()}: no arithmetic on {a} and {b}: convert first")
    if a.is_signed == b.is_signed or torch.bool in pair:
        return a if _bits(a) >= _bits(b) else b
    if division:
        raise EmulatorError(f"{here()}: division of {a} and {b}, which differ in sign")
    unsigned, signed = (b, a) if a.is_signed else (a, b)
    return unsigned if _bits(unsigned) >= _bits(signed) else signed


def round_to(value: Any, t: torch.dtype) -> Any:
    """A Python number as it is after a computation in type `t`: integers wrap, floats round."""
    if t is torch.int32 and type(value) is int:
        return (value + 2**31 & 2**32 - 1) - 2**31
    if t is torch.float32:
        return ctypes.c_float(value).value
    if t.is_floating_point:
        return torch.tensor(value, dtype=torch.float64).to(t).item()
    if t is torch.bool:
        return bool(value)
    bits = 8 * t.itemsize
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if t.is_signed and value >> (bits - 1) else value
