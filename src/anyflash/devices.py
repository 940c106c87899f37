"""One probe of the machine → frozen `Device`; capabilities are named by feature, not by model."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """A device as backends see it. `features` are words such as avx512, amx_bf16, wgmma."""

    type: str  # torch's device type: cpu, cuda, mps
    name: str
    features: frozenset[str]


@cache
def probe(device: str) -> Device:
    """Describe a torch device type or device ("cpu", "cuda:1"); one probe per process.

    A CUDA context is made only if a CUDA device is asked for. One that is not here has no features.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return Device(kind, _cpu_name(), _cpu_features())
    if kind == "cuda" and not _is_here(torch.device(device).index):
        return Device(kind, "not present", frozenset())
    if kind == "cuda":
        return Device(kind, torch.cuda.get_device_name(device), _cuda_features(device))
    return Device(kind, platform.machine(), frozenset())


def _is_here(index: int | None) -> bool:
    return torch.cuda.is_available() and (index is None or index < torch.cuda.device_count())


def _cuda_features(device: str) -> frozenset[str]:
    if torch.version.hip is not None:  # AMD's numbers look like NVIDIA's: gfx942 says (9, 4)
        name = torch.cuda.get_device_properties(device).gcnArchName
        return frozenset({name.split(":")[0]})
    major, minor = torch.cuda.get_device_capability(device)
    # Instructions of Hopper alone: later architectures replaced them.
    return frozenset({f"sm_{major}{minor}"} | ({"wgmma"} if major == 9 else set()))


def _cpu_name() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_features() -> frozenset[str]:
    wanted = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16"}
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return frozenset(wanted.intersection(line.split(":", 1)[1].split()))
    return frozenset()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")  # Linux only; elsewhere nothing is known and nothing is lost
    return path.read_text().splitlines() if path.exists() else []
