"""Planted faults: does the emulator catch them?

A mutant is one file of a kernel with one fault in it, made into a module of its own and run through
its launcher. Two kinds:

- mechanical: every statement that synchronises is dropped, every phase is the other one, every
  count is one off, every wait leaves one operation more in flight, every barrier expects half its
  bytes. They come from the syntax tree, so a new kernel gets them from one row in `SUBJECTS` of
  test_gluon_mutants.py.
- written by hand, in the form of a patch, for what no rule can guess: see `patches`.

A mutant must be a legal kernel: what raises a `NameError`, or meets a part of Gluon that is not
emulated, is a mistake in the mutant and no catch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gluon_emulator import EmulatorError, NotEmulated, emulate
from plain import assert_close

ROOT = Path(__file__).parent.parent


class Result(NamedTuple):
    """What a kernel has computed, the same in plain PyTorch, and in float64."""

    what: str
    found: Tensor
    like: Tensor
    exact: Tensor


# Launches a kernel of the given module on one small input.
Check = Callable[[ModuleType], list[Result]]


@dataclass(frozen=True)
class Subject:
    """A kernel under attack.

    files: from the repository's root: the file with the launcher, then those of its helpers that
        are attacked as well, none before one that imports it.
    checks: inputs that together reach every branch; the most telling first.
    patches: a file of faults written by hand.
    """

    files: tuple[str, ...]
    checks: tuple[Check, ...]
    patches: str | None = None


class Mutant(NamedTuple):
    name: str
    texts: dict[str, str]  # by file: of those that differ


class Catch(NamedTuple):
    seed: int
    error: str
    message: str


# The statements that synchronise, with the names of their parameters.
SYNCHRONISE = {
    "mbarrier.init": ("barrier", "count"),
    "mbarrier.expect": ("barrier", "bytes"),
    "mbarrier.arrive": ("barrier", "count"),
    "mbarrier.wait": ("barrier", "phase"),
    "mbarrier.invalidate": ("barrier",),
    "warpgroup_mma_wait": ("pendings", "deps"),
    "store_wait": ("pendings",),
    "fence_async_shared": (),
    "barrier": (),
    "thread_barrier": (),
}
SAME_PARAMETER = {
    "num_outstanding": "pendings",
    "bytes_per_cta": "bytes",
    "parity": "phase",
    "READERS": "count",
}

# What is done to an argument, by the name of its parameter.
CHANGES = {
    "phase": [("other phase", "({}) ^ 1")],
    "count": [("count + 1", "({}) + 1"), ("count - 1", "({}) - 1")],
    "pendings": [("one laxer", "({}) + 1")],
    "bytes": [("half the bytes", "({}) // 2")],
}

Signatures = dict[str, tuple[str, ...]]


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


def device_functions(text: str) -> list[ast.FunctionDef]:
    """Functions and methods that Triton compiles."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(d) for d in node.decorator_list)
    ]


def callee(call: ast.Call) -> str:
    parts = ast.unparse(call.func).split(".")
    full = ".".join(parts[-2:])
    return full if full in SYNCHRONISE else parts[-1]


def calls(node: ast.AST) -> list[ast.Call]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Call)]


@cache
def signatures(files: tuple[str, ...]) -> Signatures:
    """Everything that synchronises, helper functions and methods of `files` included."""
    known: Signatures = dict(SYNCHRONISE)
    functions = [f for file in files for f in device_functions(source(file))]
    while True:
        new = {
            f.name: tuple(a.arg for a in f.args.args if a.arg != "self")
            for f in functions
            if f.name not in known
            and (_has_assembly(f) or any(callee(c) in known for c in calls(f)))
        }
        if not new:
            return known
        known |= new


def _has_assembly(f: ast.FunctionDef) -> bool:
    text = ast.unparse(f)
    return "inline_asm" in text and ("bar." in text or "fence." in text)


