"""Attention as it is written in a textbook: the meaning that every backend is tested against.

Explicit scores (B, Hq, Sq, Sk) in float64, or float32 where asked. Unfused on purpose: it is served
only by name (`backend="reference"`). The mask is read from its boolean formula, never from the
compiled forms that kernels read, and packed sequences are computed one by one.

`double_backward` is what every backend uses: it works in strips of query rows, so that its memory
is O(S) too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.masks import from_tensor
from anyflash.masks.index import Extent, grid
from anyflash.numerics import visible_product
from anyflash.problem import Gradients, Inputs, Options, in_four_dimensions
from anyflash.rng import keep_elements

STRIP = 128  # query rows of a strip in double backward


class Weights(NamedTuple):
    """One strip of rows: what the softmax made of the scores. All (B, Hq, rows, Sk)."""

    p: Tensor
    lse: Tensor  # (B, Hq, rows)
    slope: Tensor | None  # derivative of the softcap
    visible: Tensor | None
    keep: Tensor | None  # 0 or 1/(1 − dropout)


class Sequence(NamedTuple):
    """A dense problem: a whole call, or one sequence of a packed one."""

    inputs: Inputs
    number: int = 0  # of its first batch element: dropout counts heads from there
    rows: slice = slice(None)
    keys: slice = slice(None)


def forward(inputs: Inputs, options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) and lse (B, Hq, Sq) in `dtype`; packed (total, Hq, Dv), (Hq, total)."""
    if not inputs.packed:
        one = Sequence(_widen(inputs, dtype))
        weights = _weights(one, options, slice(0, inputs.q.shape[2]))
        return _output(one.inputs, weights), weights.lse
    out = inputs.q.new_zeros((*inputs.q.shape[:2], inputs.v.shape[2]), dtype=dtype)
    lse = inputs.q.new_zeros((inputs.q.shape[1], inputs.q.shape[0]), dtype=dtype)
    for one in _sequences(_widen(inputs, dtype)):
        weights = _weights(one, options, slice(0, one.inputs.q.shape[2]))
        out[one.rows] = _output(one.inputs, weights)[0].transpose(0, 1)
        lse[:, one.rows] = weights.lse[0]
    return out, lse


def backward(
    inputs: Inputs, options: Options, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype
) -> Gradients:
    """Gradients of q, k, v, bias and sink in `dtype`, each in its tensor's shape."""
    wide = _widen(inputs, dtype)
    dout, dlse = dout.to(dtype), None if dlse is None else dlse.to(dtype)
    if not inputs.packed:
        return _backward_rows(Sequence(wide), options, dout, dlse, slice(0, inputs.q.shape[2]))
    total = _zeros_like(wide)
    for one in _sequences(wide):
        part_out, part_lse = _rows_of(one, dout, dlse)
        rows = slice(0, one.inputs.q.shape[2])
        _add(total, _backward_rows(one, options, part_out, part_lse, rows), one)
    return total


def double_backward(
    inputs: Inputs,
    options: Options,
    dout: Tensor,
    dlse: Tensor | None,
    incoming: Gradients,
    dtype: torch.dtype,
) -> tuple[Gradients, Tensor, Tensor | None]:
    """The gradients of sum(incoming · backward(...)) with respect to inputs, dout and dlse.

    A strip of query rows at a time: O(S) memory.
    """
    wide = _widen(inputs, dtype)
    weights = Gradients(*[None if g is None else g.to(dtype) for g in incoming])
    dout, dlse = dout.to(dtype), None if dlse is None else dlse.to(dtype)
    total, ddout = _zeros_like(wide), torch.zeros_like(dout)
    ddlse = None if dlse is None else torch.zeros_like(dlse)
    for one in _sequences(wide) if inputs.packed else [Sequence(wide)]:
        part_out, part_lse = _rows_of(one, dout, dlse) if inputs.packed else (dout, dlse)
        place_out, place_lse = _rows_of(one, ddout, ddlse) if inputs.packed else (ddout, ddlse)
        part_weights = _cut(weights, one) if inputs.packed else weights
        for start in range(0, one.inputs.q.shape[2], STRIP):
            rows = slice(start, min(start + STRIP, one.inputs.q.shape[2]))
            gradients, rows_out, rows_lse = _double_backward_rows(
                one,
                options,
                part_out[:, :, rows],
                None if part_lse is None else part_lse[:, :, rows],
                part_weights,
                rows,
            )
            _add(total, gradients, one)
            place_out[:, :, rows] += rows_out
            if place_lse is not None:
                place_lse[:, :, rows] += rows_lse
    return total, ddout, ddlse


