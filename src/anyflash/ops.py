"""torch.library operators, their fake kernels and autograd: the one place that knows autograd.

    attention_forward   inputs → out, lse
    attention_backward  dout, dlse, out, lse, inputs → dq, dk, dv, dbias, dsink
    attention_double_backward  gradients of the five, dout, dlse, inputs → seven gradients

Forward and backward both have autograd formulas, so that double backward, torch.compile, vmap and
opcheck work. Operators take scalars and optional tensors; `Problem` is built inside them, by
`calls.py`. A mask travels as its text and its leaf tensors.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch.utils._pytree import tree_flatten, tree_unflatten

from anyflash import reference
from anyflash.calls import ARGUMENTS, Arguments, differentiated, resolve
from anyflash.errors import Unsupported
from anyflash.masks.expression import from_text
from anyflash.numerics import accumulation_dtype
from anyflash.problem import Gradients, Needs, Saved, check

LIBRARY = torch.library.Library("anyflash", "DEF")
LIBRARY.define(f"attention_forward({ARGUMENTS}) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] needs, "
    f"{ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "attention_double_backward(Tensor?[] incoming, Tensor? dout, Tensor? dlse, "
    f"{ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


# Where arguments are: those that get a gradient, and the list of a mask's tensors.
LEAVES = tuple(map(Arguments._fields.index, ("q", "k", "v", "bias", "sink")))
LISTED = Arguments._fields.index("mask_leaves")
COUNT = len(Arguments._fields)
BEFORE = len(("dout", "dlse", "out", "lse", "needs"))  # of attention_backward


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Arguments(*arguments)
    problem, inputs, backend = resolve(call)
    out, lse = backend.forward(problem, inputs)
    return _laid_out(out, _swapped(call.q)), lse.contiguous()


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call = Arguments(*arguments)
    problem, inputs, backend = resolve(call._replace(gradient=True))
    dout = torch.zeros_like(out) if dout is None else dout
    found = backend.backward(problem, inputs, Saved(out, lse, dout, dlse), Needs(*needs))
    results = []
    for like, need, gradient, of_heads in zip(_leaves(call), needs, found, OF_HEADS, strict=True):
        if like is None or not need or gradient is None:
            results.append(call.q.new_empty(0))
        else:
            results.append(_laid_out(gradient, of_heads and like.ndim == 4))
    return tuple(results)


def double_backward(
    incoming: list[Tensor | None], dout: Tensor | None, dlse: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    call = Arguments(*arguments)
    inputs, options = call.parse()
    check(inputs, options)
    dout = torch.zeros_like(_empty_out(call)) if dout is None else dout
    found, ddout, ddlse = reference.double_backward(
        inputs, options, dout, dlse, Gradients(*incoming), accumulation_dtype(call.q.dtype)
    )
    likes = (*_leaves(call), dout, dlse)
    return tuple(
        call.q.new_empty(0) if like is None or g is None else g.to(like.dtype).contiguous()
        for like, g in zip(likes, (*found, ddout, ddlse), strict=True)
    )


def _swapped(x: Tensor) -> bool:
    """Whether heads and sequence lie in the other order in memory than in the shape: heads inside
    of the sequence for (B, H, S, D), as views of (B, S, H, D) do, and outside for (total, H, D)."""
    return x.stride(-3) < x.stride(-2)


def _empty(x: Tensor, last: int, swapped: bool) -> Tensor:
    """Fresh memory of x's shape but for the last dimension."""
    if not swapped:
        return x.new_empty((*x.shape[:-1], last))
    *batch, a, b, _ = x.shape
    return x.new_empty((*batch, b, a, last)).transpose(-3, -2)


