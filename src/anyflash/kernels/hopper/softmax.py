"""The running softmax of one warpgroup, in powers of two.

The state of a row is the largest score so far (in units of log2), the sum of its powers and, in
the caller's hands, the output so far. Source: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018), as used by FlashAttention (Dao et al., 2022, algorithm 1).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def sum_in_thread(p):
    """[rows, 4]: of each row, the sums of what each of the four threads holds that share it.

    A wgmma gives a thread columns 8g + 2t and 8g + 2t + 1. Adding up over threads waits until the
    end: no shuffles in the loop.
    """
    ROWS: gl.constexpr = p.shape[0]
    COLUMNS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([ROWS, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """[rows, columns / 2] int32: neighbours rounded to 16 bits, as registers of a wgmma have them.

    Weights that go from one loop into another as 16-bit numbers are taken apart and put together
    again there: 64 PRMT a tile of 64 × 128.
    """
    ROWS: gl.constexpr = p.shape[0]
    COLUMNS: gl.constexpr = p.shape[1]
    even, odd = p.reshape([ROWS, COLUMNS // 2, 2]).split()
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    text: gl.constexpr = f"cvt.rn.{name}.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        text, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights of `pack` as the left operand of a wgmma."""
    ROWS: gl.constexpr = x.shape[0]
    PAIRS: gl.constexpr = x.shape[1]
    even = (x & 0xFFFF).to(gl.int16)
    odd = (x >> 16).to(gl.int16)
    p = gl.join(even, odd).reshape([ROWS, 2 * PAIRS]).to(dtype, bitcast=True)
    return gl.convert_layout(p, layout)


@gluon.jit
def tanh(x):
    """tanh.approx.f32: a relative error of 2^-11, one instruction."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def logits(s, numbers, FLAGS: gl.constexpr):
    """Scores as the softmax takes them. Without SCALED the scale is folded into the exponent,
    which needs it to be positive: then the largest score stays the largest."""
    if FLAGS.SOFTCAP:
        s = tanh(s * (numbers.scale / numbers.softcap)) * numbers.softcap
    elif FLAGS.SCALED:
        s = s * numbers.scale
    return s


@gluon.jit
def online_softmax(s, row_max, row_sum, scale_log2):
    """(weights, factor for what was summed before, new maximum, new sums)."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
    # A row that has seen no key has maximum −inf, and −inf − −inf is NaN: subtract 0 instead.
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    shrink = gl.exp2(row_max - shift)
    part = sum_in_thread(p)
    shrink_sum = gl.convert_layout(shrink, gl.SliceLayout(1, part.type.layout))
    return p, shrink, new_max, row_sum * shrink_sum[:, None] + part


@gluon.jit
def with_sink(row_max, row_sum, logit):
    """(factor for the output so far, maximum, sum) after one more logit without a value."""
    sink = logit * LOG2E
    new_max = gl.maximum(row_max, sink)
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    shrink = gl.exp2(row_max - shift)
    # Written as one, product and difference become a fused multiply-add, and of a sink of 1e9 that
    # is the largest the rounding of `shift` would be left over.
    weight = gl.where(sink > row_max, 1.0, gl.exp2(sink - shift))
    return shrink, new_max, row_sum * shrink + weight
