"""What a kernel holds in registers: scalars and tensors, with the hardware's arithmetic.

Python numbers in a kernel are constants of the compiler and keep Python's arithmetic, as they do
in Triton. A `Scalar` is a number that exists at run time: its integers wrap, and its `//` and `%`
round towards zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .dtypes import FLOAT8, GLUON, HALVES, TORCH, of_literal, promote, round_to
from .errors import EmulatorError, NotEmulated, here


class Layout:
    """Stands for every layout. Layouts do not change values; the compiler checks them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    @classmethod
    def get_default_for(cls, *args: Any, **kwargs: Any) -> Layout:
        return cls()


LAYOUT = Layout()


def sizes(xs: tuple) -> list[int]:
    """`f(4, 8)` and `f([4, 8])` alike."""
    xs = xs[0] if len(xs) == 1 and isinstance(xs[0], (list, tuple)) else xs
    return [int(x) for x in xs]


class Value:
    """Arithmetic that scalars and tensors share; it is added below, from `OPERATORS`."""

    layout = LAYOUT
    __hash__ = None  # type: ignore[assignment]

    @property
    def type(self) -> Value:
        """The kernel asks a type for what the value itself knows: shape, layout, dtype."""
        return self


class Scalar(Value):
    __slots__ = ("kind", "value")

    def __init__(self, value: Any, kind: torch.dtype) -> None:
        self.value = round_to(value, kind)
        self.kind = kind

    @property
    def dtype(self) -> Any:
        return GLUON[self.kind]

    def to(self, dtype: Any, *args: Any, **kwargs: Any) -> Scalar:
        if "bitcast" in kwargs:
            return Tensor(torch.tensor(self.value, dtype=self.kind)).to(dtype, **kwargs).item()
        return Tensor(torch.tensor(self.value, dtype=self.kind)).to(dtype).item()

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __neg__(self) -> Scalar:
        return Scalar(-self.value, self.kind)

    def __invert__(self) -> Scalar:
        return Scalar(not self.value if self.kind is torch.bool else ~self.value, self.kind)

    def __repr__(self) -> str:
        return f"{self.value} ({self.dtype})"


class Tensor(Value):
    """A tensor in registers; immutable."""

    __slots__ = ("_v",)

    def __init__(self, v: torch.Tensor) -> None:
        self._v = v

    @property
    def v(self) -> torch.Tensor:
        return self._v

    @property
    def kind(self) -> torch.dtype:
        return self.v.dtype

    @property
    def dtype(self) -> Any:
        return GLUON[self.kind]

    @property
    def shape(self) -> list[int]:
        return list(self.v.shape)

    @property
    def numel(self) -> int:
        return self.v.numel()

    def item(self) -> Scalar:
        return Scalar(self.v.item(), self.kind)

    def __bool__(self) -> bool:
        raise EmulatorError(f"{here()}: a tensor cannot steer an `if`, `while` or `and`")

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if any(k is not None and k != slice(None) for k in keys):
            raise EmulatorError(f"{here()}: a tensor takes only `:` and `None` as indices")
        return Tensor(self.v[key])

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.v.reshape(sizes(shape)))

    def permute(self, *order: Any) -> Tensor:
        return Tensor(self.v.permute(sizes(order)))

    def trans(self, *order: Any) -> Tensor:
        return self.permute(*(order or range(self.v.dim())[::-1]))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.v[..., 0]), Tensor(self.v[..., 1])

    def __neg__(self) -> Tensor:
        return Tensor(-self.v)

    def __invert__(self) -> Tensor:
        return Tensor(~self.v if self.kind not in UNSIGNED else narrow(~wide(self.v), self.kind))

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}"

    def to(
        self, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False
    ) -> Tensor:
        v, kind = self.v, TORCH[dtype]
        if fp_downcast_rounding not in (None, "rtne"):
            raise NotEmulated(f"{here()}: rounding {fp_downcast_rounding}")
        if bitcast:
            return Tensor(v.contiguous().view(kind))
        if kind in FLOAT8 and v.dtype != kind:
            top = torch.finfo(kind).max  # cvt.rn.satfinite
            v = v.float().clamp(-top, top)
        elif v.dtype in FLOAT8:
            v = v.float()
        if v.is_floating_point() and not kind.is_floating_point and kind is not torch.bool:
            info = torch.iinfo(kind)  # cvt saturates, and makes 0 of NaN
            v = v.double().nan_to_num(0).trunc()
            top, bottom = v >= info.max, v <= info.min
            v = torch.where(top | bottom, 0, v).to(torch.int64)
            v = torch.where(top, info.max if info.max < 2**63 else -1, v)
            v = torch.where(bottom, info.min, v)
        return Tensor(v.to(kind) if kind not in UNSIGNED else narrow(wide(v), kind))

    # The forms of `gl.f(x, ...)` that a tensor has as methods are attached in language.py.


# Torch has these types, but next to no arithmetic on them: it is done in int64.
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def wide(v: torch.Tensor) -> torch.Tensor:
    """The same bits of an unsigned tensor, as int64."""
    return v.view(torch.int64) if v.dtype is torch.uint64 else v.to(torch.int64)


