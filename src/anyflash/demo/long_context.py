"""Masks over a long context against the same boolean mask in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash import attention, causal, documents, window
from anyflash.masks import Mask

WINDOW = 512


def masks(length: int) -> dict[str, Mask]:
    """A window, and eight documents of different lengths."""
    shares = torch.tensor([5, 1, 3, 8, 2, 6, 4, 3]).cumsum(0)
    ends = shares * length // shares[-1]
    ids = torch.searchsorted(ends, torch.arange(length), right=True)
    return {
        f"window of {WINDOW}": window(WINDOW, 0),
        "8 documents, causal": documents(ids) & causal(),
    }


def inputs(length: int, heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, width, generator=generator) for _ in range(3)]


def alternatives(
    qkv: list[Tensor], mask: Mask
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, int]]:
    """What computes the same, and the bytes that each holds before the call."""
    length = qkv[0].shape[2]
    dense = mask.materialise(1, 1, length, length)
    q, k, v = qkv
    runs: dict[str, Callable[[], Tensor]] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
        "anyflash": lambda: attention(q, k, v, mask=mask),
    }
    return runs, {"SDPA": dense.numel(), "anyflash": 0}