def _double_backward_rows(
    one: Sequence,
    options: Options,
    dout: Tensor,
    dlse: Tensor | None,
    incoming: Gradients,
    rows: slice,
) -> tuple[Gradients, Tensor, Tensor]:
    """What flows back through `_backward_rows`, for weights xq, xk, xv, xb, xs of its results.

    With a = scale·q·kᵀ, slope g(a), weights P, kept K, dP = K∘(dO·Vᵀ), dS = P∘(dP − delta), the
    weighted sum of the gradients is

        F = Σ dS∘M + Σ P∘K∘(dO·xvᵀ) − Σ xs·p_sink·delta,   M = scale·g∘(xq·kᵀ + q·xkᵀ) + xb,

    and everything below is its derivative, from the last product back to the inputs.
    """
    inputs, weights = one.inputs, _weights(one, options, rows)
    heads, heads_kv = inputs.q.shape[1], inputs.k.shape[1]
    p, seen, slope, keep = weights.p, weights.visible, weights.slope, weights.keep
    mirrored = None if seen is None else seen.mT
    q, k, v = inputs.q[:, :, rows], _for_queries(inputs.k, heads), _for_queries(inputs.v, heads)
    xq, xk, xv, xb, xs = incoming
    xq = torch.zeros_like(q) if xq is None else xq[:, :, rows]
    xk = torch.zeros_like(k) if xk is None else _for_queries(xk, heads)
    xv = torch.zeros_like(v) if xv is None else _for_queries(xv, heads)

    def attended(x: Tensor) -> Tensor:
        return x if seen is None else torch.where(seen, x, 0)

    def kept(x: Tensor) -> Tensor:
        return x if keep is None else x * keep

    dp, w = attended(kept(dout @ v.mT)), attended(kept(dout @ xv.mT))
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.unsqueeze(-1)
    ds = p * (dp - delta)
    u = attended(xq @ k.mT + q @ xk.mT) * options.scale
    m = u if slope is None else u * slope
    if xb is not None:
        xb = in_four_dimensions(xb)
        m = m + (xb if xb.shape[2] == 1 else xb[:, :, rows])
    r = (p * m).sum(-1, keepdim=True)
    p_sink = p_sink_bar = torch.zeros_like(r)
    if inputs.sink is not None:
        p_sink = _sink_share(inputs.sink, weights.lse).unsqueeze(-1)
        if xs is not None:
            r = r + xs.view(-1, 1, 1) * p_sink
            p_sink_bar = -xs.view(-1, 1, 1) * delta
    z_bar = attended(kept(p * (m - r)))
    p_bar = (dp - delta) * m + w - r * dp
    rho = (p * p_bar).sum(-1, keepdim=True) + p_sink * p_sink_bar
    s_bar = attended(p * (p_bar - rho))
    a_bar = s_bar
    da = ds
    if slope is not None:
        # g = 1 − t² with t = tanh(a/c), so g' = −2·t·g/c; the sign of t is the score's own.
        t = torch.tanh(attended(q @ k.mT * options.scale) / options.softcap)
        a_bar = s_bar * slope - ds * u * 2 * t * slope / options.softcap
        da = ds * slope
    a_bar, da = a_bar * options.scale, da * options.scale
    dq = visible_product(a_bar, k, seen) + visible_product(da, xk, seen)
    dk = visible_product(a_bar.mT, q, mirrored) + visible_product(da.mT, xq, mirrored)
    ddout = visible_product(z_bar, v, seen) + visible_product(kept(p), xv, seen)
    dv = visible_product(z_bar.mT, dout, mirrored)
    dsink = None
    if inputs.sink is not None:
        dsink = (p_sink * (p_sink_bar - rho)).sum((0, 2, 3))
    gradients = Gradients(
        _placed(dq, inputs.q.shape[2], rows.start),
        _for_keys(dk, heads_kv),
        _for_keys(dv, heads_kv),
        _bias_gradient(inputs, s_bar, rows),
        dsink,
    )
    return gradients, ddout, r.squeeze(-1)


_NAMES = ("q", "k", "v", "bias", "sink")


