"""Inputs that are not finite: what a query may not see must not reach it, bit for bit.

0·NaN is NaN, so a masked key that holds one would leak through any product. The work is done twice:
once with such keys and rows set to zero, which gives everybody else exactly what they get without
them, and once, with the products of `numerics.visible_product`, for the rows that do see them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anyflash.kernels.cpu import backward as backward_kernel
from anyflash.kernels.cpu import forward as forward_kernel
from anyflash.kernels.cpu.masking import hidden
from anyflash.kernels.cpu.pieces import plan
from anyflash.kernels.cpu.scores import Rules
from anyflash.problem import Saved


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """As `forward.forward`, for keys or values that may not be finite."""
    bad = _bad(k, v)
    out, lse = forward_kernel.forward(q, _without(k, bad), _without(v, bad), rules)
    rows = _rows_that_see(bad, q, rules)
    if rows.any():
        seen_out, seen_lse = forward_kernel.forward(q, k, v, replace(rules, strict=True))
        out = torch.where(rows.unsqueeze(-1), seen_out.to(out.dtype), out)
        lse = torch.where(rows, seen_lse, lse)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, rules: Rules, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward.backward`, for tensors that may not be finite."""
    bad = _bad(k, v)
    rows = _rows_that_see(bad, q, rules) | _bad(q, saved.dout)
    clean_k, clean_v, first = _without(k, bad), _without(v, bad), _only(saved, ~rows)
    clean_q = _without(q, rows)
    dq, dk, dv = backward_kernel.backward(clean_q, clean_k, clean_v, first, rules, dbias)
    if rows.any():
        strict, second = replace(rules, strict=True), _only(saved, rows)
        part = backward_kernel.backward(_without(q, ~rows), k, v, second, strict, dbias)
        dq = torch.where(rows.unsqueeze(-1), part[0].to(dq.dtype), dq)
        dk, dv = dk + part[1], dv + part[2]
    return dq, dk, dv


def _bad(*tensors: Tensor) -> Tensor:
    """Rows (B, H, S) of which some element in some tensor is not finite."""
    return ~torch.stack([torch.isfinite(x).all(-1) for x in tensors]).all(0)


def _without(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows.unsqueeze(-1), 0)


def _only(saved: Saved, rows: Tensor) -> Saved:
    """The results of some rows; the others get gradients of zero and a harmless lse."""
    dlse = None if saved.dlse is None else saved.dlse.masked_fill(~rows, 0)
    lse = saved.lse.masked_fill(~rows, 0)
    return Saved(_without(saved.out, ~rows), lse, _without(saved.dout, ~rows), dlse)


def _rows_that_see(bad: Tensor, q: Tensor, rules: Rules) -> Tensor:
    """Query rows (B, H, Sq) that attend one of the keys `bad` (B, H, Sk)."""
    rows = torch.zeros((*q.shape[:3], 1), dtype=torch.bool, device=q.device)
    for batch in plan(rules.form, q.shape[0], rules.heads, forward_kernel.BUDGET):
        seen = batch.keys(bad.unsqueeze(-1)).mT
        if batch.masked:
            seen = seen & ~hidden(rules.form, batch)[:, None, None]
        height = batch.pieces[0].rows[1] - batch.pieces[0].rows[0]
        some = seen.any(-1, keepdim=True)
        batch.write_rows(rows, some.expand(*some.shape[:3], height, 1))
    return rows.squeeze(-1)
