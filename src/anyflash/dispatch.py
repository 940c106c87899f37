"""Which backend serves a problem: the first of ORDER that does not refuse it."""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from typing import cast

from anyflash.backends.base import Backend
from anyflash.devices import probe
from anyflash.errors import InvalidInput, Unsupported
from anyflash.problem import Problem

ORDER = ("hopper", "cpu", "reference")

NAMES = f"one of {', '.join(map(repr, ORDER))}, or None to choose"
ONLY_BY_NAME = "it is unfused and serves only when asked for by name, backend='reference'"


@cache
def load(name: str) -> Backend:
    """The backend of that name; its kernel language is imported no earlier than here."""
    if name not in ORDER:
        raise InvalidInput("backend", repr(name), NAMES)
    return cast(Backend, importlib.import_module(f"anyflash.backends.{name}"))


def refusals(problem: Problem, requested: str | None = None) -> dict[str, str | None]:
    """Every backend's sentence, in order; None for those that serve the problem."""
    device = probe(problem.device)
    found: dict[str, str | None] = {}
    for name in ORDER if requested is None else (load(requested).name,):
        by_default = requested is not None or name != "reference"
        found[name] = load(name).refusal(problem, device) if by_default else ONLY_BY_NAME
    return found


@lru_cache(maxsize=1024)
def select(problem: Problem, requested: str | None = None) -> Backend:
    """The backend for a problem; Unsupported, with every backend's sentence, if there is none."""
    found = refusals(problem, requested)
    for name, sentence in found.items():
        if sentence is None:
            return load(name)
    raise Unsupported(problem.describe(), cast(dict[str, str], found))
