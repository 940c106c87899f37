"""Public reports: strides, views and alignment; offsets beyond 32 bits; head dimensions; memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import (
    Packing,
    assert_all_same,
    assert_close,
    assert_same,
    attend,
    fixed,
    judge,
    peak_megabytes,
    randn,
)

import anyflash as af

# Strides, views, alignment.


def test_b031_the_last_stride_is_not_one(device: str) -> None:
    q, k, v = (x.transpose(-1, -2) for x in randn(*[(2, 3, 8, 70)] * 3, device=device))
    found = judge(q, k, v, causal=True)
    dout = torch.ones_like(found.out)
    twins = [x.contiguous() for x in (q, k, v)]
    assert_all_same(attend(q, k, v, dout), attend(*twins, dout))


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_b033_slices_of_a_fused_projection(device: str, dim: int) -> None:
    x, w = randn((1, 128, 32), (32, 3 * 2 * dim), dtype=torch.bfloat16, device=device)
    q, k, v = (x @ w).unflatten(-1, (3, 2, dim)).permute(2, 0, 3, 1, 4).unbind()
    assert not q.is_contiguous()
    found = judge(q * 0.2, k, v, causal=True)
    assert all(g.isfinite().all() for g in found.gradients)
    dout = torch.ones_like(found.out)
    twins = [x.contiguous() for x in (q, k, v)]
    assert_all_same(attend(q, k, v, dout), attend(*twins, dout))


@pytest.mark.parametrize("packed", [False, True])
def test_b034_backward_of_transposed_inputs(device: str, packed: bool) -> None:
    """dQ was allocated with the strides of q, and then written as if contiguous."""
    if packed:
        q, k, v = (x.transpose(-1, -2) for x in randn(*[(40, 2, 16)] * 3, device=device))
        judge(q, k, v, packing=Packing([0, 15, 40], [0, 15, 40]), causal=True)
        return
    q, k, v = (x.transpose(-1, -2) for x in randn(*[(2, 2, 16, 40)] * 3, device=device))
    found = judge(q, k, v, causal=True)
    assert [g.shape for g in found.gradients] == [q.shape] * len(found.gradients)


def test_b035_a_gradient_that_is_not_contiguous(device: str) -> None:
    q, k, v = randn((2, 4, 32, 128), *[(2, 1, 32, 128)] * 2, dtype=torch.float16, device=device)
    (dout,) = randn((2, 4, 128, 32), dtype=torch.float16, device=device)
    dout = dout.mT
    assert_all_same(attend(q, k, v, dout), attend(q, k, v, dout.contiguous()))


def test_b036_the_gradient_of_a_sum_has_no_strides(device: str) -> None:
    q, k, v = randn(*[(1, 2, 5, 8)] * 3, dtype=torch.bfloat16, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    af.attention(*leaves, causal=True).sum().backward()
    ones = attend(q, k, v, torch.ones_like(q), causal=True)
    for x, gradient in zip(leaves, (ones.dq, ones.dk, ones.dv), strict=True):
        assert_same("gradient", x.grad, gradient)


def test_b038_strides_of_sides_of_one_element_do_not_count(device: str) -> None:
    base = randn((4096,), device=device)[0]
    odd = base.as_strided((1, 1, 2, 1), (2, 2, 1, 2))
    assert odd.is_contiguous()
    dout = torch.ones_like(odd)
    assert_all_same(attend(odd, odd, odd, dout), attend(*[odd.clone()] * 3, dout))
    for strides in ((7, 3, 16, 1), (10**9, 10**9, 16, 1), (0, 0, 16, 1)):
        x = base.as_strided((1, 1, 5, 16), strides)
        plain = base[:80].view(1, 1, 5, 16)
        dout = torch.ones_like(plain)
        assert_all_same(attend(x, x, x, dout), attend(plain, plain, plain, dout))


@pytest.mark.parametrize("start", [1, 3, 7])
def test_b039_an_odd_storage_offset(device: str, start: int) -> None:
    base = [x.bfloat16() for x in randn(*[(2 * 3 * 40 * 64 + 8,)] * 3, device=device)]
    q, k, v = (x[start : start + 2 * 3 * 40 * 64].view(2, 3, 40, 64) for x in base)
    assert q.is_contiguous() and q.data_ptr() % 16
    found = judge(q, k, v, causal=True)
    again = attend(*(x.clone() for x in (q, k, v)), causal=True)
    assert_same("out", found.out, again.out)
    cut = torch.cat([k, k], -1)[..., start : start + 64]
    assert_same("a cut of a wider cache", attend(q, cut, v).out, attend(q, cut.clone(), v).out)


def test_b041_overlapping_views(device: str) -> None:
    """Shared heads and batch elements, and windows that overlap in memory."""
    q, k, v = randn((4, 2, 20, 16), (1, 1, 20, 16), (1, 1, 20, 16), device=device)
    whole = [x.expand(4, 2, -1, -1) for x in (k, v)]
    base = randn((400,), device=device)[0]
    sliding = base.as_strided((4, 2, 20, 16), (5, 0, 7, 1))
    dout = torch.ones_like(q)
    assert_all_same(attend(q, *whole, dout), attend(q, *(x.clone() for x in whole), dout))
    judge(q, sliding, sliding)
    leaves = [x.requires_grad_() for x in (k, v)]
    out = af.attention(q, *(x.expand(4, 2, -1, -1) for x in leaves))
    summed = torch.autograd.grad(out.sum(), leaves)
    apart = attend(q, *(x.detach().clone() for x in whole), torch.ones_like(q))
    for x, y in zip(summed, (apart.dk, apart.dv), strict=True):
        exact = y.double().sum((0, 1), keepdim=True)
        assert_close("the sum over heads and batch", x, exact.to(x.dtype), exact)


def test_b041_arrays_are_refused_by_name() -> None:
    array = np.flip(np.zeros((1, 1, 4, 8), dtype=np.float32), 2)
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(af.InvalidInput, match=r"k: got ndarray, expected a torch\.Tensor"):
        af.attention(x, array, x)


# Offsets beyond 32 bits. The buffers are never touched but for the rows that are used: the system
# commits only those pages. The squares of the reports have such offsets at 4 to 8 GB of memory.


def _rows_far_apart(device: str, what: str, rows: int, pitch: int) -> None:
    dtype = torch.bool if what == "mask" else torch.bfloat16
    buffer = torch.empty((rows - 1) * pitch + 128, dtype=dtype, device=device)
    far = buffer.as_strided((1, 1, rows, 128), (0, 0, pitch, 1))
    near = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))
    near = (near > 0 if what == "mask" else near.to(dtype)).to(device)
    far.copy_(near)
    q, k, v = randn((1, 2, rows, 32), *[(1, 2, 128, 32)] * 2, device=device)
    assert_same("rows", attend(q, k, v, **{what: far}).out, attend(q, k, v, **{what: near}).out)


@pytest.mark.parametrize("what", ["mask", "bias"])
def test_b044_offsets_modulo_2_32(device: str, what: str) -> None:
    """Row 4 begins 2^32 elements in, where an unsigned offset of 32 bits is 0 again."""
    _rows_far_apart(device, what, 5, 2**30)


def test_b045_offsets_beyond_2_31(device: str) -> None:
    """Row 46340 of a mask of 46341² begins just below 2^31 elements, and ends beyond."""
    _rows_far_apart(device, "mask", 3, (2**31 - 64) // 2)


@pytest.mark.parametrize("lengths", [(64, 33728), (33728, 64)])
def test_b047_more_than_32768_rows_or_keys_of_zeros(device: str, lengths: tuple[int, int]) -> None:
    """The length went through 16 bits. One side at a time: the square is 2 TFLOP."""
    q = torch.zeros(1, 1, lengths[0], 512, device=device)
    k = torch.zeros(1, 1, lengths[1], 512, device=device)
    assert_same("zeros", attend(q, k, k).out, torch.zeros_like(q))


# Head dimensions.


def test_b051_every_head_dimension(device: str) -> None:
    """Judged by the largest error of any column, with packed sequences for two of them."""
    for dim in range(1, 257):
        q, k, v = randn((1, 2, 33, dim), *[(1, 1, 35, dim)] * 2, device=device, seed=dim)
        judge(q, k, v, causal=dim % 2 == 0)
    for dim in (72, 104):
        q, k, v = randn(*[(512, 2, dim)] * 3, dtype=torch.bfloat16, device=device)
        judge(q, k, v, packing=Packing([0, 512], [0, 512]))


@pytest.mark.parametrize("dim", [72, 80, 100])
def test_b053_the_default_scale_is_of_the_real_dimension(device: str, dim: int) -> None:
    q, k, v = randn((1, 2, 30, dim), (1, 2, 30, dim), (1, 2, 30, dim + 4), device=device)
    found = judge(q, k, v)
    assert found.out.shape == (1, 2, 30, dim + 4)
    assert_same("explicit", attend(q, k, v, scale=dim**-0.5).out, found.out)


def test_b054_different_widths_of_keys_and_values(device: str) -> None:
    q, k, v = randn((2, 6, 50, 32), (2, 2, 60, 32), (2, 2, 60, 64), device=device)
    found = judge(q, k, v, causal=True)
    assert found.out.shape == (2, 6, 50, 64)
    for gradient, x in zip(found.gradients, (q, k, v), strict=False):
        assert gradient.shape == x.shape


# Memory: what a call holds at its peak, in a process of its own.


@pytest.mark.slow
@pytest.mark.parametrize("dim", [192, 300])
def test_b055_no_head_dimension_needs_quadratic_memory(dim: int) -> None:
    """Scores of 8192² would be 256 MB."""
    used = peak_megabytes(f"""
