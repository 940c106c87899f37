"""Peak memory of one call, in a process of its own: `python -m anyflash.bench.memory CASE`.

CASE is a `Case` as JSON. The process makes the inputs, runs the same case once at a small size (so
that thread pools and lazily loaded code are there), reads its resident memory (VmRSS of
/proc/self/status), runs the case once, and reads the highest resident memory so far (VmHWM). The
difference holds everything but the inputs: results, gradients, masks, scratch. It is never too
small: whatever peaked before only adds to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from anyflash.bench import peers
from anyflash.bench.cases import Case, Workload
from anyflash.errors import AttentionError, Unsupported

STATUS = Path("/proc/self/status")
HOW = "VmHWM after one call less VmRSS before it, in a fresh process, inputs made and code warm"
WARM_LENGTH = 256


@dataclass(frozen=True)
class Memory:
    """Resident megabytes (10⁶ bytes): before the call, at its peak, and how that was measured."""

    before: float
    peak: float
    how: str = HOW

    @property
    def over_inputs(self) -> float:
        return self.peak - self.before


def measure(case: Case, threads: int) -> Memory:
    """Run a case in a fresh process with that many threads; raises Unsupported but on Linux."""
    if not STATUS.exists():
        advice = "run the memory cases on Linux; the others run here"
        raise Unsupported(f"measuring memory without {STATUS}", {}, advice)
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "anyflash.bench.memory", json.dumps(asdict(case))],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise AttentionError(
            f"case {case.name!r}: the process that measures its memory ended with exit code "
            f"{result.returncode}: {last[0]}"
        )
    return Memory(**json.loads(result.stdout))


def main(text: str) -> None:
    case = Case(**json.loads(text))
    run = peers.ours(Workload.of(case))
    peers.ours(Workload.of(replace(case, length=min(WARM_LENGTH, case.length))))()
    before = _megabytes("VmRSS")
    run()
    print(json.dumps(asdict(Memory(before, _megabytes("VmHWM")))))


def _megabytes(field: str) -> float:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6  # the kernel's "kB" are 1024 bytes
    raise AttentionError(f"{STATUS} has no line {field}; it is expected on Linux")


if __name__ == "__main__":
    main(sys.argv[1])
