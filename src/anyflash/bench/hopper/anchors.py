"""How fast the fastest of the others is, relative to cuDNN or FlashAttention-2 in the same run.

Cards of one model differ by 15 % and more, so rates are not carried from one to another: only
ratios are.
"""

from __future__ import annotations

SOURCE = "H200, 2026-11-29, cuDNN 9.19, FA3, FA4 4.0.0b36"

# (D, S, causal): the best of cuDNN, FlashAttention-2, -3 and -4 over cuDNN. Forward, bfloat16,
# 16384 queries in all, 2048 / D heads, standard normal inputs.
BEST = {
    (64, 1024, False): 1.000,
    (64, 1024, True): 1.000,
    (64, 4096, False): 1.113,
    (64, 4096, True): 1.052,
    (64, 16384, False): 1.219,
    (64, 16384, True): 1.218,
    (128, 1024, False): 1.000,
    (128, 1024, True): 1.000,
    (128, 4096, False): 1.028,
    (128, 4096, True): 1.156,
    (128, 16384, False): 1.085,
    (128, 16384, True): 1.215,
    (256, 1024, False): 1.019,
    (256, 1024, True): 1.010,
    (256, 4096, False): 1.112,
    (256, 4096, True): 1.277,
    (256, 16384, False): 1.136,
    (256, 16384, True): 1.308,
}

SHARE = 0.98  # of the best, at least
# Where cuDNN is far ahead of everyone, who is at 0.65 to 0.90 of it dense and 0.63 to 0.75 causal.
SHARES = {(64, 1024, False): 0.90, (64, 1024, True): 0.85}


def bar(anchor: tuple[int, int, bool]) -> float:
    """The least speed relative to cuDNN of a row of the table."""
    return SHARES.get(anchor, SHARE) * BEST[anchor]


# The same of the backward pass; of D=256, which cuDNN's backward refuses, over FlashAttention-2.
BEST_BACKWARD = {
    (64, 1024, False): 1.18,
    (64, 1024, True): 1.29,
    (64, 4096, False): 1.24,
    (64, 4096, True): 1.33,
    (64, 16384, False): 1.25,
    (64, 16384, True): 1.35,
    (128, 1024, False): 1.14,
    (128, 1024, True): 1.16,
    (128, 4096, False): 1.20,
    (128, 4096, True): 1.20,
    (128, 16384, False): 1.25,
    (128, 16384, True): 1.22,
    (256, 1024, False): 1.51,
    (256, 1024, True): 1.62,
    (256, 4096, False): 1.51,
    (256, 4096, True): 1.59,
    (256, 16384, False): 1.48,
    (256, 16384, True): 1.51,
}

# (D, S): the least speed of our backward pass, dense and causal, relative to the same.
BARS_BACKWARD = {
    (64, 1024): 1.0,
    (64, 4096): 1.18,
    (64, 16384): 1.18,
    (128, 1024): 1.0,
    (128, 4096): 1.0,
    (128, 16384): 1.0,
    (256, 1024): 1.5,
    (256, 4096): 1.5,
    (256, 16384): 1.5,
}