class Place:
    """From a syntax tree to its text: columns are counted in bytes."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.lines = [0]
        for line in self.data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def replaced(self, node: ast.expr | ast.stmt, new: str) -> str:
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        return (self.data[:start] + new.encode() + self.data[end:]).decode()


def mechanical(file: str, files: tuple[str, ...]) -> Iterator[Mutant]:
    """Named by function, statement and change, so that a name outlives edits elsewhere."""
    known = signatures(files)
    text = source(file)
    place = Place(text)
    for function in device_functions(text):
        statements = _statements(function)
        seen: Counter[str] = Counter()
        for call in sorted(calls(function), key=lambda c: (c.lineno, c.col_offset)):
            if callee(call) not in known:
                continue
            statement = ast.unparse(call)
            seen[statement] += 1
            number = f" #{seen[statement]}" if seen[statement] > 1 else ""
            name = f"{function.name}: {statement}{number}: "
            for what, node, new in _changes(call, statements.get(id(call)), known):
                yield Mutant(name + what, {file: place.replaced(node, new)})
            if id(call) not in statements and callee(call) not in SYNCHRONISE:
                texts = {f: source(f) for f in files}
                texts[file] = place.replaced(call.func, ast.unparse(call.func) + COPY)
                yield Mutant(name + "does not synchronise", _with_copies(texts, call, known))


def _statements(node: ast.AST) -> dict[int, ast.stmt]:
    """Calls whose results nobody uses, by the identity of their expressions."""
    return {id(s.value): s for s in ast.walk(node) if isinstance(s, ast.Expr)}


def _changes(
    call: ast.Call, statement: ast.stmt | None, known: Signatures
) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    parameters = known[callee(call)]
    given = dict(zip(parameters, call.args, strict=False))
    given |= {k.arg: k.value for k in call.keywords if k.arg}
    if statement is not None:
        yield "dropped", statement, "pass"
    elif callee(call) == "warpgroup_mma_wait":
        yield "dropped", call, ast.unparse(_waited_for(call))
    for parameter, value in given.items():
        for what, form in CHANGES.get(SAME_PARAMETER.get(parameter, parameter), ()):
            # The hardware has no count of zero.
            if not (what == "count - 1" and ast.unparse(value) == "1"):
                yield what, value, form.format(ast.unparse(value))


def _waited_for(wait: ast.Call) -> ast.expr:
    """What `warpgroup_mma_wait` returns, as it was before: one value, or a tuple of them."""
    (deps,) = [*wait.args[1:], *(k.value for k in wait.keywords if k.arg == "deps")]
    if not isinstance(deps, ast.List):
        return deps
    return deps.elts[0] if len(deps.elts) == 1 else ast.Tuple(deps.elts, ast.Load())


# A helper whose result is used cannot be dropped: a copy of it that does not synchronise is called.
COPY = "_unsynchronised"


class _Unsynchronised(ast.NodeTransformer):
    """Helpers whose results are used inside are called as copies as well: those in `copied`."""

    def __init__(self, known: Signatures) -> None:
        self.known = known
        self.copied: set[str] = set()

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and callee(call) in self.known:
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        name = callee(node)
        if name == "warpgroup_mma_wait":
            return _waited_for(node)
        if name in self.known and name not in SYNCHRONISE:
            self.copied.add(name)
            node.func = ast.parse(ast.unparse(node.func) + COPY, mode="eval").body
        return node


def _with_copies(texts: dict[str, str], call: ast.Call, known: Signatures) -> dict[str, str]:
    wanted, made = {callee(call)}, set[str]()
    while wanted - made:
        name = min(wanted - made)
        remover = _Unsynchronised(known)
        texts = {f: _with_copy(t, name, remover) for f, t in texts.items()}
        made.add(name)
        wanted |= remover.copied
    return texts


def _with_copy(text: str, name: str, remover: _Unsynchronised) -> str:
    if name not in text:
        return text
    lines = text.splitlines()
    found = [f for f in device_functions(text) if f.name == name]
    for function in sorted(found, key=lambda f: -f.lineno):  # from the last, to keep line numbers
        copy = remover.visit(function)
        copy.name += COPY
        indented = textwrap.indent(ast.unparse(copy), " " * function.col_offset)
        lines[function.end_lineno : function.end_lineno] = ["", *indented.splitlines()]
    text = "\n".join([*lines, ""])
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            node.names.append(ast.alias(name + COPY))
            return Place(text).replaced(node, ast.unparse(node))
    return text


def patches(subject: Subject) -> Iterator[Mutant]:
    """Faults written by hand: a name, then lines to be found, then what stands in their place.

        the sum is not rescaled
        -row_sum * shrink + part
        +row_sum + part

    The text behind `-` must occur exactly once in the subject's files, with its white space; it
    may begin and end within a line. Further pairs of old and new text may follow.
    """
    for block in source(subject.patches).strip("\n").split("\n\n") if subject.patches else ():
        name, *lines = block.splitlines()
        hunks: list[tuple[list[str], list[str]]] = []
        for line in lines:
            sign, rest = line[:1], line[1:]
            if sign not in ("-", "+") or (sign == "+" and not hunks):
                raise ValueError(f"{name}: neither old nor new text: {line!r}")
            if sign == "-" and (not hunks or hunks[-1][1]):
                hunks.append(([], []))
            hunks[-1][sign == "+"].append(rest)
        yield _patched(subject, name, [("\n".join(a), "\n".join(b)) for a, b in hunks])


def _patched(subject: Subject, name: str, hunks: list[tuple[str, str]]) -> Mutant:
    texts = {file: source(file) for file in subject.files}
    for old, new in hunks:
        counts = {file: text.count(old) for file, text in texts.items()}
        if sum(counts.values()) != 1:
            raise ValueError(f"{name}: {sum(counts.values())} times, not once: {old!r}")
        file = max(counts, key=counts.__getitem__)
        texts[file] = texts[file].replace(old, new)
    return Mutant(name, texts)


def mutants(subject: Subject) -> list[Mutant]:
    found = [m for file in subject.files for m in mechanical(file, subject.files)]
    return [*found, *patches(subject)]


@contextlib.contextmanager
def loaded(subject: Subject, mutant: Mutant | None = None) -> Iterator[ModuleType]:
    """The module with the launcher, it and its helpers made anew, as far as they depend on a fault.

    Each is a file of its own for as long as it is used: Triton and the emulator read the source of
    a function from its file, under a path at which there has been no other text.
    """
    texts = mutant.texts if mutant else {}
    # No file imports one before it.
    last = max(
        (n for n, f in enumerate(subject.files) if texts.get(f, source(f)) != source(f)), default=0
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, file in reversed(list(enumerate(subject.files))):
            # Below src or tests; elsewhere a module without a package.
            inside = Path(file).with_suffix("")
            name = inside.name if inside.is_absolute() else ".".join(inside.parts[1:])
            if number > last and importlib.util.find_spec(name):
                continue
            path = folder / str(number) / Path(file).name
            path.parent.mkdir()
            path.write_text(texts.get(file) or source(file))
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            stack.enter_context(_standing_in(name, module))
            spec.loader.exec_module(module)
        yield module


@contextlib.contextmanager
def _standing_in(name: str, module: ModuleType) -> Iterator[None]:
    """Whoever imports `name` meanwhile gets `module`, whether from its package or by its path."""
    package, _, last = name.rpartition(".")
    places = [(sys.modules, name)]
    if package in sys.modules:
        places.append((vars(sys.modules[package]), last))
    before = [(table, key, table.get(key)) for table, key in places]
    for table, key in places:
        table[key] = module
    try:
        yield
    finally:
        for table, key, old in before:
            if old is None:
                del table[key]
            else:
                table[key] = old


@contextlib.contextmanager
def _empty_is_nan() -> Iterator[None]:
    """What a kernel leaves out is not, by chance, what the run before has computed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # then `torch.empty` fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# By the subject's files: its checks, those first that caught the last faults. Faults that stand
# together are mostly caught by the same.
_checks: dict[tuple[str, ...], list[Check]] = {}


def caught(
    subject: Subject, mutant: Mutant | None, seeds: Iterable[int], races: bool = True
) -> Catch | None:
    """The first catch, by seeds and then by checks, of which those that caught something last come
    first. Errors of Python come through."""
    checks = _checks.setdefault(subject.files, list(subject.checks))
    with loaded(subject, mutant) as module, _empty_is_nan():
        for seed in seeds:
            for check in list(checks):
                if found := _catch(check, module, seed, races):
                    checks.insert(0, checks.pop(checks.index(check)))
                    return found
    return None


def _catch(check: Check, module: ModuleType, seed: int, races: bool) -> Catch | None:
    try:
        with emulate(seed=seed, races=races):
            results = check(module)
    except NotEmulated:
        raise
    except EmulatorError as error:
        return Catch(seed, type(error).__name__, str(error))
    for result in results:
        try:
            assert_close(*result)
        except AssertionError as error:
            return Catch(seed, "wrong values", str(error))
    return None
