"""The Gluon emulator: arithmetic, tensors and the translation of a kernel's source."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from triton.experimental import gluon as g
from triton.experimental.gluon import language as gl

from gluon_emulator import EmulatorError, NotEmulated, run

INT_MIN = -(2**31)


def outcome(kernel: Any, *args: Any, size: int = 1, dtype: torch.dtype = torch.int32) -> list:
    out = torch.zeros(size, dtype=dtype)
    run(kernel, (1,), (out, *args))
    return out.tolist()


@g.jit
def integers(out, x, y):
    gl.store(out + 0, x // y)
    gl.store(out + 1, x % y)
    gl.store(out + 2, (x + 0x7FFFFFFF) + y)
    gl.store(out + 3, x * 0x10001)
    gl.store(out + 4, x >> 1)
    gl.store(out + 5, -x)
    i = gl.arange(0, 2) * 0 + x
    gl.store(out + 6 + gl.arange(0, 2), i // y)
    gl.store(out + 8 + gl.arange(0, 2), i % y)
    gl.store(out + 10 + gl.arange(0, 2), i * 0x10001)


@pytest.mark.parametrize(("x", "y"), [(-7, 2), (7, -2), (-7, -2), (7, 2), (123456789, 1000)])
def test_int32_is_that_of_the_hardware(x: int, y: int) -> None:
    """`//` and `%` round towards zero, sums and products wrap."""

    def wrapped(n: int) -> int:
        return (n - INT_MIN) % 2**32 + INT_MIN

    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    rest, product = x - y * quotient, wrapped(x * 0x10001)
    expected = [quotient, rest, wrapped(x + 0x7FFFFFFF + y), product, x >> 1, -x]
    expected += [quotient] * 2 + [rest] * 2 + [product] * 2
    assert outcome(integers, x, y, size=12) == expected


@g.jit
def constants(out, N: gl.constexpr):
    HALF: gl.constexpr = N // 2
    gl.store(out, HALF)
    gl.store(out + 1, N % 2)


def test_constants_keep_python_s_arithmetic() -> None:
    assert outcome(constants, -7, size=2) == [-4, 1]


@g.jit
def carried(out, n):
    x = 1
    odd = False
    for _ in range(n):
        x = x * 1000003
        odd = odd == False  # noqa: E712
    y = 3
    for _ in range(n):
        y -= 5
    gl.store(out, x)
    gl.store(out + 1, y // 2)
    gl.store(out + 2, odd.to(gl.int32))


def test_a_number_carried_around_a_loop_exists_at_run_time() -> None:
    wrapped = (1000003**5 - INT_MIN) % 2**32 + INT_MIN
    assert outcome(carried, 5, size=3) == [wrapped, -11, 1]
    assert outcome(carried, 2, size=3)[1] == -3  # towards zero: -7 / 2


@g.jit
def unsigned(out, x):
    i = (gl.arange(0, 4) + x).to(gl.uint32)
    a = i * 0xD2511F53
    high = gl.umulhi(i, (i * 0).to(gl.uint32) + 0xD2511F53)
    gl.store(out + gl.arange(0, 4), (a >> 3).to(gl.int32))
    gl.store(out + 4 + gl.arange(0, 4), (high ^ 0xFFFF0000).to(gl.int32))
    wide = i.to(gl.uint64) * 0xD2511F53
    gl.store(out + 8 + gl.arange(0, 4), wide.to(gl.int64).to(gl.int32))


def test_unsigned_numbers() -> None:
    got = outcome(unsigned, 2_000_000_000, size=12)
    for i in range(4):
        product = (2_000_000_000 + i) * 0xD2511F53
        low, high = product % 2**32, product >> 32
        expected = [low >> 3, high ^ 0xFFFF0000, low]
        assert [n % 2**32 for n in got[i::4]] == expected


@g.jit
def promoted(out, half, single):
    x = gl.load(half + gl.arange(0, 2))
    gl.store(out, (x * 0.1).dtype == gl.bfloat16)
    gl.store(out + 1, (x * single).dtype == gl.float32)
    gl.store(out + 2, (x / 3).dtype == gl.float32)
    gl.store(out + 3, (gl.arange(0, 2) * 0.5).dtype == gl.float32)
    gl.store(out + 4, (gl.arange(0, 2) + gl.program_id(0).to(gl.int64)).dtype == gl.int64)
    gl.store(out + 5, gl.sum(x, 0).dtype == gl.float32)
    gl.store(out + 6, gl.max(gl.arange(0, 4).to(gl.int8), 0).dtype == gl.int32)


def test_promotion_is_triton_s() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    assert outcome(promoted, half, 1.5, size=7) == [1] * 7


@g.jit
def converted(out, x):
    a = gl.load(x + gl.arange(0, 8))
    gl.store(out + gl.arange(0, 8), a.to(gl.int32))
    small = (gl.arange(0, 4) * 100).to(gl.uint8)
    gl.store(out + 8 + gl.arange(0, 4), (small * 3).to(gl.int32))
    words = (gl.arange(0, 4) - 2).to(gl.uint32)
    gl.store(out + 12 + gl.arange(0, 4), (words // 3).to(gl.int32))
    gl.store(out + 16, gl.max(words, 0).to(gl.int32))
    gl.store(out + 17, gl.sum(words, 0).to(gl.int32))
    gl.store(out + 18 + gl.arange(0, 4), (~words).to(gl.int32))


def test_conversions_saturate_and_unsigned_numbers_stay_so() -> None:
    x = torch.tensor([3e9, -3e9, float("nan"), float("inf"), -float("inf"), 2.9, -2.9, 0.0])
    got = outcome(converted, x, size=22)
    assert got[:8] == [2**31 - 1, INT_MIN, 0, 2**31 - 1, INT_MIN, 2, -2, 0]
    assert got[8:12] == [3 * 100 * i % 256 for i in range(4)]
    words = [(i - 2) % 2**32 for i in range(4)]
    assert got[12:16] == [w // 3 for w in words]
    assert [n % 2**32 for n in got[16:18]] == [max(words), sum(words) % 2**32]
    assert [n % 2**32 for n in got[18:]] == [~w % 2**32 for w in words]


@g.jit
def floats(out, x, third):
    a = gl.load(x + gl.arange(0, 4))
    gl.store(out + gl.arange(0, 4), gl.maximum(a, 0.0))
    gl.store(out + 4 + gl.arange(0, 4), gl.minimum(a, 1.0))
    gl.store(out + 8, gl.max(a, 0))
    gl.store(out + 9, gl.max(a + a * float("nan"), 0))
    gl.store(out + 10, third * 3.0)
    gl.store(out + 11, gl.fma(third, 3.0, -1.0))


def test_the_maximum_drops_nan_and_float32_rounds() -> None:
    nan = float("nan")
    x = torch.tensor([nan, -1.0, 5.0, nan])
    got = outcome(floats, x, 1 / 3, size=12, dtype=torch.float32)
    assert got[:9] == [0, 0, 5, 0, 1, -1, 1, 1, 5]
    assert got[9] != got[9]  # of nothing but NaN
    assert got[10] == 1.0
    assert got[11] == pytest.approx(3 * torch.tensor(1 / 3).double().item() - 1, rel=1e-6)


@g.jit
def later_maximum(a, i, b, j):
    take = (b > a) | ((b == a) & (j > i))
    return gl.where(take, b, a), gl.where(take, j, i)


@g.jit
def difference(a, b):
    return a * 2 + b


@g.jit
def reductions(out, x):
    rows = gl.arange(0, 4)
    a = gl.load(x + rows[:, None] * 8 + gl.arange(0, 8)[None, :])
    index = a * 0 + gl.arange(0, 8)[None, :]
    best, at = gl.reduce((a, index), 1, later_maximum)
    gl.store(out + rows, best)
    gl.store(out + 4 + rows, at)
    gl.store(out + 8, gl.reduce(gl.arange(0, 8), 0, difference))


def test_reduce_with_a_combine_of_its_own() -> None:
    x = torch.tensor([[3, 9, 9, 1, 0, 2, 9, 4]] * 4, dtype=torch.int32)
    # difference is not associative; the tree by halves is what the emulator promises.
    tree = list(range(8))
    while len(tree) > 1:
        half = len(tree) // 2
        tree = [a * 2 + b for a, b in zip(tree[:half], tree[half:], strict=True)]
    assert outcome(reductions, x, size=9) == [9] * 4 + [6] * 4 + tree


@g.jit
def masked(out, x, n):
    i = gl.arange(0, 8)
    gl.store(out + i, gl.load(x + i, mask=i < n, other=-1), mask=i < n + 2)


def test_masked_loads_and_stores() -> None:
    x = torch.arange(10, 13, dtype=torch.int32)
    assert outcome(masked, x, 3, size=5) == [10, 11, 12, -1, -1]
    with pytest.raises(EmulatorError, match=r"test_gluon_values\.py:\d+: a load out of bounds"):
        outcome(masked, x, 4, size=6)
    with pytest.raises(EmulatorError, match="a store out of bounds: offset 4 of 4"):
        outcome(masked, x, 3, size=4)


@g.jit
def steered(out):
    if gl.arange(0, 2) > 0:
        gl.store(out, 1)


@g.jit
def wants_a_constant(out, N: gl.constexpr):
    gl.store(out, N)


@g.jit
def passes_a_number(out, n):
    wants_a_constant(out, n)


@g.jit
def divides(out, n):
    gl.store(out, 1 // n)


@g.jit
def indexes(out):
    gl.store(out, gl.arange(0, 2)[0])


@g.jit
def scans(out):
    gl.store(out, gl.histogram(gl.arange(0, 2), 2))


@pytest.mark.parametrize(
    ("kernel", "args", "kind", "message"),
    [
        (steered, (), EmulatorError, "a tensor cannot steer"),
        (passes_a_number, (3,), EmulatorError, "`N` of wants_a_constant is a constexpr"),
        (divides, (0,), EmulatorError, "divided by zero"),
        (indexes, (), EmulatorError, "only `:` and `None`"),
        (scans, (), NotEmulated, "gl.histogram is not emulated"),
    ],
)
def test_what_does_not_compile_is_refused(kernel, args, kind, message) -> None:
    with pytest.raises(kind, match=message):
        outcome(kernel, *args)
