"""One row: tensors, check, and only then time and power."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyflash.bench.check import Check, Error
from anyflash.bench.hopper import ablations, timing
from anyflash.bench.hopper.check import Reference, poisoned
from anyflash.bench.hopper.instruments import Instruments, Settings
from anyflash.bench.hopper.peers import Contest, first_calls, reason, sdpa
from anyflash.bench.hopper.power import Sampler
from anyflash.bench.hopper.results import RowResult
from anyflash.bench.hopper.rows import (
    ATTENTION,
    CUDNN,
    FA2,
    FIRST,
    HOST,
    LIBRARY,
    OURS,
    PRODUCT,
    VARIANTS,
    Inputs,
    Row,
)
from anyflash.bench.hopper.timing import Side
from anyflash.bench.timing import compare
from anyflash.errors import Unsupported
from anyflash.numerics import max_error, tolerance

HOST_SECONDS = 0.02  # of calls of each side in a round
PRODUCT_ROWS = 64  # of the matrix product, compared with float64
HEAVY = (OURS, CUDNN, LIBRARY)  # sides that are held under load

OnRound = Callable[[], None]


def run_row(
    row: Row,
    settings: Settings,
    tools: Instruments,
    on_round: OnRound = lambda: None,
    contest: Contest | None = None,
) -> RowResult:
    """Check a row, and measure it if it is right. `contest` is anyflash against PyTorch's kernels
    if not given."""
    with torch.no_grad():
        return RUNNERS[row.measure](row, settings, tools, on_round, contest or Contest())


def _attention(
    row: Row, settings: Settings, tools: Instruments, on_round: OnRound, contest: Contest
) -> RowResult:
    inputs = Inputs.of(row, tools.device)
    own = {OURS: contest.ours(inputs)}
    others, refusals = first_calls(contest.others, inputs)
    peer = others[CUDNN][1] if CUDNN in others else None
    errors = []
    try:
        with poisoned():
            out = own[OURS]()
        errors.append(Reference(inputs).error(out, peer))
        if row.yardstick is not None:
            yard = Inputs.of(row.yardstick, tools.device)
            own[row.against] = contest.ours(yard)
            with poisoned():
                out = own[row.against]()
            errors.append(Reference(yard).error(out, name=f"out on {row.yardstick.name}"))
    except Unsupported as error:
        return RowResult(row, tuple(errors), {**refusals, OURS: reason(error)})
    result = RowResult(row, tuple(errors), refusals)
    if not result.passed:
        return result
    runs = {name: run for name, (run, _) in others.items()}
    sides, failed = tools.sides(own, runs, settings.seconds)
    return measure(replace(result, refusals=refusals | failed), sides, settings, tools, on_round)


def _product(
    row: Row, settings: Settings, tools: Instruments, on_round: OnRound, contest: Contest
) -> RowResult:
    """A matrix product by the vendor's library: what the card can do."""
    generator = torch.Generator(tools.device).manual_seed(0)
    a, b = (
        torch.randn(*shape, generator=generator, device=tools.device).to(torch.bfloat16)
        for shape in ((row.queries, row.head_dim), (row.head_dim, row.keys))
    )
    exact = a[:PRODUCT_ROWS].double() @ b.double()
    rounded = exact.to(torch.bfloat16)  # as good as a product that is rounded once can be
    found = (a @ b)[:PRODUCT_ROWS]
    errors = [max_error(x, exact) for x in (found, rounded)]
    error = Error("product", errors[0], None, errors[1], tolerance(rounded, exact))
    result = RowResult(row, (error,))
    if not result.passed:
        return result
    sides = [tools.capture(LIBRARY, lambda: a @ b, settings.seconds)]
    return measure(result, sides, settings, tools, on_round)


def _host(
    row: Row, settings: Settings, tools: Instruments, on_round: OnRound, contest: Contest
) -> RowResult:
    """What a call costs the host, which does not wait for the card: so small a problem is done
    before the next call comes."""
    inputs = Inputs.of(row, tools.device)
    run = contest.ours(inputs)
    try:
        with poisoned():
            out = run()
    except Unsupported as error:
        return RowResult(row, refusals={OURS: reason(error)})

    def settle() -> None:
        tools.synchronize()
        on_round()

    # The kernel is chosen outside of what is timed.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        served, refusals = first_calls({FA2: sdpa}, inputs)
        peer, peer_out = served.get(FA2, (None, None))
        result = RowResult(row, (Reference(inputs).error(out, peer_out),), refusals)
        if not result.passed or peer is None:
            return result
        timed = compare(
            Check(row.name, result.errors), run, peer, rounds=settings.rounds,
            seconds=HOST_SECONDS, on_round=settle, clock=tools.clock,
        )  # fmt: skip
    return replace(result, host=timed)


def _first(
    row: Row, settings: Settings, tools: Instruments, on_round: OnRound, contest: Contest
) -> RowResult:
    """The first call of a process, after the same call was right in this one."""
    inputs = Inputs.of(row, tools.device)
    try:
        with poisoned():
            out = contest.ours(inputs)()
    except Unsupported as error:
        return RowResult(row, refusals={OURS: reason(error)})
    result = RowResult(row, (Reference(inputs).error(out, None),))
    return replace(result, first=tools.first(row)) if result.passed else result


def measure(
    result: RowResult,
    sides: Sequence[Side],
    settings: Settings,
    tools: Instruments,
    on_round: OnRound,
    *,
    check: Check | None = None,
    heavy: Collection[str] = HEAVY,
) -> RowResult:
    """A burst of all sides, and then, where the row asks for it, the `heavy` ones under load.
    `check` is that of these sides, if it is not the row's."""
    check = check or Check(result.row.name, result.errors)
    found = timing.burst(
        check, sides, rounds=settings.rounds, event=tools.event, on_round=on_round
    )  # fmt: skip
    result = replace(result, burst=found)
    if not result.row.sustained or not settings.sustained_seconds:
        return result
    loaded = [side for side in sides if side.name in heavy]
    with Sampler(tools.read) as sampler:
        loads = timing.sustain(
            check, loaded, seconds=settings.sustained_seconds, event=tools.event,
            power=sampler.power, clock=tools.clock,
        )  # fmt: skip
    return replace(result, sustained=dict(loads))


RUNNERS = {
    ATTENTION: _attention, PRODUCT: _product, HOST: _host, FIRST: _first, VARIANTS: ablations.run
}  # fmt: skip
