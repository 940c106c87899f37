"""The machine: programs, their partitions, asynchronous operations, and who goes on next.

Every partition of every resident program is a greenlet. Only one runs at a time, and it gives the
control back at each operation that others can notice. A seeded scheduler then lets asynchronous
operations take effect and chooses who goes on. So a seed fixes the whole run, and over a few seeds
slow and fast partitions, early and late copies meet in all ways.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

from .clocks import Access, Clock, Log, Moment, join
from .errors import Deadlock, EmulatorError, here
from .shared import Allocation

# Steps in which nothing but waiting happens before a run counts as stuck. A partition that spins
# on a global value takes one step a turn.
MOST_IDLE_STEPS = 3_000
# A run of more steps than this will not end: some hundred times those of the largest test.
MOST_STEPS = 3_000_000

# How often, per step: somebody becomes slow or fast; an operation in flight takes effect.
CHANGE_OF_PACE = 0.03
TAKES_EFFECT = 0.15
# After how many steps without any progress even a late operation takes effect.
LATEST = 100


@dataclass(eq=False, slots=True)
class Operation:
    """An asynchronous operation. `act` is called once, at a moment that the scheduler, or somebody
    who waits for it, decides."""

    action: Any
    act: Callable[[], None]
    program: Program
    outlives: bool = False  # may still be in flight when its program ends
    number: int = 0
    mode: str = "any"  # "now": at once; "any": at any step; "late": when somebody needs it
    done: bool = False


class Partition:
    """Some warps of a program that run one role."""

    def __init__(self, program: Program, index: int, warps: int, clock: Clock) -> None:
        machine = program.machine
        self.program, self.index, self.warps = program, index, warps
        self.name = "main"
        self.actor = machine.actor()
        self.clock: Clock = {**clock, self.actor: 1}
        self.last_load: Any = None
        # Queues of operations in flight, each an actor of its own with an epoch an operation.
        self.products = Queue(machine.actor())
        self.stores = Queue(machine.actor())  # TMA stores whose source is not yet read
        self.written = Queue(machine.actor())  # TMA stores not yet visible in global memory
        # How far the partition and its products had come when all its threads last met.
        self.met: Clock = {self.actor: 0, self.products.actor: 0}
        self.until: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.pace = 1.0
        self.greenlet: greenlet | None = None
        self.ended = False

    def __str__(self) -> str:
        return f"{self.name} of program {self.program.number}"

    def now(self) -> Moment:
        return Moment(self.actor, self.clock[self.actor])

    def log(self, log: Log, access: Access, by_one_thread: bool = False) -> None:
        if self.program.machine.races:
            # A fence is executed by all threads, the one that acts among them.
            clock = self.clock_of_one_thread if by_one_thread else self.clock
            log.add(access, clock, self.clock)

    def meet(self) -> None:
        """All threads of the partition wait for each other."""
        self.met = {actor: self.clock.get(actor, 0) for actor in self.met}
        self.clock[self.actor] += 1

    def release(self, into: Clock) -> None:
        """The threads meet; who acquires `into` later comes after all that they have done."""
        join(into, self.clock)
        self.meet()

    @property
    def clock_of_one_thread(self) -> Clock:
        """What is certain of all threads when one of them acts: what they had done when they last
        met. Each has waited for mbarriers by itself, so what others have released counts."""
        return {**self.clock, **self.met}

    def release_by_one_thread(self, into: Clock) -> None:
        join(into, self.clock_of_one_thread)

    def acquire(self, clock: Clock) -> None:
        join(self.clock, clock)

    def issue(self, queue: Queue, operation: Operation) -> None:
        queue.operations.append(operation)
        self.program.machine.launch(operation)

    def retire(self, queue: Queue, leave: int) -> None:
        """Wait for the operations of a queue but for the last few."""
        machine = self.program.machine
        while len(queue.operations) > leave:
            machine.fire(queue.operations.pop(0))
        join(self.clock, {queue.actor: queue.issued - len(queue.operations)})

    def end(self) -> None:
        for operation in (*self.products.operations, *self.stores.operations):
            raise EmulatorError(f"{self} ends without having waited for the {operation.action}")
        self.ended = True
        self.program.machine.progress()


@dataclass(slots=True)
class Queue:
    actor: int
    issued: int = 0
    operations: list[Operation] = field(default_factory=list)

    def next(self) -> Moment:
        self.issued += 1
        return Moment(self.actor, self.issued)


class Program:
    """A CTA: its partitions, its shared memory and its named barriers."""

    def __init__(self, machine: Machine, number: tuple[int, ...], warps: int) -> None:
        self.machine, self.number = machine, number
        self.allocations: list[Allocation] = []
        self.named_barriers: dict[int, Any] = {}
        self.main = Partition(self, 0, warps, {})
        self.partitions = [self.main]
        self.working = 0  # roles that have not ended

    def start(self, kernel: Callable[[], Any]) -> None:
        def body() -> None:
            kernel()
            self.main.end()

        self._run(self.main, body)

    def _run(self, partition: Partition, body: Callable[[], Any]) -> None:
        # The parent is the scheduler: it gets the control, or the exception, when the body is over.
        partition.greenlet = greenlet(body, parent=self.machine.hub)
        self.machine.partitions.append(partition)

    def specialise(self, roles: list[tuple[Callable, tuple]], warps: Iterable[int]) -> Any:
        """Run one role a partition; the first is the program's own, which goes on afterwards with
        what it returned."""
        main = self.main
        if len(self.partitions) > 1:
            raise EmulatorError(f"{here()}: warp_specialize inside or after warp_specialize")
        main.release({})
        results = []
        names = [f.__name__ for f, _ in roles]
        for i, ((role, args), count) in enumerate(
            zip(roles, (main.warps, *warps), strict=True), start=1
        ):
            partition = Partition(self, i, count, main.clock)
            repeated = names.count(role.__name__) > 1
            partition.name = role.__name__ + f"#{names[: i - 1].count(role.__name__)}" * repeated
            self.partitions.append(partition)

            def body(role=role, args=args, partition=partition) -> None:
                result = role(*args)
                if partition.index == 1:
                    results.append(result)
                partition.end()
                self.working -= 1

            self._run(partition, body)
        self.working = len(roles)
        step(lambda: self.working == 0, lambda: "the other partitions to end")
        for p in self.partitions[1:]:
            join(main.clock, p.clock)
        return results[0]

    def end(self) -> None:
        """What TMA still writes when a program ends is written before the kernel ends."""
        for number, b in self.named_barriers.items():
            if b.threads:
                raise EmulatorError(
                    f"program {self.number} ends with {b.threads} of {b.size} threads arrived at"
                    f" named barrier {number}"
                )
        for allocation in self.allocations:
            for moment, action in allocation.loads.values():
                if not moment.known(self.main.clock):
                    raise EmulatorError(f"nobody has waited for the {action}")
        for operation in [o for o in self.machine.operations if o.program is self]:
            if not operation.outlives:
                raise EmulatorError(
                    f"program {self.number} ends before the {operation.action} is complete"
                )


class Machine:
    """One launch of a kernel."""

    current: Machine | None = None

    def __init__(self, grid: tuple[int, ...], seed: int, races: bool, resident: int) -> None:
        self.grid, self.races, self.resident = grid, races, resident
        self.random = random.Random(seed)
        self.hub = getcurrent()
        self.partitions: list[Partition] = []
        self.operations: list[Operation] = []
        self.running: Partition | None = None
        self.memories: dict[int, Any] = {}  # global memory, by the address of its storage
        self.steps = self.last_progress = self.shared_bytes = 0
        self.schedule = 0  # a digest of all choices
        self._actors = 0

    def actor(self) -> int:
        self._actors += 1
        return self._actors

    def progress(self) -> None:
        self.last_progress = self.steps

    # Asynchronous operations.

    def launch(self, operation: Operation) -> None:
        operation.mode = self.random.choice(("now", "any", "any", "late"))
        operation.number = self.actor()
        self.operations.append(operation)
        if operation.mode == "now":
            self.fire(operation)

    def fire(self, operation: Operation) -> None:
        if not operation.done:
            operation.done = True
            self._note(operation.number)
            self.operations.remove(operation)
            self.progress()
            operation.act()

    # Who goes on.

    def run(self, numbers: list[tuple[int, ...]], warps: int, kernel: Callable[[], Any]) -> None:
        """Run `kernel` as every program of `numbers`, a few at a time."""
        self.random.shuffle(numbers)
        programs: list[Program] = []
        try:
            while numbers or programs:
                while numbers and len(programs) < self.resident:
                    programs.append(Program(self, numbers.pop(), warps))
                    programs[-1].start(kernel)
                self._turn()
                if self.running is not None and self.running.ended:
                    self.partitions.remove(self.running)
                    program = self.running.program
                    if self.running is program.main:
                        program.end()
                        programs.remove(program)
                        used = sum(a.nbytes for a in program.allocations)
                        self.shared_bytes = max(self.shared_bytes, used)
            while self.operations:
                self.fire(self.random.choice(self.operations))
        finally:
            for p in self.partitions:
                if p.greenlet:
                    p.greenlet.throw()

    def _turn(self) -> None:
        rng = self.random
        self.steps += 1
        if self.steps - self.last_progress > MOST_IDLE_STEPS:
            raise Deadlock(f"for {MOST_IDLE_STEPS} steps nothing has changed:\n{self._waiting()}")
        if self.steps > MOST_STEPS:
            raise Deadlock(f"no end after {MOST_STEPS} steps:\n{self._waiting()}")
        if rng.random() < CHANGE_OF_PACE:
            for p in self.partitions:
                p.pace = math.exp(rng.gauss(0, 2.5))
        for o in [o for o in self.operations if o.mode == "any" and rng.random() < TAKES_EFFECT]:
            self.fire(o)
        # Somebody spins, perhaps on what the latest of operations would bring.
        if self.operations and self.steps - self.last_progress > LATEST:
            self.fire(rng.choice(self.operations))
        while not (ready := [p for p in self.partitions if p.until is None or p.until()]):
            if not self.operations:
                raise Deadlock(f"everybody waits:\n{self._waiting()}")
            self.fire(rng.choice(self.operations))
        p = self._one_of(ready)
        p.until = None
        self.running = p
        self._note(p.actor)
        p.greenlet.switch()

    def _one_of(self, ready: list[Partition]) -> Partition:
        """By pace."""
        left = self.random.random() * sum([p.pace for p in ready])
        for p in ready:
            left -= p.pace
            if left < 0:
                return p
        return ready[-1]

    def _note(self, choice: int) -> None:
        self.schedule = zlib.crc32(choice.to_bytes(4, "little"), self.schedule)

    def _waiting(self) -> str:
        return "\n".join(
            f"  {p} {'for ' + p.waits_for() if p.until else 'goes on and on'}"
            for p in self.partitions
        )


def step(until: Callable[[], bool] | None = None, waits_for: Callable[[], str] = str) -> Partition:
    """Let others go on; come back when it is this partition's turn and `until` holds."""
    machine = Machine.current
    if machine is None or machine.running is None:
        raise EmulatorError("device code was called outside of a launch")
    me = machine.running
    me.until, me.waits_for = until, waits_for
    machine.hub.switch()
    return me


def running() -> Partition:
    """The partition that runs, without giving up the control."""
    return Machine.current.running  # type: ignore[union-attr, return-value]
