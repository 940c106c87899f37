"""A card that is not there, for tests of its benchmarks: every time and every watt is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typer.testing import CliRunner, Result

from anyflash.bench.hopper.card import Card
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.power import Power, Reading
from anyflash.bench.hopper.timing import Load, Side, Span
from anyflash.bench.machine import Machine
from anyflash.cli import app

HERE = Card("Made-up H200", 132, 150.0, 700.0, 1980, "1.2", "13.0", Machine.here())
SHORT = Settings(rounds=3, seconds=0.001, sustained_seconds=0.1)


@dataclass
class FakeCard:
    """A queue of work and a clock that advances only when the host waits for the work."""

    slow: Callable[[float], float] = lambda now: 1.0
    now: float = 0.0
    done: float = 0.0
    order: list[str] = field(default_factory=list)
    idle: float = 0.0

    def side(self, name: str, seconds: float, calls: int = 10) -> Side:
        def replay() -> None:
            self.idle += max(0.0, self.now - self.done)
            start = max(self.now, self.done)
            self.done = start + calls * seconds * self.slow(start)
            self.order.append(name)

        return Side(name, replay, calls)

    def clock(self) -> float:
        return self.now

    def event(self) -> FakeEvent:
        return FakeEvent(self)


@dataclass
class FakeEvent:
    card: FakeCard
    time: float = 0.0

    def record(self) -> None:
        self.time = self.card.done

    def synchronize(self) -> None:
        self.card.now = max(self.card.now, self.time)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return 1000 * (end_event.time - self.time)


def made(value: float = 1e-3, **sides: float) -> tuple[FakeCard, Instruments]:
    """Instruments on the CPU that take each side's time from `sides`."""
    fake = FakeCard()

    def capture(name: str, run: Callable[[], Any], seconds: float) -> Side:
        run()
        return fake.side(name, sides.get(name, value))

    def read() -> Reading:
        return Reading(fake.now, 600 * fake.now, 1500)

    return fake, Instruments(read, "cpu", capture, fake.event, lambda: None, fake.clock)


def a_load(milliseconds: float, watts: float | None) -> Load:
    span = Span(100, milliseconds / 10, Power(watts, 1500.0, 1400, 1600))
    return Load((span, span))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def words(text: str) -> str:
    return " ".join(text.split())
