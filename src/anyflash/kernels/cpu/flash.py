"""torch's own fused CPU kernel, where it gives what anyflash means.

`aten::_scaled_dot_product_flash_attention_for_cpu` must not be used for: scale ≤ 0 with causal
(NaN), anything not finite in masked keys or values (it leaks), a last stride other than 1; its lse
is 0 on rows that attend nothing. It knows neither softcap nor dropout, and takes Dv = D only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash.kernels.cpu.masking import additive
from anyflash.kernels.cpu.pieces import Batch, Budget
from anyflash.kernels.cpu.scores import Places, Rules
from anyflash.numerics import accumulation_dtype
from anyflash.problem import Saved

# The kernel takes 32, 64 or 256 query rows at a time for under 192, under 768 and more rows: larger
# blocks cost less per score, smaller ones skip more. Costs are those of a masked score at D=64 on
# two AVX-512 cores, 256 rows = 1 (0.99 ns); a call costs about 0.25 ms, most of it Python run from
# caches that the call before has emptied.
BUDGET = Budget(
    blocks=((64, 1.22), (128, 1.15), (192, 1.05), (256, 1.0), (512, 1.02), (1024, 1.0)),
    call=1 << 18,
    piece=1 << 13,
    scores=1 << 24,
    copied=1 << 11,
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def serves(q: Tensor, v: Tensor, rules: Rules) -> bool:
    """Whether the fused kernel computes these scores: finite inputs, masks and biases at most."""
    plain = not (rules.softcap or rules.dropout or rules.strict)
    by_sequence = rules.packed is not None and (rules.bias is not None or rules.alibi is not None)
    scaled = rules.scale >= torch.finfo(torch.float32).tiny  # below, it is 0 in the kernel
    return plain and not by_sequence and scaled and q.shape[-1] > 0 and v.shape[-1] > 0


def serves_whole(rules: Rules) -> bool:
    """Whether it can take the whole problem in one call: all scores, or exactly causal."""
    return rules.alibi is None and (rules.full or (rules.causal and rules.bias is None))


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """The whole problem in one call: q (B, H, Sq, D), k, v (B, H, Sk, ·) → out, lse."""
    bias = whole_bias(q, rules)
    inputs = _same_width(q, k, v)
    out, lse = _forward(*inputs, 0.0, rules.causal, attn_mask=bias, scale=rules.scale)
    out, lse = _without_empty_rows(out[..., : v.shape[-1]], lse, bias)
    return _with_sink(out, lse, None if rules.sink is None else rules.sink.unsqueeze(-1))


def forward_batch(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, batch: Batch
) -> tuple[Tensor, Tensor]:
    """As `forward.forward_batch`."""
    mask = _mask(rules, batch, q.dtype)
    flat = [x.flatten(1, 2) for x in (q, k, v)]
    out, lse = _forward(*_same_width(*flat), 0.0, False, attn_mask=mask, scale=rules.scale)
    out = out[..., : v.shape[-1]]
    if batch.empty or rules.bias is not None:
        out, lse = _without_empty_rows(out, lse, mask)
    out, lse = out.unflatten(1, q.shape[1:3]), lse.unflatten(1, q.shape[1:3])
    return _with_sink(out, lse, None if rules.sink is None else batch.heads(rules.sink))


def backward(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, rules: Rules, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of 4-D inputs; `mask` is added, else causal if the rules are. No gradient of lse:
    where it is all there is, the kernel's exp (20 units in the last place) exceeds the tolerance.
    """
    lse = torch.where(saved.lse == -torch.inf, 0, saved.lse)  # such a row's scores are all −inf
    wide_q, wide_k, wide_v = _same_width(q, k, v)
    dout, out = (_widened(x, wide_v.shape[-1]) for x in (saved.dout, saved.out))
    causal = rules.causal and mask is None
    dq, dk, dv = _backward(
        dout, wide_q, wide_k, wide_v, out, lse, 0.0, causal, attn_mask=mask, scale=rules.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def backward_batch(
    q: Tensor, k: Tensor, v: Tensor, rows: Saved, rules: Rules, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward.backward_batch`."""
    saved = Saved(rows.out.flatten(1, 2), rows.lse.flatten(1, 2), rows.dout.flatten(1, 2), None)
    # Pieces have their own mask: where there is none, all of their scores are attended.
    uncut, mask = replace(rules, causal=False), _mask(rules, batch, q.dtype)
    dq, dk, dv = backward(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), saved, uncut, mask)
    shape = q.shape[1:3]
    return dq.unflatten(1, shape), dk.unflatten(1, shape), dv.unflatten(1, shape)


def _mask(rules: Rules, batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias as the kernel adds them: (pieces or 1, batch·heads or 1, rows, keys).

    A mask is exact in any dtype; a bias stays in float32, which the kernel takes beside 16 bits.
    """
    piece = batch.pieces[0]
    dtype = (
        accumulation_dtype(dtype) if rules.bias is not None or rules.alibi is not None else dtype
    )
    mask = additive(rules.form, batch, dtype).unsqueeze(1) if batch.masked else None
    bias = Places(rules, batch).bias(0, piece.width, dtype)
    if bias is None:
        return mask
    counts = piece.batch[1] - piece.batch[0], piece.heads[1] - piece.heads[0]
    by_head = bias.shape[1] > 1 or bias.shape[2] > 1
    shape = *(counts if by_head else (1, 1)), piece.rows[1] - piece.rows[0], piece.width
    added = bias.expand(len(bias), *shape).flatten(1, 2)
    return added if mask is None else added + mask


def whole_bias(q: Tensor, rules: Rules) -> Tensor | None:
    """The bias as the kernel reads it in place, broadcast or not: in q's dtype, or in float32
    beside 16 bits (beside float64 it would read a float32 one as if it were wider)."""
    bias = rules.bias
    return bias if bias is None or bias.dtype == q.dtype else bias.to(accumulation_dtype(q.dtype))


def _without_empty_rows(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel's lse is 0 where a row's scores are all −inf; ours is −inf."""
    if mask is None:
        return out, lse
    nothing = (mask.amax(-1) == -torch.inf).expand(lse.shape)
    if not nothing.any():
        return out, lse
    return out.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -torch.inf)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """q, k, v with equal last dimensions (zeros change no score) and unit last strides."""
    width = max(x.shape[-1] for x in tensors)
    padded = [_widened(x, width) for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """A sink is one more logit without a value: it only rescales. `sink` broadcasts to lse."""
    if sink is None:
        return out, lse
    whole = torch.logaddexp(lse, sink.to(lse.dtype))
    share = torch.exp(lse - torch.where(whole == -torch.inf, 0, whole))
    return out * share.unsqueeze(-1).to(out.dtype), whole
