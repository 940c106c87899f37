"""One case: tensors, check, and only then time or memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyflash.api import explain
from anyflash.bench import memory, peers, timing
from anyflash.bench.cases import MEMORY, NOT_CALLED, Case, Workload
from anyflash.bench.check import Check, Error, check
from anyflash.bench.memory import Memory
from anyflash.bench.timing import Timing
from anyflash.errors import Unsupported

FIRST_CALLS = 3  # with as many new masks, to take the median


@dataclass(frozen=True)
class Settings:
    """`rounds` of about `seconds` for each side; `quick` takes small cases, for tests."""

    rounds: int = 15
    seconds: float = 0.25
    quick: bool = False


@dataclass(frozen=True)
class MaskCost:
    """What a mask compiles to, and the milliseconds of a first call with a new one, which builds
    it; calls that follow find it."""

    form: str
    first_call: float


@dataclass(frozen=True)
class CaseResult:
    """A case, the errors of its check, and what was measured; nothing is, if the check failed.

    `backend` served it, `peer_kernel` is the one that SDPA chose. `note` says why something that
    the case asks for is missing.
    """

    case: Case
    errors: tuple[Error, ...]
    backend: str
    peer_kernel: str | None = None
    mask: MaskCost | None = None
    timing: Timing | None = None
    memory: Memory | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        return Check(self.case.name, self.errors).passed

    @property
    def error_ratio(self) -> float | None:
        """The largest of our errors over the peer's, over the tensors of the case."""
        pairs = [(e.ours, e.peer) for e in self.errors if e.peer]
        return max((ours / peer for ours, peer in pairs), default=None)

    @property
    def first_ratio(self) -> float | None:
        """SDPA's time over that of a first call: the ratio where the mask is new on every call."""
        if self.timing is None or self.mask is None:
            return None
        return statistics.median(self.timing.peer) / self.mask.first_call

    @property
    def met(self) -> bool | None:
        """Whether the bars are met; None where nothing was measured."""
        if self.case.measure == MEMORY:
            return None if self.memory is None else self.memory.over_inputs <= self.case.bar
        if self.timing is None:
            return None
        fast = self.timing.ratio >= self.case.bar
        worst = self.error_ratio
        if self.case.error_bar is None:
            return fast
        return fast and worst is not None and worst <= self.case.error_bar

    def derived(self) -> dict[str, Any]:
        """What follows from the numbers, for human readers of a result file."""
        timing = self.timing
        return {
            "ratio": None if timing is None else timing.ratio,
            "ratio_least": None if timing is None else min(timing.ratios),
            "ratio_most": None if timing is None else max(timing.ratios),
            "first_ratio": self.first_ratio,
            "error_ratio": self.error_ratio,
            "over_inputs_mb": None if self.memory is None else self.memory.over_inputs,
            "check_passed": self.passed,
            "bar_met": self.met,
        }


def run_case(
    case: Case, settings: Settings, on_round: Callable[[], None] = lambda: None
) -> CaseResult:
    """Check a case, and measure it if it is right."""
    work = Workload.of(case)
    ours = peers.ours(work)
    peer = None if case.peer == NOT_CALLED else peers.sdpa(work)
    checked = check(work, ours(), None if peer is None else peer())
    explained = explain(work.q, work.k, work.v, mask=work.mask, causal=case.causal)
    result = CaseResult(
        case,
        checked.errors,
        backend=explained.chosen or "none",
        peer_kernel=None if peer is None else peers.sdpa_kernel(work),
    )
    if not checked.passed:
        return result
    if work.mask is not None:
        new = [peers.ours(work.with_new_mask(n + 1)) for n in range(FIRST_CALLS)]
        first = statistics.median(timing.milliseconds(call) for call in new)
        result = replace(result, mask=MaskCost(explained.mask_form.kind, first))
    if case.measure == MEMORY:
        try:
            return replace(result, memory=memory.measure(case, torch.get_num_threads()))
        except Unsupported as error:
            return replace(result, note=str(error))
    if peer is None:
        return replace(result, note="nothing to compare with: SDPA is not called")
    timed = timing.compare(
        checked, ours, peer, rounds=settings.rounds, seconds=settings.seconds, on_round=on_round
    )
    return replace(result, timing=timed)
