"""Every public report is tested, or waits for a part that does not exist yet."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from later import PARTLY, WAITING

HERE = Path(__file__).parent
IDS = [line.split(maxsplit=1) for line in (HERE / "ids.txt").read_text().splitlines()]


def _tested() -> set[str]:
    """The ids in names of tests: `test_b007_nan_in_masked_slot`."""
    found = set()
    for file in HERE.parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= {x.upper() for x in re.findall(r"(?<=_)b\d{3}(?=_|$)", node.name)}
    return found


def test_the_list_is_in_order() -> None:
    ids = [name for name, _ in IDS]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(r"B\d{3}", name) and words for name, words in IDS)


def test_every_report_is_tested_or_waits() -> None:
    ids, tested = {name for name, _ in IDS}, _tested()
    assert tested <= ids, "a test is named after a report that is not in ids.txt"
    assert ids - tested == WAITING.keys(), "take an id out of WAITING once it has a test"


def test_partly_tested_reports_are_tested() -> None:
    assert PARTLY.keys() <= _tested()
    assert not PARTLY.keys() & WAITING.keys()
