"""From tensors to launches: descriptors, tiles, flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash.kernels.hopper.forward import ROWS, Flags, Numbers, forward_kernel
from anyflash.kernels.hopper.launcher import Kernel
from anyflash.kernels.hopper.operands import (
    KEPT,
    describe,
    describe_ragged,
    empty_addressable,
    granules_of,
    in_place,
    lawful,
)
from anyflash.kernels.hopper.schedule import Packing
from anyflash.kernels.hopper.softmax import LOG2E
from anyflash.kernels.hopper.tiles import Tile, choose, typical_keys
from anyflash.masks.tiles import TileMap
from anyflash.rng import keep_threshold

FORWARD = Kernel(forward_kernel)
# Bytes of K and V that a section of heads may have. More than a part of the 50 MB of L2, and they
# are read from DRAM, which costs energy: at D = 128, S = 16 K dense, sections of 8, 16, 32 and 128
# MiB are under load 1.08, 1.04, 1.03 and 0.96 of cuDNN, causal 1.13, 1.12, 1.13 and 1.10; bursts
# do not show it (1.05, 1.05, 1.05 and 1.05).
SECTION_BYTES = 8 * 2**20


class Options(NamedTuple):
    """What a call asks for besides its tensors; see `forward`."""

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    bounds: Tensor | None = None
    tile_map: TileMap | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    tile: Tile | None = None
    share: int | None = None
    section: int | None = None
    programs: int | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention of each query head with the keys of its window.

    Args:
        q: (B, Hq, Sq, D), float16 or bfloat16, any strides; D at most 256.
        k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) of the same dtype; Hq a multiple of Hkv, Sk at
            least 1, Dv at most 256. Tensors that TMA cannot address (base or strides that are no
            multiples of 16 bytes, a last stride other than 1) are copied.
        scale: of the scores; may be 0 or negative.
        left, right: keys that a query sees before and after its own position i + Sk − Sq; None is
            all of them. Causal is right=0.
        softcap: scores become softcap · tanh(score / softcap), by tanh.approx; 0 is none.
        sink: float32 (Hq,), contiguous, one more logit per row without a value.
        bounds: int32 (1 or B, Sq, n, 2), contiguous, n at most 2: the intervals [lo, hi) of keys
            that each row sees, sorted, disjoint, empty ones last; not with `left` or `right`.
        tile_map: who sees whom, instead of `left`, `right` and `bounds`; not of a packed batch.
        dropout: probability of dropping a weight, in [0, 1], by the bits of `anyflash.rng`.
        seed: int64 (1,) on the device, with dropout.
        tile: None chooses from the table.
        share: how many query heads with one key head stand in a tile, a power of two that divides
            Hq / Hkv, at most 64; None chooses.
        section: how many heads, or `share` of them each, are worked on side by side; None chooses.
        programs: how many run side by side; None is one for each multiprocessor.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype and q's order of axes, and lse (B, Hq, Sq), float32,
        natural logarithm. Products are accumulated in float32, weights rounded to q's dtype.
        A row that sees nothing has out 0 and lse −inf, or the sink.

    A value that a row does not see is multiplied by zero where the row's tiles of keys cover it: if
    it is NaN or infinite, the row becomes NaN. What lies beyond the keys of a sequence, or beyond
    the last key that `bounds` let a tile of rows see, has no effect, whatever it is.
    """
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return _launch(q, k, v, lse, None, dense_lengths(q, k), Options(**options))


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`forward` of sequences that lie one behind the other.

    Args:
        q, k, v: (total_q, Hq, D), (total_k, Hkv, D), (total_k, Hkv, Dv), as for `forward`.
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,), where the sequences begin.
        seqused_k: int32 (n,), how many keys of each count; None is all of them.
        max_seqlen_q, max_seqlen_k: the longest sequences, by which the tile is chosen.
        bounds: (1, total_q, n, 2), in rows of k, all of them in the row's own sequence.

    Returns:
        out (total_q, Hq, Dv) and lse (Hq, total_q). Neither another sequence nor an unused key
        changes them, whatever it holds.
    """
    starts = cu_seqlens_q, cu_seqlens_k, seqused_k
    starts, lengths = packed_lengths(q, k, starts, max_seqlen_q, max_seqlen_k)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return _launch(q, k, v, lse, starts, lengths, Options(**options))


# Where the sequences of a packed batch begin in q and in k, and how many keys of each count.
Starts = tuple[Tensor, Tensor, Tensor]


class Lengths(NamedTuple):
    """Sizes of a call. Packed: rows and keys of all sequences together."""

    batch: int
    queries: int
    keys: int
    longest_q: int
    longest_k: int
    packed: bool


class Heads(NamedTuple):
    """Sizes of the heads of a call, and whose card it runs on."""

    heads: int
    heads_kv: int
    columns: int
    columns_v: int
    device: torch.device


class Plan(NamedTuple):
    """What follows from a call's sizes and options."""

    lengths: Lengths
    tile: Tile
    share: int  # query heads in one tile
    blocks: int  # of one head, or of `share` of them; packed: at most
    total: int  # of all heads
    section: int  # heads, or `share` of them each, that are worked on side by side
    programs: int
    flags: Flags
    numbers: Numbers
    left: int
    right: int
    constants: dict[str, Any]


