"""What is compared: anyflash's Hopper backend, and PyTorch's cuDNN and FlashAttention-2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyflash.api import attention, attention_varlen
from anyflash.bench.hopper.rows import CUDNN, FA2, Inputs
from anyflash.errors import AttentionError, Unsupported
from anyflash.masks import window

Run = Callable[[], Tensor]  # one call; its output, in q's shape
Maker = Callable[[Inputs], Run]
T = TypeVar("T")

BACKEND = "hopper"


class Refused(AttentionError):
    """A side does not serve a row; the message is its reason."""


def ours(inputs: Inputs) -> Run:
    """anyflash as a user calls it."""
    row, q, k, v = inputs.row, inputs.q, inputs.k, inputs.v
    mask = None if row.window is None else window(row.window, 0)
    if inputs.offsets is None:
        return lambda: attention(q, k, v, mask=mask, causal=row.causal, backend=BACKEND)
    offsets, longest = inputs.offsets, max(row.lengths)
    return lambda: attention_varlen(
        q, k, v, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, mask=mask,
        causal=row.causal, backend=BACKEND,
    )  # fmt: skip


def sdpa(inputs: Inputs) -> Run:
    """`scaled_dot_product_attention`, by whatever kernel is enabled.

    Its causal mask aligns top-left, which is the same where there are as many keys as queries.
    """
    row, q, k, v = inputs.row, inputs.q, inputs.k, inputs.v
    if row.window is not None:
        raise Refused("scaled_dot_product_attention has no window")
    if row.lengths:
        # A capture fails late with nested tensors (torch 2.11), and takes the process's CUDA along.
        raise Refused("packed sequences are nested tensors there, which no CUDA graph captures")
    grouped = row.heads != row.heads_kv
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=row.causal, enable_gqa=grouped)


def only(backend: SDPBackend) -> Maker:
    """SDPA by one kernel."""

    def make(inputs: Inputs) -> Run:
        run = sdpa(inputs)

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return run()

        return call

    return make


PEERS = {CUDNN: only(SDPBackend.CUDNN_ATTENTION), FA2: only(SDPBackend.FLASH_ATTENTION)}


def attempt(function: Callable[[], T]) -> T:
    """What `function` returns; raises Refused if it says that it does not serve the problem.

    PyTorch refuses by a RuntimeError and tells why in warnings. Subclasses of it (no memory left,
    an error of the device) are failures, not refusals.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return function()
        except Unsupported as error:
            raise Refused(reason(error)) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, NotImplementedError):
                raise
            reasons = [str(w.message).split(" (Triggered internally")[0] for w in told]
            first = str(error).splitlines()[:1] or [type(error).__name__]
            raise Refused(" ".join(dict.fromkeys([*first, *reasons]))) from error


def reason(error: Unsupported) -> str:
    """Why nothing serves a call, in one line."""
    return "; ".join(error.refusals.values()) or " ".join(str(error).split())


def unserved(error: Exception) -> str | None:
    """Why a kernel of ours does not serve a row, in one line, if that is what its error says. None:
    it is a failure."""
    if isinstance(error, Unsupported):
        return reason(error)
    # What Triton says of a kernel that cannot be compiled or does not fit the card. Its errors have
    # no common base that a host file could name without importing it.
    if type(error).__module__.split(".")[0] == "triton":
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def first_calls(
    makers: Mapping[str, Callable[[Inputs], Callable[[], T]]], inputs: Inputs
) -> tuple[dict[str, tuple[Callable[[], T], T]], dict[str, str]]:
    """Each side's run and the output of its first call, and why the others refuse."""
    served, refusals = {}, {}
    for name, make in makers.items():
        try:
            run = attempt(lambda m=make: m(inputs))
            served[name] = run, attempt(run)
        except Refused as error:
            refusals[name] = str(error)
    return served, refusals


def kernel(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernel itself, which can be told a tile; loaded no earlier than here."""
    from anyflash.kernels.hopper.launch import forward

    return forward(*tensors, **options)


@dataclass(frozen=True)
class Contest:
    """Who is measured: ours, the others by name, and the kernel whose variants are."""

    ours: Maker = ours
    others: Mapping[str, Maker] = field(default_factory=lambda: PEERS)
    kernel: Callable[..., tuple[Tensor, Tensor]] = kernel
