"""What a backend is: four members, and two that it may have besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from anyflash.devices import Device
from anyflash.problem import Gradients, Inputs, Needs, Problem, Saved

# q, k, v → out, lse.
Replay = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]


class Backend(Protocol):
    """A module of this package. What `refusal` does not refuse must run and be right."""

    name: str

    def refusal(self, problem: Problem, device: Device) -> str | None:
        """One sentence why this problem is not served here, or None if it is."""
        ...

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """out in q's dtype, shaped (B, Hq, Sq, Dv) or packed (total, Hq, Dv), in any layout, and
        lse (B, Hq, Sq) or (Hq, total), float32 (float64 for float64)."""
        ...

    def backward(self, problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
        """The gradients in `needs` in their tensors' dtypes; the others may be None. A backend
        without one refuses problems with `gradient`, and raises Unsupported here."""
        ...


@runtime_checkable
class Explaining(Backend, Protocol):
    """A backend that has several ways to compute gradients."""

    def algorithm(self, problem: Problem, inputs: Inputs) -> str:
        """One line for people: which of them this problem gets if it asks for the gradients of q, k
        and v, and how much memory that takes besides its results."""
        ...


@runtime_checkable
class Preparing(Backend, Protocol):
    """A backend that can do a call again without looking at all of it anew."""

    def prepare(self, problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> Replay | None:
        """How to repeat a call that has just given `out` and `lse` to its caller.

        It had no tensors but q, k and v, no mask but causal, and no dropout.

        Returns:
            A function of q, k, v of the same shapes, strides, dtypes and device, which may lie
            anywhere (PyTorch's tensors of symbolic zeros at 0): what `forward` computes of them, to
            the bit, in new tensors laid out as `out` and `lse`. It keeps no tensor, and any thread
            may call it, at any time. It returns None, with nothing launched, where this once the
            call has to take the ordinary way.
            None in place of the function: there is no shorter way for such a call.
        """
        ...
