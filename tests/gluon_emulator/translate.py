"""From a @gluon.jit function to a plain Python function that runs in the emulator.

The function is compiled once more from its source, under its own file name and line numbers, in a
scope where every name of Gluon stands for the emulator's. Two things are changed in the source: an
annotation such as `x: gl.constexpr` is dropped, and a number that is carried around a loop becomes
a scalar of the run time before the loop, as it does in Triton.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import triton.experimental.gluon.language as real
from triton.runtime.jit import ConstexprFunction, JITCallable, JITFunction

from .errors import EmulatorError, here
from .global_memory import Descriptor, Pointer
from .hopper import hopper, mbarrier, tma
from .language import gl, range_
from .shared import View
from .values import Scalar, Value, kind_of

LANGUAGE = "triton.experimental.gluon.language"
MODULES = {
    LANGUAGE: gl,
    "triton.language": gl,
    **{
        f"{LANGUAGE}.nvidia.{arch}{part}": space
        for arch in ("ampere", "hopper")
        for part, space in (("", hopper), (".mbarrier", mbarrier), (".tma", tma))
    },
}

# Builtins of the user's own, made with Triton's @builtin, by name.
USER_BUILTINS: dict[str, Callable] = {"_reduce_add": tma.async_atomic_add}


def number_carried(x: Any) -> Any:
    """A variable that a loop changes exists at run time, whatever it was before the loop."""
    return Scalar(x, kind_of(x)) if isinstance(x, (bool, int, float)) else x


def _smallest(*xs: Any) -> Any:
    return _fold(gl.minimum, builtins.min, xs)


def _largest(*xs: Any) -> Any:
    return _fold(gl.maximum, builtins.max, xs)


def _fold(device: Callable, host: Callable, xs: tuple) -> Any:
    if not any(isinstance(x, Value) for x in xs):
        return host(*xs)
    out = xs[0]
    for x in xs[1:]:
        out = device(out, x)
    return out


SCOPE = {
    "__builtins__": builtins,
    "__carried": number_carried,
    "range": range_,
    "min": _smallest,
    "max": _largest,
}


class _Module:
    """A module of the user: what is asked of it is translated."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return translate(getattr(self._module, name))


_translated: dict[Any, Any] = {}


def translate(x: Any) -> Any:
    """What a kernel sees in place of the global `x`."""
    if isinstance(x, types.ModuleType):
        return MODULES.get(x.__name__) or _Module(x)
    if isinstance(x, real.constexpr):
        return x.value
    if getattr(x, "__triton_aggregate__", False):
        return _once(x, x, _record)
    if isinstance(x, ConstexprFunction):
        return _once(x.fn, x.fn, _host_function)
    if isinstance(x, JITFunction):
        ours = x.__module__.startswith("triton.")
        return _builtin(x.__name__) if ours else _once(x.fn, x, _device_function)
    if getattr(x, "__triton_builtin__", False):
        return _builtin(x.__name__)
    if isinstance(x, type) and x.__module__.startswith("triton."):
        return _builtin(x.__name__)
    return x


def _once(key: Any, x: Any, make: Callable) -> Any:
    if key not in _translated:
        _translated[key] = make(x)
    return _translated[key]


def _builtin(name: str) -> Any:
    if name in USER_BUILTINS:
        return USER_BUILTINS[name]
    space = next((s for s in (hopper, tma, mbarrier) if name in s), gl)
    return getattr(space, name)


def _device_function(kernel: JITFunction) -> Callable:
    body = None  # compiled when first called: a function may name itself
    constants = [(p.num, p.name) for p in kernel.params if p.is_constexpr]

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal body
        body = body or _compiled(kernel.fn, SCOPE, DeviceSource())
        for i, name in constants:
            x = args[i] if i < len(args) else kwargs.get(name)
            if isinstance(x, Value):
                what = f"`{name}` of {kernel.__name__}"
                raise EmulatorError(f"{here()}: {what} is a constexpr, not {x}")
        return body(*args, **kwargs)

    call.__name__ = kernel.__name__
    return call


def _host_function(f: Callable) -> Callable:
    return _compiled(f, {"__builtins__": builtins}, Source())


