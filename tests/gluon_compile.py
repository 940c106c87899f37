"""Compile a Gluon kernel for Hopper (sm_90a) on a machine without a GPU, and look at the result.

    compiled = compile_kernel(kernel, [q_desc, out, 1.0, 128], num_warps=4, maxnreg=168)
    assert compiled.spills == 0 and compiled.opcodes["HGMMA"] == 16

What is compiled is what a launch with these arguments on a Hopper card compiles: Triton's own
binder looks at them, so a 16-byte aligned pointer, a multiple of 16 and the value 1 count. Tensors
are only looked at: `torch.empty(shape, device="meta")` serves. The tools are those that come with
the installed Triton; TRITON_PTXAS_PATH and its like choose others.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)")


@dataclass(frozen=True)
class Compiled:
    """One kernel for sm_90a. What needs the disassembler is read when asked for."""

    ptx: str
    shared_bytes: int  # of one CTA: everything allocated, and the compiler's own scratch
    threads: int  # of one CTA: all partitions
    cubin: bytes = field(repr=False)

    @cached_property
    def registers(self) -> int:
        """Per thread at launch; warp specialisation moves registers between partitions later."""
        usage = _run_on(self.cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
        return int(re.findall(r"\bREG:(\d+)", usage)[0])

    @cached_property
    def sass(self) -> str:
        """The machine code."""
        return _run_on(self.cubin, knobs.nvidia.nvdisasm.path)

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How often each machine instruction stands in the code, by name up to its first dot."""
        return Counter(OPCODE.findall(self.sass))

    def loop_with(self, products: int) -> Counter[str]:
        """The instructions of the shortest loop with so many tensor-core products. A branch back is
        not always a loop: what is tried again after a wait may stand far behind it."""
        labels: dict[str, int] = {}
        code: list[str] = []
        found: list[Counter[str]] = []
        for line in self.sass.splitlines():
            if label := re.match(r"\s*(\.L_\w+):", line):
                labels[label[1]] = len(code)
            elif opcode := OPCODE.search(line):
                code.append(opcode[1])
                back = re.search(r"BRA.*`\((\.L_\w+)\)", line)
                if back and back[1] in labels:
                    found.append(Counter(code[labels[back[1]] :]))
        fitting = [c for c in found if c["HGMMA"] + c["QGMMA"] == products]
        return min(fitting, key=lambda c: c.total())

    @property
    def spills(self) -> int:
        """Stores to local memory."""
        return self.opcodes["STL"]

    @cached_property
    def serialised(self) -> bool:
        """Whether ptxas makes each wgmma wait for the one before (its remarks C7510 to C7514): it
        does when it cannot keep the registers of products in flight apart."""
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(self.ptx)
            file.flush()
            command = [
                knobs.nvidia.ptxas.path,
                "-v",
                "--gpu-name=sm_90a",
                file.name,
                "-o",
                "/dev/null",
            ]
            said = subprocess.run(command, capture_output=True, text=True, check=True)
        return "serialized" in said.stdout + said.stderr


def compile_kernel(
    kernel: GluonJITFunction[Any],
    arguments: Mapping[str, Any] | Sequence[Any],
    *,
    num_warps: int = 4,
    maxnreg: int | None = None,
) -> Compiled:
    """Compile `kernel` for these arguments, given by name or in order, constexprs included.

    A parameter called `num_warps` or `maxnreg` gets that value, as in a launch. Raises what the
    compiler raises; a signature that does not fit is a TypeError.
    """
    options: dict[str, Any] = {"num_warps": num_warps}
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    by_name = isinstance(arguments, Mapping)
    positional, named = ((), dict(arguments)) if by_name else (tuple(arguments), {})

    backend = make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*positional, **named, **options)
    if unknown := rest.keys() - options.keys():
        raise TypeError(f"{kernel.__name__} has no parameter {', '.join(sorted(unknown))}")
    _, signature, constexprs, attributes = kernel._pack_args(
        backend, options, bound, specialization, rest
    )
    source = GluonASTSource(kernel, signature, constexprs, attributes)
    result = triton.compile(source, target=HOPPER, options=options)
    return Compiled(
        ptx=result.asm["ptx"],
        shared_bytes=result.metadata.shared,
        threads=int(re.findall(r"\.reqntid (\d+)", result.asm["ptx"])[0]),
        cubin=result.asm["cubin"],
    )


def compile_launches(launcher: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Compiled]:
    """Call `launcher`, compile every Gluon kernel that it launches instead of running it."""
    found: list[Compiled] = []

    def instead(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {n: kwargs.pop(n) for n in ("num_warps", "maxnreg") if n in kwargs}
        names = (p.name for p in self.params)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        found.append(compile_kernel(self, arguments, **options))

    real, JITFunction.run = JITFunction.run, instead
    try:
        launcher(*args, **kwargs)
    finally:
        JITFunction.run = real
    return found


def _run_on(cubin: bytes, tool: str, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
