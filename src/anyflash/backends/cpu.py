"""CPU: pieces of torch operations, and torch's fused kernel wherever it means the same.

Every feature of the contract. Packed sequences become row intervals over the packed rows, so that
they share one path with documents. Grouped query heads are taken in rounds that have one query head
for each key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anyflash.devices import Device
from anyflash.kernels.cpu import backward as backward_kernel
from anyflash.kernels.cpu import forward as forward_kernel
from anyflash.kernels.cpu import isolation
from anyflash.kernels.cpu.scores import Rules
from anyflash.masks.algebra import Everything, Window
from anyflash.masks.compiled import compiled
from anyflash.masks.index import Extent
from anyflash.masks.places import Packed
from anyflash.numerics import accumulation_dtype, all_finite
from anyflash.problem import (
    Gradients,
    Inputs,
    Needs,
    Problem,
    Saved,
    in_four_dimensions,
    packed_mask,
)

name = "cpu"
CPU = torch.device("cpu")


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
        if q.dtype == torch.float16:  # faster in float32: 36 against 30 ms at B1 H8 S2048 D64
            q, k, v = q.float(), k.float(), v.float()
        q, rules, rounds = _upright(q, problem), _rules(problem, inputs), _rounds(problem)
        parts = [forward_kernel.forward(q[:, h], k, v, rules.of_heads(h)) for h in rounds]
        # lse is no witness: it is −inf where a row attends nothing.
        if not rules.full and not _all_finite(rules, [part[:1] for part in parts], (-1,)):
            parts = [isolation.forward(q[:, h], k, v, rules.of_heads(h)) for h in rounds]
        out, lse = parts[0]
        if len(rounds) > 1:
            out, lse = (_empty_with_heads(x, problem.heads) for x in parts[0])
            for heads, part in zip(rounds, parts, strict=True):
                out[:, heads], lse[:, heads] = part
        out = out.to(problem.dtype)
    return (out[0].transpose(0, 1), lse[0]) if problem.packed else (out, lse)


def backward(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
    # In float32 whatever the inputs: torch's fused backward adds 16-bit dK and dV up in 16 bits,
    # three times plain PyTorch's error at S=2048 causal. It costs 1.3 times the time in bfloat16
    # and 0.75 times in float16.
    wide = accumulation_dtype(problem.dtype)
    tensors = (inputs.q, inputs.k, inputs.v, saved.out, saved.dout)
    q, k, v, out, dout = (x.to(wide) for x in _dense(problem, *tensors))
    lse, dlse = saved.lse, saved.dlse
    if problem.packed:
        lse, dlse = lse[None], None if dlse is None else dlse[None]
    bias = inputs.bias if needs.bias else None
    sink = inputs.sink if needs.sink else None
    dbias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    dsink = None if sink is None else _sink_gradient(sink, out, lse, dout, dlse)
    if not _some_work(q, k):
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    else:
        q, rules, rounds = _upright(q, problem), _rules(problem, inputs), _rounds(problem)

        def run(kernel: Callable[..., tuple[Tensor, Tensor, Tensor]], h: slice) -> Any:
            rows = Saved(out[:, h], lse[:, h], dout[:, h], None if dlse is None else dlse[:, h])
            return kernel(q[:, h], k, v, rows, rules.of_heads(h), _bias_of(dbias, h))

        parts = [run(backward_kernel.backward, h) for h in rounds]
        if not rules.full and not _all_finite(rules, parts, (-1, 0, 0)):
            if dbias is not None:
                dbias.zero_()
            parts = [run(isolation.backward, h) for h in rounds]
        dq, dk, dv = parts[0]
        if len(rounds) > 1:
            dq = torch.empty_like(q)
            for heads, part in zip(rounds, parts, strict=True):
                dq[:, heads] = part[0]
            for part in parts[1:]:
                dk, dv = dk + part[1], dv + part[2]
        dq = _upright(dq, problem)
    if problem.packed:
        dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    found = (dq, dk, dv, dbias, dsink)
    return Gradients(
        *(
            g.to(getattr(inputs, name).dtype) if need and g is not None else None
            for g, (name, need) in zip(found, needs._asdict().items(), strict=True)
        )
    )


def _all_finite(rules: Rules, parts: Sequence[Sequence[Tensor]], telling: Sequence[int]) -> bool:
    """Whether results (B, H, S, …) say that no masked slot can have leaked into them.

    What leaks from a slot that is not finite makes the result so, since 0·NaN is NaN. In a causal
    call one row tells of each result: the last query sees every key, and the first key is seen by
    every query. Reading everything would cost 3 % of the call.
    """
    if rules.causal:
        parts = [[x[:, :, row] for x, row in zip(part, telling, strict=True)] for part in parts]
    return all_finite(*(x for part in parts for x in part))


def _upright(q: Tensor, problem: Problem) -> Tensor:
    """Negated for a negative scale, so that every kernel sees a positive one: the same bits."""
    return -q if problem.options.scale < 0 else q


def _empty_with_heads(part: Tensor, heads: int) -> Tensor:
    return part.new_empty((part.shape[0], heads, *part.shape[2:]))


def _sink_gradient(
    sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """Σ p_sink·(dlse − dO·O) per head: a sink takes its share of every row, also of empty ones."""
    wide = lse.dtype
    pull = -(dout.to(wide) * out.to(wide)).sum(-1)
    pull = pull if dlse is None else pull + dlse
    logit = sink.to(wide).view(-1, 1)
    share = torch.exp(logit - torch.where(lse == -torch.inf, torch.inf, lse))
    return (share * pull).sum((0, 2))


def _dense(problem: Problem, *tensors: Tensor) -> list[Tensor]:
    """Packed (total, H, ·) as one batch element (1, H, total, ·); dense as it is."""
    return [x.transpose(0, 1)[None] if problem.packed else x for x in tensors]


def _some_work(q: Tensor, k: Tensor) -> bool:
    return bool(q.shape[0] and q.shape[1] and q.shape[2] and k.shape[2])


def _rounds(problem: Problem) -> list[slice]:
    """Query heads in rounds in which head n has key head n: h uses h // (Hq / Hkv)."""
    per_key_head = problem.heads // problem.heads_kv
    return [slice(first, None, per_key_head) for first in range(per_key_head)]


def _rules(problem: Problem, inputs: Inputs) -> Rules:
    """The rules of all heads."""
    options, mask = problem.options, inputs.mask
    extent = problem.extent
    if problem.packed:
        mask = packed_mask(inputs)
        extent = Extent(1, problem.heads, inputs.q.shape[0], inputs.k.shape[0])
    causal = isinstance(mask, Window) and mask.left is None and mask.right == 0
    return Rules(
        scale=abs(options.scale),
        softcap=options.softcap,
        dropout=options.dropout,
        seed=inputs.seed,
        bias=_bias_of(inputs.bias, slice(None)),
        alibi=None if inputs.alibi is None else inputs.alibi.view(-1, max(1, problem.heads)),
        sink=inputs.sink,
        extent=extent,
        form_of=cache(lambda: compiled(Everything() if mask is None else mask, extent, CPU)),
        full=mask is None,
        causal=causal and extent.queries == extent.keys,
        heads=range(problem.heads),
        heads_total=problem.heads,
        packed=mask if isinstance(mask, Packed) else None,
        strict=False,
    )


def _bias_of(bias: Tensor | None, heads: slice) -> Tensor | None:
    """A bias in four dimensions, for some heads."""
    if bias is None:
        return None
    bias = in_four_dimensions(bias)
    return bias[:, heads] if bias.shape[1] > 1 else bias
