"""A call as the operators pass it on: its schema, and from there to the backend that serves it.

Most of what a small call costs is finding out what it is. One that was served before, and of which
q, k, v and a few numbers are everything, is replayed: its looks lead straight to what its backend
prepared then, past checks, operators and dispatch, which would find nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _autograd as recorder  # type: ignore[attr-defined]
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad

from anyflash.backends.base import Backend, Preparing, Replay
from anyflash.dispatch import select
from anyflash.masks.expression import from_text
from anyflash.masks.index import readable
from anyflash.numerics import default_scale
from anyflash.problem import Inputs, Options, Problem

# `gradient`: whether a derivative will follow. Autograd knows, but an operator's kernel runs below
# it, and a backend that has no derivative must say so before it computes anything.
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi, Tensor? sink, Tensor? seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor[] mask_leaves, str mask, "
    "float? scale, float softcap, float dropout, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "bool deterministic, str? precision, str? backend, bool gradient"
)


class Arguments(NamedTuple):
    """What all operators take, in the order of their schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi: Tensor | None
    sink: Tensor | None
    seed: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    mask_leaves: list[Tensor]
    mask: str
    scale: float | None
    softcap: float
    dropout: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    deterministic: bool
    precision: str | None
    backend: str | None
    gradient: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:10]  # all but those of the mask

    @property
    def numbers(self) -> tuple[Any, ...]:
        return self[11:]  # and names: all behind the tensors

    def parse(self) -> tuple[Inputs, Options]:
        scale = default_scale(self.q.shape[-1]) if self.scale is None else self.scale
        inputs = Inputs(*self[:10], from_text(self.mask, self.mask_leaves))
        return inputs, Options(scale, *self[13:19])

    def key(self) -> tuple[Any, ...]:
        """All that decides a call of which nothing is read."""
        q, k, v, *others = self[:10]
        return (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            *[x if x is None else (x.shape, x.dtype, x.device) for x in others], *self[11:],
        )  # fmt: skip


def differentiated(arguments: Iterable[Any]) -> bool:
    """Whether autograd would record an operator with these arguments."""
    if torch.is_grad_enabled():
        for x in arguments:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


# Calls whose check depends on shapes alone, and packed ones on an accelerator are among them: after
# a large call the checks run from cold caches and take half a millisecond. With each its mask, but
# for those that travel by number, which the entry would keep alive.
_checked: dict[Any, tuple[Problem, Backend, Any]] = {}
CHECKED = 1024


def resolve(call: Arguments) -> tuple[Problem, Inputs, Backend]:
    """Check a call and choose its backend. Never in a fake kernel: a symbolic length that is hashed
    becomes a constant."""
    starts = call.cu_seqlens_q
    by_shape = not call.mask_leaves and (starts is None or not readable(starts))
    key = call.key() if by_shape else None
    found = None if key is None else _checked.get(key)
    if found is not None:
        problem, backend, mask = found
        if "#" in call.mask:
            mask = from_text(call.mask, ())
        return problem, Inputs(*call[:10], mask), backend
    inputs, options = call.parse()
    problem = Problem.of(inputs, options, call.gradient)
    backend = select(problem, call.backend)
    if key is not None:
        if len(_checked) >= CHECKED:
            _checked.clear()
        _checked[key] = problem, backend, None if "#" in call.mask else inputs.mask
    return problem, inputs, backend


# Replays.

_NONE = type(None)
_NUMBER = (_NONE, float, int)
# The types of q, k, v, mask, causal, scale, softcap, bias, sink, dropout, deterministic, precision
# and backend in a call that may be replayed: these very types, since a subclass may mean anything,
# and 1 is refused where True, its equal, is not.
KINDS = frozenset(
    product(
        (Tensor,), (Tensor,), (Tensor,), (_NONE,), (bool,), _NUMBER, _NUMBER, (_NONE,), (_NONE,),
        (float, int), (bool,), (_NONE,), (_NONE, str),
    )
)  # fmt: skip

# None for calls whose backend knows no shorter way.
_replays: dict[Any, Replay | None] = {}


def replayable(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Any, ...] | None:
    """All that decides a call of `attention`, options in the order of KINDS; None unless it is a
    plain one, whose kernel's launch is all that anybody would see of it."""
    if (
        torch.compiler.is_compiling()  # first: nothing else here can be traced
        or (type(q), type(k), type(v), *map(type, options)) not in KINDS
        or _changed()
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or _lazy(q)
        or _lazy(k)
        or _lazy(v)
    ):
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, *options,
    )  # fmt: skip


def replay(
    key: tuple[Any, ...] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call like one before; None: it has to take the ordinary way."""
    found = None if key is None else _replays.get(key)
    return None if found is None else found(q, k, v)


def remember(key: tuple[Any, ...] | None, call: Arguments, out: Tensor, lse: Tensor) -> None:
    """Let calls like this one, which has been served, be replayed."""
    # Dropout draws anew each time, and of tensors without data nothing was computed.
    if key is None or call.dropout or out.is_meta or key in _replays:
        return
    problem, inputs, backend = resolve(call)
    if len(_replays) >= CHECKED:
        _replays.clear()
    prepares = isinstance(backend, Preparing)
    _replays[key] = backend.prepare(problem, inputs, out, lse) if prepares else None


def _changed() -> bool:
    """Whether operators do something else than usual, or somebody watches them, in this thread."""
    return (
        functorch.peek_interpreter_stack() is not None  # torch.func
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()  # torch.jit
        or recorder._profiler_enabled()
    )


def _lazy(x: Tensor) -> bool:
    """Whether x is more or less than its strides and its memory: nested, sparse, a view of other
    signs, what torch.func gave to a function that let it escape."""
    return x.is_nested or not torch._C._has_storage(x) or x.is_neg()
