"""The running softmax of one warpgroup, in powers of two.

Weights are powers of two of scores less a reference, a score of the row; their sums and, in the
caller's hands, the output so far are rescaled when the reference changes. Source: Milakov and
Gimelshein, "Online normalizer calculation for softmax" (2018), as used by FlashAttention (Dao et
al., 2022, algorithm 1); that it need not be the largest score: FlashAttention-4 (2026).

No maximum is looked for in most tiles. Weights are taken relative to the reference as it is, and
their sums, which are needed anyway, tell whether it was too low: only then are the row's largest
scores the new references, and the tile is weighed once more. In a tile of 64 · 128 scores that
saves 130 of 450 instructions, two for each score: the maximum and the rescaling of the output. At
D = 64, S = 16 K it is 1.07 of the speed, under load 1.06.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# The most that the weights in a thread's part of a row and tile may add up to, 2^14, as the bits of
# a float32: they fit float16. Smaller weights lose nothing to a low reference.
MOST = gl.constexpr(0x46800000)
STEEP = gl.constexpr(2.0**26)  # see `slope`


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
def slope(shift, numbers):
    """What scores of a row are multiplied by in the exponent.

    A weight is 2^(s · slope − shift) by one fused multiply-add, with shift = reference · slope;
    2^((s − reference) · slope) takes one more and would cost 6 %. The rounding of the shift shifts
    all weights of a row alike, which matters only where it leaves the range of numbers. Beyond
    STEEP the slope is therefore a power of two, no smaller than the true one, and nothing is
    rounded: there, scores that differ in their last bit have weights 2^4 or more apart.
    """
    return gl.where(gl.abs(shift) > STEEP, numbers.power, numbers.scale_log2)


@gluon.jit
def weigh(s, shift, numbers):
    """(weights, `sum_in_thread` of them) of a tile of scores. Of a row without a reference, whose
    shift is −inf, both are infinite or NaN."""
    p = gl.exp2(s * slope(shift, numbers)[:, None] - shift[:, None])
    return p, sum_in_thread(p)


@gluon.jit
def any_too_large(sums):
    """Whether some row needs another reference; the same in all threads of the warpgroup.

    From each warp one number goes through shared memory, and each thread looks at all of them:
    reduced to one number the usual way they go there and back twice (D = 64 with two consumers:
    0.91 of the speed at S = 4 K, 0.96 at 1 K).
    """
    COUNT: gl.constexpr = sums.shape[0] * sums.shape[1]
    bits = gl.abs(sums).to(gl.int32, bitcast=True)  # in the order of the sums, NaN last
    of_warps = gl.max(bits.reshape([4, COUNT // 4]), 1)
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(gl.convert_layout(of_warps, everywhere), 0) > MOST


@gluon.jit
def weigh_anew(s, shift, numbers):
    """(weights, `sum_in_thread` of them, new shift, factor for what was summed before), with the
    largest scores so far as references."""
    reference = gl.maximum(shift / slope(shift, numbers), gl.max(s, 1))
    new = reference * numbers.scale_log2
    new = gl.where(gl.abs(new) > STEEP, reference * numbers.power, new)
    factor = gl.where(shift == -float("inf"), 0.0, gl.exp2(shift - new))
    # A row that has seen no key still has none, and −inf − −inf is NaN: subtract 0 instead.
    p, sums = weigh(s, gl.where(new == -float("inf"), 0.0, new), numbers)
    return p, sums, new, factor


@gluon.jit
def with_sink(row_max, row_sum, logit):
    """(factor for the output so far, maximum, sum) after one more logit of each row, without a
    value."""
    sink = logit * LOG2E
    new_max = gl.maximum(row_max, sink)
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    shrink = gl.exp2(row_max - shift)
    # Written as one, product and difference become a fused multiply-add, and of a sink of 1e9 that
    # is the largest the rounding of `shift` would be left over.
    weight = gl.where(sink > row_max, 1.0, gl.exp2(sink - shift))
    return shrink, new_max, row_sum * shrink + weight
