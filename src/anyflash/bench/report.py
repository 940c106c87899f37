"""A result file: the machine, the versions, the commit, and every number of one run, as JSON.

A file must not tell whose machine it was: no host name, no user name, no path.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anyflash.bench.cases import Case
from anyflash.bench.check import Error
from anyflash.bench.memory import Memory
from anyflash.bench.suite import CaseResult, MaskCost, Settings
from anyflash.bench.timing import Timing
from anyflash.devices import probe
from anyflash.errors import InvalidInput

FORMAT = 1  # of the file; a change that older readers would misread raises it
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Machine:
    """`features` are instruction sets, `cores` are those that this process may use, `threads` those
    that torch uses, `memory_gb` is in 10⁹ bytes."""

    cpu: str
    features: tuple[str, ...]
    cores: int
    threads: int
    memory_gb: float
    system: str

    @classmethod
    def here(cls) -> Machine:
        device = probe("cpu")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        return cls(
            device.name,
            tuple(sorted(device.features)),
            cores or 1,
            torch.get_num_threads(),
            round(memory, 1),
            f"{platform.system()} {platform.machine()}",
        )

    @property
    def slug(self) -> str:
        """The machine as a folder's name: letters, digits and dashes."""
        words = re.sub(r"\((r|tm)\)|@", " ", self.cpu.lower())
        words = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
        return f"{words or 'cpu'}-{self.threads}-threads"


@dataclass(frozen=True)
class Report:
    """One run of a suite. `commit` is None outside of a checkout of anyflash; `dirty` says whether
    the package's files differed from it; `date` is UTC, to the second."""

    suite: str
    date: str
    commit: str | None
    dirty: bool
    machine: Machine
    versions: dict[str, str]
    settings: Settings
    results: tuple[CaseResult, ...]

    @classmethod
    def of(
        cls,
        suite: str,
        settings: Settings,
        results: Sequence[CaseResult],
        source: tuple[str | None, bool],
    ) -> Report:
        """Describe this machine and this moment around results; `source` is `source()` as it was
        before the first of them."""
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        commit, dirty = source
        return cls(suite, date, commit, dirty, Machine.here(), versions(), settings, tuple(results))

    def to_json(self) -> str:
        """What `from_json` reads, and beside it, for human readers, what follows from it."""
        data = {"format": FORMAT, **asdict(self)}
        for entry, result in zip(data["results"], self.results, strict=True):
            entry["derived"] = _derived(result)
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=True) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "result file") -> Report:
        """Raises InvalidInput, naming `source`, if it is not a report of this format."""
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            data["machine"] = Machine(**_tuples(data["machine"], "features"))
            data["settings"] = Settings(**data["settings"])
            data["results"] = tuple(_result(entry) for entry in data["results"])
            return cls(**data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            expected = "a report written by `anyflash bench`"
            advice = "run the benchmark again, or remove the file"
            raise InvalidInput(
                source, f"{type(error).__name__}: {error}", expected, advice
            ) from error


def source() -> tuple[str | None, bool]:
    """The commit of the checkout that this package runs from, and whether its files differ."""
    top = _git("rev-parse", "--show-toplevel")
    # Installed elsewhere, the package may lie in a checkout of something else.
    if top is None or Path(top).resolve() / "src" / "anyflash" != PACKAGE:
        return None, False
    changes = _git("status", "--porcelain", "--", str(PACKAGE))
    return _git("rev-parse", "HEAD"), changes != ""


def versions() -> dict[str, str]:
    """Python, and what is installed of the packages that a measurement may depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
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


def write(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.to_json(), encoding="utf-8")


def read(path: Path) -> Report:
    return Report.from_json(path.read_text(encoding="utf-8"), str(path))


def _derived(result: CaseResult) -> dict[str, Any]:
    timing = result.timing
    return {
        "ratio": None if timing is None else timing.ratio,
        "ratio_least": None if timing is None else min(timing.ratios),
        "ratio_most": None if timing is None else max(timing.ratios),
        "first_ratio": result.first_ratio,
        "error_ratio": result.error_ratio,
        "over_inputs_mb": None if result.memory is None else result.memory.over_inputs,
        "check_passed": result.passed,
        "bar_met": result.met,
    }


def _result(entry: dict[str, Any]) -> CaseResult:
    entry = {name: value for name, value in entry.items() if name != "derived"}
    entry["case"] = Case(**entry["case"])
    entry["errors"] = tuple(Error(**error) for error in entry["errors"])
    for name, kind in (("mask", MaskCost), ("memory", Memory)):
        entry[name] = None if entry[name] is None else kind(**entry[name])
    if entry["timing"] is not None:
        fields = ("ours", "peer", "calls_ours", "calls_peer")
        entry["timing"] = Timing(**_tuples(entry["timing"], *fields))
    return CaseResult(**entry)


def _tuples(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    """JSON knows no tuples."""
    return entry | {name: tuple(entry[name]) for name in names}


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        return None
    return result.stdout.strip()
