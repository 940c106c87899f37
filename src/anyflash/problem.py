"""What is asked for, without tensors: `Problem`, and `check`, the only validator.

A `Problem` is frozen and hashable, so that a backend can cache what depends on it alone. It is
built inside the operators (real and fake), never in traced code: hashing a symbolic length would
specialise it.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.errors import InvalidInput
from anyflash.masks.algebra import Everything
from anyflash.masks.expression import Mask
from anyflash.masks.index import Extent, readable
from anyflash.masks.kinds import kind_of
from anyflash.masks.places import Packed
from anyflash.numerics import FLOATS

LAYOUT = "attention takes (B, H, S, D); for (B, S, H, D) use .transpose(1, 2) or compat.flash_attn"


class Inputs(NamedTuple):
    """The tensors of a call. Dense: q (B, Hq, Sq, D); packed: q (total, Hq, D) with starts."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # broadcastable to (B, Hq, Sq, Sk), any float dtype
    alibi: Tensor | None = None  # float (Hq,) or (B, Hq): slopes of −slope·|i + offset − j|
    sink: Tensor | None = None  # float (Hq,)
    seed: Tensor | None = None  # int64 (1,), with dropout
    cu_seqlens_q: Tensor | None = None  # int32 (n + 1,), packed only, as cu_seqlens_k
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # int32 (n,)
    mask: Mask | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None


class Saved(NamedTuple):
    """What backward has besides the inputs: forward's results and their gradients."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sink: bool


class Gradients(NamedTuple):
    """What backward returns; None for what was not asked for."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sink: Tensor | None


class Options(NamedTuple):
    """The numbers of a call, as the operators pass them on; `softcap` 0 is none."""

    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    max_queries: int | None = None  # longest sequence; packed only
    max_keys: int | None = None
    deterministic: bool = False
    precision: str | None = None


@dataclass(frozen=True)
class Problem:
    """Everything but the data. `batch` counts sequences; packed lengths are the longest ones."""

    batch: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: str
    options: Options
    packed: bool = False
    mask: str = "none"  # what kernels read of it: "none", "window", "intervals" or "tiles"
    features: frozenset[str] = field(default_factory=frozenset)  # of bias, alibi, sink, dropout, …
    gradient: bool = False  # whether a derivative follows
    total_queries: int = 0  # rows of q and of k in all sequences together
    total_keys: int = 0

    @property
    def extent(self) -> Extent:
        return Extent(self.batch, self.heads, self.queries, self.keys)

    @classmethod
    def of(cls, inputs: Inputs, options: Options, gradient: bool = False) -> Problem:
        """Check a call and describe it; raises InvalidInput, naming the argument."""
        q, k, v = inputs.q, inputs.k, inputs.v
        batch, heads, queries, keys = check(inputs, options)
        names = ("bias", "alibi", "sink")
        features = {name for name in names if getattr(inputs, name) is not None}
        features |= {name for name in ("softcap", "dropout") if getattr(options, name)}
        features |= {"deterministic"} if options.deterministic else set()
        totals = (q.shape[0], k.shape[0]) if inputs.packed else (batch * queries, batch * keys)
        return cls(
            batch, heads, k.shape[1], queries, keys, q.shape[-1], v.shape[-1], q.dtype,
            str(q.device), options, inputs.packed, kind_of(inputs.mask), frozenset(features),
            gradient, *totals,
        )  # fmt: skip

    def describe(self) -> str:
        """One line for messages and tables."""
        shape = (
            f"q ({self.batch}, {self.heads}, {self.queries}, {self.head_dim}), k ({self.batch}, "
        )
        shape += f"{self.heads_kv}, {self.keys}, {self.head_dim}), Dv={self.head_dim_v}"
        parts = [str(self.dtype).removeprefix("torch."), self.device, f"mask={self.mask}"]
        parts += ["packed"] if self.packed else []
        parts += [f"precision={self.options.precision}"] if self.options.precision else []
        parts += ["gradient"] if self.gradient else []
        return f"{shape} [{', '.join([*parts, *sorted(self.features)])}]"


def check(inputs: Inputs, options: Options) -> Extent:
    """Raise InvalidInput, naming the argument, for a call that is malformed; its sizes. Contents
    are read only where that waits for nothing, so that fake kernels can check as well."""
    q, k, v = inputs.q, inputs.k, inputs.v
    check_devices(inputs)
    _check_common(inputs)
    if inputs.packed:
        batch, queries, keys = _check_packed(inputs, options)
    else:
        batch, queries, keys = _check_dense(q, k, v)
    _check_heads(q.shape[1], k.shape[1])
    extent = Extent(batch, q.shape[1], queries, keys)
    try:
        _check_extras(inputs, extent)
    except InvalidInput as error:
        starts = inputs.cu_seqlens_q
        known = options.max_queries is not None and options.max_keys is not None
        if starts is None or readable(starts) or known or error.advice:
            raise
        advice = f"pass max_seqlen_q and max_seqlen_k: offsets on {q.device.type} are not read"
        raise InvalidInput(error.argument, error.got, error.expected, advice) from None
    _check_options(options)
    return extent