# What the scale may be without being applied to the scores first: beyond, scale · log2 e or a
# product with it leaves float32.
SCALES = (2.0**-64, 2.0**64)


@lru_cache(maxsize=KEPT)
def _plan(lengths: Lengths, heads: Heads, o: Options) -> Plan:
    """`o` is without tensors: True stands for one, and for `bounds` how many there are of a row."""
    # Under a map the fewest rows there are: what one of them sees all of a block goes over.
    keys = 0 if o.tile_map else typical_keys(lengths.longest_k, o.left, o.right)
    tile = o.tile or choose(heads.columns, heads.columns_v, keys)
    share = o.share or _share(lengths, heads, o, tile.block_q)
    if share > _most_shared(heads, o) or share & (share - 1):
        raise ValueError(f"share: {share} heads of {heads}, dropout {o.dropout}")
    block_q = tile.block_q // share
    blocks = blocks_of(lengths, lengths.queries, block_q)
    total = blocks * (heads.heads // share)
    programs = programs_of(o.programs, heads.device)
    flags = Flags(
        LEFT=o.left is not None, RIGHT=o.right is not None, INTERVALS=o.bounds or 0,
        MAP=o.tile_map is not None,
        SCALED=o.softcap != 0 or not SCALES[0] < o.scale < SCALES[1], SOFTCAP=o.softcap != 0,
        SINK=o.sink is not None, DROPOUT=o.dropout != 0, PACKED=lengths.packed, HEADS=share,
        DYNAMIC=total > programs, PANELS=(tile.qk.boxes, tile.v.boxes), PINGPONG=tile.pingpong,
        APART=tile.apart and not o.tile_map, SHARED=tile.shared_out, Q_REGISTERS=tile.q_registers,
    )  # fmt: skip
    slope = LOG2E.value * (1.0 if flags.SCALED else o.scale)
    numbers = Numbers(
        slope, float(o.scale), float(o.softcap), power=2.0 ** math.ceil(math.log2(slope)),
        kept=0.0 if o.dropout >= 1 else 1 / (1 - o.dropout),
    )  # fmt: skip
    left, right = within(lengths, o.left, o.right)
    _, consumer, producer = tile.registers
    constants = {
        "CONSUMERS": tile.consumers, "KV_SLOTS": tile.kv_slots, "FLAGS": flags,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer,
    }  # fmt: skip
    section = o.section or _section(lengths, heads, share)
    programs = min(programs, total)
    return Plan(
        lengths, tile, share, blocks, total, section, programs, flags, numbers, left, right,
        constants,
    )  # fmt: skip


def blocks_of(lengths: Lengths, rows: int, block: int) -> int:
    """Of one head, of the side that has so many rows; packed, where only the device knows how many
    there are, at most."""
    if lengths.packed:
        return rows // block + lengths.batch
    return lengths.batch * -(-rows // block)


def within(lengths: Lengths, left: int | None, right: int | None) -> tuple[int, int]:
    """A window's sides as the kernels take them. None reaches further than all rows and keys:
    positions stay within 32 bits."""
    reach = lengths.queries + lengths.keys
    left, right = (max(-reach, min(n or 0, reach)) for n in (left, right))
    return left, right


def programs_of(asked: int | None, device: torch.device) -> int:
    """How many run side by side: one for each multiprocessor, if nothing else is asked for."""
    if asked is not None:
        return asked
    return torch.cuda.get_device_properties(device).multi_processor_count


def _share(lengths: Lengths, heads: Heads, o: Options, block_q: int) -> int:
    """How many heads share a tile: enough to fill its rows, if the queries alone do not. 64 queries
    on 16 K keys: two heads 2.04 of one. Causal 8 K, which fills them: four heads 1.02 of one."""
    most, share = _most_shared(heads, o), 1
    while share < most and share * lengths.longest_q < block_q:
        share *= 2
    return share


def _section(lengths: Lengths, heads: Heads, share: int) -> int:
    bytes_of_one = 2 * max(lengths.longest_k, 1) * (heads.columns + heads.columns_v)
    heads_kv = max(1, SECTION_BYTES // bytes_of_one)
    all_heads = heads.heads * (1 if lengths.packed else lengths.batch)
    return min(heads_kv * (heads.heads // heads.heads_kv), all_heads) // share


def _most_shared(heads: Heads, o: Options) -> int:
    # Draws of dropout serve rows i and i + 8 of one head, granules of a map 64 positions of one.
    if o.dropout or o.tile_map:
        return 1
    group = heads.heads // heads.heads_kv
    return min(group & -group, ROWS.value)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """`forward` again, of tensors like these and options without tensors.

    Args:
        q, k, v, options: as for `forward`.
        out, lse: its results, `out` in any strides.

    Returns:
        A function of q, k, v: as `forward`, its results laid out like these. It returns None, and
        nothing has run, if q, k or v is no multiple of 16, or it cannot launch (`Prepared`).
        None: TMA cannot address q, k, v or out, wherever they lie.
    """
    o = Options(**options)
    if any(isinstance(x, Tensor | TileMap) for x in o):
        raise TypeError("a call is prepared without tensors among its options")
    contiguous = lse.numel() > 0 and lse.is_contiguous()
    if not contiguous or not all(map(lawful, (q, k, v, out))):
        return None
    plan, o = _planned(q, k, v, dense_lengths(q, k), o)
    dynamic = plan.flags.DYNAMIC
    new_counter = partial(torch.zeros, 1, dtype=torch.int32, device=q.device)
    counter = torch.empty(1, dtype=torch.int32, device=q.device) if dynamic else lse
    args = _arguments(plan, o, (q, k, v, out), lse, counter, None)
    launch = FORWARD.prepare(plan.programs, args, plan.constants, maxnreg=plan.tile.registers[0])
    if launch is None:
        return None
    new_out, new_lse = _another(out), _another(lse)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        # At 0 lies what has no memory, such as PyTorch's tensors of symbolic zeros.
        if (q_at | k_at | v_at) % 16 or not (q_at and k_at and v_at) or not launch.ready():
            return None
        out, lse = new_out(), new_lse()
        counter = new_counter() if dynamic else lse
        at = lse.data_ptr()  # for sink, seed and bounds too
        pointers = (at, at, at, at, counter.data_ptr())
        launch((q_at, k_at, v_at, out.data_ptr()), pointers)
        return out, lse

    return run


def _another(x: Tensor) -> Callable[[], Tensor]:
    """Makes tensors like x."""
    return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, starts: Starts | None,
    lengths: Lengths, o: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = in_place(q), in_place(k), in_place(v)
    out = empty_addressable(q, v.shape[-1])
    if lse.numel() == 0:
        return out, lse
    plan, o = _planned(q, k, v, lengths, o)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if plan.flags.DYNAMIC else lse
    args = _arguments(plan, o, (q, k, v, out), lse, counter, starts)
    FORWARD(plan.programs, args, plan.constants, maxnreg=plan.tile.registers[0])
    return out, lse


def dense_lengths(q: Tensor, k: Tensor) -> Lengths:
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    return Lengths(batch, queries, keys, queries, keys, False)


def packed_lengths(
    q: Tensor, k: Tensor, starts: tuple[Tensor, Tensor, Tensor | None], longest_q: int | None,
    longest_k: int | None,
) -> tuple[Starts, Lengths]:  # fmt: skip
    """Starts of q and k with how many keys count, and the sizes of the call."""
    starts_q, starts_k, used = starts
    n, total_q, total_k = starts_q.shape[0] - 1, q.shape[0], k.shape[0]
    longest_q = total_q if longest_q is None else longest_q
    longest_k = total_k if longest_k is None else longest_k
    used = starts_k.diff() if used is None else used
    return (starts_q, starts_k, used), Lengths(n, total_q, total_k, longest_q, longest_k, True)


def _planned(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, o: Options) -> tuple[Plan, Options]:
    """The plan of a call, and its options in the form that the kernel takes."""
    bounds = o.bounds
    if bounds is not None and bounds.shape[2] == 0:  # nothing is seen: one interval, empty
        bounds = bounds.new_zeros(1, lengths.queries, 1, 2)
        o = o._replace(bounds=bounds)
    heads = Heads(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.device)
    intervals = None if bounds is None else bounds.shape[2]
    marks: dict[str, Any] = {"sink": o.sink is not None or None, "bounds": intervals}
    marks |= {"seed": None, "tile_map": o.tile_map is not None or None}
    return _plan(lengths, heads, o._replace(**marks)), o


def _arguments(
    plan: Plan, o: Options, tensors: tuple[Tensor, Tensor, Tensor, Tensor], lse: Tensor,
    counter: Tensor, starts: Starts | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Those of the kernel, in order, for addressable q, k, v and out."""
    q, k, v, out = tensors
    sink, bounds, seed, lengths = o.sink, o.bounds, o.seed, plan.lengths
    tile, share, heads, heads_kv = plan.tile, plan.share, q.shape[1], k.shape[1]
    positions = ROWS.value // share
    packing, v_rows = None, 0
    if starts is not None:
        packing = packing_of(starts, tile.block_q // share, False)
    if bounds is None or starts is not None:
        v_operand = describe(v, tile.block_kv, tile.v.width)
    else:
        v_operand, v_rows = describe_ragged(v, tile.block_kv, tile.v.width)
    if o.tile_map is not None and starts is not None:
        raise ValueError("a tile map of a packed batch")
    granules, _, map_batch, map_head = granules_of(o.tile_map, tile.block_q, tile.block_kv)
    threshold = min(keep_threshold(o.dropout), 2**32 - 1)  # all drop: Numbers.kept is 0
    return (
        describe(q, positions, tile.qk.width, share), describe(k, tile.block_kv, tile.qk.width),
        v_operand, describe(out, positions, tile.v.width, share),
        # Where FLAGS do not ask for a tensor, any serves.
        lse, lse if sink is None else sink, lse if seed is None else seed,
        lse if bounds is None else bounds, counter, plan.numbers, packing, granules,
        lengths.queries, lengths.keys, plan.left, plan.right,
        0 if bounds is None or bounds.shape[0] == 1 else lengths.queries, v_rows,
        map_batch, map_head,
        threshold - (threshold >> 31 << 32),  # its bits as an int32
        lengths.batch, heads // share, heads // heads_kv // share, plan.section, plan.total,
    )  # fmt: skip


def packing_of(starts: Starts, block: int, of_keys: bool) -> Packing:
    """Where sequences lie, seen from the side that has the blocks."""
    starts_q, starts_k, used_k = starts
    used_q = starts_q.diff()
    if of_keys:
        starts_q, starts_k, used_q, used_k = starts_k, starts_q, used_k, used_q
    blocks = (used_q + (block - 1)) // block
    first_block = torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))
    return Packing(first_block, starts_q, starts_k, used_q, used_k)
