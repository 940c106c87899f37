"""Forward: softmax(scores) · V for batches of pieces, online over the keys.

FlashAttention-2 (Dao 2023), algorithm 1, with torch operations as the instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.kernels.cpu import flash
from anyflash.kernels.cpu.pieces import Batch, Budget, plan
from anyflash.kernels.cpu.scores import Rules, Tile
from anyflash.numerics import accumulation_dtype

# Keys of a step of the online softmax. Not a matter of batch or heads: what a row gets must not
# depend on its neighbours. 8 heads of 256 rows make 2 MB of scores, the second-level cache.
STEP = 256
BUDGET = Budget(
    blocks=((64, 1.0), (256, 1.0)), call=1 << 17, piece=1 << 13, scores=1 << 21, copied=1 << 11
)


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, Dv) in q's dtype and lse (B, H, Sq), for q, k, v of equal head counts."""
    fused = flash.serves(q, v, rules)
    if fused and flash.serves_whole(rules):
        return flash.forward(q, k, v, rules)
    budget, step = (flash.BUDGET, flash.forward_batch) if fused else (BUDGET, forward_batch)
    work = plan(rules.form, q.shape[0], rules.heads, budget)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    if sum(batch.rows_computed for batch in work) < lse.numel():  # some rows attend nothing
        out.zero_()
        lse.copy_(
            lse.new_full((1,), -torch.inf) if rules.sink is None else rules.sink.view(1, -1, 1)
        )
    for batch in work:
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
    queries = whole.queries(q.to(dtype))
    sums = Sums(queries, whole)
    out = queries.new_zeros((*q.shape[:-1], v.shape[-1]))
    for keys in steps(k):
        tile = whole.columns(keys)
        p, decay = sums.add(tile.scores(queries, k[..., keys, :].to(dtype))[0])
        keep = tile.keep(dtype)
        part = tile.product(p if keep is None else p.mul_(keep), v[..., keys, :].to(dtype))
        out = part.add_(out.mul_(decay))
    # A row with nothing: total is 0 and top −inf, so its lse is −inf and its output 0.
    lse = (sums.log() / whole.unit.per_nat).squeeze(-1)
    return out.div_(torch.where(sums.total == 0, 1, sums.total)), lse


def log_sum(queries: Tensor, k: Tensor, whole: Tile) -> Tensor:
    """log Σ base^score of each row, in units: (N, B, H, R, 1); −inf for a row with nothing."""
    sums = Sums(queries, whole)
    for keys in steps(k):
        sums.add(whole.columns(keys).scores(queries, k[..., keys, :])[0])
    return sums.log()


class Sums:
    """The online softmax: the highest score of each row so far, and Σ base^(score − highest)."""

    def __init__(self, queries: Tensor, whole: Tile) -> None:
        self.unit, sink = whole.unit, whole.sink(queries)  # one more logit, with no value
        self.top = queries.new_full((*queries.shape[:-1], 1), -torch.inf) if sink is None else sink
        self.total = torch.zeros_like(self.top) if sink is None else torch.ones_like(self.top)

    def add(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Take in more scores (overwritten): their weights, and what all earlier ones shrink by."""
        higher = torch.maximum(self.top, s.amax(-1, keepdim=True))
        finite = torch.where(higher == -torch.inf, 0, higher)  # −inf − −inf would be NaN
        p = self.unit.power_(s.sub_(finite))
        decay = self.unit.power_(self.top - finite)
        self.total = self.total * decay + p.sum(-1, keepdim=True)
        self.top = higher
        return p, decay

    def log(self) -> Tensor:
        return self.top + self.unit.log(self.total)


def steps(k: Tensor) -> list[slice]:
    """The keys (N, B, H, C, D) of a piece in steps."""
    return [slice(start, min(start + STEP, k.shape[-2])) for start in range(0, k.shape[-2], STEP)]
