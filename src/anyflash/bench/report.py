"""A result file: the machine, the versions, the commit, and every number of one run, as JSON.

A file must not tell whose machine it was: no host name, no user name, no path.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from anyflash.bench import suite
from anyflash.bench.hopper import goals, instruments
from anyflash.bench.hopper.backward import goals as backward_goals
from anyflash.bench.hopper.card import Card
from anyflash.bench.hopper.results import RowResult
from anyflash.bench.machine import Machine
from anyflash.bench.records import decode
from anyflash.errors import InvalidInput

FORMAT = 1  # of the file; a change that older readers would misread raises it
PACKAGE = Path(__file__).resolve().parents[1]

CPU, HOPPER_FORWARD, HOPPER_BACKWARD = "cpu", "hopper-forward", "hopper-backward"  # suites

MachineT = TypeVar("MachineT")
SettingsT = TypeVar("SettingsT")
ResultT = TypeVar("ResultT")


class Kinds(NamedTuple):
    """What the files of a suite hold, and what follows from all their results together."""

    machine: type
    settings: type
    result: type
    derived: Callable[[Sequence[Any]], dict[str, Any]]


KINDS = {
    CPU: Kinds(Machine, suite.Settings, suite.CaseResult, lambda results: {}),
    HOPPER_FORWARD: Kinds(Card, instruments.Settings, RowResult, goals.derived),
    HOPPER_BACKWARD: Kinds(Card, instruments.Settings, RowResult, backward_goals.derived),
}


@dataclass(frozen=True)
class Report(Generic[MachineT, SettingsT, ResultT]):
    """One run of a suite. `commit` is None outside of a checkout of anyflash; `dirty` says whether
    the package's files differed from it; `date` is UTC, to the second."""

    suite: str
    date: str
    commit: str | None
    dirty: bool
    machine: MachineT
    versions: dict[str, str]
    settings: SettingsT
    results: tuple[ResultT, ...]

    @classmethod
    def of(
        cls,
        suite: str,
        settings: Any,
        results: Sequence[Any],
        source: tuple[str | None, bool],
        machine: Any = None,
    ) -> Report[Any, Any, Any]:
        """Describe this moment around results, and the machine, which is this one if not given;
        `source` is `source()` as it was before the first of them."""
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        commit, dirty = source
        machine = Machine.here() if machine is None else machine
        return Report(suite, date, commit, dirty, machine, versions(), settings, tuple(results))

    def to_json(self) -> str:
        """What `from_json` reads, and beside it, for human readers, what follows from it."""
        data = {"format": FORMAT, **asdict(self)}
        for entry, result in zip(data["results"], self.results, strict=True):
            entry["derived"] = result.derived()  # pyright: ignore[reportAttributeAccessIssue]
        whole = KINDS[self.suite].derived(self.results)
        if whole:
            data["derived"] = whole
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=True) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "result file") -> Report[Any, Any, Any]:
        """Raises InvalidInput, naming `source`, if it is not a report of this format."""
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            for entry in (data, *data["results"]):
                entry.pop("derived", None)
            kinds = KINDS[data["suite"]]
            for name in ("machine", "settings"):
                data[name] = decode(getattr(kinds, name), data[name])
            data["results"] = tuple(decode(kinds.result, entry) for entry in data["results"])
            return Report(**data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            expected = "a report written by `anyflash bench`"
            advice = "run the benchmark again, or remove the file"
            raise InvalidInput(
                source, f"{type(error).__name__}: {error}", expected, advice
            ) from error


def source() -> tuple[str | None, bool]:
    """The commit of the checkout that this package runs from, and whether its files differ. A copy
    without its history is told by ANYFLASH_COMMIT, and may differ."""
    top = _git("rev-parse", "--show-toplevel")
    # Installed elsewhere, the package may lie in a checkout of something else.
    if top is None or Path(top).resolve() / "src" / "anyflash" != PACKAGE:
        told = os.environ.get("ANYFLASH_COMMIT")
        return told, told is not None
    changes = _git("status", "--porcelain", "--", str(PACKAGE))
    return _git("rev-parse", "HEAD"), changes != ""


def versions() -> dict[str, str]:
    """Python, and what is installed of the packages that a measurement may depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    cudnn = torch.backends.cudnn.version()
    found |= {} if cudnn is None else {"cudnn": str(cudnn)}
    for name in ("anyflash", "triton", "transformers"):
        version = installed(name)
        if version is not None:
            found[name] = version
    return found


def installed(name: str) -> str | None:
    """A package's version without importing it; None if it is not installed."""
    if name == "anyflash":
        # From the source, since a checkout need not be installed.
        match = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.M)
        return match[1] if match else None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write(report: Report[Any, Any, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.to_json(), encoding="utf-8")


def read(path: Path) -> Report[Any, Any, Any]:
    return Report.from_json(path.read_text(encoding="utf-8"), str(path))


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        return None
    return result.stdout.strip()
