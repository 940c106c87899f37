"""What the first call of a process costs, with nothing compiled and from Triton's cache on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from anyflash.bench.hopper.rows import Row

COLD, CACHED = "nothing compiled", "from the disk cache"

# Run by a Python of its own, in which PyTorch is imported and the card at work before the clock.
CHILD = """
import json, sys, time
import torch
import anyflash
queries, keys, head_dim = map(int, sys.argv[1:])
q, k = (torch.randn(1, 1, n, head_dim, device="cuda").bfloat16() for n in (queries, keys))
torch.cuda.synchronize()
start = time.perf_counter()
import anyflash.kernels.hopper.launch
imported = time.perf_counter()
with torch.no_grad():
    anyflash.attention(q, k, k)
torch.cuda.synchronize()
print(json.dumps([imported - start, time.perf_counter() - imported]))
"""


@dataclass(frozen=True)
class FirstCall:
    """Seconds: `imports` of the kernel, which are Triton's for the most part, then the `call`."""

    imports: float
    call: float

    @property
    def total(self) -> float:
        return self.imports + self.call


def in_new_processes(row: Row) -> dict[str, FirstCall]:
    """COLD and CACHED, each in a process of its own; raises CalledProcessError if one fails."""
    command = [sys.executable, "-c", CHILD, *map(str, (row.queries, row.keys, row.head_dim))]
    with tempfile.TemporaryDirectory() as cache:
        paths = os.pathsep.join(path for path in sys.path if path)
        env = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": paths}
        found = {}
        for name in (COLD, CACHED):
            said = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
            found[name] = FirstCall(*json.loads(said.stdout))
    return found
