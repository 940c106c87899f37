"""What is compared: anyflash's backward pass, its algorithms one by one, and PyTorch's kernels.

Nobody's autograd engine is timed: under the capture of a CUDA graph it is fragile, and it costs all
sides the same. Each side is the operators that its autograd formula calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from anyflash.bench.hopper import peers
from anyflash.bench.hopper.backward.rows import ALGORITHMS
from anyflash.bench.hopper.peers import BACKEND
from anyflash.bench.hopper.rows import CUDNN, FA2, STEP, Inputs, Row
from anyflash.calls import Arguments
from anyflash.errors import Unsupported
from anyflash.masks import causal, window
from anyflash.ops import attention_backward, attention_forward
from anyflash.problem import Saved

Gradients = tuple[Tensor, ...]  # dq, dk, dv, shaped as q, k, v
Run = Callable[[], Gradients]
Maker = Callable[[Inputs], Run]

NEEDS = [True, True, True, False, False]  # gradients of q, k, v, and not of bias and sink
aten = torch.ops.aten


class Passes(NamedTuple):
    """What a side computes forward, and from that backward."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Gradients]


def timed(side: Callable[[Inputs], Passes]) -> Maker:
    """What a row measures of a side: backward, of a forward that ran once before, or both."""

    def make(inputs: Inputs) -> Run:
        passes = side(inputs)
        if inputs.row.measure == STEP:
            return lambda: passes.backward(passes.forward())
        saved = passes.forward()
        return lambda: passes.backward(saved)

    return make


def user(inputs: Inputs) -> Passes:
    """anyflash as a user's `backward()` calls it, with the algorithm that it picks."""
    call, dout = arguments(inputs), inputs.dout

    def backward(saved: tuple[Tensor, Tensor]) -> Gradients:
        return attention_backward(dout, None, *saved, NEEDS, *call)[:3]

    return Passes(lambda: attention_forward(*call), backward)


def arguments(inputs: Inputs) -> Arguments:
    """What `attention` or `attention_varlen` hands on of a call that will be differentiated."""
    row, offsets = inputs.row, inputs.offsets
    mask = causal() if row.causal else None if row.window is None else window(row.window, 0)
    longest = max(row.lengths, default=None)
    return Arguments(
        inputs.q, inputs.k, inputs.v, bias=None, alibi=None, sink=None, seed=None,
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, seqused_k=None,
        mask_leaves=[] if mask is None else list(mask.leaves),
        mask="" if mask is None else mask.text, scale=None, softcap=0.0, dropout=0.0,
        max_seqlen_q=longest, max_seqlen_k=longest, deterministic=False, precision=None,
        backend=BACKEND, gradient=True,
    )  # fmt: skip


def algorithm(name: str) -> Callable[[Inputs], Passes]:
    """One algorithm of the backward kernels, by name, after the forward that users get. Raises
    Unsupported where its launcher would take another one."""

    def side(inputs: Inputs) -> Passes:
        if (chosen := picked(inputs, name)) != name:
            why = f"it does not do this row: {chosen} would, in its place"
            raise Unsupported(f"the algorithm {name!r}", {name: why})
        return Passes(user(inputs).forward, lambda saved: launched(inputs, saved, algorithm=name))

    return side


def picked(inputs: Inputs, algorithm: str | None = None) -> str:
    """The algorithm that the launcher takes, if this one is asked for, or left to choose."""
    from anyflash.kernels.hopper import algorithms, launch  # loads Triton

    row, q, k = inputs.row, inputs.q, inputs.k
    if inputs.offsets is None:
        lengths = launch.dense_lengths(q, k)
    else:
        starts, longest = (inputs.offsets, inputs.offsets, None), max(row.lengths)
        _, lengths = launch.packed_lengths(q, k, starts, longest, longest)
    heads = launch.Heads(row.heads, row.heads_kv, row.head_dim, row.head_dim_v, q.device)
    options = algorithms.Options(1.0, *window_of(row), algorithm=algorithm)
    return algorithms.chosen(options, lengths, heads)[0]


def window_of(row: Row) -> tuple[int | None, int | None]:
    """Keys that a query sees before and after its own position."""
    return row.window, 0 if row.causal or row.window is not None else None


def launched(inputs: Inputs, saved: tuple[Tensor, Tensor], **options: Any) -> Gradients:
    """The kernels' backward pass, with options of their launcher."""
    from anyflash.kernels.hopper import launch_backward as launch  # loads Triton

    row, q, k, v = inputs.row, inputs.q, inputs.k, inputs.v
    left, right = window_of(row)
    asked = {"scale": row.head_dim**-0.5, "left": left, "right": right, **options}
    results = Saved(*saved, inputs.dout, None)
    if inputs.offsets is None:
        found = launch.backward(q, k, v, results, **asked)
    else:
        longest = max(row.lengths)
        found = launch.backward_packed(
            q, k, v, results, inputs.offsets, inputs.offsets, max_seqlen_q=longest,
            max_seqlen_k=longest, **asked,
        )  # fmt: skip
    return tuple(x for x in found if x is not None)  # dq, dk and dv, of which all are asked for


def cudnn_passes(inputs: Inputs) -> Passes:
    """The operators of cuDNN. What forward leaves undefined (a bias, packed lengths) is None."""
    q, k, v, dout, is_causal = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.row.causal

    def backward(saved: tuple[Any, ...]) -> Gradients:
        out, lse, *lengths, seed, offset, _ = saved
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, is_causal
        )

    return Passes(
        lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal),
        backward,
    )


def fa2_passes(inputs: Inputs) -> Passes:
    """The operators of FlashAttention-2."""
    q, k, v, dout, is_causal = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.row.causal

    def backward(saved: tuple[Any, ...]) -> Gradients:
        out, lse, *lengths, seed, offset, _ = saved
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, is_causal, seed, offset
        )

    return Passes(
        lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal), backward
    )


def served(backend: SDPBackend, side: Callable[[Inputs], Passes]) -> Callable[[Inputs], Passes]:
    """A side of PyTorch's, where PyTorch itself would choose it for training: the operators look at
    less than `scaled_dot_product_attention` does before it calls them. Raises what that raises."""

    def make(inputs: Inputs) -> Passes:
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        with torch.enable_grad():
            peers.only(backend)(replace(inputs, q=q, k=k, v=v))()
        return side(inputs)

    return make


OTHERS = {
    CUDNN: timed(served(SDPBackend.CUDNN_ATTENTION, cudnn_passes)),
    FA2: timed(served(SDPBackend.FLASH_ATTENTION, fa2_passes)),
}


@dataclass(frozen=True)
class Contest:
    """Who is measured: anyflash as users get it, each of its algorithms, and the others."""

    ours: Maker = field(default_factory=lambda: timed(user))
    algorithms: Mapping[str, Maker] = field(
        default_factory=lambda: {name: timed(algorithm(name)) for name in ALGORITHMS}
    )
    others: Mapping[str, Maker] = field(default_factory=lambda: OTHERS)
    picked: Callable[[Inputs], str] = picked  # by ours
