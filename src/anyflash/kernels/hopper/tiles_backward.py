"""How the backward kernels cut up a problem, and the measurements behind it: see tiles.py for what
the figures are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from anyflash.kernels.hopper.tiles import REGISTERS, SHARED_BYTES, TICKET_BYTES, WIDTHS, Columns

STATISTICS_ROWS = 64  # what statistics of queries come in tiles of


@dataclass(frozen=True)
class Walk:
    """One way to run the backward kernel, from the queries or from the keys."""

    qk: Columns
    v: Columns
    block: int  # rows of a tile of the other side; from the keys STATISTICS_ROWS
    slots: int  # of Y: K, or Q with its statistics; at least 2, since S is a tile ahead
    slots_2: int  # of Y': V or dO
    first: bool = True  # A, which is dQ or dK
    second: bool = False  # A', which is dV
    # Results take the places of X and X', and the next ones wait for them; A' alone that of X.
    shared_out: bool = True
    own_registers: bool = False  # X and X' are multiplied from registers
    # S of the next tile is started before dP is waited for; not with `own_registers`: there ptxas
    # (12.8) takes those of X' for dS, and from the second tile of a block on dP is wrong.
    early: bool = False
    # From the keys: dQ is added up in memory by the "consumers" or by a "role", or dS is "stored".
    ds: str = ""
    ds_slots: int = 2  # of dS, for dQ
    consumers: int = 2
    # Per thread: at launch, consumer, producer, and the role that makes dQ.
    registers: tuple[int, int, int, int] = (168, 240, 24, 0)

    def __post_init__(self) -> None:
        launch, consumer, producer, adder = self.registers
        role = self.ds == "role"
        if (
            not {self.qk.width, self.v.width} <= set(WIDTHS)
            or self.block not in (32, 64, 128)
            or ((self.second or self.ds != "") and self.block != STATISTICS_ROWS)
            or min(self.qk.boxes, self.v.boxes, self.slots - 1, self.slots_2) < 1
            or not (self.first or self.second)
            or self.consumers != 2
            or self.ds not in ("", "consumers", "role", "stored")
            or (self.early and self.own_registers)
            or (self.ds != "" and (self.ds_slots < 1 or not self.first))
            or (self.ds == "consumers" and self.qk.boxes != self.consumers)
            or (self.shared_out and not self.first and self.qk.width != self.v.width)
            or (self.shared_out and not self.first and self.qk.boxes < self.v.boxes)
            or (adder > 0) != role
            or 128 * (self.consumers + 1 + role) * launch > REGISTERS
            or 128 * (self.consumers * consumer + producer + adder) > REGISTERS
            or self.shared_bytes > SHARED_BYTES
        ):
            raise ValueError(f"no kernel for {self}")

    @property
    def block_own(self) -> int:
        return 64 * self.consumers

    @property
    def shared_bytes(self) -> int:
        """X and X', results, all slots of Y, Y' and the statistics, notes, barriers, 2 tickets."""
        qk, v = self.qk.total, self.v.total
        results = 0 if self.shared_out else qk * self.first + v * self.second
        numbers = self.block_own * (qk + v * self.first + results)
        numbers += self.block * (self.slots * qk + self.slots_2 * v)
        barriers = 2 * (2 * self.consumers + self.slots + self.slots_2 + 2)
        statistics = self.slots * 2 * STATISTICS_ROWS * 4
        if self.ds:  # dS of all consumers
            numbers += self.ds_slots * self.block_own * self.block
            barriers += 2 * self.ds_slots
        if self.ds in ("consumers", "role"):  # places from which dQ is added, in float32
            numbers += 2 * self.consumers * self.block * self.qk.width
        notes = 32 * (self.slots + self.ds_slots)
        return 2 * numbers + statistics + 8 * barriers + notes + 2 * TICKET_BYTES


class Split(NamedTuple):
    """The walks of `split`, the backward in seven products and, if dK and dV do not fit beside each
    other, an eighth: S once more."""

    queries: Walk  # dQ
    keys: Walk | None  # dK and dV
    key: Walk  # dK alone
    value: Walk  # dV alone


def split_of(
    qk: Columns, v: Columns, together: bool = True, queries: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None, value: dict[str, Any] | None = None, **of_all: Any,
) -> Split:  # fmt: skip
    """Walks that are alike, but for what is given for one of them."""
    fields: dict[str, Any] = {"block": 64, "slots": 2, "slots_2": 2} | of_all
    return Split(
        Walk(qk, v, **fields | (queries or {})),
        Walk(qk, v, **fields | (keys or {}), second=True) if together else None,
        Walk(qk, v, **fields),
        Walk(qk, v, **fields | (value or {}), first=False, second=True),
    )


@dataclass(frozen=True)
class Stored:
    """The kernels of `stored`, the backward in five products and, if dK and dV do not fit beside
    each other, a sixth: S once more."""

    keys: Walk  # dS, dK and, if it can, dV
    value: Walk | None  # dV, if that cannot
    slots: int  # of K and dS, in the kernel that makes dQ, 64 keys at a time
    # Of 64 queries, there. K is read from L2 once for all of them: with two it is as much as dS.
    consumers: int = 4
    # Per thread, there: at launch, consumer, and producer.
    registers: tuple[int, int, int] = (96, 112, 56)

    def __post_init__(self) -> None:
        launch, consumer, producer = self.registers
        if (
            self.keys.ds != "stored"
            or self.keys.second == (self.value is not None)
            or self.slots < 1
            or self.consumers not in (2, 4)
            or self.shared_bytes > SHARED_BYTES
            or 128 * (self.consumers + 1) * launch > REGISTERS
            or 128 * (self.consumers * consumer + producer) > REGISTERS
        ):
            raise ValueError(f"no kernels for {self}")

    @property
    def shared_bytes(self) -> int:
        """dQ of all consumers, all slots of K and dS, the barriers, 2 tickets."""
        qk = self.keys.qk.total
        rows = 64 * self.consumers
        numbers = rows * qk + self.slots * 64 * (qk + rows)
        return 2 * numbers + 16 * (self.slots + 2) + 2 * TICKET_BYTES


# Of the walks and of what did not help, as for forward: at 4 K and 16 K, dense then causal.

# The walks of `fused`, from the keys: five products.
FUSED = (
    # 1.17, 1.21, 1.26, 1.28 / 1.13, ·, 1.17, ·; three and four slots 0.97 and 0.93 of it, three of
    # dS 0.95, results in the place of X 0.97, X from shared memory 0.88, with S early 0.90.
    Walk(
        *(Columns(64), Columns(64)),
        block=64,
        slots=2,
        slots_2=2,
        second=True,
        shared_out=False,
        own_registers=True,
        ds="role",
        registers=(128, 208, 24, 72),
    ),
    # 0.88, 0.89, 0.94, 0.93; one slot of dS 0.8 of it, one of dO 0.8, S early 0.8. Registers are
    # short: some are loaded from local memory in the loop.
    Walk(
        *(Columns(64, 2), Columns(128)),
        block=64,
        slots=2,
        slots_2=2,
        second=True,
        ds="consumers",
        ds_slots=2,
    ),
)

SPLITS = (
    # 0.95, 0.91, 1.06, 1.00.
    split_of(
        *(Columns(64), Columns(64)),
        keys={"shared_out": False},
        slots=3,
        slots_2=3,
        own_registers=True,
    ),
    # 0.93, 0.92, 1.04, 1.00; with two slots and X from shared memory, from the queries, 0.98 of it.
    split_of(
        *(Columns(128), Columns(128)),
        queries={"slots": 3, "slots_2": 3, "own_registers": True},
        keys={"shared_out": False},
    ),
    # At 4 K, dense and causal, 1.36, 0.96, and 1.21, 1.31.
    split_of(Columns(64, 3), Columns(64, 2), together=False),
    split_of(Columns(64, 3), Columns(64, 3), together=False),
    # Of FlashAttention-2: 1.92 at 4 K, causal 2.05 and 1.98 at 1 K and 16 K; 32 keys a tile, from
    # the queries, 0.9 of it.
    split_of(*(Columns(256), Columns(256)), together=False, value={"slots_2": 2}, slots_2=1),
)

STORED = (
    # 0.93, 0.86, 1.01, 0.84.
    Stored(
        Walk(
            *(Columns(64), Columns(64)),
            block=64,
            slots=3,
            slots_2=3,
            second=True,
            own_registers=True,
            ds="stored",
            ds_slots=3,
        ),
        None,
        slots=3,
    ),
    # 1.03, 1.06, 1.16, 1.03 / 1.01, 1.03, 1.05, 0.95. The walk alone is at 1.57 without storing dS,
    # and at 1.35 with it.
    Stored(
        Walk(
            *(Columns(128), Columns(128)),
            block=64,
            slots=2,
            slots_2=2,
            second=True,
            shared_out=False,
            ds="stored",
        ),
        None,
        slots=3,
    ),
    # At 4 K, dense and causal, 1.51, 1.06. The walks are those of split.
    Stored(
        replace(SPLITS[2].key, ds="stored"),
        SPLITS[2].value,
        slots=3,
        consumers=2,
        registers=(168, 240, 24),
    ),
    # At 4 K 1.37, 1.50.
    Stored(
        replace(SPLITS[3].key, slots_2=1, ds="stored"),
        SPLITS[3].value,
        slots=3,
        consumers=2,
        registers=(168, 240, 24),
    ),
)


def choose_split(columns: int, columns_v: int) -> Split:
    """The walks for heads of so many columns of Q and K, and of V."""
    for split in SPLITS:
        if columns <= split.queries.qk.total and columns_v <= split.queries.v.total:
            return split
    most = SPLITS[-1].queries.qk.total
    raise ValueError(f"heads of {columns} and {columns_v} columns: at most {most} fit a tile")


def choose_fused(columns: int, columns_v: int) -> Walk | None:
    """Likewise of `fused`; None where no walk has room for dQ."""
    for walk in FUSED:
        if columns <= walk.qk.total and columns_v <= walk.v.total:
            return walk
    return None


def choose_stored(columns: int, columns_v: int) -> Stored | None:
    """Likewise of `stored`; None where there is no room for dS."""
    for stored in STORED:
        if columns <= stored.keys.qk.total and columns_v <= stored.keys.v.total:
            return stored
    return None


def preferred(columns: int, columns_v: int, deterministic: bool) -> tuple[str, ...]:
    """Algorithms for such heads, the fastest first; the last one serves all calls."""
    most = max(columns, columns_v)
    if most <= FUSED[0].qk.total:
        return ("split",) if deterministic else ("fused", "split")
    return ("stored", "split")
