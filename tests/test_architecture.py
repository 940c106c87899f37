"""The source tree keeps its shape: layers, no cycles, lazy kernel languages, small files.

The checks read syntax trees, so they see code that no test runs. All imports count as a
dependency, also those inside a function or under ``TYPE_CHECKING`` and
``import_module("literal")``: a reader has to follow them all. What they cannot see is
``import_module`` of a computed name.

Every check takes the root of a package, and below the real tree each is run on a small lawful one
with one fault planted, which it must find.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "anyflash"

# From the bottom up. A module may import from every layer below its own. Within a layer, entries
# do not import each other, but the modules of one entry that is a package may. "kernels.*" makes
# each child of kernels an entry of its own. "__init__" is the package's own list of public names.
LAYERS = (
    ("errors", "numerics", "rng"),
    ("masks", "quantize", "devices"),
    ("problem",),
    ("reference", "kernels.*"),
    ("backends.base",),
    ("backends.*",),
    ("dispatch",),
    ("calls", "explanation"),
    ("ops",),
    ("api",),
    ("compat", "distributed", "bench"),
    ("__init__",),
    ("demo",),
    ("cli",),
)

# Where each kernel language may be imported: under kernels/ at will, in a backend only lazily.
# Gluon is part of Triton. Metal has no module of its own.
KERNEL_LANGUAGES = {
    "triton": ("kernels.hopper", "kernels.triton", "backends.hopper", "backends.triton"),
}

MAX_LINES = 700
MAX_LINES_BACKEND = 300
MAX_LINES_HOST = 400
CODE_SUFFIXES = (".py", ".metal", ".h")

# Errors too broad, or too telling of a broken installation, to be passed over in silence.
NEVER_SILENT = {"Exception", "BaseException", "ImportError", "ModuleNotFoundError"}


@dataclass(frozen=True)
class Import:
    target: str  # a module of the tree, or whatever was named if it lies outside
    line: int
    eager: bool  # happens when the importing module is imported


@dataclass(frozen=True)
class Module:
    name: str
    file: str  # relative to the root
    tree: ast.Module
    imports: tuple[Import, ...]


def _name(node: ast.AST | None) -> str:
    """The last part of a possibly dotted name, or nothing."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


class _ImportCollector(ast.NodeVisitor):
    """Lists (candidate targets, line, eager) of each import, the longest candidate first."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.eager = True
        self.found: list[tuple[tuple[str, ...], int, bool]] = []

    def _add(self, line: int, *candidates: str) -> None:
        self.found.append((candidates, line, self.eager))

    def _absolute(self, name: str, level: int) -> str:
        if level == 0:
            return name
        parents = self.package.split(".")
        base = parents[: len(parents) - level + 1]
        return ".".join([*base, name] if name else base)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node.module or "", node.level)
        for alias in node.names:
            self._add(node.lineno, f"{base}.{alias.name}", base)

    def visit_Call(self, node: ast.Call) -> None:
        if _name(node.func) in ("import_module", "__import__") and node.args:
            literal = getattr(node.args[0], "value", None)
            if isinstance(literal, str):
                name = literal.lstrip(".")
                self._add(node.lineno, self._absolute(name, len(literal) - len(name)))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if _name(node.test) == "TYPE_CHECKING":
            self._visit_lazily(*node.body)
            node = ast.If(test=node.test, body=[], orelse=node.orelse)
        self.generic_visit(node)

    def _visit_lazily(self, *nodes: ast.AST) -> None:
        before, self.eager = self.eager, False
        for node in nodes:
            self.visit(node)
        self.eager = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_lazily(*node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_lazily(*node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_lazily(node.body)


def load(root: Path) -> dict[str, Module]:
    """All modules of the package at ``root``, by dotted name."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    if not files:
        raise FileNotFoundError(f"no Python files under {root}")

    def resolve(candidates: tuple[str, ...]) -> str:
        if not _within(candidates[0], root.name):
            return candidates[0]
        return next((name for name in candidates if name in files), candidates[-1])

    modules = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        is_package = path.name == "__init__.py"
        collector = _ImportCollector(name if is_package else name.rpartition(".")[0])
        collector.visit(tree)
        # One statement that takes several names from one module is one import.
        imports = dict.fromkeys(
            Import(resolve(c), line, eager) for c, line, eager in collector.found
        )
        modules[name] = Module(name, path.relative_to(root).as_posix(), tree, tuple(imports))
    return modules


