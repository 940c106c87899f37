"""How the kernels cut up a problem, and the measurements behind it.

The figures are times relative to cuDNN's, both in one run on an H200, with bfloat16, 16 K queries
in all and 2048 / D heads: higher is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    most_queries: int | None = None  # for longer sequences there is another row
    pingpong: bool = False  # two consumers take turns at the tensor cores
    shared_out: bool = False  # the output takes Q's place, and the next Q waits for it
    registers: tuple[int, int, int] = (168, 240, 24)  # per thread: at launch, consumer, producer

    def __post_init__(self) -> None:
        launch, consumer, producer = self.registers
        warpgroups = self.consumers + 1
        if (
            self.columns not in COLUMNS
            or self.consumers not in (2, 3)
            or self.block_kv not in (32, 64, 128)
            or (self.pingpong and self.consumers != 2)
            or self.shared_bytes > SHARED_BYTES
            or 128 * warpgroups * launch > REGISTERS
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


THREE = (128, 160, 24)

# The first row that fits is taken.
TILES = (
    # Short sequences: blocks of 192 rows leave a third of 1024 idle. S = 1024 dense 0.92, causal
    # 0.94, 4096 causal 1.05; the next row has 0.93, 0.71, 1.02.
    Tile(64, consumers=2, block_kv=128, kv_slots=2, most_queries=1024),
    # 16 K dense 1.14, causal 1.14; with two consumers 0.93 and 1.06, with tiles of 64 keys 0.99 and
    # 1.07, with three slots the same.
    Tile(64, consumers=3, block_kv=128, kv_slots=2, registers=THREE),
    # 16 K dense 1.07, causal 1.23; with ping-pong 1.04 and 1.21; three consumers with 64 keys 1.03
    # and 1.15 (before the last changes, when this had 1.03 and 1.16).
    Tile(128, consumers=2, block_kv=128, kv_slots=2),
    # 16 K dense 1.08, causal 1.26; with ping-pong 1.08 and 1.24.
    Tile(256, consumers=2, block_kv=64, kv_slots=2, shared_out=True),
)


def choose(columns: int, queries: int) -> Tile:
    """The tile for heads of at most `columns`."""
    return next(
        t
        for t in TILES
        if columns <= t.columns and (t.most_queries is None or queries <= t.most_queries)
    )
