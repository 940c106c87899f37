"""Which accesses are ordered: vector clocks, logs of accesses and the check for races.

An actor is whatever does things in an order of its own: a partition of a CTA, its queue of wgmmas,
its queue of TMA stores, the TMA loads of one buffer. A clock maps actors to how far each is known
to have come. An access carries the actor that makes it and the actor's epoch then; it is known to
somebody whose clock has that epoch.

Source: vector clocks and the happens-before relation after Lamport (1978) and Mattern (1988), used
for data races as in FastTrack (Flanagan and Freund, 2009), here with whole regions of memory in
place of single variables. The proxies are those of the PTX ISA, section "Memory consistency model".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .errors import Race

Clock = dict[int, int]


def join(into: Clock, other: Clock) -> None:
    for actor, epoch in other.items():
        if into.get(actor, 0) < epoch:
            into[actor] = epoch


class Region(Protocol):
    """A part of one memory."""

    def meets(self, other: Any) -> bool:
        """Whether the two share an element; exact."""

    def inside(self, other: Any) -> bool:
        """Whether `other` has all of this one; may say no when it does."""


class Moment(NamedTuple):
    """An actor and how far it has come."""

    actor: int
    epoch: int

    def known(self, clock: Clock) -> bool:
        return clock.get(self.actor, 0) >= self.epoch


class Action(NamedTuple):
    """What is done, with the parts of a sentence about it."""

    verb: str
    target: Any
    place: Any
    who: Any

    def __str__(self) -> str:
        return f"{self.verb} {self.target} at {self.place} by {self.who}"


@dataclass(slots=True)
class Access:
    region: Region
    moment: Moment
    action: Action
    write: bool
    asynchronous: bool  # through the asynchronous proxy: TMA, or a wgmma that reads memory
    atomic: bool = False
    # Proxy fences after an ordinary store: whoever comes after one of these moments may read it
    # through the asynchronous proxy.
    fences: list[Moment] = field(default_factory=list)


class Log:
    """The accesses to one memory that a later one may still have to be ordered after."""

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def add(self, new: Access, clock: Clock, fences: Clock) -> None:
        """Check `new` against what came before, and keep it. It is made by somebody who comes after
        what `clock` knows; of proxy fences it has what `fences` knows."""
        self.writes = self._check(new, clock, fences, self.writes)
        if new.write:
            self.reads = self._check(new, clock, fences, self.reads)
            self.writes.append(new)
        else:
            self.reads = [r for r in self.reads if not _replaces(new, r)]
            self.reads.append(new)

    def _check(self, new: Access, clock: Clock, fences: Clock, old: list[Access]) -> list[Access]:
        keep = []
        for r in old:
            if new.atomic and r.atomic:
                keep.append(r)
                continue
            ordered = r.moment.known(clock)
            fenced = not _crosses_proxies(r, new) or _known(r.fences, fences)
            if not (ordered and fenced) and r.region.meets(new.region):
                raise Race(_report(new, r, ordered))
            # A write that is ordered after `r` and covers it stands for it from now on.
            if not (new.write and ordered and fenced and r.region.inside(new.region)):
                keep.append(r)
        return keep

    def fence(self, clock: Clock, now: Moment) -> None:
        """Whoever comes after `now` sees all ordinary stores known to `clock` through TMA."""
        for r in self.writes:
            if r.moment.known(clock) and not _known(r.fences, clock):
                r.fences.append(now)


def _crosses_proxies(old: Access, new: Access) -> bool:
    """Whether a write is read by another proxy, or by TMA in another program than TMA's that wrote
    it: within one program its accesses are of one proxy, between two they are not."""
    if not (old.write and new.asynchronous):
        return False
    return not old.asynchronous or old.action.who.program is not new.action.who.program


def _known(moments: Iterable[Moment], clock: Clock) -> bool:
    return any(m.known(clock) for m in moments)


def _replaces(new: Access, old: Access) -> bool:
    same = new.moment.actor == old.moment.actor and new.atomic == old.atomic
    return same and old.region.inside(new.region)


def _report(new: Access, old: Access, ordered: bool) -> str:
    if ordered:
        return (
            f"{new.action} may not see the {old.action}: between an ordinary store and TMA or"
            " wgmma, and between TMA of two programs, there must be a proxy fence, here there is"
            " none (fence_async_shared for shared memory, fence.proxy.async for all)"
        )
    return (
        f"{new.action} is not ordered after the {old.action}: no barrier or wait that"
        f" {new.action.who} has passed says that it is over"
    )
