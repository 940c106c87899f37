"""What is compared: anyflash, and PyTorch's own attention given the same mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.api import attention
from anyflash.bench.cases import BOOLEAN, BOTH, IS_CAUSAL, Workload

# Runs a case once: out, followed by dq, dk and dv where the case has a backward pass.
Run = Callable[[], tuple[Tensor, ...]]


def ours(work: Workload) -> Run:
    """`anyflash.attention`, given the mask as a user gives it, anew on every call."""
    causal = work.case.causal
    return _runner(work, lambda q, k, v: attention(q, k, v, mask=work.mask, causal=causal))


def sdpa(work: Workload) -> Run:
    """`torch.nn.functional.scaled_dot_product_attention`, told as `case.peer` says.

    A boolean mask is made once, outside of what is timed.
    """
    mask = boolean_mask(work)
    causal = work.case.peer == IS_CAUSAL
    return _runner(
        work, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    )


def sdpa_kernel(work: Workload) -> str:
    """The name of the kernel that SDPA chooses for a case, as PyTorch tells it."""
    causal = work.case.peer == IS_CAUSAL
    choice = torch.ops.aten._fused_sdp_choice(
        work.q, work.k, work.v, boolean_mask(work), 0.0, causal
    )
    return torch.nn.attention.SDPBackend(choice).name.lower()


def boolean_mask(work: Workload) -> Tensor | None:
    """The mask as SDPA takes it, (1, 1|H, S, S), where the case says so."""
    if work.case.peer != BOOLEAN:
        return None
    seen = work.allowed(slice(0, work.case.length))
    return None if seen is None else seen.unsqueeze(0)


def _runner(work: Workload, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    if work.case.direction != BOTH:
        return lambda: (function(work.q, work.k, work.v),)
    leaves = [x.detach().requires_grad_() for x in (work.q, work.k, work.v)]

    def both() -> tuple[Tensor, ...]:
        out = function(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, work.dout))

    return both