def place(name: str) -> tuple[int, str] | None:
    """The layer of a module and the entry of ``LAYERS`` to which it belongs."""
    parts = name.split(".")[1:] or ["__init__"]
    relative = ".".join(parts)
    for layer, entries in enumerate(LAYERS):
        for entry in entries:
            if entry == f"{parts[0]}.*":
                return layer, ".".join(parts[:2])
            if _within(relative, entry):
                return layer, entry
    return None


def check_arrows(root: Path) -> list[str]:
    found = []
    for module in load(root).values():
        own = place(module.name)
        if own is None:
            found.append(f"{module.file}: has no place in LAYERS")
            continue
        for item in module.imports:
            if not _within(item.target, root.name):
                continue
            other = place(item.target)
            if other is None or (other[0] >= own[0] and other[1] != own[1]):
                found.append(f"{module.file}:{item.line}: imports {item.target}")
    return found


def check_cycles(root: Path) -> list[str]:
    modules = load(root)
    graph = {
        name: {item.target for item in module.imports if item.target in modules}
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["cycle: " + " <- ".join(error.args[1])]
    return []


def check_kernel_languages(root: Path) -> list[str]:
    modules = load(root)
    found = []
    for language, homes in KERNEL_LANGUAGES.items():
        for module in modules.values():
            _, entry = place(module.name) or (None, None)
            for item in module.imports:
                where = f"{module.file}:{item.line}"
                direct = _within(item.target, language)
                if direct and entry not in homes:
                    found.append(f"{where}: imports {language}")
                elif item.eager and not _in_kernels(module.name):
                    # A host file that imports this one is not at fault, so only the step from
                    # the host to a kernel is followed.
                    kernel = _in_kernels(item.target)
                    if direct or (kernel and _loads(item.target, language, modules)):
                        found.append(f"{where}: loads {language} when imported")
    return found


def _in_kernels(name: str) -> bool:
    return name.split(".")[1:2] == ["kernels"]


def _loads(start: str, language: str, modules: dict[str, Module]) -> bool:
    """Whether importing the kernel module ``start`` imports ``language``, by whatever way."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if _within(name, language):
            return True
        if name not in modules or name in seen:
            continue
        seen.add(name)
        pending += [item.target for item in modules[name].imports if item.eager]
        # The packages around a module are imported with it, all but the root before it.
        parts = name.split(".")
        pending += [".".join(parts[:n]) for n in range(2, len(parts))]
    return False


def check_sizes(root: Path) -> list[str]:
    found = []
    for path in sorted(p for p in root.rglob("*") if p.suffix in CODE_SUFFIXES):
        area = path.relative_to(root).parts[0]
        limit = {"kernels": MAX_LINES, "backends": MAX_LINES_BACKEND}.get(area, MAX_LINES_HOST)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            found.append(f"{path.relative_to(root).as_posix()}: {lines} lines, {limit} allowed")
    return found


def _nodes(root: Path) -> Iterator[tuple[Module, ast.AST]]:
    for module in load(root).values():
        for node in ast.walk(module.tree):
            yield module, node


def check_asserts(root: Path) -> list[str]:
    """An assert vanishes under ``python -O`` and tells a user nothing."""
    return [f"{m.file}:{n.lineno}: assert" for m, n in _nodes(root) if isinstance(n, ast.Assert)]


def check_swallowed_errors(root: Path) -> list[str]:
    found = []
    for module, node in _nodes(root):
        if isinstance(node, ast.ExceptHandler):
            silent = _is_broad(node.type) and all(_does_nothing(s) for s in node.body)
        elif isinstance(node, ast.Call):
            silent = _name(node.func) == "suppress" and any(_is_broad(a) for a in node.args)
        else:
            continue
        if silent:
            found.append(f"{module.file}:{node.lineno}: swallows errors")
    return found


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(element) for element in caught.elts)
    return _name(caught) in NEVER_SILENT


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, (ast.Pass, ast.Continue))


Check = Callable[[Path], list[str]]

CHECKS: tuple[Check, ...] = (
    check_arrows,
    check_cycles,
    check_kernel_languages,
    check_sizes,
    check_asserts,
    check_swallowed_errors,
)
every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
def test_source_tree(check: Check) -> None:
    assert check(SOURCE) == []


# A small tree that obeys every rule, by means that a careless check would take for faults.
LAWFUL = {
    "__init__.py": "from anyflash import errors\nfrom anyflash.api import attention\n",
    "errors.py": "class Unsupported(NotImplementedError): ...\n",
    "masks/__init__.py": "from anyflash.masks.algebra import causal\n",
    "masks/algebra.py": "from . import intervals\ndef causal(): return intervals\n",
    "masks/intervals.py": "from ..errors import Unsupported\n",
    "problem.py": "from anyflash import masks\n",
    "kernels/__init__.py": "",
    "kernels/triton/__init__.py": "",
    "kernels/triton/tiles.py": "",
    "kernels/triton/forward.py": "import triton\nfrom anyflash.kernels.triton import tiles\n",
    "kernels/hopper/__init__.py": "",
    "kernels/hopper/forward.py": "from triton.experimental import gluon\n",
    "kernels/metal/__init__.py": "",
    "kernels/metal/forward.metal": "// a kernel\n" * 700,
    "backends/__init__.py": "",
    "backends/base.py": "from anyflash.problem import masks\n",
    "backends/triton.py": (
        "from anyflash.backends import base\n"
        "from anyflash.kernels.triton import tiles\n"
        "def forward():\n"
        "    import triton\n"
        "    from anyflash.kernels.triton import forward\n"
    ),
    "backends/cpu.py": "from .base import masks\n",
    "dispatch.py": "from anyflash.backends import cpu\n",
    "api.py": (
        "from anyflash import dispatch\n"
        "def attention():\n"
        "    try:\n"
        "        return dispatch\n"
        "    except (KeyError, ValueError):\n"
        "        pass\n"
    ),
    "compat/__init__.py": "from anyflash.compat import sdpa\n",
    "compat/sdpa.py": "from anyflash.api import attention\n",
    "cli.py": "import anyflash\nfrom anyflash.compat import sdpa\n",
}


def write_tree(parent: Path, files: dict[str, str]) -> Path:
    root = parent / "anyflash"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@every_check
def test_lawful_tree(check: Check, tmp_path: Path) -> None:
    assert check(write_tree(tmp_path, LAWFUL)) == []


def test_missing_tree(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "anyflash")


class Fault(NamedTuple):
    rule: str
    check: Check
    file: str
    text: str
    report: str  # how the one finding begins


def for_types(name: str) -> str:
    return f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {name}\n"


def lazily(statement: str) -> str:
    return f"def f():\n    {statement}\n"


def handler(clause: str) -> str:
    return f"try:\n    import numpy\n{clause}\n"


# fmt: off
FAULTS = (
    Fault("arrow reversed", check_arrows, "errors.py",
          "from anyflash import problem", "errors.py:1: imports anyflash.problem"),
    Fault("arrow reversed by a relative import", check_arrows, "masks/intervals.py",
          "from ..problem import Problem, causal",
          "masks/intervals.py:1: imports anyflash.problem"),
    Fault("arrow reversed in a function", check_arrows, "errors.py",
          lazily("import anyflash.api as api"), "errors.py:2: imports anyflash.api"),
    Fault("arrow reversed for types", check_arrows, "errors.py",
          for_types("anyflash.api"), "errors.py:3: imports anyflash.api"),
    Fault("arrow reversed by import_module", check_arrows, "problem.py",
          "import importlib\nimportlib.import_module('.api', __package__)",
          "problem.py:2: imports anyflash.api"),
    Fault("public names taken from inside", check_arrows, "compat/sdpa.py",
          "from anyflash import attention", "compat/sdpa.py:1: imports anyflash"),
    Fault("sibling in a layer", check_arrows, "devices.py",
          "from anyflash import masks", "devices.py:1: imports anyflash.masks"),
    Fault("sibling backend", check_arrows, "backends/cpu.py",
          "from anyflash.backends import triton",
          "backends/cpu.py:1: imports anyflash.backends.triton"),
    Fault("sibling backend in a function", check_arrows, "backends/cpu.py",
          lazily("from .triton import forward"),
          "backends/cpu.py:2: imports anyflash.backends.triton"),
    Fault("backend imported by the protocol", check_arrows, "backends/base.py",
          "from anyflash.backends import cpu", "backends/base.py:1: imports anyflash.backends.cpu"),
    Fault("sibling kernels", check_arrows, "kernels/hopper/tiles.py",
          "from anyflash.kernels.triton import tiles",
          "kernels/hopper/tiles.py:1: imports anyflash.kernels.triton.tiles"),
    Fault("import of what does not exist", check_arrows, "api.py",
          "import anyflash.helpers", "api.py:1: imports anyflash.helpers"),
    Fault("module without a layer", check_arrows, "helpers.py",
          "", "helpers.py: has no place in LAYERS"),
    Fault("cycle within a package", check_cycles, "masks/intervals.py",
          "from anyflash.masks import algebra", "cycle: "),
    Fault("cycle through a function", check_cycles, "errors.py",
          lazily("from anyflash import cli"), "cycle: "),
    Fault("language in a host file", check_kernel_languages, "dispatch.py",
          lazily("import triton.language as tl"), "dispatch.py:2: imports triton"),
    Fault("language for types", check_kernel_languages, "api.py",
          for_types("triton"), "api.py:3: imports triton"),
    Fault("language under another's kernels", check_kernel_languages, "kernels/metal/source.py",
          "from triton.experimental import gluon", "kernels/metal/source.py:1: imports triton"),
    Fault("language in another backend", check_kernel_languages, "backends/cpu.py",
          lazily("import triton"), "backends/cpu.py:2: imports triton"),
    Fault("language loaded by its backend", check_kernel_languages, "backends/triton.py",
          handler("finally:\n    import triton"),
          "backends/triton.py:4: loads triton when imported"),
    Fault("language loaded by way of a kernel", check_kernel_languages, "backends/triton.py",
          "from anyflash.kernels.triton import forward",
          "backends/triton.py:1: loads triton when imported"),
    Fault("language loaded by a host file", check_kernel_languages, "dispatch.py",
          "from anyflash.kernels import hopper\nfrom anyflash.kernels.hopper import forward",
          "dispatch.py:2: loads triton when imported"),
    Fault("language loaded by a package", check_kernel_languages, "kernels/triton/__init__.py",
          "from . import forward", "backends/triton.py:2: loads triton when imported"),
    Fault("long host file", check_sizes, "api.py",
          "pass\n" * 401, "api.py: 401 lines, 400 allowed"),
    Fault("long backend", check_sizes, "backends/cpu.py",
          "pass\n" * 301, "backends/cpu.py: 301 lines, 300 allowed"),
    Fault("long kernel", check_sizes, "kernels/metal/forward.metal",
          "// a kernel\n" * 701, "kernels/metal/forward.metal: 701 lines, 700 allowed"),
    Fault("assert", check_asserts, "api.py",
          lazily("assert True"), "api.py:2: assert"),
    Fault("except", check_swallowed_errors, "api.py",
          handler("except:\n    pass"), "api.py:3: swallows errors"),
    Fault("except Exception", check_swallowed_errors, "api.py",
          handler("except Exception as error:\n    'not now'\n    ..."),
          "api.py:3: swallows errors"),
    Fault("except ImportError among others", check_swallowed_errors, "api.py",
          handler("except (OSError, ImportError):\n    pass"), "api.py:3: swallows errors"),
    Fault("suppress", check_swallowed_errors, "api.py",
          "import contextlib\nwith contextlib.suppress(Exception):\n    import numpy",
          "api.py:2: swallows errors"),
)
# fmt: on


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.rule for fault in FAULTS])
def test_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    found = fault.check(write_tree(tmp_path, LAWFUL | {fault.file: fault.text}))
    assert len(found) == 1, found
    assert found[0].startswith(fault.report)


# Run in a process of its own: what `import anyflash` does beyond what `import torch` did.
IMPORT_PROBE = """
import hashlib, json, os, sys, warnings
import torch

def settings():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "flash SDP": cuda.flash_sdp_enabled(),
        "memory-efficient SDP": cuda.mem_efficient_sdp_enabled(),
        "math SDP": cuda.math_sdp_enabled(),
        "cuDNN SDP": cuda.cudnn_sdp_enabled(),
        "SDP function": id(torch.nn.functional.scaled_dot_product_attention),
        "matmul TF32": cuda.matmul.allow_tf32,
        "matmul float16 reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "matmul bfloat16 reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuDNN TF32": cudnn.allow_tf32,
        "cuDNN benchmark": cudnn.benchmark,
        "cuDNN deterministic": cudnn.deterministic,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "threads between operators": torch.get_num_interop_threads(),
        "grad enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flush denormals": float(torch.tensor(1e-310, dtype=torch.float64) * 1),
        "random state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "warning filters": repr(warnings.filters),
        "environment": dict(os.environ),
    }

