"""Public reports: masks as programs, polarity and broadcasting; messages; processes and imports."""

from __future__ import annotations

import pytest
import torch
from support import assert_close, assert_same, attend, child, fixed, judge, randn

import anyflash as af
from anyflash.masks.places import Compiled
from anyflash.masks.tiles import FULL, PARTIAL, TileMap

# Masks as programs, and the tile map that they become.


def test_b136_causal_and_a_bias_of_position_at_1025(device: str) -> None:
    q, k, v = randn(*[(1, 1, 1025, 64)] * 3, dtype=torch.bfloat16, device=device)
    i, j = torch.arange(1025.0, device=device)[:, None], torch.arange(1025.0, device=device)
    mask = af.from_function(lambda b, h, i, j: j <= i)
    found = judge(
        q, k, v, mask=mask, bias=(i - j)[None, None], seen=lambda b, h, i, j, offset: j <= i
    )
    assert all(g.isfinite().all() for g in found.gradients)


@pytest.mark.parametrize("kind", ["tensor", "documents", "compiled", "positions"])
def test_b137_a_mask_for_another_length(kind: str) -> None:
    x = torch.zeros(2, 1, 32, 8)
    ids = torch.zeros(64, dtype=torch.int64)
    longer = {
        "tensor": torch.ones(64, 64, dtype=torch.bool),
        "documents": af.documents(ids),
        "compiled": af.from_function(lambda b, h, i, j: (i + j) % 2 == 0).compile(2, 1, 64, 64),
        "positions": af.causal().at(torch.arange(64), torch.arange(64)),
    }[kind]
    with pytest.raises(ValueError, match="mask"):
        af.attention(x, x, x, mask=longer)
    longer = torch.ones(4, 1, 32, 32, dtype=torch.bool) if kind == "tensor" else longer
    with pytest.raises(ValueError, match="mask"):
        af.attention(x, x, x, mask=longer)


