"""A set of device functions that stands in for a module of Gluon."""

from __future__ import annotations

from typing import Any

from .errors import NotEmulated, here


class Namespace:
    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.__dict__.update(members)
        self._name = name

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __getattr__(self, name: str) -> Any:
        raise NotEmulated(f"{here()}: {self._name}.{name} is not emulated")


def identity(x: Any, *_: Any, **__: Any) -> Any:
    return x
