"""How the kernels cut up a problem, and the measurements behind it.

The figures are speeds relative to cuDNN's (9.19) in the same run on an H200, bfloat16, 16 K queries
in all, 2048 / D heads: in bursts of 20 ms, then, after a stroke, under load for seconds, where the
card is bound by its 700 W and what counts is energy. A row of three is for sequences of 1 K, 4 K
and 16 K. From card to card and run to run the same kernel differs by 2 %, under load by 3 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Shared memory that a program can have on Hopper: 227 KiB.
SHARED_BYTES = 232448
# Registers of a multiprocessor. The producer's warp counts as a warpgroup.
REGISTERS = 65536
# Registers of a thread where there are three consumers.
OF_THREE = (128, 160, 24)
TICKET_BYTES = 13 * 16  # each of its numbers is aligned
# Columns that one box can have: what a wgmma multiplies, and powers of two because Gluon's are.
WIDTHS = (32, 64, 128, 256)


class Columns(NamedTuple):
    """Of Q and K, or of V and the output, as boxes of TMA side by side; narrower heads are filled
    up with zeros."""

    width: int
    boxes: int = 1

    @property
    def total(self) -> int:
        return self.width * self.boxes


@dataclass(frozen=True)
class Tile:
    """One way to run the forward kernel."""

    qk: Columns
    v: Columns
    consumers: int  # warpgroups, with 64 query rows each
    block_kv: int
    kv_slots: int  # of K, and of V
    pingpong: bool = False  # consumers take turns at the tensor cores
    apart: bool = False  # tiles of keys that need a mask have a loop of their own
    shared_out: bool = False  # the output takes Q's place, and the next Q waits for it
    q_registers: bool = False  # Q is multiplied from registers instead of shared memory
    registers: tuple[int, int, int] = (168, 240, 24)  # per thread: at launch, consumer, producer

    def __post_init__(self) -> None:
        launch, consumer, producer = self.registers
        if (
            not {self.qk.width, self.v.width} <= set(WIDTHS)
            or self.consumers not in (2, 3)
            or self.block_kv not in (32, 64, 128)
            or min(self.qk.boxes, self.v.boxes) < 1
            or (self.shared_out and self.qk.width != self.v.width)
            or (self.shared_out and self.qk.boxes < self.v.boxes)
            or self.shared_bytes > SHARED_BYTES
            or 128 * (self.consumers + 1) * launch > REGISTERS
            or 128 * (self.consumers * consumer + producer) > REGISTERS
        ):
            raise ValueError(f"no kernel for {self}")

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def shared_bytes(self) -> int:
        """Q and the output of all consumers, all slots of K and V, the barriers, and 2 tickets."""
        qk, v = self.qk.total, self.v.total
        numbers = self.block_q * (qk + (0 if self.shared_out else v))
        numbers += self.kv_slots * self.block_kv * (qk + v)
        barriers = 2 * (self.consumers + 2 * self.kv_slots + 2)
        return 2 * numbers + 8 * barriers + 2 * TICKET_BYTES


class Row(NamedTuple):
    """When a tile is taken; the first row that fits is."""

    tile: Tile
    most_keys: int | None = None  # `typical_keys`


# Of what did not help anywhere: exponentials on the FMA units (25 % of them: 0.9 at D = 64 and
# 128), a second slot of Q, filled while the block before it goes on (1.00; D = 64, S = 4 K 1.02),
# sums of weights by a product with ones (D = 64: 1.1, but then lse is that of rounded weights; D =
# 128 and 256: 0.93).
ROWS = (
    # Dense 0.99 / 1.01, causal 1.05 / 1.01 at 1 K. Without ping-pong both consumers exponentiate at
    # the same time: 0.88. With three consumers 0.70.
    Row(
        Tile(
            *(Columns(64), Columns(64)),
            consumers=2,
            block_kv=128,
            kv_slots=2,
            pingpong=True,
            q_registers=True,
        ),
        most_keys=512,
    ),
    # Dense 1.05, 1.21, 1.30 / 1.02, 1.17, 1.24, causal at 4 K and 16 K 1.12, 1.31 / 1.08, 1.24.
    # Without ping-pong 0.90 of it; 64 keys, four slots and Q in registers 0.90; two consumers 0.81.
    Row(
        Tile(
            *(Columns(64), Columns(64)),
            consumers=3,
            block_kv=128,
            kv_slots=2,
            pingpong=True,
            registers=OF_THREE,
        )
    ),
    # At 4 K dense 1.24 / 1.22; with two consumers and 128 keys 1.17 / 1.18.
    Row(
        Tile(
            Columns(32, 3), Columns(128), 3, block_kv=64, kv_slots=3, apart=True, registers=OF_THREE
        )
    ),
    # Dense at 1 K 1.07 / 1.03, causal at 1 K and 4 K 1.16, 1.29 / 1.07, 1.14.
    Row(Tile(Columns(128), Columns(128), 2, block_kv=128, kv_slots=2), most_keys=1536),
    # Dense at 4 K and 16 K 1.15, 1.17 / 1.11, 1.14, causal at 16 K 1.29 / 1.19; two consumers with
    # 128 keys 1.10, 1.11 / 1.03, 1.06 and 1.28 / 1.16. Keys are read from L2 once for 192 rows
    # instead of 128. Masked tiles not apart 0.97, four slots 0.99 under load, ping-pong 0.98.
    Row(
        Tile(Columns(128), Columns(128), 3, block_kv=64, kv_slots=3, apart=True, registers=OF_THREE)
    ),
    # At 4 K dense 1.23, causal 1.34 / 1.18; without ping-pong 1.15 / 1.09; with 64 keys and three
    # consumers 1.15 / 1.08.
    Row(
        Tile(
            *(Columns(64, 3), Columns(64, 2)),
            consumers=2,
            block_kv=128,
            kv_slots=2,
            pingpong=True,
            shared_out=True,
        )
    ),
    # At 4 K dense 1.11, causal 1.18 / 1.08; filled up to 256 columns 0.87 of it.
    Row(Tile(Columns(64, 3), Columns(64, 3), consumers=2, block_kv=64, kv_slots=2)),
    # Dense 1.13, 1.16, 1.16 / 1.03, 1.06, 1.08, causal 1.09, 1.26, 1.30 / 1.00, 1.09, 1.14. Masked
    # tiles apart 0.99; ping-pong 0.98.
    Row(Tile(Columns(256), Columns(256), 2, block_kv=64, kv_slots=2, shared_out=True)),
)


def typical_keys(keys: int, left: int | None, right: int | None) -> int:
    """Keys of a row, by which its tile is chosen, of `keys` in all and a window. A quarter of them
    if causal: half is what rows see on average, but the ends of a block and tiles that need a mask
    weigh more there (D = 128: dense 2 K is best with three consumers, causal 4 K with two)."""
    seen = keys if right is None else keys // 4
    if left is not None and right is not None:
        seen = min(seen, max(left + right + 1, 1))
    return seen


def choose(columns: int, columns_v: int, keys: int) -> Tile:
    """The tile for heads of so many columns of Q and K, and of V, and `typical_keys`."""
    for tile, most_keys in ROWS:
        fits = columns <= tile.qk.total and columns_v <= tile.v.total
        if fits and (most_keys is None or keys <= most_keys):
            return tile
    most = ROWS[-1].tile.qk.total
    raise ValueError(f"heads of {columns} and {columns_v} columns: at most {most} fit a tile")


# Backward.

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
    early: bool = False  # S of the next tile is started before dP is waited for
    adds: str = ""  # from the keys: who adds dQ up in memory, nobody, the "consumers", or a "role"
    ds_slots: int = 2  # of dS, for dQ
    consumers: int = 2
    # Per thread: at launch, consumer, producer, and the role that makes dQ.
    registers: tuple[int, int, int, int] = (168, 240, 24, 0)

    def __post_init__(self) -> None:
        launch, consumer, producer, adder = self.registers
        role = self.adds == "role"
        if (
            not {self.qk.width, self.v.width} <= set(WIDTHS)
            or self.block not in (32, 64, 128)
            or ((self.second or self.adds != "") and self.block != STATISTICS_ROWS)
            or min(self.qk.boxes, self.v.boxes, self.slots - 1, self.slots_2) < 1
            or not (self.first or self.second)
            or self.consumers != 2
            or self.adds not in ("", "consumers", "role")
            or (self.adds == "consumers" and self.qk.boxes != self.consumers)
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
        if self.adds:  # dS of all consumers, and places from which dQ is added, in float32
            numbers += self.ds_slots * self.block_own * self.block
            numbers += 2 * self.consumers * self.block * self.qk.width
            barriers += 2 * self.ds_slots
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
    qk: Columns, v: Columns, together: bool = True, value: dict[str, Any] | None = None,
    **of_all: Any,
) -> Split:  # fmt: skip
    """Walks that are alike, but for those fields of dV's alone that `value` gives."""
    fields: dict[str, Any] = {"block": 64, "slots": 2, "slots_2": 2} | of_all
    return Split(
        Walk(qk, v, **fields),
        Walk(qk, v, **fields, second=True) if together else None,
        Walk(qk, v, **fields),
        Walk(qk, v, **fields | (value or {}), first=False, second=True),
    )