def narrow(v: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The lower bits of an int64 tensor, as an unsigned one."""
    if kind is torch.uint64:
        return v.contiguous().view(kind)
    return (v & ((1 << 8 * kind.itemsize) - 1)).to(kind)


def kind_of(x: Any) -> torch.dtype:
    return x.kind if isinstance(x, Value) else of_literal(x)


def cast(x: Any, kind: torch.dtype) -> Any:
    """An operand in a given type: a torch tensor, or a Python number of that type."""
    if isinstance(x, Tensor):
        return x.v if x.kind is kind else x.v.to(kind)
    value = x.value if isinstance(x, Scalar) else x
    if kind.is_floating_point:
        return round_to(value, kind)
    rounded = round_to(value, kind)
    if not isinstance(x, Scalar) and rounded != value:
        raise EmulatorError(f"{here()}: the constant {value} does not fit in {kind}")
    return rounded


def together(*xs: Any, division: bool = False) -> tuple[list[Any], torch.dtype]:
    """All operands in the type in which they are combined, and that type."""
    kind, literal = kind_of(xs[0]), not isinstance(xs[0], Value)
    for x in xs[1:]:
        other = not isinstance(x, Value)
        kind = promote(kind, literal, kind_of(x), other, division)
        literal = literal and other
    return [cast(x, kind) for x in xs], kind


class Operator(NamedTuple):
    tensors: Callable
    scalars: Callable
    compares: bool = False
    divides: bool = False
    integers: bool = False


def _truncated(a: int, b: int) -> int:
    return -(-a // b) if (a < 0) != (b < 0) else a // b


def _remainder(a: Any, b: Any) -> Any:
    return a - b * _truncated(a, b) if isinstance(a, int) else math.fmod(a, b)


def _trunc_div(a: Any, b: Any) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


OPERATORS = {
    "add": Operator(torch.add, operator.add),
    "sub": Operator(torch.sub, operator.sub),
    "mul": Operator(torch.mul, operator.mul),
    "truediv": Operator(torch.true_divide, operator.truediv, divides=True),
    "floordiv": Operator(_trunc_div, _truncated, divides=True, integers=True),
    "mod": Operator(torch.fmod, _remainder, divides=True),
    "and": Operator(operator.and_, operator.and_, integers=True),
    "or": Operator(operator.or_, operator.or_, integers=True),
    "xor": Operator(operator.xor, operator.xor, integers=True),
    "lshift": Operator(operator.lshift, operator.lshift, integers=True),
    "rshift": Operator(operator.rshift, operator.rshift, integers=True),
    **{
        name: Operator(getattr(torch, name), getattr(operator, name), compares=True)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
}


def binary(name: str, a: Any, b: Any) -> Any:
    """`a` and `b` combined as Triton does: in a common type, wrapped or rounded to it."""
    f = OPERATORS[name]
    # Most of what a kernel does needs no conversion: floats, and counters with constants.
    if type(a) is type(b) is Tensor and a.v.dtype is b.v.dtype is torch.float32 and not f.integers:
        return Tensor(f.tensors(a.v, b.v))
    if type(b) is int and type(a) is Scalar and a.kind is torch.int32 and 0 < b < 2**31:
        if f.compares:
            return Scalar(f.scalars(a.value, b), torch.bool)
        if name in ("add", "sub", "mul", "floordiv", "mod", "and", "xor"):
            return Scalar(f.scalars(a.value, b), torch.int32)
    (x, y), kind = together(a, b, division=f.divides)
    if kind.is_floating_point and f.integers:
        raise EmulatorError(f"{here()}: {name} of {kind_of(a)} and {kind_of(b)}")
    if name == "truediv" and not kind.is_floating_point:
        kind, x, y = torch.float32, x * 1.0, y * 1.0
    shift = name in ("lshift", "rshift") and not isinstance(y, torch.Tensor)
    if shift and not 0 <= y < 8 * kind.itemsize:
        raise EmulatorError(f"{here()}: a shift of {kind} by {y} bits")
    if kind in UNSIGNED and (isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor)):
        return _unsigned(name, x, y, kind)
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        # Torch takes a number on the left only as a tensor.
        x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=kind)
        out = f.tensors(x, y)
        return Tensor(out if f.compares or out.dtype is kind else out.to(kind))
    if f.divides and not kind.is_floating_point and y == 0:
        raise EmulatorError(f"{here()}: {x} divided by zero")
    if name == "truediv" and y == 0:
        return Tensor(torch.true_divide(torch.tensor(x, dtype=kind), y)).item()
    return Scalar(f.scalars(x, y), torch.bool if f.compares else kind)


def _unsigned(name: str, x: Any, y: Any, kind: torch.dtype) -> Tensor:
    f = OPERATORS[name]
    if kind is torch.uint64 and (f.divides or f.compares or name == "rshift"):
        raise NotEmulated(f"{here()}: {name} of uint64")
    out = f.tensors(*(wide(torch.as_tensor(z, dtype=kind)) for z in (x, y)))
    return Tensor(out if f.compares else narrow(out, kind))


def _attach(name: str) -> None:
    def forward(a: Value, b: Any) -> Any:
        return binary(name, a, b) if _operand(b) else NotImplemented

    def reflected(a: Value, b: Any) -> Any:
        return binary(name, b, a) if _operand(b) else NotImplemented

    setattr(Value, f"__{name}__", forward)
    if not OPERATORS[name].compares:
        setattr(Value, f"__r{name}__", reflected)


def _operand(x: Any) -> bool:
    return isinstance(x, (Value, int, float))


for _name in OPERATORS:
    _attach(_name)


def elementwise(f: Callable[..., torch.Tensor], *xs: Any) -> Any:
    """A function of torch on operands of one type; of scalars alone it is a scalar."""
    if len(xs) == 1 and type(xs[0]) is Tensor and xs[0].kind is torch.float32:
        return Tensor(f(xs[0].v))
    args, kind = together(*xs)
    args = [torch.as_tensor(x, dtype=kind) for x in args]
    if kind in UNSIGNED:
        out = Tensor(narrow(f(*(wide(x) for x in args)), kind))
    else:
        out = Tensor(f(*(x.float() if kind in HALVES else x for x in args)).to(kind))
    return out if any(isinstance(x, Tensor) for x in xs) else out.item()