def _compiled(f: Callable, scope: dict[str, Any], source: Source) -> Callable:
    lines, first = inspect.getsourcelines(f)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    definition.decorator_list.clear()
    tree = ast.fix_missing_locations(source.visit(tree))
    ast.increment_lineno(tree, first - 1)
    known = {**f.__globals__, **inspect.getclosurevars(f).nonlocals}
    scope = dict(scope)
    scope.update((n, translate(known[n])) for n in _names(tree) if n in known)
    exec(compile(tree, f.__code__.co_filename, "exec"), scope)
    new = scope[definition.name]
    new.__defaults__ = f.__defaults__ and tuple(map(translate, f.__defaults__))
    new.__kwdefaults__ = f.__kwdefaults__
    return new


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class Source(ast.NodeTransformer):
    """Annotations are not evaluated: Gluon's would not be, or would mean nothing here."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        a = node.args
        for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs):
            arg.annotation = None
        # The defaults are put back as objects.
        a.defaults = [ast.Constant(None) for _ in a.defaults]
        a.kw_defaults = [d and ast.Constant(None) for d in a.kw_defaults]
        node.returns = None
        return self.generic_visit(node)


class DeviceSource(Source):
    """Before a loop at run time, numbers that it carries become numbers of the run time."""

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter.func if isinstance(node.iter, ast.Call) else node.iter
        if getattr(call, "attr", getattr(call, "id", "")) == "static_range":
            return self.generic_visit(node)
        return self._loop(node)

    def visit_While(self, node: ast.While) -> Any:
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> list[ast.stmt]:
        assigned = {
            target.id
            for statement in ast.walk(node)
            if isinstance(statement, (ast.Assign, ast.AugAssign))
            for target in ast.walk(
                statement.target
                if isinstance(statement, ast.AugAssign)
                else ast.Tuple(statement.targets)
            )
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
        }
        before = "".join(
            # A name that has no value before the loop is not carried.
            f"try:\n    {name} = __carried({name})\nexcept NameError:\n    pass\n"
            for name in sorted(assigned)
        )
        new = ast.parse(before).body
        for statement in new:
            for part in ast.walk(statement):
                ast.copy_location(part, node)
        return [*new, self.generic_visit(node)]


# @aggregate.


def _record(aggregate: Any) -> type:
    """An @aggregate class with its methods translated and the kinds of its fields checked."""
    owner = inspect.getclosurevars(aggregate.__setattr__).nonlocals
    annotations = (
        owner["all_annotations"] if "all_annotations" in owner else owner["cls"].__annotations__
    )
    if any(isinstance(t, str) for t in annotations.values()):
        raise EmulatorError(
            f"the annotations of {aggregate.__name__} are strings, which Triton 3.6 does not look"
            " up: no `from __future__ import annotations` in its file"
        )
    fields = {name: FIELD_KINDS.get(t) or translate(t) for name, t in annotations.items()}

    def set_field(self: Any, name: str, value: Any) -> None:
        if name not in fields:
            raise EmulatorError(f"{here()}: {aggregate.__name__} has no field `{name}`")
        if not isinstance(value, fields[name]):
            raise EmulatorError(
                f"{here()}: field `{name}` of {aggregate.__name__} is annotated as"
                f" {annotations[name].__name__}, got {value}"
            )
        object.__setattr__(self, name, value)

    record = type(aggregate.__name__, (), {"__setattr__": set_field, "type": property(_self)})
    _translated[aggregate] = record  # before its methods, which may name it
    init, *members = aggregate.hash_attrs
    generated = not isinstance(init, JITCallable) and init.__module__.startswith("triton.")
    record.__init__ = _fill_in(fields) if generated else _member(init)  # type: ignore[misc]
    for member in members:
        setattr(record, member.__name__, _member(member))
    return record


def _self(x: Any) -> Any:
    return x


def _member(f: Any) -> Callable:
    return translate(f) if isinstance(f, JITCallable) else _host_function(f)


# A field annotated as a constant holds anything but a value of the run time.
class _Constant(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return not isinstance(x, (Value, View, Pointer))


class Constant(metaclass=_Constant):
    pass


FIELD_KINDS: dict[Any, Any] = {
    real.constexpr: Constant,
    real.tensor: (Value, Pointer),
    real.shared_memory_descriptor: View,
    real.nvidia.hopper.tma.tensor_descriptor: Descriptor,
    real.tuple: tuple,
}


def _fill_in(fields: dict[str, Any]) -> Callable:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in {**dict(zip(fields, args, strict=False)), **kwargs}.items():
            setattr(self, name, value)

    return __init__
