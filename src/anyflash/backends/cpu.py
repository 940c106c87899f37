"""CPU: pieces of torch operations, and torch's fused kernel wherever it means the same.

Every feature of the contract. Packed sequences become row intervals over the packed rows, so that
they share one path with documents. Grouped query heads are taken a key head's worth at a time:
each round has as many query as key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.backends.base import Needs, Saved
from anyflash.devices import Device
from anyflash.kernels.cpu import backward as backward_kernel
from anyflash.kernels.cpu import flash
from anyflash.kernels.cpu import forward as forward_kernel
from anyflash.kernels.cpu.scores import Rules
from anyflash.masks.algebra import Everything, Window
from anyflash.masks.compiled import compiled
from anyflash.masks.index import Extent
from anyflash.masks.places import Packed
from anyflash.numerics import accumulation_dtype, all_finite
from anyflash.problem import Gradients, Inputs, Problem, packed_mask

name = "cpu"


def refusal(problem: Problem, device: Device) -> str | None:
    if device.type != "cpu":
        return f"tensors are on {device.type}, and this backend computes on the CPU"
    if problem.options.precision == "fp8":
        return "there is no FP8 arithmetic here; leave precision at None"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = _dense(inputs)
    whole = _whole(problem, inputs, strict_on=(k, v))
    if whole is not None and problem.heads == problem.heads_kv:
        out, lse = flash.forward(q, k, v, problem.options.scale, whole, inputs.sink)
        return out, lse.contiguous()
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    if inputs.sink is not None:
        lse.copy_(inputs.sink.view(1, -1, 1))  # rows that no piece touches
    if out.shape[0] and out.shape[1] and out.shape[2] and k.shape[2]:
        for heads in _rounds(problem):
            arguments = q[:, heads], k, v
            if whole is not None:
                sink = None if inputs.sink is None else inputs.sink[heads]
                o, l = flash.forward(*arguments, problem.options.scale, whole, sink)
                out[:, heads], lse[:, heads] = o, l
                continue
            rules = _rules(problem, inputs, heads, strict_on=(k, v))
            forward_kernel.forward(*arguments, rules, out[:, heads], lse[:, heads])
    return (out[0].transpose(0, 1), lse[0]) if problem.packed else (out, lse)


def backward(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
    q, k, v = _dense(inputs)
    wide = accumulation_dtype(q.dtype)
    if problem.packed:
        out, dout = saved.out.transpose(0, 1)[None], saved.dout.transpose(0, 1)[None]
        dlse = None if saved.dlse is None else saved.dlse[None]
        saved = Saved(out, saved.lse[None], dout, dlse)
    whole = _whole(problem, inputs, strict_on=(q, k, v, saved.dout))
    dbias = (
        torch.zeros_like(inputs.bias, dtype=wide)
        if needs.bias and inputs.bias is not None
        else None
    )
    dsink = (
        torch.zeros_like(inputs.sink, dtype=wide)
        if needs.sink and inputs.sink is not None
        else None
    )
    direct = whole is not None and problem.heads == problem.heads_kv and dsink is None
    if direct:
        dq, dk, dv = flash.backward(q, k, v, *saved, problem.options.scale, whole)
        return Gradients(dq, dk, dv, None, None)
    dq, dk, dv = (
        torch.zeros_like(q),
        torch.zeros_like(k, dtype=wide),
        torch.zeros_like(v, dtype=wide),
    )
    if q.shape[0] and q.shape[1] and q.shape[2] and k.shape[2]:
        for heads in _rounds(problem):
            mine = Saved(*[None if x is None else x[:, heads] for x in saved])  # type: ignore[arg-type]
            rules = _rules(problem, inputs, heads, strict_on=(q, k, v, saved.dout))
            outputs = backward_kernel.Outputs(
                dq[:, heads],
                dk,
                dv,
                _bias_of(dbias, heads),
                None if dsink is None else dsink[heads],
            )
            backward_kernel.backward(
                q[:, heads], k, v, backward_kernel.Saved(*mine), rules, outputs
            )
    if problem.packed:
        dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    bias, sink = inputs.bias, inputs.sink
    return Gradients(
        dq,
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
        None if dsink is None or sink is None else dsink.to(sink.dtype),
    )


def _dense(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Packed (total, H, D) as one batch element (1, H, total, D); dense as it is."""
    tensors = inputs.q, inputs.k, inputs.v
    return tuple(x.transpose(0, 1)[None] for x in tensors) if inputs.packed else tensors  # type: ignore[return-value]


def _rounds(problem: Problem) -> list[slice]:
    """Query heads in rounds in which head n has key head n: h uses h // (Hq / Hkv)."""
    per_key_head = problem.heads // problem.heads_kv
    return [slice(first, None, per_key_head) for first in range(per_key_head)]


def _whole(problem: Problem, inputs: Inputs, strict_on: tuple[Tensor, ...]) -> bool | None:
    """Whether the fused kernel can take the call whole: None if not, else its causal flag."""
    options, mask = problem.options, inputs.mask
    plain = not (inputs.packed or inputs.bias is not None or inputs.alibi is not None)
    sizes = (
        problem.batch and problem.heads and problem.queries and problem.keys and problem.head_dim
    )
    if (
        not plain
        or options.softcap
        or options.dropout
        or options.scale <= 0
        or not sizes
        or not problem.head_dim_v
    ):
        return None
    if mask is None:
        return False
    causal = isinstance(mask, Window) and mask.left is None and mask.right == 0
    if causal and problem.queries == problem.keys and all_finite(*strict_on):
        return True
    return None


def _rules(problem: Problem, inputs: Inputs, heads: slice, strict_on: tuple[Tensor, ...]) -> Rules:
    options = problem.options
    mask = packed_mask(inputs) if problem.packed else inputs.mask or Everything()
    extent = problem.extent
    if problem.packed:
        extent = Extent(1, problem.heads, inputs.q.shape[0], inputs.k.shape[0])
    alibi = inputs.alibi
    if alibi is not None:
        alibi = alibi.view(-1, problem.heads)[:, heads]
    form = compiled(mask, extent, inputs.q.device)
    return Rules(
        scale=options.scale,
        softcap=options.softcap,
        dropout=options.dropout,
        seed=inputs.seed,
        bias=_bias_of(inputs.bias, heads),
        alibi=alibi,
        sink=None if inputs.sink is None else inputs.sink[heads],
        form=form,
        heads=torch.arange(problem.heads)[heads],
        heads_total=problem.heads,
        packed=mask if isinstance(mask, Packed) else None,
        strict=(problem.packed or inputs.mask is not None) and not all_finite(*strict_on),
    )


def _bias_of(bias: Tensor | None, heads: slice) -> Tensor | None:
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.ndim)]
    return bias[:, heads] if bias.shape[1] > 1 else bias
