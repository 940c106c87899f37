"""Tables as lists of cells, for the terminal and for Markdown, and the numbers in them."""

from __future__ import annotations

from collections.abc import Sequence

from anyflash.bench.check import Error

Table = tuple[list[str], list[list[str]]]  # head, and rows of as many cells

NOTHING = "–"  # a cell without a number


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def number(x: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def ratio(x: float | None, all_rounds: Sequence[float] = ()) -> str:
    """Two decimals, and beside them the least and the most of all rounds."""
    if x is None:
        return NOTHING
    return f"{x:.2f}" + (f" ({min(all_rounds):.2f}–{max(all_rounds):.2f})" if all_rounds else "")


def provenance(date: str, commit: str | None, dirty: bool, versions: dict[str, str]) -> str:
    """When and with what something was measured: two sentences."""
    source = "no commit known" if commit is None else f"commit {commit[:12]}"
    source += ", with changes that are not committed" if dirty else ""
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{date[:10]}, {source}. {found}."


def error_cells(error: Error) -> list[str]:
    """What was compared, the errors of ours, of the peer and of plain PyTorch, the tolerance, and
    whether ours is within it."""
    values = (error.ours, error.peer, error.plain, error.tolerance)
    cells = [NOTHING if x is None else f"{x:.2e}" for x in values]
    return [error.tensor, *cells, "yes" if error.passed else "NO"]
