"""The running softmax of one warpgroup, in powers of two.

Weights are powers of two of scores less a reference; their sums and, in the caller's hands, the
output so far are rescaled when the reference changes. Source: Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018), as used by FlashAttention (Dao et al., 2022, algorithm
1); that it need not be the largest score: FlashAttention-4 (2026).
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
def online_softmax(s, state, numbers, LAZY: gl.constexpr):
    """(weights, factor for what was summed before, new state) of a tile of scores.

    The state of a row is its reference, a score, the reference as an exponent, and the sums of its
    weights. The reference is the largest score so far, or, under LAZY, one that the largest exceeds
    by less than a factor of 2^8 in the weights: then the factor is 1 for most tiles.

    A weight is 2^(s · slope − shift) by one fused multiply-add; 2^((s − reference) · slope) takes
    one more and would cost 6 %. The rounding of shift = reference · slope shifts all weights of a
    row alike, which matters only where it leaves the range of numbers. Beyond `steep` the slope is
    therefore a power of two, no smaller than the true one, and nothing is rounded: there, scores
    that differ in their last bit have weights 2^4 or more apart.
    """
    reference, shift, row_sum = state
    largest = gl.max(s, 1)
    if LAZY:
        reference = gl.where(largest > reference + numbers.slack, largest, reference)
    else:
        reference = gl.maximum(reference, largest)
    slope = gl.where(gl.abs(reference) > numbers.steep, numbers.power, numbers.scale_log2)
    new_shift = reference * slope
    # A row that has seen no key has reference −inf, and −inf − −inf is NaN: subtract 0 instead.
    subtract = gl.where(reference == -float("inf"), 0.0, new_shift)
    p = gl.exp2(s * slope[:, None] - subtract[:, None])
    shrink = gl.exp2(shift - subtract)
    part = sum_in_thread(p)
    shrink_sum = gl.convert_layout(shrink, gl.SliceLayout(1, part.type.layout))
    return p, shrink, (reference, new_shift, row_sum * shrink_sum[:, None] + part)


@gluon.jit
def hold(x):
    """x, and what was computed for it is, before any product is waited for that comes after.

    ptxas moves arithmetic behind such a wait, but no store: this one never happens.
    """
    text: gl.constexpr = (
        "{ .reg .pred never; .reg .b32 nowhere; mov.b32 nowhere, 0; mov.f32 $0, $1; "
        "setp.lt.f32 never, $1, 0f00000000; @never st.volatile.shared.f32 [nowhere], $1; }"
    )
    return gl.inline_asm_elementwise(text, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.constexpr_function
def _rescale_text(n):
    """Of the n numbers of a thread, the first two and the next two are of its two rows."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred one; setp.eq.f32 one, ${2 * n}, 0f3F800000; "
        f"setp.eq.and.f32 one, ${2 * n + 2}, 0f3F800000, one; "
        f"vote.sync.all.pred one, one, 0xffffffff; @one bra KEEP; {products} KEEP: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(o, factor):
    """o · factor, row by row; a warp whose factors are all 1 skips it."""
    N: gl.constexpr = o.shape[1] // 2  # numbers of a thread
    text: gl.constexpr = _rescale_text(N)
    constraints: gl.constexpr = _rescale_constraints(N)
    factors = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]
    factors = factors + gl.zeros_like(o)
    return gl.inline_asm_elementwise(
        text, constraints, [o, factors], dtype=gl.float32, is_pure=True, pack=N
    )


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
