"""Dataclasses back from JSON: what `dataclasses.asdict` and `json` make of them, read by type."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints


def decode(kind: Any, value: Any) -> Any:
    """What JSON made of a `kind`, as it was: a dataclass, tuple[X, ...], dict[str, X], X | None, or
    something that JSON has itself, which is taken as it is.

    Raises KeyError or TypeError where fields are missing or unknown.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return decode(kind, value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} needs an object, not {type(value).__name__}")
        hints = get_type_hints(kind)
        return kind(**{name: decode(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        return tuple(decode(arguments[0], item) for item in value)
    if origin is dict:
        return {name: decode(arguments[1], item) for name, item in value.items()}
    return value
