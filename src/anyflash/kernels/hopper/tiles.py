"""How the kernels cut up a problem, and the measurements behind it."""

from __future__ import annotations

from dataclasses import dataclass

# Shared memory that a program can have on Hopper: 227 KiB.
SHARED_BYTES = 232448


@dataclass(frozen=True)
class Tile:
    """One way to run the forward kernel."""

    consumers: int  # warpgroups with 64 query rows each
    block_kv: int
    kv_slots: int  # of K, and of V
    pingpong: bool = False
    shared_out: bool = False  # the output takes Q's place, and the next Q waits for it
    registers: tuple[int, int, int] = (168, 240, 24)  # per thread: at launch, consumer, producer

    def __post_init__(self) -> None:
        if self.consumers not in (2, 3) or self.block_kv not in (32, 64, 128, 256):
            raise ValueError(f"no kernel for {self}")

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    def shared_bytes(self, columns: int, columns_v: int, itemsize: int = 2) -> int:
        """Q and the output of all consumers, all slots of K and V, and the barriers."""
        rows = self.block_q * (columns if self.shared_out else columns + columns_v)
        rows += self.kv_slots * self.block_kv * (columns + columns_v)
        return rows * itemsize + 16 * (self.consumers + 2 * self.kv_slots)


THREE = (128, 160, 24)
