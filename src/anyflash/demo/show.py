"""The demo from beginning to end: what is run, compared, printed and drawn."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from anyflash.demo import long_context, picture
from anyflash.demo.encoder import BATCH, QUERIES, Encoder, sentences
from anyflash.demo.measure import Alternatives, Measured, duration, mebibytes
from anyflash.numerics import max_error

LEAST_COSINE = 0.99999  # between an embedding and PyTorch's of the same sentence
MOST_ERROR = 1e-5  # of attention on standard normal inputs in float32; 1e-6 is usual
NEIGHBOURS = 3

PADDED, SORTED = "SDPA, padded", "SDPA, by length"
MINE_PADDED, MINE_PACKED = "anyflash, padded", "anyflash, packed"


class Size(NamedTuple):
    """How much work."""

    every: int  # of the sentences, every so many
    context: int  # tokens
    heads: int
    rounds: int  # at most
    budget: float  # seconds of timing for the encoder; half of it for each mask


FULL = Size(every=1, context=8192, heads=8, rounds=5, budget=24.0)
QUICK = Size(every=8, context=2048, heads=2, rounds=2, budget=2.0)

Found = dict[str, Measured]


def show(path: Path, quick: bool) -> int:
    """Run everything and save the picture; returns the exit code."""
    console = Console()
    size = QUICK if quick else FULL
    failures: list[str] = []
    with torch.no_grad():
        encoder, found = _sentences(console, size, failures)
        bars = {f"MiniLM, {len(encoder.rows)} sentences": found}
        bars |= _long_contexts(console, size, failures)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.draw(path, encoder.which(encoder.packs()[0]), bars)
    console.print(f"Picture saved as {path}")
    for failure in failures:
        console.print(f"[bold red]Results differ:[/] {failure}")
    return 1 if failures else 0


def _sentences(console: Console, size: Size, failures: list[str]) -> tuple[Encoder, Found]:
    texts = sentences()[:: size.every]
    with console.status("Loading MiniLM"), _no_progress_bars():
        encoder = Encoder([*texts, *QUERIES])
    runs: dict[str, Callable[[], Tensor]] = {
        PADDED: lambda: encoder.padded(encoder.sdpa),
        SORTED: lambda: encoder.padded(encoder.sdpa, by_length=True),
        MINE_PADDED: lambda: encoder.padded(encoder.anyflash),
        MINE_PACKED: lambda: encoder.packed(encoder.anyflash),
    }
    found = _measure(console, "MiniLM", runs, size.rounds, size.budget)
    padding = 1 - encoder.tokens / encoder.padded_tokens
    table = Table(
        title=f"MiniLM on {len(encoder.rows)} sentences of {int(encoder.lengths.min())} to "
        f"{int(encoder.lengths.max())} tokens, {encoder.tokens:,} in all\n"
        f"(batches of {BATCH} as they come are {padding:.0%} padding)"
    )
    for name in ("", "time", "speed", "memory", "max diff.", "min cos.", "top 3"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    plain = found[PADDED]
    nearest = _nearest(plain.result)
    for name, one in found.items():
        cosine = float((one.result * plain.result).sum(-1).min())
        if cosine < LEAST_COSINE:
            failures.append(f"{name}: cosine {cosine:.6f}, expected at least {LEAST_COSINE}")
        same = int((_nearest(one.result) == nearest).all(-1).sum())
        compared = f"{max_error(one.result, plain.result):.1e}", f"{cosine:.6f}"
        table.add_row(
            name, duration(one.seconds), f"{plain.seconds / one.seconds:.2f}×",
            mebibytes(one.bytes), *compared, f"{same}/{len(QUERIES)}",
        )  # fmt: skip
    console.print(table)
    answers = Table("question", "nearest sentence", title="Search by the packed embeddings")
    for question, best in zip(QUERIES, _nearest(found[MINE_PACKED].result), strict=True):
        answers.add_row(question, textwrap.shorten(texts[int(best[0])], 100, placeholder=" …"))
    console.print(answers)
    return encoder, found


def _nearest(embeddings: Tensor) -> Tensor:
    """The sentences next to each question: (questions, NEIGHBOURS)."""
    questions, answers = embeddings[-len(QUERIES) :], embeddings[: -len(QUERIES)]
    return (questions @ answers.mT).topk(NEIGHBOURS).indices


def _long_contexts(console: Console, size: Size, failures: list[str]) -> dict[str, Found]:
    qkv = long_context.inputs(size.context, size.heads, 64)
    table = Table(
        title=f"Attention, {size.context} tokens, {size.heads} heads of 64, float32\n"
        "(SDPA gets the mask as a boolean tensor)"
    )
    for name in ("mask", "", "time", "speed", "memory", "max diff."):
        left = name in ("mask", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    everything = {}
    for mask_name, mask in long_context.masks(size.context).items():
        runs, held = long_context.alternatives(qkv, mask)
        found = _measure(console, mask_name, runs, size.rounds, size.budget / 2)
        everything[f"Attention, {size.context} tokens, {mask_name}"] = found
        plain = next(iter(found.values()))
        for name, one in found.items():
            error = max_error(one.result, plain.result)
            if error > MOST_ERROR:
                failures.append(f"{mask_name}: {name} by {error:.1e}, expected {MOST_ERROR:.0e}")
            table.add_row(
                mask_name, name, duration(one.seconds), f"{plain.seconds / one.seconds:.2f}×",
                mebibytes(one.bytes + held[name]), f"{error:.1e}",
            )  # fmt: skip
    console.print(table)
    console.print(
        "Memory is the most that PyTorch's allocator held at once during a call beyond what it "
        "held before, as torch.profiler counts it, and for SDPA also the boolean mask. Times are "
        f"medians of 2 to {size.rounds} interleaved rounds; threads: {torch.get_num_threads()}.",
        style="dim",
    )
    return everything


def _measure(
    console: Console, what: str, runs: dict[str, Callable[[], Tensor]], rounds: int, budget: float
) -> Found:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=len(runs) * (rounds + 1))

        def step(name: str) -> None:
            progress.update(task, description=f"{what}: {name}", advance=1)

        return Alternatives(runs, step).measure(rounds, budget)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for loading that lasts milliseconds."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
