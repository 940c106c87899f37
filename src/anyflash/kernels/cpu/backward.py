"""Backward for batches of pieces: five products per tile, dK and dV added where pieces share keys.

FlashAttention-2 (Dao 2023), algorithm 2. delta = rowsum(dO∘O) − dlse carries the gradient of the
log-sum-exp at no further cost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.kernels.cpu import flash
from anyflash.kernels.cpu.forward import BLOCK, KEYS, SCORES
from anyflash.kernels.cpu.pieces import Batch, batches
from anyflash.kernels.cpu.scores import Rules, Tile, bias_index, exp
from anyflash.numerics import accumulation_dtype


class Outputs(NamedTuple):
    """Where gradients go: accumulated in float32 or wider, views of the query heads at hand."""

    dq: Tensor  # (B, H, Sq, D)
    dk: Tensor  # (B, H, Sk, D)
    dv: Tensor  # (B, H, Sk, Dv)
    dbias: Tensor | None  # the bias' own shape
    dsink: Tensor | None  # (H,)


class Saved(NamedTuple):
    """What forward left and what came back from the loss."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def backward(q: Tensor, k: Tensor, v: Tensor, saved: Saved, rules: Rules, to: Outputs) -> None:
    """Add the gradients of q, k, v of equal head counts onto `to`."""
    if to.dsink is not None and rules.sink is not None:
        dot = (saved.dout.to(saved.lse.dtype) * saved.out.to(saved.lse.dtype)).sum(-1)
        delta = dot if saved.dlse is None else dot - saved.dlse
        weight = torch.exp(rules.sink.to(saved.lse.dtype).view(-1, 1) - saved.lse)
        to.dsink.sub_((weight * delta).sum((0, 2)))
    fused = flash.serves(q, rules) and to.dbias is None
    for batch in batches(
        rules.form, q.shape[0], rules.heads.tolist(), BLOCK, flash.SCORES if fused else SCORES
    ):
        rows = Saved(
            batch.rows(saved.out),
            batch.rows(saved.lse.unsqueeze(-1)).squeeze(-1),
            batch.rows(saved.dout),
            None if saved.dlse is None else batch.rows(saved.dlse.unsqueeze(-1)).squeeze(-1),
        )
        arguments = batch.rows(q), batch.keys(k), batch.keys(v), rows, rules, batch
        dq, dk, dv = (
            flash.backward_batch(*arguments) if fused else backward_batch(*arguments, to.dbias)
        )
        batch.write_rows(to.dq, dq)
        batch.add_keys(to.dk, dk)
        batch.add_keys(to.dv, dv)


def backward_batch(
    q: Tensor, k: Tensor, v: Tensor, rows: Saved, rules: Rules, batch: Batch, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one batch of pieces, in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    q, k, v, dout = q.to(dtype), k.to(dtype), v.to(dtype), rows.dout.to(dtype)
    delta = (dout * rows.out.to(dtype)).sum(-1, keepdim=True)
    if rows.dlse is not None:
        delta = delta - rows.dlse.unsqueeze(-1)
    lse = rows.lse.unsqueeze(-1)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)  # an empty row: every weight e^(−inf) = 0
    whole = Tile.of(rules, batch, dtype)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for start in range(0, k.shape[-2], KEYS):
        keys = slice(start, min(start + KEYS, k.shape[-2]))
        tile = whole.columns(keys.start, keys.stop)
        k_tile, v_tile = k[..., keys, :], v[..., keys, :]
        s, slope = tile.scores(q, k_tile)
        p = exp(s.sub_(lse))
        dp = torch.matmul(dout, v_tile.mT)
        keep = tile.keep(dtype)
        if keep is not None:
            dp = dp * keep
        dv[..., keys, :] = tile.product(p if keep is None else p * keep, dout, transposed=True)
        ds = dp.sub_(delta).mul_(p)
        if rules.strict and tile.seen is not None:
            ds.masked_fill_(~tile.seen, 0)  # 0·NaN where a masked value is not finite
        if dbias is not None and tile.at is not None:
            dbias.index_put_(
                bias_index(dbias, tile.at), *_reduced(ds, dbias, tile), accumulate=True
            )
        ds = (ds if slope is None else ds * slope).mul_(rules.scale)
        dq += tile.product(ds, k_tile)
        dk[..., keys, :] = tile.product(ds, q, transposed=True)
    return dq, dk, dv


def _reduced(ds: Tensor, dbias: Tensor, tile: Tile) -> tuple[Tensor]:
    """ds summed over the dimensions along which its bias index does not vary."""
    index = torch.broadcast_shapes(*(i.shape for i in bias_index(dbias, tile.at)))  # type: ignore[arg-type]
    return (ds.sum_to_size(index),)
