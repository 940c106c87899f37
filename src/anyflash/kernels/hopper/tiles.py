"""How the kernels cut up a problem, and the measurements behind it.

The figures are speeds relative to cuDNN's (9.19) in the same run on an H200, medians of 9 rounds of
about 12 ms in random order, launches in CUDA graphs: bfloat16, 16 K queries in all, 2048 / D heads.
A row of three is for sequences of 1 K, 4 K and 16 K.
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
    q_registers: bool = False  # Q is multiplied from registers instead of shared memory
    registers: tuple[int, int, int] = (168, 240, 24)  # per thread: at launch, consumer, producer

    def __post_init__(self) -> None:
        launch, consumer, producer = self.registers
        if (
            self.columns not in COLUMNS
            or self.consumers not in (2, 3)
            or self.block_kv not in (32, 64, 128)
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


# Of what did not help anywhere: exponentials on the FMA units (25 % of them: 0.9 times the speed at
# D = 64 and 128), ping-pong (0.97 to 1.02), a third slot of K and V, 32 or 64 keys a tile at D = 64
# and 128, half of Q in registers (D = 128: 0.93 to 1.00; D = 256: 0.96).
ROWS = (
    # With two consumers Q in registers is worth 1.12, and short sequences fill blocks of 128 rows
    # better than blocks of 192. Dense 1.00, 1.03, 1.06, causal 0.98, 1.06, 1.07.
    Row(Tile(64, consumers=2, block_kv=128, kv_slots=2, q_registers=True), most_keys=2048),
    # Dense 0.93, 1.08, 1.15, causal 0.72, 1.02, 1.16. With Q in registers three consumers spill.
    Row(Tile(64, consumers=3, block_kv=128, kv_slots=2, registers=(128, 160, 24))),
    # Dense 1.03, 1.08, 1.10, causal 1.09, 1.23, 1.26; with all of Q in registers 0.97 of it.
    Row(Tile(128, consumers=2, block_kv=128, kv_slots=2)),
    # Dense 1.07, 1.09, 1.10, causal 1.06, 1.21, 1.24.
    Row(Tile(256, consumers=2, block_kv=64, kv_slots=2, shared_out=True)),
)


def choose(columns: int, keys: int) -> Tile:
    """The tile for heads of at most `columns` whose rows see `keys` keys on average."""
    for row in ROWS:
        if columns <= row.tile.columns and (row.most_keys is None or keys <= row.most_keys):
            return row.tile
    raise ValueError(f"heads of {columns} columns: at most {COLUMNS[-1]} fit a tile")
