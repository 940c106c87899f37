"""How the kernels cut up a problem, and the measurements behind it.

The figures are speeds relative to cuDNN's, both in one run on an H200, with bfloat16, 16 K queries
in all and 2048 / D heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Shared memory that a program can have on Hopper: 227 KiB.
SHARED_BYTES = 232448
# Registers of a multiprocessor. The producer's warp counts as a warpgroup.
REGISTERS = 65536
# Columns that a tile can have: what a wgmma multiplies, and powers of two because Gluon's are.
COLUMNS = (64, 128, 256)


@dataclass(frozen=True)
class Tile:
    """One way to run the forward kernel."""

    columns: int  # of Q, K and V; narrower heads are filled up with zeros by TMA
    consumers: int  # warpgroups, with 64 query rows each
    block_kv: int
    kv_slots: int  # of K, and of V
    pingpong: bool = False  # two consumers take turns at the tensor cores
    shared_out: bool = False  # the output takes Q's place, and the next Q waits for it
    q_columns: int = 0  # columns of Q that are multiplied from registers, not shared memory
    registers: tuple[int, int, int] = (168, 240, 24)  # per thread: at launch, consumer, producer

    def __post_init__(self) -> None:
        launch, consumer, producer = self.registers
        if (
            self.columns not in COLUMNS
            or self.consumers not in (2, 3)
            or self.block_kv not in (32, 64, 128)
            or self.q_columns not in (0, self.columns, self.columns // 2)
            or (self.pingpong and self.consumers != 2)
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
        rows = self.block_q * (1 if self.shared_out else 2) + 2 * self.kv_slots * self.block_kv
        barriers = 2 * (self.consumers + 2 * self.kv_slots + 2)
        return 2 * rows * self.columns + 8 * barriers + 2 * 128


class Row(NamedTuple):
    """When a tile is taken; the first row that fits is."""

    tile: Tile
    most_keys: int | None = None  # that a row of queries sees on average
    masked: bool | None = None  # causal or a window, neither, or either


# Of what did not help anywhere: exponentials on the FMA units (25 % of them: 0.9 times the speed at
# D = 64, 128), a third slot of K and V, and 32 or 64 keys a tile at D = 64 and 128.
ROWS = (
    # D = 64. With two consumers Q in registers is worth 1.12, and short sequences fill blocks of
    # 128 rows better than blocks of 192. 1 K dense 1.00, causal 0.98, 4 K causal 1.07; the next
    # row has 0.90, 0.67, 1.00.
    Row(Tile(64, consumers=2, block_kv=128, kv_slots=2, q_columns=64), most_keys=2048),
    # 4 K dense 1.04, 16 K dense 1.10, causal 1.11; the row above has 1.00, 1.01, 1.06. With Q in
    # registers three consumers spill.
    Row(Tile(64, consumers=3, block_kv=128, kv_slots=2, registers=(128, 160, 24))),
    # D = 128. 1 K, 4 K, 16 K dense 1.01, 1.10, 1.08; the next row has 1.01, 1.07, 1.06.
    Row(Tile(128, consumers=2, block_kv=128, kv_slots=2, q_columns=64), masked=False),
    # 1 K, 4 K, 16 K causal 1.04, 1.19, 1.24; the row above has 0.99, 1.08, 1.12, all of Q in
    # registers 1.04, 1.18, 1.22. Ping-pong 1.01, 1.20, 1.21.
    Row(Tile(128, consumers=2, block_kv=128, kv_slots=2)),
    # D = 256. 1 K, 4 K, 16 K dense 1.03, 1.08, 1.06, causal 1.05, 1.20, 1.24; with half of Q in
    # registers 1.00, 1.03, 1.00 and 0.53, 1.16, 1.17, with ping-pong 1.06, 1.08, 1.08 and 1.04,
    # 1.23, 1.24.
    Row(Tile(256, consumers=2, block_kv=64, kv_slots=2, shared_out=True)),
)


def choose(columns: int, keys: int, masked: bool) -> Tile:
    """The tile for heads of at most `columns` whose rows see `keys` keys on average."""
    for row in ROWS:
        if (
            columns <= row.tile.columns
            and (row.most_keys is None or keys <= row.most_keys)
            and (row.masked is None or row.masked == masked)
        ):
            return row.tile
    raise ValueError(f"heads of {columns} columns: at most {COLUMNS[-1]} fit a tile")