modules, before = set(sys.modules), settings()
import anyflash
loaded, after = set(sys.modules) - modules, settings()
print(json.dumps({
    "file": anyflash.__file__,
    "heavy": sorted(loaded & {"triton", "matplotlib", "transformers"}),
    "CUDA started": torch.cuda.is_initialized(),
    "changed": sorted(name for name in before if before[name] != after[name]),
}))
"""


def probe_import(root: Path) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        cwd=root.parent,
        env=os.environ | {"PYTHONPATH": str(root.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert Path(report.pop("file")) == root / "__init__.py"
    return report


def test_import_changes_nothing() -> None:
    assert probe_import(SOURCE) == {"heavy": [], "CUDA started": False, "changed": []}


def test_import_that_changes_things_is_found(tmp_path: Path) -> None:
    for name in ("triton", "matplotlib", "transformers"):
        (tmp_path / f"{name}.py").touch()
    misdeeds = """
import os, warnings
import torch, triton, matplotlib, transformers
torch.cuda._initialized = True
torch.backends.cuda.enable_flash_sdp(False)
torch.nn.functional.scaled_dot_product_attention = print
torch.set_default_dtype(torch.float64)
torch.set_num_threads(torch.get_num_threads() + 1)
torch.set_float32_matmul_precision("medium")
torch.rand(1)
warnings.simplefilter("ignore")
os.environ["ANYFLASH"] = "1"
"""
    report = probe_import(write_tree(tmp_path, {"__init__.py": misdeeds}))
    assert report["heavy"] == ["matplotlib", "transformers", "triton"]
    assert report["CUDA started"]
    assert set(report["changed"]) >= {
        "flash SDP",
        "SDP function",
        "default dtype",
        "threads",
        "float32 matmul precision",
        "random state",
        "warning filters",
        "environment",
    }
