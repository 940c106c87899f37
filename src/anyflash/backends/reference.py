"""The textbook, by name only: it holds all scores in memory."""

from __future__ import annotations

from torch import Tensor

from anyflash import reference
from anyflash.devices import Device
from anyflash.numerics import accumulation_dtype
from anyflash.problem import Gradients, Inputs, Needs, Problem, Saved

name = "reference"


def refusal(problem: Problem, device: Device) -> str | None:
    if problem.options.precision == "fp8":
        return "the reference has no FP8"
    return None


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(problem.dtype)
    out, lse = reference.forward(inputs, problem.options, dtype)
    return out.to(problem.dtype), lse


def backward(problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
    dtype = accumulation_dtype(problem.dtype)
    found = reference.backward(inputs, problem.options, saved.dout, saved.dlse, dtype)
    wanted = (getattr(inputs, field) if need else None for field, need in needs._asdict().items())
    return Gradients(
        *[
            None if x is None or g is None else g.to(x.dtype)
            for x, g in zip(wanted, found, strict=True)
        ]
    )
