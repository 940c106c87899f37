"""NVIDIA Hopper: the Gluon kernels of `kernels/hopper`.

Windows are arithmetic in the kernel, other masks row intervals or tile maps. A value that a row
does not see is multiplied by zero where a tile of keys covers it: if it is NaN or infinite, the row
becomes NaN. What lies beyond the keys of a sequence has no effect, whatever it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anyflash.backends.base import Replay
from anyflash.devices import Device
from anyflash.masks.algebra import Window
from anyflash.masks.compiled import compiled
from anyflash.masks.index import Extent
from anyflash.masks.intervals import RowIntervals
from anyflash.numerics import accumulation_dtype
from anyflash.problem import Gradients, Inputs, Needs, Problem, Saved, packed_mask

name = "hopper"

DTYPES = (torch.float16, torch.bfloat16)
WIDEST = 256  # columns of a head that fit into shared memory
LONGEST = 2**30  # rows or keys of a sequence, whose sums and differences stay within 32 bits
# Of query rows. They are numbered with 32 bits, and each program looks up one beyond the last.
MOST_BLOCKS = 2**31 - 2**16
LEAST_BLOCK = 128  # rows
TRITON = (3, 6)  # the oldest that has what the kernels are written in


def refusal(problem: Problem, device: Device) -> str | None:
    return _hardware(device) or _features(problem) or _sizes(problem) or _software()


def _hardware(device: Device) -> str | None:
    if device.type != "cuda":
        return f"tensors are on {device.type}, and this backend computes on NVIDIA GPUs"
    if "wgmma" not in device.features:
        return (
            "the kernels need wgmma, which GPUs of compute capability 9.x have and this one "
            f"({device.name}) has not"
        )
    return None


def _features(problem: Problem) -> str | None:
    if problem.options.precision == "fp8":
        return "there is no FP8 kernel here yet; leave precision at None"
    if problem.dtype not in DTYPES:
        got = str(problem.dtype).removeprefix("torch.")
        return f"it takes float16 and bfloat16, not {got}"
    if "bias" in problem.features:
        return "the kernels add no bias; what is only −inf or 0 can be a boolean mask"
    if "alibi" in problem.features:
        return "the kernels add no ALiBi slopes"
    if problem.mask == "tiles" and problem.packed:
        return (
            "this mask becomes a tile map, and of packed sequences the kernels read windows and "
            "row intervals only (at most two intervals of keys for each query)"
        )
    return None


def _sizes(problem: Problem) -> str | None:
    for side, columns in (("q and k", problem.head_dim), ("v", problem.head_dim_v)):
        if not 1 <= columns <= WIDEST:
            return f"it takes heads of 1 to {WIDEST} columns, and those of {side} have {columns}"
    for side, rows in (("queries", problem.queries), ("keys", problem.keys)):
        if rows > LONGEST:
            return f"it takes sequences of at most {LONGEST} {side}, not {rows}"
    if problem.packed and max(problem.total_queries, problem.total_keys) > LONGEST:
        got = f"{problem.total_queries} of q and {problem.total_keys} of k"
        return f"it takes packed batches of at most {LONGEST} rows, not {got}"
    blocks = problem.heads * (problem.total_queries // LEAST_BLOCK + problem.batch)
    if blocks >= MOST_BLOCKS:
        return f"it takes fewer than {MOST_BLOCKS} blocks of {LEAST_BLOCK} queries, not {blocks}"
    return None


def _software() -> str | None:
    found = _triton()
    wanted = ".".join(map(str, TRITON))
    advice = f"pip install 'triton>={wanted}'"
    if found is None:
        return f"the kernels need Triton {wanted} or newer, and there is none: {advice}"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < TRITON:
        return f"the kernels need Triton {wanted} or newer, and it is {found}: {advice}"
    return _language()


@cache
def _language() -> str | None:
    """Why the kernels' own names are not in this Triton, or None where they are."""
    try:
        importlib.import_module("anyflash.kernels.hopper.compat")
    except ImportError as error:
        return " ".join(str(error).split())
    return None


