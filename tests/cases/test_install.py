"""Public reports about kernels compiled at run time: caches, compilers, versions.

Kernels are compiled for a Hopper card without one, each in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import SOURCE, child

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")

KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def kernel(out, N: gl.constexpr):
    gl.store(out, N + 1)
"""

# `build(n)` is the machine code of the kernel for N = n, compiled as a launch would do it.
BUILD = """
import hashlib, os, warnings
import torch
from anyflash.errors import AttentionError
from anyflash.errors import NotCompiled
from anyflash.kernels.hopper.launcher import compiling
from gluon_compile import compile_kernel
from small import kernel

out = torch.empty(4, dtype=torch.int32, device="meta")

def build(n):
    return compiling("kernel", lambda: compile_kernel(kernel, [out, n])).cubin

def refusal(run):
    try:
        run()
    except NotCompiled as error:
        assert isinstance(error, AttentionError) and error.__cause__ is not None
        return str(error)
"""


def run(folder: Path, code: str, **environment: str) -> str:
    """Run code after BUILD in a process of its own; the kernel and the cache lie in `folder`."""
    if not (folder / "small.py").exists():
        (folder / "small.py").write_text(KERNEL)
    places = [SOURCE, folder, Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(str(x) for x in places if x),
        "PYTHONDONTWRITEBYTECODE": "1",  # Python, too, keeps compiled code: by time and size
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    return child(f"{BUILD}\n{code}", 120, **(given | environment))


AT_ONCE = """
import multiprocessing
context = multiprocessing.get_context("fork")
start = context.Barrier(8)

def work(_):
    start.wait()
    return tuple(hashlib.sha256(build(n)).hexdigest() for n in range(3))

with context.Pool(8) as pool:
    found = pool.map(work, range(8), chunksize=1)
print(len(found), len(set(found)), len(set(found[0])))
"""


def test_b114_eight_processes_share_a_cache(tmp_path: Path) -> None:
    assert run(tmp_path, AT_ONCE) == "8 1 3\n"
    kept = list((tmp_path / "cache").rglob("*"))
    assert len([x for x in kept if x.suffix == ".cubin"]) == 3
    assert not [x for x in kept if x.name.startswith("tmp.")]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


UNWRITABLE = """
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    before = dict(os.environ)
    for n in (1, 2):
        assert build(n) == build(n)
assert dict(os.environ) == before
assert all(issubclass(x.category, RuntimeWarning) for x in told)
print(*(x.message for x in told), sep="\\n")
"""
# The superuser may write anywhere.
AS_ANOTHER_USER = "import os\nif os.geteuid() == 0: os.seteuid(65534)\n"
DISK_FULL = """
import errno
from triton.runtime.cache import FileCacheManager
put = FileCacheManager.put
def full(self, data, filename, binary=True):
    if self.cache_dir.startswith(os.environ["FULL"]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return put(self, data, filename, binary)
FileCacheManager.put = full
"""


@pytest.mark.parametrize("fault", ["missing", "a file", "not ours", "no home", "disk full"])
def test_b115_where_the_cache_cannot_be_written(open_folder: Path, fault: str) -> None:
    cache, temporary = open_folder / "parent" / "cache", open_folder / "temporary"
    temporary.mkdir()
    temporary.chmod(0o777)
    environment = {"TRITON_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    before = ""
    if fault == "a file":
        cache.parent.write_text("")
    elif fault == "not ours":
        cache.mkdir(parents=True)
        cache.chmod(0o555)
        before = AS_ANOTHER_USER
    elif fault == "no home":
        environment |= {"HOME": "/nonexistent/home"}
        before = f"{AS_ANOTHER_USER}\ndel os.environ['TRITON_CACHE_DIR']"
        cache = Path("/nonexistent/home/.triton/cache")
    elif fault == "disk full":
        before = DISK_FULL
        environment |= {"FULL": str(cache)}
    told = run(open_folder, before + UNWRITABLE, **environment).splitlines()
    if fault == "missing":
        assert told == [""] and cache.is_dir()
    else:
        (line,) = told  # once
        assert line.startswith(f"{cache} cannot be written (")
        assert line.endswith("TRITON_CACHE_DIR names another one")
    assert not any(temporary.iterdir())


def test_b115_a_full_cache_that_may_only_be_read(open_folder: Path) -> None:
    """As in a container image: what lies there is used, and nobody warns."""
    run(open_folder, "build(1); build(2)")
    folders = [
        open_folder / "cache",
        *(x for x in (open_folder / "cache").rglob("*") if x.is_dir()),
    ]
    for folder in folders:
        folder.chmod(0o555)
    told = run(open_folder, AS_ANOTHER_USER + UNWRITABLE)
    for folder in folders:
        folder.chmod(0o755)
    assert told == "\n"


BUILD_C = """
from triton.runtime.build import compile_module_from_src
print(refusal(lambda: compiling("kernel", lambda: compile_module_from_src("int x;", "x"))))
"""


@pytest.mark.parametrize("compiler", [None, "/nonexistent/cc", "false"])
def test_b116_no_c_compiler(tmp_path: Path, compiler: str | None) -> None:
    (tmp_path / "empty").mkdir()
    code = f"os.environ.pop('CC', None); os.environ['PATH'] = {str(tmp_path / 'empty')!r}\n"
    if compiler is not None:
        found = shutil.which(compiler) or compiler
        code += f"os.environ['CC'] = {found!r}\n"
    said = run(tmp_path, code + BUILD_C)
    assert said.startswith("Triton cannot build its launcher, a small C module: ")
    assert "install a C compiler (or name it in CC)" in said.splitlines()[0]


def test_b118_the_cache_knows_sources_and_not_paths(tmp_path: Path) -> None:
    code = "print(hashlib.sha256(build(1)).hexdigest())"

    def entries() -> int:
        return len(list((tmp_path / "cache").iterdir()))

    first = run(tmp_path, code)
    kept = entries()
    paths = os.environ["PATH"].split(os.pathsep)
    assert run(tmp_path, code, PATH=os.pathsep.join([*paths[::-1], "/"])) == first
    assert entries() == kept
    file = tmp_path / "small.py"
    time = file.stat()
    file.write_text(KERNEL.replace("N + 1", "N + 5"))
    os.utime(file, ns=(time.st_atime_ns, time.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (time.st_mtime_ns, time.st_size)
    assert run(tmp_path, code) != first
    assert entries() > kept


def test_b119_no_binary_to_be_of_another_version() -> None:
    files = [x for x in (SOURCE / "anyflash").rglob("*") if x.is_file() and x.suffix != ".pyc"]
    assert files
    for file in files:
        file.read_text(encoding="utf-8")


def test_b119_a_triton_that_does_not_fit() -> None:
    """The package is imported all the same, and the message names both versions."""
    code = """
import anyflash
from triton.experimental.gluon import language
for name in ("barrier", "thread_barrier"):
    vars(language).pop(name, None)
try:
    import anyflash.kernels.hopper.compat
except ImportError as error:
    print(error)
"""
    places = (str(SOURCE), os.environ.get("PYTHONPATH", ""))
    said = child(code, PYTHONPATH=os.pathsep.join(filter(None, places)))
    assert said.startswith(f"Triton {triton.__version__} has no ")
    assert said.endswith("the Hopper kernels need 3.6 to 3.9\n")


def test_b151_a_broken_ptxas(tmp_path: Path) -> None:
    """The cause in the first line; the compiler's own words are behind it."""
    broken = tmp_path / "ptxas"
    real = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nexit 1\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    said = run(tmp_path, "print(refusal(lambda: build(1)))", TRITON_PTXAS_PATH=str(broken))
    line = said.splitlines()[-1]  # before it, Triton itself prints the program
    assert line.startswith("ptxas cannot compile a kernel: `ptxas` failed with error code 1; ")
    assert "TRITON_PTXAS_PATH" in line
