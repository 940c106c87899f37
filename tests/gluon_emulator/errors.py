"""What a kernel can be found guilty of, and where in its source."""

from __future__ import annotations

import os
import sys
from types import CodeType

PACKAGE = os.path.dirname(__file__) + os.sep


class EmulatorError(Exception):
    """The kernel did something that the hardware or the compiler does not allow."""


class Race(EmulatorError):
    """Two accesses to one piece of memory, one of them a write, that nothing orders."""


class Poison(EmulatorError):
    """A read of shared memory that was never written, or that is still being written."""


class Deadlock(EmulatorError):
    """Nobody can go on, or everybody spins and nothing changes."""


class NotEmulated(EmulatorError):
    """The kernel uses a part of Gluon that the emulator does not have."""


class Place:
    """A point in a kernel: the line of the role and, inner last, those of the functions it called.

    Cheap to take and formatted only for a report, since every access to memory remembers one.
    """

    __slots__ = ("frames",)

    def __init__(self, frames: list[tuple[CodeType, int]]) -> None:
        self.frames = frames

    def __str__(self) -> str:
        lines = [f"{os.path.basename(code.co_filename)}:{n}" for code, n in self.frames]
        return " > ".join(reversed(lines)) or "the launch"


def here() -> Place:
    """The place in the kernel from which the emulator was called."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # A partition runs in a greenlet of its own, where the chain of frames ends.
        if not code.co_filename.startswith(PACKAGE):
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    return Place(frames)
