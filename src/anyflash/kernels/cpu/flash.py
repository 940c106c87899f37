"""torch's own fused CPU kernel, where it gives what anyflash means.

`aten::_scaled_dot_product_flash_attention_for_cpu` must not be used for: scale ≤ 0 with causal
(NaN), anything not finite in masked keys or values (it leaks), a last stride other than 1; its lse
is 0 on rows that attend nothing. It knows neither softcap nor dropout, and takes Dv = D only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.kernels.cpu.masking import additive
from anyflash.kernels.cpu.pieces import Batch, Budget
from anyflash.kernels.cpu.scores import Places, Rules
from anyflash.numerics import accumulation_dtype

# The kernel takes 32, 64 or 256 query rows at a time for under 192, under 768 and more rows: larger
# blocks cost less per score, smaller ones skip more.
BUDGET = Budget(
    blocks=((64, 1.8), (128, 1.4), (256, 1.2), (512, 1.05), (1024, 1.0)),
    overhead=1 << 12,
    scores=1 << 24,
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def serves(q: Tensor, v: Tensor, rules: Rules) -> bool:
    """Whether the fused kernel computes these scores: finite inputs, masks and biases at most."""
    plain = not (rules.softcap or rules.dropout or rules.strict)
    by_sequence = rules.packed is not None and (rules.bias is not None or rules.alibi is not None)
    return plain and not by_sequence and rules.scale > 0 and q.shape[-1] > 0 and v.shape[-1] > 0


def serves_whole(rules: Rules) -> bool:
    """Whether it can take the whole problem in one call: all scores, or exactly causal."""
    return (rules.causal or rules.full) and rules.bias is None and rules.alibi is None


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """The whole problem in one call: q (B, H, Sq, D), k, v (B, H, Sk, ·) → out, lse."""
    out, lse = _forward(*_same_width(q, k, v), 0.0, rules.causal, scale=rules.scale)
    sink = None if rules.sink is None else rules.sink.unsqueeze(-1)
    return _with_sink(out[..., : v.shape[-1]], lse, sink)


def forward_batch(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, batch: Batch
) -> tuple[Tensor, Tensor]:
    """As `forward.forward_batch`."""
    mask = _mask(rules, batch, q.dtype)
    flat = [x.flatten(1, 2) for x in (q, k, v)]
    out, lse = _forward(*_same_width(*flat), 0.0, False, attn_mask=mask, scale=rules.scale)
    out = out[..., : v.shape[-1]]
    if mask is not None and (batch.empty or rules.bias is not None):
        nothing = (mask == -torch.inf).all(-1)
        lse = lse.masked_fill(nothing, -torch.inf)
        out = out.masked_fill(nothing.unsqueeze(-1), 0)
    out, lse = out.unflatten(1, q.shape[1:3]), lse.unflatten(1, q.shape[1:3])
    return _with_sink(out, lse, None if rules.sink is None else batch.heads(rules.sink))


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    scale: float, causal: bool, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of 4-D inputs.

    The gradient of lse enters as one more column: with V' = [V, 1], dO' = [dO, dlse], O' = [O, 0]
    the kernel's dP' − rowsum(dO'∘O') is dP + dlse − delta.
    """
    if dlse is not None:
        one = torch.ones_like(v[..., :1])
        v, dout = torch.cat([v, one], -1), torch.cat([dout, dlse.unsqueeze(-1).to(dout.dtype)], -1)
        out = F.pad(out, (0, 1))
    lse = torch.where(lse == -torch.inf, 0, lse)  # every score of such a row is −inf already
    wide_q, wide_k, wide_v = _same_width(q, k, v)
    pad = (0, wide_v.shape[-1] - v.shape[-1])
    dout, out = (F.pad(x, pad) if pad[1] else x for x in (dout, out))
    dq, dk, dv = _backward(
        dout, wide_q, wide_k, wide_v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    width_v = v.shape[-1] - (dlse is not None)
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., :width_v]


def backward_batch(q: Tensor, k: Tensor, v: Tensor, rows, rules: Rules, batch: Batch):  # type: ignore[no-untyped-def]
    """As `backward.backward_batch`, in the inputs' dtype."""
    flat = [x.flatten(1, 2) for x in (q, k, v, rows.out, rows.lse, rows.dout)]
    dlse = None if rows.dlse is None else rows.dlse.flatten(1, 2)
    mask = _mask(rules, batch, q.dtype)
    grads = backward(*flat, dlse, rules.scale, False, mask)
    return tuple(g.unflatten(1, q.shape[1:3]) for g in grads)


def _mask(rules: Rules, batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as the kernel takes them: added, (pieces or 1, batch·heads or 1, rows, keys)."""
    piece = batch.pieces[0]
    mask = additive(rules.form, batch, dtype).unsqueeze(1) if batch.masked else None
    bias = Places(rules, batch).bias(0, piece.width, accumulation_dtype(dtype))
    if bias is None:
        return mask
    counts = piece.batch[1] - piece.batch[0], piece.heads[1] - piece.heads[0]
    by_head = bias.shape[1] > 1 or bias.shape[2] > 1
    shape = *(counts if by_head else (1, 1)), piece.rows[1] - piece.rows[0], piece.width
    added = bias.expand(len(bias), *shape).flatten(1, 2)
    return added.to(dtype) if mask is None else added.to(dtype) + mask


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k, v with equal last dimensions (zeros change no score) and unit last strides."""
    width = max(q.shape[-1], v.shape[-1])
    padded = [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """A sink is one more logit without a value: it only rescales. `sink` broadcasts to lse."""
    if sink is None:
        return out, lse
    whole = torch.logaddexp(lse, sink.to(lse.dtype))
    return out * torch.exp(lse - whole).unsqueeze(-1).to(out.dtype), whole
