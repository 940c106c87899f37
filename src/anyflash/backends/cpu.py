"""CPU: pieces of torch operations, and torch's fused kernel wherever it means the same.

Every feature of the contract. Packed sequences become row intervals over the packed rows, so that
they share one path with documents. Grouped query heads are taken in rounds that have one query head
for each key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.devices import Device
from anyflash.kernels.cpu import backward as backward_kernel
from anyflash.kernels.cpu import forward as forward_kernel
from anyflash.kernels.cpu.scores import Rules
from anyflash.masks.algebra import Everything, Window
from anyflash.masks.compiled import compiled
from anyflash.masks.index import Extent
from anyflash.masks.places import Packed
from anyflash.numerics import accumulation_dtype, all_finite
from anyflash.problem import Gradients, Inputs, Needs, Problem, Saved, packed_mask

name = "cpu"


def refusal(problem: Problem, device: Device) -> str | None:
    if device.type != "cpu":
        return f"tensors are on {device.type}, and this backend computes on the CPU"
    if problem.options.precision == "fp8":
        return "there is no FP8 arithmetic here; leave precision at None"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v = _dense(problem, inputs.q, inputs.k, inputs.v)
    if not _some_work(q, k):
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
        if inputs.sink is not None:
            lse.copy_(inputs.sink.view(1, -1, 1))
    else:
        rules, rounds = _rules(problem, inputs, k, v), _rounds(problem)
        parts = [forward_kernel.forward(q[:, h], k, v, rules.of_heads(h)) for h in rounds]
        out, lse = parts[0]
        if len(rounds) > 1:
            out, lse = (
                torch.empty_like(x).repeat(1, len(rounds), *[1] * (x.ndim - 2)) for x in parts[0]
            )
            for heads, part in zip(rounds, parts, strict=True):
                out[:, heads], lse[:, heads] = part
    return (out[0].transpose(0, 1), lse[0]) if problem.packed else (out, lse)


def backward(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
    q, k, v, out, dout = _dense(problem, inputs.q, inputs.k, inputs.v, saved.out, saved.dout)
    lse, dlse = saved.lse, saved.dlse
    if problem.packed:
        lse, dlse = lse[None], None if dlse is None else dlse[None]
    wide = accumulation_dtype(q.dtype)
    bias = inputs.bias if needs.bias else None
    sink = inputs.sink if needs.sink else None
    dbias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    dsink = None if sink is None else _sink_gradient(sink, out, lse, dout, dlse)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if _some_work(q, k):
        rules, rounds = _rules(problem, inputs, q, k, v, dout), _rounds(problem)
        parts = []
        for heads in rounds:
            mine = Saved(
                out[:, heads],
                lse[:, heads],
                dout[:, heads],
                None if dlse is None else dlse[:, heads],
            )
            some = rules.of_heads(heads)
            part = backward_kernel.backward(q[:, heads], k, v, mine, some, _bias_of(dbias, heads))
            parts.append(part)
        dq, dk, dv = parts[0]
        if len(rounds) > 1:
            dq = torch.empty_like(q)
            for heads, part in zip(rounds, parts, strict=True):
                dq[:, heads] = part[0]
            for part in parts[1:]:
                dk, dv = dk.to(wide) + part[1], dv.to(wide) + part[2]
    if problem.packed:
        dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    return Gradients(
        dq if needs.q else None,
        dk.to(k.dtype) if needs.k else None,
        dv.to(v.dtype) if needs.v else None,
        None if dbias is None or bias is None else dbias.to(bias.dtype),
        None if dsink is None or sink is None else dsink.to(sink.dtype),
    )


def _sink_gradient(
    sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """Σ p_sink·(dlse − dO·O) per head: a sink takes its share of every row, also of empty ones."""
    wide = lse.dtype
    pull = -(dout.to(wide) * out.to(wide)).sum(-1)
    pull = pull if dlse is None else pull + dlse
    return (torch.exp(sink.to(wide).view(-1, 1) - lse) * pull).sum((0, 2))


def _dense(problem: Problem, *tensors: Tensor) -> list[Tensor]:
    """Packed (total, H, ·) as one batch element (1, H, total, ·); dense as it is."""
    return [x.transpose(0, 1)[None] if problem.packed else x for x in tensors]


def _some_work(q: Tensor, k: Tensor) -> bool:
    return bool(q.shape[0] and q.shape[1] and q.shape[2] and k.shape[2])


def _rounds(problem: Problem) -> list[slice]:
    """Query heads in rounds in which head n has key head n: h uses h // (Hq / Hkv)."""
    per_key_head = problem.heads // problem.heads_kv
    return [slice(first, None, per_key_head) for first in range(per_key_head)]


def _rules(problem: Problem, inputs: Inputs, *read: Tensor) -> Rules:
    """The rules of all heads. `read` are the tensors whose masked slots must not leak."""
    options, mask = problem.options, inputs.mask
    extent = problem.extent
    if problem.packed:
        mask = packed_mask(inputs)
        extent = Extent(1, problem.heads, inputs.q.shape[0], inputs.k.shape[0])
    causal = isinstance(mask, Window) and mask.left is None and mask.right == 0
    return Rules(
        scale=options.scale,
        softcap=options.softcap,
        dropout=options.dropout,
        seed=inputs.seed,
        bias=_bias_of(inputs.bias, slice(None)),
        alibi=None if inputs.alibi is None else inputs.alibi.view(-1, max(1, problem.heads)),
        sink=inputs.sink,
        form=compiled(Everything() if mask is None else mask, extent, inputs.q.device),
        full=mask is None,
        causal=causal and extent.queries == extent.keys,
        heads=torch.arange(problem.heads),
        heads_total=problem.heads,
        packed=mask if isinstance(mask, Packed) else None,
        strict=mask is not None and not all_finite(*read),
    )


def _bias_of(bias: Tensor | None, heads: slice) -> Tensor | None:
    """A bias in four dimensions, for some heads."""
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.ndim)]
    return bias[:, heads] if bias.shape[1] > 1 else bias