def _zeros_like(inputs: Inputs) -> Gradients:
    return Gradients(*[None if x is None else torch.zeros_like(x) for x in _leaves(inputs)])


def _rows_of(one: Sequence, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Packed dout (total, H, Dv) and dlse (H, total): views (1, H, rows, Dv) and (1, H, rows)."""
    return dout[one.rows].transpose(0, 1)[None], None if dlse is None else dlse[None, :, one.rows]


def _cut(total: Gradients, one: Sequence) -> Gradients:
    """The part of packed gradients that belongs to one sequence, as views in its dense shapes."""
    places = (one.rows, one.keys, one.keys)
    q, k, v = (
        None if x is None else x[s].transpose(0, 1)[None]
        for x, s in zip(total[:3], places, strict=True)
    )
    bias = total.bias
    if bias is not None and one.inputs.bias is not None:
        full = in_four_dimensions(bias)
        b = one.number if full.shape[0] > 1 else 0
        bias = full[b : b + 1, :, : one.inputs.bias.shape[2], : one.inputs.bias.shape[3]]
    return Gradients(q, k, v, bias, total.sink)


def _add(total: Gradients, part: Gradients, one: Sequence) -> None:
    """Add a dense problem's gradients where they belong."""
    for whole, piece in zip(
        _cut(total, one) if one.rows != slice(None) else total, part, strict=True
    ):
        if whole is not None and piece is not None:
            whole += piece.view(whole.shape)


def _leaves(inputs: Inputs) -> list[Tensor | None]:
    return [getattr(inputs, name) for name in _NAMES]


def _widen(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    names = (*_NAMES, "alibi")
    return inputs._replace(
        **{n: t.to(dtype) for n in names if (t := getattr(inputs, n)) is not None}
    )


def _weights(one: Sequence, options: Options, rows: slice) -> Weights:
    """Scores and softmax of some query rows, in the dtype of the inputs."""
    inputs = one.inputs
    q, k = inputs.q[:, :, rows], inputs.k
    batch, heads, queries, keys = (
        inputs.q.shape[0],
        inputs.q.shape[1],
        inputs.q.shape[2],
        k.shape[2],
    )
    at = grid(
        Extent(batch, heads, queries, keys),
        slice(rows.start, rows.start + q.shape[2]),
        slice(0, keys),
        q.device,
    )
    s = q @ _for_queries(k, heads).mT * options.scale
    slope = None
    if options.softcap:
        t = torch.tanh(s / options.softcap)
        s, slope = options.softcap * t, 1 - t * t
    if inputs.bias is not None:
        bias = in_four_dimensions(inputs.bias)
        s = s + (bias if bias.shape[2] == 1 else bias[:, :, rows])
    if inputs.alibi is not None:
        slopes = inputs.alibi[..., None, None]
        s = s - slopes * (at.row + at.offset - at.key).abs()
    visible = None
    if inputs.mask is not None:
        visible = inputs.mask.visible(at).expand(s.shape)
        s = torch.where(visible, s, -torch.inf)
    logits = s
    if inputs.sink is not None:
        sink = inputs.sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        logits = torch.cat([s, sink], -1)
    top = logits.detach().amax(-1) if logits.shape[-1] else s.new_full(s.shape[:3], -torch.inf)
    top = torch.where(top == -torch.inf, 0, top).unsqueeze(-1)
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    lse = total.log() + top
    p = torch.where(total == 0, 0, torch.exp(s - top) / torch.where(total == 0, 1, total))
    if visible is not None:  # a row that sees a NaN is NaN only where it sees
        p = torch.where(visible, p, 0)
        slope = None if slope is None else torch.where(visible, slope, 0)
    keep = None
    if options.dropout and inputs.seed is not None:
        kept = keep_elements(
            inputs.seed, (at.batch + one.number) * heads + at.head, at.row, at.key, options.dropout
        )
        keep = (
            kept.to(s.dtype) / (1 - options.dropout) if options.dropout < 1 else torch.zeros_like(s)
        )
    return Weights(p, lse.squeeze(-1), slope, visible, keep)


def _output(inputs: Inputs, weights: Weights) -> Tensor:
    kept = weights.p if weights.keep is None else weights.p * weights.keep
    return visible_product(kept, _for_queries(inputs.v, kept.shape[1]), weights.visible)


def _backward_rows(
    one: Sequence, options: Options, dout: Tensor, dlse: Tensor | None, rows: slice
) -> Gradients:
    """The gradients that flow through some query rows; dq is zero in all the others."""
    inputs = one.inputs
    heads, heads_kv = inputs.q.shape[1], inputs.k.shape[1]
    weights = _weights(one, options, rows)
    p, seen = weights.p, weights.visible
    q, k, v = inputs.q[:, :, rows], _for_queries(inputs.k, heads), _for_queries(inputs.v, heads)
    delta = (dout * _output(inputs, weights)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.unsqueeze(-1)
    dp = dout @ v.mT
    kept = p
    if weights.keep is not None:
        kept, dp = p * weights.keep, dp * weights.keep
    ds = p * (dp - delta)
    if seen is not None:
        ds = torch.where(seen, ds, 0)
    dsink = None
    if inputs.sink is not None:
        dsink = -(_sink_share(inputs.sink, weights.lse).unsqueeze(-1) * delta).sum((0, 2, 3))
    weighted = ds
    ds = (ds if weights.slope is None else ds * weights.slope) * options.scale
    mirrored = None if seen is None else seen.mT
    return Gradients(
        _placed(visible_product(ds, k, seen), inputs.q.shape[2], rows.start),
        _for_keys(visible_product(ds.mT, q, mirrored), heads_kv),
        _for_keys(visible_product(kept.mT, dout, mirrored), heads_kv),
        _bias_gradient(inputs, weighted, rows),
        dsink,
    )


def _sink_share(sink: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(sink.view(-1, 1) - torch.where(lse == -torch.inf, torch.inf, lse))


def _bias_gradient(inputs: Inputs, ds: Tensor, rows: slice) -> Tensor | None:
    """ds of some rows summed over what the bias broadcasts, in the bias' shape."""
    if inputs.bias is None:
        return None
    bias = in_four_dimensions(inputs.bias)
    shape = [1 if b == 1 else d for b, d in zip(bias.shape, ds.shape, strict=True)]
    dbias = ds.sum_to_size(shape)
    if bias.shape[2] > 1:
        dbias = _placed(dbias, bias.shape[2], rows.start)
    return dbias.view(inputs.bias.shape)


def _placed(part: Tensor, length: int, start: int) -> Tensor:
    """Rows `part` at `start` of an otherwise zero tensor with `length` rows."""
    return torch.nn.functional.pad(part, (0, 0, start, length - start - part.shape[2]))


def _for_queries(x: Tensor, heads: int) -> Tensor:
    """Key heads repeated for the query heads that share them: h uses h // (Hq / Hkv)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _for_keys(x: Tensor, heads_kv: int) -> Tensor:
    return x if x.shape[1] == heads_kv else x.unflatten(1, (heads_kv, -1)).sum(2)


def _sequences(inputs: Inputs) -> list[Sequence]:
    """Each packed sequence as a dense problem of its own, with its rows and keys."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return []
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    used = None if inputs.seqused_k is None else inputs.seqused_k.tolist()
    found = []
    for n in range(len(starts_q) - 1):
        rows = slice(starts_q[n], starts_q[n + 1])
        keys = slice(starts_k[n], starts_k[n + 1] if used is None else starts_k[n] + used[n])
        q, k, v = (
            x[s].transpose(0, 1)[None]
            for x, s in ((inputs.q, rows), (inputs.k, keys), (inputs.v, keys))
        )
        bias, alibi, mask = inputs.bias, inputs.alibi, inputs.mask
        if bias is not None:
            bias = in_four_dimensions(bias)
            bias = bias[n : n + 1] if bias.shape[0] > 1 else bias
            bias = bias[:, :, : q.shape[2], : k.shape[2]]
        if alibi is not None and alibi.ndim == 2:
            alibi = alibi[n : n + 1]
        if mask is not None:  # as the mask sees batch element n with this sequence's lengths
            extent = Extent(n + 1, q.shape[1], q.shape[2], k.shape[2])
            at = grid(extent, slice(0, extent.queries), slice(0, extent.keys), q.device)
            seen = mask.visible(at._replace(batch=at.batch[-1:], box=None))
            mask = from_tensor(seen.expand(1, *extent[1:]))
        one = Inputs(q, k, v, bias=bias, alibi=alibi, sink=inputs.sink, seed=inputs.seed, mask=mask)
        found.append(Sequence(one, n, rows, keys))
    return found