def check_kind(name: str, value: object) -> None:
    """What a tensor argument must be before it may enter an operator: dense, strided, floating."""
    if not isinstance(value, Tensor):
        raise InvalidInput(name, type(value).__name__, "a torch.Tensor")
    if value.is_nested:
        advice = "unpack it and use attention_varlen with its values() and offsets()"
        raise InvalidInput(name, "a nested tensor", "a dense tensor", advice)
    if value.layout != torch.strided:
        raise InvalidInput(name, f"layout {value.layout}", "a strided (dense) tensor")
    if value.dtype not in FLOATS:
        raise InvalidInput(name, value.dtype, "float16, bfloat16, float32 or float64")


def check_devices(inputs: Inputs) -> None:
    """One device for every tensor. Needed before an operator is called: where one is on the meta
    device, PyTorch would run the fake kernel and hand out memory that nobody wrote."""
    device = inputs.q.device
    for name, tensor in zip(Inputs._fields[1:-1], inputs[1:-1], strict=True):
        if tensor is not None and tensor.device != device:
            raise InvalidInput(name, f"device {tensor.device}", f"q's device, {device}")
    for leaf in inputs.mask.leaves if inputs.mask is not None else ():
        if leaf.device != device:
            advice = "build the mask from tensors that are there"
            raise InvalidInput("mask", f"device {leaf.device}", f"q's device, {device}", advice)


def check_number(name: str, value: object, expected: str = "a number") -> None:
    """What a number must be before it may enter an operator, which takes 64-bit floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        advice = "read it with .item()" if isinstance(value, Tensor) else ""
        got = "None" if value is None else type(value).__name__
        raise InvalidInput(name, got, expected, advice)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise InvalidInput(name, "an integer beyond 1e308", f"{expected}, finite")


def check_choice(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """What a switch or a name must be before it may enter an operator."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name_of = type(value).__name__
        got = name_of if isinstance(value, Tensor) else f"{name_of} {value!r}"
        raise InvalidInput(name, got, expected)


def check_packing(name: str, value: object, expected: str) -> None:
    """What offsets and lengths must be before they may enter an operator."""
    if not isinstance(value, Tensor):
        got = "None" if value is None else type(value).__name__
        raise InvalidInput(name, got, expected)
    if value.is_nested or value.layout != torch.strided:
        raise InvalidInput(name, f"layout {value.layout}", f"{expected}, strided (dense)")


def in_four_dimensions(bias: Tensor) -> Tensor:
    """A bias as (1|B, 1|Hq, 1|Sq, 1|Sk): a view."""
    return bias[(None,) * (4 - bias.ndim)]