def _laid_out(x: Tensor, swapped: bool) -> Tensor:
    """x in the memory order that the fake kernels announce; a copy only if it is in another."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if swapped else x.contiguous()


# Gradients of q, k and v (not of bias and sink) have heads inside, whatever the input's order: a
# projection over H·D comes next.
OF_HEADS = (True, True, True, False, False)


def _empty_out(call: Arguments) -> Tensor:
    return _empty(call.q, call.v.shape[-1], _swapped(call.q))


def _leaves(call: Arguments) -> tuple[Tensor | None, ...]:
    return call.q, call.k, call.v, call.bias, call.sink


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Arguments(*arguments)
    check(*call.parse())
    shape = (
        [*call.q.shape[:-1]] if call.cu_seqlens_q is None else [call.q.shape[1], call.q.shape[0]]
    )
    return _empty_out(call), call.q.new_empty(shape, dtype=accumulation_dtype(call.q.dtype))


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    needs, call = given[BEFORE - 1], Arguments(*given[BEFORE:])
    results = []
    for like, need, of_heads in zip(_leaves(call), needs, OF_HEADS, strict=True):
        if like is None or not need:
            results.append(call.q.new_empty(0))
        elif of_heads:
            results.append(_empty(like, like.shape[-1], like.ndim == 4))
        else:
            results.append(like.new_empty(like.shape))
    return tuple(results)


def _fake_double_backward(
    incoming: list[Tensor | None], dout: Tensor | None, dlse: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    call = Arguments(*arguments)
    likes = (*_leaves(call), _empty_out(call) if dout is None else dout, dlse)
    return tuple(call.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in likes)


KERNELS = (
    ("attention_forward", forward, _fake_forward),
    ("attention_backward", backward, _fake_backward),
    ("attention_double_backward", double_backward, _fake_double_backward),
)


def _outside_autocast(kernel: Any) -> Any:
    """Autocast has done its work before the operator: inside, products of tensors that were widened
    on purpose must stay wide."""

    @wraps(kernel)
    def run(*arguments: Any) -> Any:
        kind = arguments[-COUNT].device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return kernel(*arguments)
        with torch.autocast(kind, enabled=False):
            return kernel(*arguments)

    return run


for _name, _kernel, _fake in KERNELS:
    LIBRARY.impl(_name, _outside_autocast(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"anyflash::{_name}", _fake, lib=LIBRARY)


def _save(ctx: Any, tensors: list[Tensor | None], arguments: tuple[Any, ...]) -> None:
    """Keep a call for backward. save_for_backward watches the versions of its tensors."""
    call = Arguments(*arguments)
    ctx.save_for_backward(*tensors, *call.tensors, *call.mask_leaves)
    ctx.extra, ctx.numbers = len(tensors), call.numbers
    ctx.mask = from_text(call.mask, call.mask_leaves)  # keeps the function of from_function alive


def _restore(ctx: Any) -> tuple[list[Tensor | None], Arguments]:
    saved = list(ctx.saved_tensors)
    first = ctx.extra + LISTED
    fields: list[Any] = [*saved[ctx.extra : first], saved[first:], *ctx.numbers]
    return saved[: ctx.extra], Arguments(*fields)


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _save(ctx, list(output), inputs)


def _forward_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    (out, lse), call = _restore(ctx)
    needs = [ctx.needs_input_grad[i] for i in LEAVES]
    found = iter(attention_backward(dout, dlse, out, lse, needs, *call))
    gradients: list[Any] = [None] * COUNT
    for place, need in zip(LEAVES, needs, strict=True):
        gradient = next(found)
        gradients[place] = gradient if need else None
    gradients[LISTED] = [None] * len(call.mask_leaves)
    return tuple(gradients)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.needs = inputs[4]
    _save(ctx, list(inputs[:2]), inputs[BEFORE:])


def _backward_backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
    """out and lse get no gradient of their own: double backward differentiates through both, as
    functions of the inputs, and gives the sum."""
    (dout, dlse), call = _restore(ctx)
    # Where nothing was asked for, backward's result was an empty placeholder.
    asked = zip(incoming, ctx.needs, _leaves(call), strict=True)
    real = [g if need and x is not None else None for g, need, x in asked]
    found = attention_double_backward(real, dout, dlse, *call)
    gradients: list[Any] = [None] * (BEFORE + COUNT)
    for place, like, gradient in zip(
        (*(BEFORE + i for i in LEAVES), 0, 1), (*_leaves(call), dout, dlse), found, strict=True
    ):
        if like is not None and ctx.needs_input_grad[place]:
            gradients[place] = gradient
    gradients[BEFORE + LISTED] = [None] * len(call.mask_leaves)
    return tuple(gradients)


def _third(ctx: Any, *incoming: Tensor | None) -> None:
    raise Unsupported("third derivatives of attention", {}, "first and second derivatives exist")


class Operator:
    """An operator with its autograd formula, callable under every torch.func transform.

    PyTorch's own registration serves eager mode and torch.compile, but refuses torch.func.grad: its
    autograd.Function has no setup_context. Under a transform the same formula runs in one that has.
    """

    def __init__(self, name: str, backward: Any, setup_context: Any) -> None:
        self.op = getattr(torch.ops.anyflash, name).default
        torch.library.register_autograd(
            f"anyflash::{name}", backward, setup_context=setup_context, lib=LIBRARY
        )
        torch.library.register_vmap(f"anyflash::{name}", self._vmap, lib=LIBRARY)
        rules = {
            "forward": staticmethod(self.op),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(lambda ctx, *incoming: _flat(backward(ctx, *incoming))),
            "vmap": staticmethod(self._vmap),
        }
        self.function = type(name, (torch.autograd.Function,), rules)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        recorded = differentiated(arguments)
        if recorded and not arguments[-1]:
            arguments = (*arguments[:-1], True)  # `gradient`
        if torch.compiler.is_compiling():
            return self.op(*arguments)
        if functorch.peek_interpreter_stack():
            return self.function.apply(*arguments)  # type: ignore[no-any-return]
        if recorded:
            return self.op(*arguments)
        # Nothing to differentiate: the wrapper that records it costs as much as the call itself.
        with torch._C._AutoDispatchBelowAutograd():
            return self.op(*arguments)

    def _vmap(self, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        """Fold the mapped dimension into the batch; element by element where something else than
        a dense batch would have to be folded (packed rows, or masks and biases by batch)."""
        flat, spec = tree_flatten(list(arguments))
        dims = tree_flatten(_spread(list(in_dims), list(arguments)))[0]
        call = Arguments(*arguments[-COUNT:])
        size = info.batch_size
        others = (*call[3:10], *call.mask_leaves)
        if any(x is not None for x in others) or "#" in call.mask:
            slices = []
            for n in range(size):
                one = [x if d is None else x.select(d, n) for x, d in zip(flat, dims, strict=True)]
                slices.append(self(*tree_unflatten(one, spec)))
            return tuple(torch.stack(parts) for parts in zip(*slices, strict=True)), (0,) * len(
                slices[0]
            )
        folded = [
            _fold(x, d, size) if isinstance(x, Tensor) else x
            for x, d in zip(flat, dims, strict=True)
        ]
        results = self(*tree_unflatten(folded, spec))
        # An empty tensor stands for a gradient that was not asked for.
        unfolded = [
            x.expand(size, 0) if x.ndim == 1 else x.unflatten(0, (size, -1)) for x in results
        ]
        return tuple(unfolded), (0,) * len(unfolded)


def _flat(gradients: Any) -> Any:
    """A Function's list argument has one gradient, None; a registered formula's has a list."""
    return tuple(None if isinstance(g, list) else g for g in gradients)


def _spread(dims: Any, values: Any) -> Any:
    """in_dims with the structure of the arguments: one entry for each element of a list."""
    if isinstance(values, list):
        dims = dims if isinstance(dims, (list, tuple)) else [dims] * len(values)
        return [_spread(d, v) for d, v in zip(dims, values, strict=True)]
    return dims


def _fold(x: Tensor, dim: Any, size: int) -> Tensor:
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


attention_forward = Operator("attention_forward", _forward_backward, _setup_forward)
attention_backward = Operator("attention_backward", _backward_backward, _setup_backward)
attention_double_backward = Operator(
    "attention_double_backward", _third, lambda ctx, inputs, output: None
)
