"""What a number means in anyflash: accumulation dtypes, empty rows, masked slots, tolerances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOG2E = math.log2(math.e)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower: the dtype of scores, sums and lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_scale(head_dim: int) -> float:
    """1/√D of the real head dimension, never of a padded one; 1 where D is 0."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def all_finite(*tensors: Tensor) -> bool:
    """True if no element is NaN or infinite; one read of each tensor, at memory speed.

    A sum in float32 is non-finite whenever an element is. It may also overflow on finite elements
    (values near 1e38): the answer is then a harmless False, which only costs the slower path.
    """
    for tensor in tensors:
        wide = None if tensor.dtype == torch.float64 else torch.float32
        if not math.isfinite(tensor.sum(dtype=wide).item()):
            return False
    return True


def visible_product(weights: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """weights @ values, in which a slot that is not visible adds nothing, whatever `values` holds.

    weights (..., R, C), zero wherever `visible` (..., R, C) is False; values (..., C, N).
    A plain product turns 0·NaN and 0·inf into NaN; here the non-finite rows of `values` are taken
    out of the product and added only to the rows of `weights` that see them.
    """
    if visible is None:
        return weights @ values
    bad = ~torch.isfinite(values).all(-1)
    result = weights @ values.masked_fill(bad.unsqueeze(-1), 0)
    poisoned = bad & visible.any(-2)
    some = poisoned.any(dim=tuple(range(poisoned.ndim - 1))) if poisoned.ndim > 1 else poisoned
    for c in some.nonzero().flatten().tolist():
        seen = visible[..., c, None] & bad[..., c, None, None]
        result += torch.where(seen, weights[..., c, None] * values[..., c, None, :], 0)
    return result


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite where finiteness differs, equal infinities agree."""
    actual, expected = _comparable(actual, expected)
    if actual.numel() == 0:
        return 0.0
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, (actual - expected).abs())
    return float(torch.where(difference.isnan(), math.inf, difference).max())


def rmse(actual: Tensor, expected: Tensor) -> float:
    """Root of the mean squared difference; 0 of nothing."""
    actual, expected = _comparable(actual, expected)
    return float((actual - expected).square().mean().sqrt()) if actual.numel() else 0.0


def _comparable(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != expected.shape:
        shapes = f"{tuple(actual.shape)} and {tuple(expected.shape)}"
        raise ValueError(f"cannot compare shapes {shapes}: broadcasting would hide a wrong shape")
    return actual.detach().double(), expected.detach().double()


def tolerance(plain: Tensor, exact: Tensor, *, softcap: bool = False) -> float:
    """The largest error allowed: 2·max|plain − exact| + 1e-5, and 3 instead of 2 with softcap.

    `exact` is the float64 reference, `plain` the same computation in plain PyTorch in the dtype
    under test (FlashAttention's own rule, tests/test_flash_attn.py, with a smaller floor).
    """
    error = max_error(plain, exact)
    if not math.isfinite(error):
        raise ValueError(
            "plain PyTorch is not finite where the exact result is: nothing could fail"
        )
    return (3.0 if softcap else 2.0) * error + 1e-5
