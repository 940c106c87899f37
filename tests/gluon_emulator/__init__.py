"""Run Gluon kernels for Hopper on a CPU, and attack their synchronisation.

```python
with emulate(seed=3):
    out = attention(q, k, v)    # any kernel[grid](...) inside runs here, on CPU tensors
```

The body of each @gluon.jit function runs as plain Python over torch tensors. Partitions and
programs take turns, asynchronous operations take effect at moments that a seeded scheduler
chooses. Two nets that know nothing of each other catch mistakes:

- values: a TMA load fills its destination, a wgmma or a TMA store reads its operands, at an
  adversarial moment between issue and wait. Memory that was never written, or is being written, is
  poison and may not be read.
- order: vector clocks. Two accesses to the same memory, one of them a write, must be ordered by
  barriers and waits, and by a proxy fence from ordinary stores to TMA and wgmma, whatever the
  schedule that happened to run.

From the bottom up: `errors`, `dtypes`, `values` (arithmetic), `clocks` (order), `shared` and
`global_memory`, `machine` (the scheduler), `assembly`, `atomics`, `language` and `hopper` (what a
kernel can call), `translate` (its source), `launch`. docs/emulator.md says how to use it.
"""

from .errors import Deadlock, EmulatorError, NotEmulated, Poison, Race
from .launch import Launch, emulate, run

__all__ = [
    "Deadlock",
    "EmulatorError",
    "Launch",
    "NotEmulated",
    "Poison",
    "Race",
    "emulate",
    "run",
]