# The walks of `fused`, from the keys: five products. No row has been measured yet.
FUSED = (
    Walk(
        *(Columns(64), Columns(64)),
        block=64,
        slots=3,
        slots_2=3,
        second=True,
        shared_out=False,
        own_registers=True,
        adds="role",
        registers=(128, 208, 24, 72),
    ),
    Walk(
        *(Columns(64, 2), Columns(128)),
        block=64,
        slots=2,
        slots_2=2,
        second=True,
        adds="consumers",
        ds_slots=1,
    ),
)

# No row has been measured yet.
SPLITS = (
    split_of(Columns(64), Columns(64), True, slots=3, slots_2=3, own_registers=True),
    split_of(Columns(128), Columns(128), True),
    split_of(Columns(64, 3), Columns(64, 2), False),
    split_of(Columns(64, 3), Columns(64, 3), False),
    split_of(Columns(256), Columns(256), False, slots_2=1, value={"slots_2": 2}),
)


def choose_fused(columns: int, columns_v: int) -> Walk | None:
    """Likewise of `fused`; None where no walk has room for dQ."""
    for walk in FUSED:
        if columns <= walk.qk.total and columns_v <= walk.v.total:
            return walk
    return None


def choose_split(columns: int, columns_v: int) -> Split:
    """The walks for heads of so many columns of Q and K, and of V."""
    for split in SPLITS:
        if columns <= split.queries.qk.total and columns_v <= split.queries.v.total:
            return split
    most = SPLITS[-1].queries.qk.total
    raise ValueError(f"heads of {columns} and {columns_v} columns: at most {most} fit a tile")
