"""Forward: softmax(scores) · V for batches of pieces, online over the keys.

FlashAttention-2 (Dao 2023), algorithm 1, with torch operations as the instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflash.kernels.cpu import flash
from anyflash.kernels.cpu.pieces import Batch, batches
from anyflash.kernels.cpu.scores import Rules, Tile, exp
from anyflash.numerics import accumulation_dtype

# Scores held at a time. 2^19 float32 are 2 MB: they stay in the second-level cache of two cores.
SCORES = 1 << 19
# Keys of a step of the online softmax.
KEYS = 512
BLOCK = 256


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules, out: Tensor, lse: Tensor) -> None:
    """Write out (B, H, Sq, Dv) and lse (B, H, Sq) for q, k, v of equal head counts."""
    fused = flash.serves(q, rules)
    for batch in batches(
        rules.form, q.shape[0], rules.heads.tolist(), BLOCK, flash.SCORES if fused else SCORES
    ):
        step = flash.forward_batch if fused else forward_batch
        o, l = step(batch.rows(q), batch.keys(k), batch.keys(v), rules, batch)
        batch.write_rows(out, o)
        batch.write_rows(lse.unsqueeze(-1), l.unsqueeze(-1))


def forward_batch(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, batch: Batch
) -> tuple[Tensor, Tensor]:
    """q (N, B, H, R, D), k (N, B, H, C, D), v → out (N, B, H, R, Dv), lse (N, B, H, R)."""
    dtype = accumulation_dtype(q.dtype)
    q = q.to(dtype)
    whole = Tile.of(rules, batch, dtype)
    if rules.sink is None:
        top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(top)
    else:  # one more logit per row, with no value
        sink = batch.heads(rules.sink).to(dtype).unsqueeze(-1)
        top = sink.expand(*q.shape[:-1], 1).clone()
        total = torch.ones_like(top)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for start in range(0, k.shape[-2], KEYS):
        stop = min(start + KEYS, k.shape[-2])
        tile = whole.columns(start, stop)
        s, _ = tile.scores(q, k[..., start:stop, :].to(dtype))
        higher = torch.maximum(top, s.amax(-1, keepdim=True))
        finite = torch.where(higher == -torch.inf, 0, higher)  # −inf − −inf would be NaN
        p = exp(s.sub_(finite))
        decay = exp(top - finite)
        total = total * decay + p.sum(-1, keepdim=True)
        keep = tile.keep(dtype)
        weights = p if keep is None else p * keep
        out = out * decay + tile.product(weights, v[..., start:stop, :].to(dtype))
        top = higher
    lse = (top + total.log()).squeeze(-1)  # −inf for a row with nothing: total is 0 and top −inf
    return out / torch.where(total == 0, 1, total), lse
