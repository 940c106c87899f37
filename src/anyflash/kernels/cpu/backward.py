"""Backward for batches of pieces: five products per tile, dK and dV added where pieces share keys.

FlashAttention-2 (Dao 2023), algorithm 2. delta = rowsum(dO∘O) − dlse carries the gradient of the
log-sum-exp at no further cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.kernels.cpu import flash
from anyflash.kernels.cpu.forward import BUDGET, log_sum, steps
from anyflash.kernels.cpu.pieces import Batch, plan
from anyflash.kernels.cpu.scores import Rules, Tile
from anyflash.numerics import accumulation_dtype
from anyflash.problem import Saved


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    rules: Rules,
    dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for q, k, v of equal head counts, in their dtype or a wider one.

    Adds onto dbias (1|B, 1|H, 1|Sq, 1|Sk) where given, in the accumulation dtype.
    """
    wide = accumulation_dtype(q.dtype)
    fused = flash.serves(q, v, rules) and dbias is None and saved.dlse is None
    if fused and flash.serves_whole(rules):
        bias = flash.whole_bias(q, rules)
        return flash.backward(q, k, v, saved, rules, bias)
    dq, dk, dv = (
        torch.zeros_like(q),
        torch.zeros_like(k, dtype=wide),
        torch.zeros_like(v, dtype=wide),
    )
    for batch in plan(rules.form, q.shape[0], rules.heads, flash.BUDGET if fused else BUDGET):
        rows = Saved(
            batch.rows(saved.out),
            batch.rows(saved.lse.unsqueeze(-1)).squeeze(-1),
            batch.rows(saved.dout),
            None if saved.dlse is None else batch.rows(saved.dlse.unsqueeze(-1)).squeeze(-1),
        )
        work = batch.rows(q), batch.keys(k), batch.keys(v), rows, rules, batch
        part = flash.backward_batch(*work) if fused else backward_batch(*work, dbias)
        batch.write_rows(dq, part[0])
        batch.add_keys(dk, part[1])
        batch.add_keys(dv, part[2])
    return dq, dk, dv


def backward_batch(
    q: Tensor, k: Tensor, v: Tensor, rows: Saved, rules: Rules, batch: Batch, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one batch of pieces, in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    whole = Tile.of(rules, batch, dtype)
    q, k, v, dout = q.to(dtype), k.to(dtype), v.to(dtype), rows.dout.to(dtype)
    queries = whole.queries(q)
    delta = (dout * rows.out.to(dtype)).sum(-1, keepdim=True)
    if rows.dlse is not None:
        delta = delta - rows.dlse.unsqueeze(-1)
    lse = rows.lse.unsqueeze(-1) * whole.unit.per_nat
    if rows.dlse is not None:
        # The fused kernel's lse is good to 20 units in the last place, its exp: not good enough
        # where weights are all there is to the gradient (2.2 times the tolerance at D=128).
        lse = log_sum(queries, k, whole)
    # An empty row has lse −inf; +inf makes every weight of it e^(−inf) = 0.
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for keys in steps(k):
        tile = whole.columns(keys)
        k_tile, v_tile = k[..., keys, :], v[..., keys, :]
        s, bent = tile.scores(queries, k_tile)
        p = tile.unit.power_(s.sub_(lse))
        if rules.strict and tile.hidden is not None:
            p.masked_fill_(tile.hidden, 0)  # −inf − NaN, where a row's lse is not finite
        dp = torch.matmul(dout, v_tile.mT)
        keep = tile.keep(dtype)
        if keep is not None:
            dp.mul_(keep)
        dv[..., keys, :] = tile.product(p if keep is None else p * keep, dout, transposed=True)
        ds = dp.sub_(delta).mul_(p)
        if rules.strict and tile.hidden is not None:
            ds.masked_fill_(tile.hidden, 0)  # 0·NaN where a masked value is not finite
        if dbias is not None:
            tile.add_bias_gradient(dbias, ds)
        if bent is not None:
            ds.mul_(bent.square_().neg_().add_(1))
        ds.mul_(rules.scale)
        dq += tile.product(ds, k_tile)
        dk[..., keys, :] = tile.product(ds, q, transposed=True)
    return dq, dk, dv
