"""Forward: softmax(scores) · V for batches of pieces, online over the keys.

FlashAttention-2 (Dao 2023), algorithm 1, with torch operations as the instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.kernels.cpu import flash
from anyflash.kernels.cpu.pieces import Batch, Budget, plan
from anyflash.kernels.cpu.scores import Rules, Tile, step_of
from anyflash.numerics import accumulation_dtype

# Scores of a step of the online softmax: 2^18 float32 are 1 MB and stay in second-level cache.
STEP = 1 << 18
BUDGET = Budget(blocks=((64, 1.0), (256, 1.0)), call=1 << 17, piece=1 << 13, scores=1 << 21)


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, Dv) in q's dtype and lse (B, H, Sq), for q, k, v of equal head counts."""
    fused = flash.serves(q, v, rules)
    if fused and flash.serves_whole(rules):
        return flash.forward(q, k, v, rules)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    if rules.sink is not None:
        lse.copy_(rules.sink.view(1, -1, 1))  # rows that no piece touches
    budget, step = (flash.BUDGET, flash.forward_batch) if fused else (BUDGET, forward_batch)
    for batch in plan(rules.form, q.shape[0], rules.heads.tolist(), budget):
        part, part_lse = step(batch.rows(q), batch.keys(k), batch.keys(v), rules, batch)
        batch.write_rows(out, part)
        batch.write_rows(lse.unsqueeze(-1), part_lse.unsqueeze(-1))
    return out, lse


def forward_batch(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, batch: Batch
) -> tuple[Tensor, Tensor]:
    """q (N, B, H, R, D), k (N, B, H, C, D), v → out (N, B, H, R, Dv), lse (N, B, H, R)."""
    dtype = accumulation_dtype(q.dtype)
    whole = Tile.of(rules, batch, dtype)
    unit, queries = whole.unit, whole.queries(q.to(dtype))
    if rules.sink is None:
        top = queries.new_full((*q.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(top)
    else:  # one more logit per row, with no value
        sink = batch.heads(rules.sink).to(dtype).unsqueeze(-1) * unit.per_nat
        top = sink.expand(*q.shape[:-1], 1)
        total = torch.ones_like(top)
    out = queries.new_zeros((*q.shape[:-1], v.shape[-1]))
    step = step_of(q, STEP)
    for start in range(0, k.shape[-2], step):
        stop = min(start + step, k.shape[-2])
        tile = whole.columns(start, stop)
        s, _ = tile.scores(queries, k[..., start:stop, :].to(dtype))
        higher = torch.maximum(top, s.amax(-1, keepdim=True))
        finite = torch.where(higher == -torch.inf, 0, higher)  # −inf − −inf would be NaN
        p = unit.power_(s.sub_(finite))
        decay = unit.power_(top - finite)
        total = total * decay + p.sum(-1, keepdim=True)
        keep = tile.keep(dtype)
        part = tile.product(p if keep is None else p.mul_(keep), v[..., start:stop, :].to(dtype))
        out = part.add_(out.mul_(decay))
        top = higher
    # A row with nothing: total is 0 and top −inf, so its lse is −inf and its output 0.
    lse = ((top + unit.log(total)) / unit.per_nat).squeeze(-1)
    return out.div_(torch.where(total == 0, 1, total)), lse