def test_b138_whole_tiles_only(device: str) -> None:
    """Tiles are full or absent, none is partial: only the listed ones are attended."""

    def board(b, h, i, j, offset=0):
        return (i // 64 + j // 64) % 2 == 0

    mask = af.from_function(lambda *at: board(*at))
    form = mask.compile(1, 2, 320, 256)
    assert isinstance(form.form, TileMap) and len(form.form.bits) == 0
    q, k, v = randn((1, 2, 320, 32), *[(1, 2, 256, 32)] * 2, device=device)
    judge(q, k, v, mask=mask, seen=board)


def test_b140_full_tiles_written_as_partial_ones() -> None:
    """The same pattern as whole tiles and as tiles of bits that are all set."""
    q, k, v, dout = randn(*[(1, 2, 256, 32)] * 4)
    whole = af.from_function(lambda b, h, i, j: j <= i).compile(1, 2, 256, 256)
    form = whole.form
    assert isinstance(form, TileMap) and {1, 2} <= set(form.kinds.flatten().tolist())
    ones = torch.full((1, 64), -1, dtype=torch.int64)
    full = form.kinds == FULL
    tensors = [
        torch.where(full, PARTIAL, form.kinds).to(torch.uint8),
        torch.where(full, len(form.bits), form.numbers).int(),
        torch.cat([form.bits, ones]),
        torch.cat([form.bits_by_key, ones]),
        *form.tensors[4:],
    ]
    bits = Compiled("TileMap", 1, 2, 256, 256, *tensors)
    a, b = attend(q, k, v, dout, mask=whole), attend(q, k, v, dout, mask=bits)
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert_close(name, y, x, x.double())
    none = attend(q, k, v, dout, mask=~whole & whole)
    for x in (none.out, none.dq, none.dk, none.dv):
        assert_same("an empty list", x, torch.zeros_like(q))


# Polarity and broadcasting.


def test_b141_true_is_attend(device: str) -> None:
    q, k = randn((1, 1, 4, 8), (1, 1, 4, 8), device=device)
    v = torch.eye(4, dtype=q.dtype, device=device)[None, None]
    mask = torch.rand(4, 4, generator=torch.Generator().manual_seed(2)).to(device) < 0.5
    mask[:, 0], mask[:, 1] = True, False
    for given, seen in ((mask, mask), (~mask, ~mask)):
        for form in (given, af.from_tensor(given)):
            assert_same("weights", attend(q, k, v, mask=form).out[0, 0] > 0, seen)


def test_b142_boolean_and_additive_masks_agree(device: str) -> None:
    q, k, v = randn(*[(1, 8, 128, 64)] * 3, device=device)
    keep = torch.arange(128, device=device) < 100
    found = judge(q, k, v, mask=keep, seen=fixed(keep))
    for lowest in (-torch.inf, torch.finfo(torch.float32).min):
        bias = torch.where(keep, 0.0, lowest).view(1, 1, 1, 128)
        added = attend(q, k, v, torch.ones_like(q), bias=bias)
        assert_close("out", added.out, found.out, found.out.double())
        assert_same("dv", added.dv[:, :, 100:], torch.zeros_like(v[:, :, 100:]))
        assert added.dq.isfinite().all()


def test_b144_a_bias_that_is_constant_along_keys(device: str) -> None:
    q, k, v = randn((1, 8, 1, 64), *[(1, 8, 50, 64)] * 2, device=device)
    found = judge(q, k, v)
    (bias,) = randn((8, 1, 1), device=device)
    added = judge(q, k, v, bias=bias)
    assert_close("out", added.out, found.out, found.out.double())
    ones = torch.ones(8, 1, 1, dtype=torch.bool, device=device)
    kept = attend(q, k, v, mask=ones)
    assert_close("out", kept.out, found.out, found.out.double())
    ones[3] = False
    assert (attend(q, k, v, mask=ones).out[0, 3] == 0).all()


@pytest.mark.parametrize("length", [137, 600, 1000])
def test_b145_a_mask_of_keys_beyond_512(device: str, length: int) -> None:
    q, k, v = randn((1, 12, 8, 64), *[(1, 12, length, 64)] * 2, device=device)
    keep = torch.rand(1, 1, 1, length, generator=torch.Generator().manual_seed(1)) < 0.5
    keep = keep.to(device)
    judge(q, k, v, mask=keep, seen=fixed(keep))
    other = v.masked_fill(~keep.view(1, 1, length, 1), 100.0)
    assert_same("masked values", attend(q, k, other, mask=keep).out, attend(q, k, v, mask=keep).out)


def test_b146_masks_of_43_keys_and_transposed_ones(device: str) -> None:
    q, k, v = randn((2, 2, 30, 16), *[(2, 2, 43, 16)] * 2, device=device)
    g = torch.Generator().manual_seed(0)
    wide = (torch.rand(2, 1, 43, 30, generator=g) < 0.5).to(device)
    judge(q, k, v, mask=wide.mT, seen=fixed(wide.mT))
    (bias,) = randn((1, 2, 43, 30), device=device)
    found = judge(q, k, v, bias=bias.mT)
    again = attend(q, k, v, bias=bias.mT.contiguous())
    assert_same("contiguous", again.out, found.out)
    padded = torch.zeros(2, 1, 30, 48, dtype=torch.bool, device=device)[..., :43]
    padded.copy_(wide.mT)
    judge(q, k, v, mask=padded, seen=fixed(wide.mT))


# Messages.


def test_b149_every_backend_says_why_not() -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(af.Unsupported) as caught:
        af.attention(x, x, x, precision="fp8")
    lines = str(caught.value).splitlines()
    assert set(caught.value.refusals) >= {"cpu", "reference"}
    for name, sentence in caught.value.refusals.items():
        assert f"  {name}: {sentence}" in lines and sentence
    assert "float32" in lines[0] and "q (1, 1, 4, 8)" in lines[0]


def test_b150_the_wrong_order_of_dimensions() -> None:
    """(B, S, H, D) shows where heads or lengths do not fit; the message says which order it is."""
    q, k = torch.zeros(1, 30, 4, 8), torch.zeros(1, 20, 2, 8)
    with pytest.raises(ValueError, match=r"30 query heads and 20 key heads.*\(B, H, S, D\)"):
        af.attention(q, k, k)
    with pytest.raises(ValueError, match=r"v: .*\(B, H, S, D\)"):
        af.attention(q, k, torch.zeros(1, 2, 20, 8))
    assert "(B, H, S, D)" in str(af.attention.__doc__) or "(B, Hq, Sq, D)" in af.attention.__doc__


def test_b151_the_cause_comes_first() -> None:
    """One line says what is wrong, under torch.compile too."""
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(af.InvalidInput) as caught:
        af.attention(x, x[..., :4], x)
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).startswith("k: got head dimension 4, expected")
    with pytest.raises(af.Unsupported) as refused:
        af.attention(x, x, x, precision="fp8", backend="cpu")
    assert str(refused.value).splitlines()[0].startswith("nothing serves q (1, 1, 4, 8)")
    run = torch.compile(af.attention, backend="aot_eager")
    with pytest.raises(Exception, match=r"InvalidInput\('k', 'head dimension "):
        run(x, x[..., :4], x)


# Imports, forks.


def test_b113_import_starts_no_cuda_and_forks_work() -> None:
    said = child(
        """
import os, torch, anyflash as af
print(torch.cuda.is_initialized())
def use():
    q = torch.randn(1, 2, 70, 16, requires_grad=True)
    af.attention(q, q, q, mask=af.window(9, 0)).sum().backward()
    return bool(q.grad.isfinite().all())
def in_a_fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if use() else 1)
    return os.waitpid(pid, 0)[1]
print(in_a_fork())  # the first use is in the child
print(use(), in_a_fork())  # and once more after the parent has used it
""",
        seconds=60,
    )
    assert said.split() == ["False", "0", "True", "0"]


def test_b120_import_changes_nothing_global() -> None:
    said = child("""
import os, sys, warnings, torch
def state():
    return {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.enabled,
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "sdpa": id(torch.nn.functional.scaled_dot_product_attention),
        "hook": (sys.excepthook, sys.displayhook),
    }
before = state()
import anyflash as af
after = state()
assert before["filters"] == after["filters"]
q = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
af.attention(q, q, q, causal=True).sum().backward()
used = state()
del before["filters"], after["filters"]  # SymPy, which torch loads on first use, adds its own
print([k for k in before if before[k] != after[k]], [k for k in before if before[k] != used[k]])
""")
    assert said.strip() == "[] []"