run = lambda q, k: af.attention(q, k, k)
small = [torch.randn(1, 1, 300, {dim})] * 2
large = torch.randn(1, 1, 8192, {dim}), torch.randn(1, 1, 8192, {dim})
""")
    assert used < 64


def test_b121_a_window_needs_no_more_memory_than_it_is_wide() -> None:
    """A mask of 16384² would be 256 MB of bytes."""
    used = peak_megabytes("""
run = lambda q, k: af.attention(q, k, k, mask=af.window(16, 0))
small = [torch.randn(1, 2, 600, 32)] * 2
large = torch.randn(1, 2, 16384, 32), torch.randn(1, 2, 16384, 32)
""")
    assert used < 64


@pytest.mark.slow
def test_b122_grouped_heads_of_512_need_linear_memory() -> None:
    """Scores of 2 · 4096² would be 128 MB, keys repeated for all heads 64 MB more."""
    used = peak_megabytes("""
run = lambda q, k: af.attention(q, k, k)
small = torch.randn(1, 2, 300, 512), torch.randn(1, 1, 300, 512)
large = torch.randn(1, 2, 4096, 512), torch.randn(1, 1, 4096, 512)
""")
    assert used < 96


def test_b124_a_broadcast_mask_is_read_in_place(device: str) -> None:
    """A mask of 2048², the same for 12 heads: 4 MB, and 48 MB if it were expanded."""
    used = peak_megabytes("""
run = lambda q, mask: af.attention(q, q, q, mask=mask)
g = torch.Generator().manual_seed(0)
small = torch.randn(1, 12, 300, 8), torch.rand(1, 1, 300, 300, generator=g) < 0.5
large = torch.randn(1, 12, 2048, 8), torch.rand(1, 1, 2048, 2048, generator=g) < 0.5
""")
    assert used < 48
    mask = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    q, k, v = randn(*[(2, 12, 40, 8)] * 3, device=device)
    found = judge(q, k, v, mask=mask, seen=fixed(mask))
    full = attend(q, k, v, mask=mask.expand(2, 12, 40, 40).contiguous())
    assert_close("expanded", full.out, found.out, found.out.double())