@cache
def _triton() -> str | None:
    """The version of Triton, or None where there is none."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton  # only once everything else fits

    return triton.__version__


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    if _empty(problem, inputs):
        return _nothing(inputs)
    with _on(inputs.q):
        return _forward(problem, inputs)


def backward(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
    with _on(inputs.q):
        return _backward(problem, inputs, saved, needs)


def _on(q: Tensor) -> AbstractContextManager[Any]:
    """The card that a tensor is on, as the current one."""
    device = q.get_device()
    if device < 0 or device == torch.cuda.current_device():  # −1 is that of a CPU tensor
        return nullcontext()
    return torch.cuda.device(device)


def algorithm(problem: Problem, inputs: Inputs) -> str:
    """See `Explaining`."""
    if 0 in (problem.batch, problem.heads, inputs.q.numel(), inputs.k.numel()):
        return "nothing to compute"
    from anyflash.kernels.hopper import algorithms, launch

    packed = problem.packed
    totals = problem.total_queries, problem.total_keys
    lengths = launch.Lengths(
        problem.batch, *(totals if packed else (problem.queries, problem.keys)), problem.queries,
        problem.keys, packed,
    )  # fmt: skip
    heads = launch.Heads(
        problem.heads,
        problem.heads_kv,
        problem.head_dim,
        problem.head_dim_v,
        torch.device(problem.device),
    )
    mask, o = inputs.mask, problem.options
    window = mask if isinstance(mask, Window) else Window(None, None)
    tiles = problem.mask == "tiles"
    bounds = None if mask is None or mask is window or tiles else torch.empty(0)
    options = algorithms.Options(
        o.scale, window.left, window.right, bounds=bounds, tile_map=tiles or None,
        dropout=o.dropout, deterministic=_deterministic(problem),
    )  # fmt: skip
    name, size = algorithms.described(options, lengths, heads)
    return f"{name}, {size / 1e6:,.1f} MB of scratch memory"


def prepare(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> Replay | None:
    if _empty(problem, inputs):
        return None
    from anyflash.kernels.hopper import launch

    options = problem.options
    asked = {"scale": options.scale, "softcap": options.softcap, **_visible(problem, inputs)}
    return launch.prepare(inputs.q, inputs.k, inputs.v, out, lse, **asked)


def _empty(problem: Problem, inputs: Inputs) -> bool:
    return 0 in inputs.q.shape or 0 in inputs.k.shape or not problem.batch


def _forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    from anyflash.kernels.hopper import launch

    asked = {**_asked(problem, inputs), **_visible(problem, inputs)}
    sequences = _sequences(problem, inputs)
    run = launch.forward_packed if sequences else launch.forward
    return run(inputs.q, inputs.k, inputs.v, **sequences, **asked)


def _backward(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
    from anyflash.kernels.hopper import launch_backward as launch

    asked = {**_asked(problem, inputs), **_visible(problem, inputs, backward=True)}
    sequences = _sequences(problem, inputs)
    run = launch.backward_packed if sequences else launch.backward
    asked["deterministic"] = _deterministic(problem)
    found = run(inputs.q, inputs.k, inputs.v, saved, needs=needs, **sequences, **asked)
    if found.sink is None or inputs.sink is None:
        return found
    return found._replace(sink=found.sink.to(inputs.sink.dtype))


def _deterministic(problem: Problem) -> bool:
    """Whether gradients are to be the same bits in each run: for this call, or for all of PyTorch,
    where that is more than a warning."""
    everywhere = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return problem.options.deterministic or (everywhere and not warns)


def _asked(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    sink, options = inputs.sink, problem.options
    return {
        "scale": options.scale,
        "softcap": options.softcap,
        "sink": None if sink is None else sink.to(torch.float32).contiguous(),
        "dropout": options.dropout,
        "seed": inputs.seed,
    }


def _sequences(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """Where those of a packed batch lie; nothing of a dense one."""
    starts_q, starts_k, used = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k
    if starts_q is None or starts_k is None:
        return {}
    return {
        "cu_seqlens_q": starts_q.contiguous(),
        "cu_seqlens_k": starts_k.contiguous(),
        "seqused_k": None if used is None else used.contiguous(),
        "max_seqlen_q": problem.queries,
        "max_seqlen_k": problem.keys,
    }


def _visible(problem: Problem, inputs: Inputs, backward: bool = False) -> dict[str, Any]:
    """The mask in the kernel's terms."""
    mask, extent = inputs.mask, problem.extent
    if mask is None:
        return {}
    if isinstance(mask, Window):
        return {"left": mask.left, "right": mask.right}
    if problem.packed:
        mask = packed_mask(inputs)
        extent = Extent(1, problem.heads, inputs.q.shape[0], inputs.k.shape[0])
    form = compiled(mask, extent, inputs.q.device)
    if not isinstance(form, RowIntervals):
        if problem.packed:
            raise TypeError("a tile map of packed sequences, which refusal() should have refused")
        return {"tile_map": form}
    return {"bounds": form.bounds} | ({"query_tiles": form.query_tiles} if backward else {})


def _nothing(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Rows that have no keys: out 0, and lse −inf or the sink."""
    q, sink = inputs.q, inputs.sink
    rows = (q.shape[1], q.shape[0]) if inputs.packed else q.shape[:-1]
    lse = q.new_full(rows, -torch.inf, dtype=accumulation_dtype(q.dtype))
    if sink is not None:
        lse.copy_(sink.unsqueeze(-1))
    return q.new_zeros((*q.shape[:-1], inputs.v.shape[-1])), lse