def packed_mask(inputs: Inputs) -> Mask:
    """The mask of a packed call over its packed rows and keys: sequences never see each other."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise TypeError("packed_mask needs a packed call")
    return Packed(
        Everything() if inputs.mask is None else inputs.mask,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        inputs.seqused_k,
    )


def _check_common(inputs: Inputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    rank, form = (3, "(total, H, D)") if inputs.packed else (4, "(B, H, S, D)")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != rank:
            raise InvalidInput(name, f"shape {tuple(tensor.shape)}", f"{rank} dimensions {form}")
    if not q.dtype == k.dtype == v.dtype:
        got = f"dtypes q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise InvalidInput("q, k, v", got, "one dtype", "cast them, or use torch.autocast")
    if k.shape[-1] != q.shape[-1]:
        raise InvalidInput(
            "k", f"head dimension {k.shape[-1]}", f"q's head dimension {q.shape[-1]}"
        )
    if k.shape[:-1] != v.shape[:-1]:
        got = f"shape {tuple(v.shape)}"
        raise InvalidInput("v", got, f"k's {tuple(k.shape[:-1])} with any last dimension", LAYOUT)


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    if q.shape[0] != k.shape[0]:
        raise InvalidInput("k", f"batch {k.shape[0]}", f"q's batch {q.shape[0]}")
    return q.shape[0], q.shape[2], k.shape[2]


def _check_heads(heads: int, heads_kv: int) -> None:
    if heads == heads_kv:
        return
    if heads_kv == 0 or heads % heads_kv:
        got = f"{heads} query heads and {heads_kv} key heads"
        raise InvalidInput("q, k", got, "query heads a multiple of key heads", LAYOUT)


def _check_extras(inputs: Inputs, extent: Extent) -> None:
    bias, alibi, sink = inputs.bias, inputs.alibi, inputs.sink
    for name, tensor in (("bias", bias), ("alibi", alibi), ("sink", sink)):
        if tensor is not None and tensor.dtype not in FLOATS:
            raise InvalidInput(name, tensor.dtype, "a floating-point tensor")
    if bias is not None:
        full = tuple(extent)
        fits = bias.ndim <= 4 and all(
            b in (1, f) for b, f in zip(reversed(bias.shape), reversed(full), strict=False)
        )
        if not fits:
            expected = f"broadcastable to (B, Hq, Sq, Sk) = {full}"
            raise InvalidInput("bias", f"shape {tuple(bias.shape)}", expected)
    if alibi is not None and tuple(alibi.shape) not in (
        (extent.heads,),
        (extent.batch, extent.heads),
    ):
        expected = f"({extent.heads},) or ({extent.batch}, {extent.heads})"
        raise InvalidInput("alibi slopes", f"shape {tuple(alibi.shape)}", expected)
    if sink is not None and tuple(sink.shape) != (extent.heads,):
        raise InvalidInput(
            "sink", f"shape {tuple(sink.shape)}", f"({extent.heads},), one logit per query head"
        )
    if inputs.mask is not None:
        inputs.mask.check(extent)


def _check_options(options: Options) -> None:
    if not math.isfinite(options.scale):
        raise InvalidInput("scale", options.scale, "a finite number, or None for 1/sqrt(D)")
    if not (math.isfinite(options.softcap) and options.softcap >= 0):
        raise InvalidInput("softcap", options.softcap, "a finite number > 0, or None for no cap")
    if not 0 <= options.dropout <= 1:
        raise InvalidInput("dropout", options.dropout, "a probability in [0, 1]")
    if options.precision not in (None, "fp8"):
        raise InvalidInput("precision", repr(options.precision), "None or 'fp8'")


def _check_packed(inputs: Inputs, options: Options) -> tuple[int, int, int]:
    starts_q, starts_k, used = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k
    if starts_q is None or starts_k is None:
        raise InvalidInput("cu_seqlens_k", None, "int32 offsets (n + 1,), as cu_seqlens_q")
    longest = []
    for name, starts, total, most in (
        ("cu_seqlens_q", starts_q, inputs.q.shape[0], options.max_queries),
        ("cu_seqlens_k", starts_k, inputs.k.shape[0], options.max_keys),
    ):
        if starts.dtype != torch.int32 or starts.ndim != 1 or starts.shape[0] < 1:
            got = f"{starts.dtype} of shape {tuple(starts.shape)}"
            raise InvalidInput(name, got, "int32 offsets of shape (n + 1,)", "convert with .int()")
        if most is not None and most < 0:
            raise InvalidInput(f"max_seqlen_{name[-1]}", most, "a length ≥ 0")
        longest.append(_check_starts(name, starts, total, most))
    if starts_q.shape != starts_k.shape:
        raise InvalidInput(
            "cu_seqlens_k", f"{starts_k.shape[0]} offsets", f"{starts_q.shape[0]}, as cu_seqlens_q"
        )
    if used is not None:
        if used.dtype != torch.int32 or used.shape != (starts_k.shape[0] - 1,):
            got = f"{used.dtype} of shape {tuple(used.shape)}"
            raise InvalidInput("seqused_k", got, f"int32 of shape ({starts_k.shape[0] - 1},)")
        if readable(used):
            lengths = starts_k[1:] - starts_k[:-1]
            wrong = ((used < 0) | (used > lengths)).nonzero().flatten().tolist()
            if wrong:
                got = f"{int(used[wrong[0]])} at index {wrong[0]}"
                raise InvalidInput(
                    "seqused_k", got, f"0 to {int(lengths[wrong[0]])}, its sequence's length"
                )
    return starts_q.shape[0] - 1, longest[0], longest[1]


def _check_starts(name: str, starts: Tensor, total: int, most: int | None) -> int:
    """Check the offsets where they may be read; the longest sequence (or its bound) is returned."""
    if not readable(starts):
        return total if most is None else most
    values = starts.tolist()
    if values[0] != 0:
        raise InvalidInput(name, f"{values[0]} at index 0", "0")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise InvalidInput(
                name,
                f"{values[i]} at index {i} after {values[i - 1]}",
                "offsets that never decrease",
            )
    if values[-1] != total:
        expected = f"{total}, the number of packed rows"
        raise InvalidInput(name, f"{values[-1]} at index {len(values) - 1}", expected)
    lengths = [b - a for a, b in itertools.pairwise(values)]
    longest = max(lengths, default=0)
    if most is not None and longest > most:
        got = f"a sequence of {longest} at index {lengths.index(longest)}"
        raise InvalidInput(name, got, f"at most max_seqlen_{name[-1]} = {most}")
    return longest if most is None else most
