"""The card of a run, and the refusal where there is none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyflash.bench.hopper.power import Meter
from anyflash.bench.machine import Machine, folder_name
from anyflash.errors import Unsupported

HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True)
class Card:
    """`memory_gb` is in 10⁹ bytes, `clock_mhz` the most that the multiprocessors' clock can be."""

    name: str
    multiprocessors: int
    memory_gb: float
    power_limit_watts: float
    clock_mhz: int
    driver: str
    cuda: str
    host: Machine

    @classmethod
    def here(cls, meter: Meter) -> Card:
        """The current card, that of the meter."""
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(
            found.name,
            found.multi_processor_count,
            round(found.total_memory / 1e9, 1),
            meter.power_limit,
            meter.most_mhz,
            meter.driver,
            torch.version.cuda or "none",
            Machine.here(),
        )

    @property
    def slug(self) -> str:
        """The card as a folder's name."""
        return folder_name(self.name) or "hopper"


def require() -> None:
    """Raises Unsupported unless the current CUDA device is a Hopper card."""
    advice = "run it on a machine with an H100, an H200 or another card of compute capability 9.0"
    if not torch.cuda.is_available():
        why = "no CUDA device is here"
    else:
        found = torch.cuda.get_device_capability()
        if found == HOPPER:
            return
        name, version = torch.cuda.get_device_name(), ".".join(map(str, found))
        why = f"the current device is {name}, compute capability {version}"
    raise Unsupported("a benchmark of Hopper kernels", {"cuda": why}, advice)
