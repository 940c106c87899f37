"""What the tests of public reports share: inputs, the judgement, and child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import anyflash as af
import plain
from plain import Packing, Seen, Terms, assert_close, assert_same

SOURCE = Path(af.__file__).resolve().parents[1]


class Found(NamedTuple):
    """What a call gave; None for gradients that were not asked for."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    @property
    def gradients(self) -> list[Tensor]:
        return [x for x in (self.dq, self.dk, self.dv) if x is not None]


def usual(device: str) -> torch.dtype:
    """The dtype of a report that does not say: the widest that every kernel of a device takes."""
    return torch.float32 if device == "cpu" else torch.float16


def randn(
    *shapes: Sequence[int], dtype: torch.dtype | None = None, device: str = "cpu", seed: int = 0
) -> list[Tensor]:
    """The same numbers on every device, but for their rounding."""
    dtype = usual(device) if dtype is None else dtype
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g).to(device, dtype) for shape in shapes]


def attend(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, dlse: Tensor | None = None,
    **arguments: Any,
) -> Found:  # fmt: skip
    """out, lse and the gradients of q, k, v for the given gradients of out and lse."""
    packing = arguments.pop("packing", None)
    run = af.attention
    if packing is not None:
        starts = [torch.tensor(s, dtype=torch.int32, device=q.device) for s in packing[:2]]

        def run(*qkv: Tensor, **more: Any) -> Any:
            return af.attention_varlen(*qkv, *starts, **more)

    return _differentiate(
        lambda *qkv: run(*qkv, return_lse=True, **arguments), (q, k, v), dout, dlse
    )


def judge(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Seen | None = None, backward: bool = True,
    **arguments: Any,
) -> Found:  # fmt: skip
    """Run a call, forward and backward, and hold it against plain PyTorch by the tolerance rule.

    `seen` is what the mask among the arguments means. On an accelerator that serves the call, but
    not its gradients, forward alone is held, and there are none.
    """
    packing = arguments.get("packing")
    terms = Terms(
        seen=seen,
        **{n: arguments[n] for n in ("scale", "softcap", "bias", "sink") if n in arguments},
    )
    if arguments.get("causal") and seen is None:
        terms = terms._replace(seen=causal)

    def by_hand(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        wide = terms if qkv[0].dtype == q.dtype else widen(terms)
        return plain.attention(*qkv, wide) if packing is None else plain.packed(*qkv, wide, packing)

    g = torch.Generator().manual_seed(99)
    shape = (*q.shape[:-1], v.shape[-1])
    dout = torch.randn(shape, generator=g).to(q) if backward else None
    try:
        found = attend(q, k, v, dout, **arguments)
    except af.Unsupported:
        if dout is None or q.device.type == "cpu":
            raise
        dout, found = None, attend(q, k, v, **arguments)
    like = _differentiate(by_hand, (q, k, v), dout, None)
    double = [x.double() for x in (q, k, v)]
    exact = _differentiate(by_hand, double, None if dout is None else dout.double(), None)
    for name, x, y, z in zip(Found._fields, found, like, exact, strict=True):
        if x is not None:
            assert_close(name, x, y, z, softcap=terms.softcap is not None)
    return found


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
    return j <= i + offset


def fixed(mask: Tensor) -> Seen:
    """A boolean tensor as a formula."""
    return lambda *at: mask.to(at[2].device)


def widen(terms: Terms) -> Terms:
    return terms._replace(
        **{n: x.double() for n, x in terms._asdict().items() if isinstance(x, Tensor)}
    )


def _differentiate(
    run: Callable[..., tuple[Tensor, Tensor]], qkv: Sequence[Tensor], dout: Tensor | None,
    dlse: Tensor | None,
) -> Found:  # fmt: skip
    wanted = dout is not None or dlse is not None
    leaves = [x.detach().requires_grad_(wanted) for x in qkv]
    out, lse = run(*leaves)
    pairs = [(x, g) for x, g in ((out, dout), (lse, dlse)) if g is not None]
    if not pairs:
        return Found(out.detach(), lse.detach())
    found = torch.autograd.grad(
        [x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
    )
    gradients = [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
    ]
    return Found(out.detach(), lse.detach(), *gradients)


def assert_all_same(found: Found, expected: Found) -> None:
    for name, x, y in zip(Found._fields, found, expected, strict=True):
        if y is None:
            assert x is None
        else:
            assert_same(name, x, y)


def child(code: str, seconds: float = 60, **environment: str) -> str:
    """Run Python code in a process of its own and return what it printed.

    A crash, an error or a hang there is a failure here, and nothing more.
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment},
    )
    if done.returncode:
        raise AssertionError(f"the child ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


PEAK = """
import torch, anyflash as af
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
def measure(run, small):
    run(*small)  # what the first call allocates for good
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = peak()
    run(*large)
    print(peak() - before)
"""


def peak_megabytes(code: str, seconds: float = 60) -> float:
    """How much more memory a child process held at its peak while `run(*large)` ran.

    The code defines `run` and the tuples `small` (a first call to get ready) and `large`.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from /proc, which Linux has")
    return float(child(f"{PEAK}\n{code}\nmeasure(run, small)", seconds))


__all__ = [
    "Found", "Packing", "Terms", "assert_all_same", "assert_close", "assert_same", "attend",
    "causal", "child", "fixed", "judge", "peak_megabytes", "randn", "usual",
]  # fmt: skip
