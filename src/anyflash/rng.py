"""Philox-4x32-10 for dropout: one keep decision per score, the same on every backend.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3 (Philox; ten rounds). The bits are those of Random123 and of Triton's `tl.philox`.

One draw gives four 32-bit words and serves four scores, rows {i, i + 8} x keys {j, j + 1}: the
ones that one thread holds of a 16 x 8 matrix-multiply accumulator.

    counter = (bh, row pair, key pair, 0)      key = (seed & 0xFFFFFFFF, seed >> 32)
    key pair = j >> 1                          key bit = j & 1
    row pair = (i >> 4) * 8 + (i & 7)          row bit = (i >> 3) & 1
    word = 2 * row bit + key bit               keep iff word >= floor(dropout * 2^32), unsigned

i and j are absolute positions (in packed batches: within the sequence), bh = batch * heads + head.
Nothing else enters: no tile size, no order of work, no batch-mate. In a Triton kernel:

    w0, w1, w2, w3 = tl.philox(tl.load(seed), bh, row_pair, key_pair, 0)    # int32 counters
"""

import torch
from torch import Tensor

__all__ = ["draw_seed", "keep_elements", "keep_mask", "keep_threshold", "philox_4x32"]

Integers = Tensor | int

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
MASK_32 = 0xFFFFFFFF


def philox_4x32(
    counter: tuple[Integers, Integers, Integers, Integers], key: tuple[Integers, Integers]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 (Salmon et al. 2011, section 3.3) in int64 tensor operations.

    Shapes are static, nothing synchronises. Counters broadcast as late as they can: from (K,),
    (R, 1) and (H, 1, 1) the first rounds run on the small shapes.

    Args:
        counter: four integers or integer tensors that broadcast together, taken modulo 2^32.
        key: (low, high), likewise.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = map(_low_word, counter)
    k0, k1 = map(_low_word, key)
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(MULTIPLIER_0, c0)
        high_1, low_1 = _multiply(MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    # Every word depends on every input by now, so the four shapes are the same.
    return torch.as_tensor(c0), torch.as_tensor(c1), torch.as_tensor(c2), torch.as_tensor(c3)


def keep_threshold(dropout: float) -> int:
    """floor(dropout * 2^32): scores whose word is below it are dropped.

    dropout = 1 gives 2^32, above every word: a kernel that holds 32 bits must treat it apart.
    """
    return int(dropout * 2.0**32)  # exact: a power of two changes only the exponent


def keep_mask(
    seed: Tensor, head_index: Tensor, rows: Tensor, keys: Tensor, dropout: float
) -> Tensor:
    """Which scores of a grid dropout keeps, with one Philox for every four scores.

    Synchronises to count distinct pairs: under graph capture use `keep_elements`.

    Args:
        seed: int64, (1,) or (), on the device.
        head_index: integer bh = batch * heads + head, any shape.
        rows, keys: integer (R,) and (K,), absolute, in any order, gaps and repeats allowed.
        dropout: probability of dropping, in [0, 1].

    Returns:
        bool, head_index.shape + (R, K), True where kept: the same as
        `keep_elements(seed, head_index[..., None, None], rows[:, None], keys, dropout)`.
    """
    row_pair, row_bit, key_pair, key_bit = _pairs(rows, keys)
    r, row_slot = torch.unique(row_pair, return_inverse=True)
    c, key_slot = torch.unique(key_pair, return_inverse=True)
    words = philox_4x32((head_index[..., None, None], r[:, None], c, 0), _key(seed))
    threshold = keep_threshold(dropout)
    kept = torch.stack([word >= threshold for word in words], dim=-1).unflatten(-1, (2, 2))
    # (..., row pair, key pair, row bit, key bit) -> (..., row pair and bit, key pair and bit)
    kept = kept.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return kept.index_select(-2, 2 * row_slot + row_bit).index_select(-1, 2 * key_slot + key_bit)


def keep_elements(
    seed: Tensor, head_index: Tensor, rows: Tensor, keys: Tensor, dropout: float
) -> Tensor:
    """Which scores dropout keeps, with one Philox for each; static shapes, no synchronisation.

    For packed sequences, where head, row and key go together element by element.

    Args:
        seed: int64, (1,) or (), on the device.
        head_index, rows, keys: integer tensors that broadcast together; meaning as in `keep_mask`.
        dropout: probability of dropping, in [0, 1].

    Returns:
        bool of the broadcast shape, True where kept.
    """
    row_pair, row_bit, key_pair, key_bit = _pairs(rows, keys)
    w0, w1, w2, w3 = philox_4x32((head_index, row_pair, key_pair, 0), _key(seed))
    upper, lower = torch.where(key_bit == 0, w0, w1), torch.where(key_bit == 0, w2, w3)
    return torch.where(row_bit == 0, upper, lower) >= keep_threshold(dropout)


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed, int64 (1,) on `device`, non-negative, from PyTorch's generator for that device.

    It follows `torch.manual_seed`, is restored by activation checkpointing, is drawn anew by every
    replay of a CUDA graph, and never visits the host.
    """
    if torch.device(device).type == "mps":
        # Before pytorch pull request 182386 torch drew 32 bits on MPS whatever the range.
        part = torch.randint(0, 2**21, (3,), dtype=torch.int64, device=device)
        return (part[:1] << 42) | (part[1:2] << 21) | part[2:]
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _low_word(value: Integers) -> Integers:
    return (value.to(torch.int64) if isinstance(value, Tensor) else value) & MASK_32


def _multiply(multiplier: int, word: Integers) -> tuple[Integers, Integers]:
    # multiplier * word overflows int64. (multiplier - 2^32) * word does not, has the same low word
    # and a high word that is short by `word`.
    low = (multiplier - 2**32) * word
    high = low >> 32
    high += word  # in place on our own tensors: 20% faster on a CPU
    high &= MASK_32
    low &= MASK_32
    return high, low


def _pairs(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (rows >> 4) * 8 + (rows & 7), (rows >> 3) & 1, keys >> 1, keys & 1


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed.reshape(()) & MASK_32, (seed.reshape(()) >> 32) & MASK_32
