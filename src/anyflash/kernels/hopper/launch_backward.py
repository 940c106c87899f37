"""From tensors to launches: the backward pass."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash.kernels.hopper import launch, launch_stored
from anyflash.kernels.hopper.algorithms import (
    ALL,
    Call,
    Options,
    chosen,
    is_triangle,
    tiles_of,
)
from anyflash.kernels.hopper.backward import ROWS, Flags, Numbers, backward_kernel
from anyflash.kernels.hopper.launch import SCALES, Heads, Lengths, Starts
from anyflash.kernels.hopper.launcher import Kernel, Operand
from anyflash.kernels.hopper.operands import (
    KEPT,
    describe,
    describe_ragged,
    describe_rows,
    describe_tiles,
    granules_of,
    in_place,
)
from anyflash.kernels.hopper.softmax import LOG2E
from anyflash.kernels.hopper.statistics import STATISTICS, statistics_kernel
from anyflash.kernels.hopper.statistics import Flags as StatisticsFlags
from anyflash.kernels.hopper.stored import Layout
from anyflash.kernels.hopper.tiles import WIDTHS
from anyflash.kernels.hopper.tiles_backward import STATISTICS_ROWS, Split, Stored, Walk
from anyflash.problem import Gradients, Needs, Saved
from anyflash.rng import keep_threshold

BACKWARD = Kernel(backward_kernel)
ROW_STATISTICS = Kernel(statistics_kernel)


def backward(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, needs: Needs = ALL, **options: Any
) -> Gradients:
    """Gradients of `launch.forward`.

    Args:
        q, k, v, options: as for forward; the sink, which is in lse, only if its gradient is asked
            for.
        saved: out (B, Hq, Sq, Dv) and lse (B, Hq, Sq) of forward; their gradients, dout in q's
            dtype and any strides, dlse float32 or None.
        needs: which gradients are asked for; the others cost nothing. Not `bias`.
        query_tiles: with `bounds`, int32 (1 or B, ⌈Sk / 64⌉, 2): the query tiles [first, last) of
            64 rows that may see some of 64 keys.
        algorithm: "split"; "fused", which adds dQ up in memory, in an order that is another one in
            each run; "stored", which keeps dS in memory. What the latter two do not serve (see
            `algorithms.chosen`) is split. None chooses the fastest.
        deterministic: among those whose results are bitwise the same in each run.
        split, fused, stored: None chooses from the table.
        scratch: bytes that "stored" may have for dS.

    Returns:
        dq, dk, dv, shaped as q, k, v, in their dtype, with heads inside of the sequence in memory;
        dsink (Hq,), float32. Products are accumulated in float32, weights and dS rounded to q's
        dtype for the products that they enter. Rows that see nothing, and keys that nobody sees,
        have 0.

    Weights are 2^(score · log2 e − lse): of scores beyond 2^20 they have lost digits, as lse has,
    and beyond 2^30 all of them. What forward says of values that a row does not see holds for dq by
    "split"; for dk, dv and all of the others, what lies beyond the keys of a sequence, or beyond
    the last key that any of its queries sees, has no effect.
    """
    return _launch(q, k, v, saved, needs, None, launch.dense_lengths(q, k), Options(**options))


def backward_packed(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, needs: Needs = ALL, **options: Any,
) -> Gradients:  # fmt: skip
    """`backward` of sequences that lie one behind the other: of `launch.forward_packed`.

    Args:
        saved: out (total_q, Hq, Dv), lse (Hq, total_q) and so on.
        query_tiles: (1, ⌈total_k / 64⌉, 2), of rows of all sequences.
        max_seqlen_q: as for forward; "stored", if it is asked for, is wrong if it is too small.

    Returns:
        dq, dk, dv; unused keys have 0.
    """
    given = cu_seqlens_q, cu_seqlens_k, seqused_k
    starts, lengths = launch.packed_lengths(q, k, given, max_seqlen_q, max_seqlen_k)
    return _launch(q, k, v, saved, needs, starts, lengths, Options(**options))


def _launch(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, needs: Needs, starts: Starts | None,
    lengths: Lengths, o: Options,
) -> Gradients:  # fmt: skip
    inputs = zip((q, k, v), needs[:3], strict=True)
    dq, dk, dv = (_gradient(x, starts) if needed else None for x, needed in inputs)
    sink = o.sink if needs.sink else None
    if 0 in (q.numel(), k.numel()):
        dq, dk, dv = (None if x is None else x.zero_() for x in (dq, dk, dv))
        dsink = None if sink is None else _of_sinks_alone(sink, saved.dlse)
        return Gradients(dq, dk, dv, None, dsink)
    dout = in_place(saved.dout)
    statistics = _statistics(saved, dout, starts, lengths)
    dsink = None if sink is None else _sink_gradient(sink, statistics, tiles_of(lengths))
    q, k, v = in_place(q), in_place(k), in_place(v)
    o = _with_intervals(o, lengths)
    ends = None if o.bounds is None else _ends(o.bounds, starts, lengths)
    call = Call(lengths, starts, o, statistics, ends, q.shape[1], k.shape[1])
    heads = Heads(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.device)
    _, kernels = chosen(o, lengths, heads, needs)
    tensors, found = (q, k, v, dout), (dq, dk, dv)
    if isinstance(kernels, Split):
        _split(call, kernels, tensors, found)
    elif dq is not None and dk is not None and dv is not None:  # or it would have been split
        if isinstance(kernels, Stored):
            _stored(call, kernels, tensors, (dq, dk, dv))
        else:
            sums = _gradient(q, starts, torch.float32)
            _walk(call, kernels, True, (k, v, q, dout), dk, dv, sums)
            dq.copy_(sums)
    return Gradients(dq, dk, dv, None, dsink)


Four = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dout; or X, X', Y, Y'


def _split(call: Call, kernels: Split, tensors: Four, found: tuple[Tensor | None, ...]) -> None:
    (q, k, v, dout), (dq, dk, dv) = tensors, found
    of_keys = (k, v, q, dout)
    if dq is not None:
        _walk(call, kernels.queries, False, (q, dout, k, v), dq, None)
    if dk is not None and dv is not None and kernels.keys is not None:
        _walk(call, kernels.keys, True, of_keys, dk, dv)
        return
    if dk is not None:
        _walk(call, kernels.key, True, of_keys, dk, None)
    if dv is not None:
        _walk(call, kernels.value, True, of_keys, None, dv)


def _stored(
    call: Call, kernels: Stored, tensors: Four, found: tuple[Tensor, Tensor, Tensor]
) -> None:
    (q, k, v, dout), (dq, dk, dv), walk = tensors, found, kernels.keys
    for part in launch_stored.parts(call, q.dtype):
        own_q, own_dout, own_dq = part.of_queries(q, dout, dq)
        own_k, own_v, own_dk, own_dv = part.of_keys(k, v, dk, dv)
        own, second = (own_k, own_v, own_q, own_dout), own_dv if walk.second else None
        _walk(part.call, walk, True, own, own_dk, second, part.scores, part.layout)
        launch_stored.query_gradient(part, kernels, own_k, own_dq)
    if kernels.value is not None:
        _walk(call, kernels.value, True, (k, v, q, dout), None, dv)


def _gradient(x: Tensor, starts: Starts | None, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for x's gradient, that TMA can address. Packed, no block has keys that do not count:
    they are 0 from the beginning. So are sums, whose dtype is given."""
    *outer, last = x.shape if starts is not None else x.transpose(1, 2).shape
    make = torch.zeros if starts is not None or dtype is not None else torch.empty
    found = make((*outer, -(-last // 8) * 8), dtype=dtype or x.dtype, device=x.device)[..., :last]
    return found if starts is not None else found.transpose(1, 2)


def _sink_gradient(sink: Tensor, statistics: Tensor, tiles: int) -> Tensor:
    """Σ p_sink · −delta of each head: a sink takes its share of every row."""
    lse, delta = statistics.view(-1, sink.shape[0], tiles, 2, STATISTICS.value).unbind(-2)
    # A share is at most 1; and where the sink is all there is, lse was rounded as this is.
    exponent = (sink.float().view(-1, 1, 1) * LOG2E.value - lse).clamp(max=0)
    return -(torch.exp2(exponent) * delta).sum((0, 2, 3))


def _of_sinks_alone(sink: Tensor, dlse: Tensor | None) -> Tensor:
    """Where there are no keys, lse is the sink."""
    if dlse is None:
        return torch.zeros_like(sink)
    return dlse.float().movedim(-2, 0).flatten(1).sum(1)


class Plan(NamedTuple):
    """What follows from a call's sizes and options, for one walk."""

    own_length: int
    other_length: int
    heads: int  # of the own side
    group: int
    section: int
    total: int
    programs: int
    flags: Flags
    numbers: Numbers
    left: int
    right: int
    constants: dict[str, Any]


@lru_cache(maxsize=KEPT)
def _plan(lengths: Lengths, heads: Heads, o: Options, walk: Walk, of_keys: bool) -> Plan:
    """`o` is without tensors: True stands for one, and for `bounds` how many there are of a row."""
    if (of_keys or o.tile_map) and walk.block != STATISTICS_ROWS:
        raise ValueError(f"no walk from the keys: {walk}")
    own, other, longest_other = lengths.queries, lengths.keys, lengths.longest_k
    left, right, own_heads = o.left, o.right, heads.heads
    group = heads.heads // heads.heads_kv
    if of_keys:  # a window looks the same from there, with its sides exchanged
        own, other, longest_other = other, own, lengths.longest_q
        left, right, own_heads = right, left, heads.heads_kv
    total = launch.blocks_of(lengths, own, walk.block_own) * own_heads
    programs = launch.programs_of(o.programs, heads.device)
    flags = Flags(
        KEYS=of_keys, FIRST=walk.first, SECOND=walk.second, LEFT=left is not None,
        RIGHT=right is not None, INTERVALS=o.bounds or 0, MAP=o.tile_map is not None,
        SCALED=o.softcap != 0 or not SCALES[0] < o.scale < SCALES[1],
        SOFTCAP=o.softcap != 0, DROPOUT=o.dropout != 0, PACKED=lengths.packed,
        DYNAMIC=total > programs, PANELS=(walk.qk.boxes, walk.v.boxes), SHARED=walk.shared_out,
        REGISTERS=walk.own_registers, EARLY=walk.early,
        TRIANGLE=walk.ds == "stored" and is_triangle(lengths, o.left, o.right),
        DS=walk.ds,
    )  # fmt: skip
    numbers = Numbers(
        LOG2E.value * (1.0 if flags.SCALED else o.scale), float(o.scale), float(o.softcap),
        kept=0.0 if o.dropout >= 1 else 1 / (1 - o.dropout),
    )  # fmt: skip
    left, right = launch.within(lengths, left, right)
    _, consumer, producer, adder = walk.registers
    constants = {
        "CONSUMERS": walk.consumers, "SLOTS": walk.slots, "SLOTS_2": walk.slots_2,
        "DS_SLOTS": walk.ds_slots, "FLAGS": flags, "CONSUMER_REGISTERS": consumer,
        "ADDER_REGISTERS": adder, "PRODUCER_REGISTERS": producer,
    }  # fmt: skip
    # What blocks of one key head read over and over should stay in L2, as in forward.
    bytes_of_one = 2 * max(longest_other, 1) * (heads.columns + heads.columns_v)
    bytes_of_one *= group if of_keys else 1
    together = max(1, launch.SECTION_BYTES // bytes_of_one) * (1 if of_keys else group)
    section = o.section or min(together, own_heads * (1 if lengths.packed else lengths.batch))
    return Plan(
        own, other, own_heads, group, section, total, min(programs, total), flags, numbers, left,
        right, constants,
    )  # fmt: skip


def _walk(
    call: Call, walk: Walk, of_keys: bool, tensors: Four,
    first: Tensor | None, second: Tensor | None, away: Tensor | None = None,
    layout: Layout | None = None,
) -> None:  # fmt: skip
    """Make `first` and `second`, dQ or dK and dV, from X, X', Y, Y': see backward.py. In `away` dQ
    is added up, or dS^T stored in that layout."""
    own, own_2, other, other_2 = tensors
    lengths, o, statistics = call.lengths, call.options, call.statistics
    bounds, query_tiles, seed = o.bounds, o.query_tiles, o.seed
    columns, columns_v, device = own.shape[-1], own_2.shape[-1], own.device
    heads = Heads(call.heads, call.heads_kv, columns, columns_v, device)
    marks = {
        "bounds": None if bounds is None else bounds.shape[2],
        "tile_map": o.tile_map is not None or None, "part": (0, 0), "query_tiles": None,
        "seed": None, "sink": None, "split": None, "fused": None, "stored": None,
    }  # fmt: skip
    plan = _plan(lengths, heads, o._replace(**marks), walk, of_keys)
    packing = None
    if call.starts is not None:
        packing = launch.packing_of(call.starts, walk.block_own, of_keys)
    tile_map, *map_numbers = granules_of(
        o.tile_map, walk.block_own, walk.block, o.part, by_key=of_keys
    )
    counter = statistics
    if plan.flags.DYNAMIC:
        counter = torch.zeros(1, dtype=torch.int32, device=device)
    rows, qk, v = ROWS.value, walk.qk.width, walk.v.width
    own_operands = describe(own, rows, qk), describe(own_2, rows, v)
    others, apart = (describe(other, walk.block, qk), describe(other_2, walk.block, v)), (0, 0)
    if bounds is not None and call.starts is None:  # of K and V, wherever they are
        seen, height = ((own, own_2), rows) if of_keys else ((other, other_2), walk.block)
        pairs = zip(seen, (qk, v), strict=True)
        ragged, apart = zip(*(describe_ragged(x, height, n) for x, n in pairs), strict=True)
        own_operands, others = (ragged, others) if of_keys else (own_operands, ragged)
    # Where FLAGS do not ask for a tensor, any serves.
    threshold = min(keep_threshold(o.dropout), 2**32 - 1)  # all drop: Numbers.kept is 0
    args = (
        *own_operands, *others,
        own_operands[0] if first is None else describe(first, rows, qk),
        own_operands[1] if second is None else describe(second, rows, v),
        describe_rows(statistics, STATISTICS.value),
        own_operands[0] if away is None else _describe_away(away, walk), statistics,
        *(statistics if x is None else x for x in (seed, bounds, query_tiles, call.ends)),
        counter, plan.numbers, packing, tile_map,
        plan.own_length, plan.other_length, plan.left, plan.right,
        0 if bounds is None or bounds.shape[0] == 1 else lengths.queries,
        0 if query_tiles is None or query_tiles.shape[0] == 1 else query_tiles.shape[1],
        *apart, *map_numbers, threshold - (threshold >> 31 << 32),  # its bits as an int32
        *((0, 0, 0) if layout is None else layout[1:]), lengths.batch, plan.heads, plan.group,
        call.heads, tiles_of(lengths), plan.section, plan.total,
    )  # fmt: skip
    BACKWARD(plan.programs, args, plan.constants, maxnreg=walk.registers[0])


def _describe_away(away: Tensor, walk: Walk) -> Operand:
    if walk.ds == "stored":
        return describe_tiles(away, ROWS.value)
    return describe(away, walk.block, walk.qk.width)


def _statistics(saved: Saved, dout: Tensor, starts: Starts | None, lengths: Lengths) -> Tensor:
    """What backward has to know of each row: see statistics.py. Tiles between packed sequences
    stay 0: the one tile that is looked at of a sequence without queries is among them."""
    out, dlse, tiles, heads = in_place(saved.out), saved.dlse, tiles_of(lengths), saved.out.shape[1]
    rows = heads * (1 if lengths.packed else lengths.batch)
    make = torch.zeros if lengths.packed else torch.empty
    found = make((rows * tiles, 2 * STATISTICS.value), dtype=torch.float32, device=out.device)
    lse = saved.lse.contiguous()
    packing = None
    if starts is not None:
        packing = launch.packing_of(starts, STATISTICS.value, False)
    width = next(width for width in WIDTHS if width >= out.shape[-1])
    args = (
        describe(out, STATISTICS.value, width), describe(dout, STATISTICS.value, width),
        lse, lse if dlse is None else dlse.float().contiguous(), found, packing,
        lengths.queries, lengths.batch, heads, tiles,
    )  # fmt: skip
    flags = StatisticsFlags(LEFT=False, RIGHT=False, PACKED=lengths.packed, DLSE=dlse is not None)
    ROW_STATISTICS(rows * tiles, args, {"FLAGS": flags})
    return found


def _ends(bounds: Tensor, starts: Starts | None, lengths: Lengths) -> Tensor:
    """One past the last key that any query sees, of each batch element or sequence: int32 (B,)."""
    lo, hi = bounds.unbind(-1)
    last = (hi * (lo < hi)).amax(-1)  # (1 or B, rows)
    if starts is None:
        return last.amax(-1).expand(lengths.batch).contiguous()
    starts_q, starts_k, _ = starts
    row = torch.arange(lengths.queries, dtype=torch.int32, device=bounds.device)
    sequence = torch.searchsorted(starts_q[1:], row, right=True)
    sequence = sequence.clamp_(max=lengths.batch - 1)  # rows beyond the offsets belong to nobody
    found = last.new_zeros(lengths.batch).scatter_reduce(0, sequence, last[0], "amax")
    return (found - starts_k[:-1]).clamp_(min=0)


def _with_intervals(o: Options, lengths: Lengths) -> Options:
    """Where nothing is seen: one interval, empty."""
    bounds = o.bounds
    if bounds is None or bounds.shape[2]:
        return o
    return o._replace(bounds=bounds.new_zeros(1, lengths.queries, 1, 2))
