"""The machine of a run, without a name that would tell whose it is."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass

import torch

from anyflash.devices import probe


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
        return f"{folder_name(self.cpu) or 'cpu'}-{self.threads}-threads"


def folder_name(text: str) -> str:
    """A product's name in small letters, digits and dashes; nothing of nothing."""
    words = re.sub(r"\((r|tm)\)|@", " ", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")
