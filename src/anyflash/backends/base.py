"""What a backend is: four members."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from anyflash.devices import Device
from anyflash.problem import Gradients, Inputs, Needs, Problem, Saved


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
        """The gradients in `needs` in their tensors' dtypes; the others may be None."""
        ...
