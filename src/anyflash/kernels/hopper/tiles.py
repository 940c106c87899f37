"""How the kernels cut up a problem, and the measurements behind it.

The figures are speeds relative to cuDNN's (9.19) in the same run on an H200, bfloat16, 16 K queries
in all, 2048 / D heads: in bursts of 20 ms, then, after a stroke, under load for seconds, where the
card is bound by its 700 W and what counts is energy. A row of three is for sequences of 1 K, 4 K
and 16 K. From card to card and run to run the same kernel differs by 2 %, under load by 3 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    # Dense 1.05, 1.21, 1.30 / 1.02, 1.17, 1.24, causal at 4 K and 16 K 1.12, 1.29 / 1.07, 1.22.
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
    # Dense at 1 K 1.08 / 1.03, causal at 1 K and 4 K 1.17, 1.28 / 1.06, 1.14. In a window of 1 K it
    # is 0.97 of what three consumers do, causal at 4 K 0.995.
    Row(Tile(Columns(128), Columns(128), 2, block_kv=128, kv_slots=2), most_keys=1536),
    # Dense at 4 K and 16 K 1.15, 1.15 / 1.10, 1.14, causal at 16 K 1.33 / 1.21; two consumers with
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
    # Dense 1.13, 1.16, 1.16 / 1.03, 1.06, 1.08, causal 1.18, 1.37, 1.35 / 1.05, 1.16, 1.18. Masked
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
