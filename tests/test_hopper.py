"""The Hopper backend: the battery on a card, and on any machine what it refuses and what it does
with a call, in the emulator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflash as af
import plain
from anyflash import calls, devices, dispatch
from anyflash.backends import hopper
from anyflash.devices import Device
from anyflash.masks import Mask
from anyflash.ops import _laid_out, _swapped
from anyflash.problem import Gradients, Inputs, Needs, Options, Problem, Saved
from battery import Battery
from gluon_plugin import Gluon
from plain import Packing, Seen, Terms, assert_close, assert_same


class Hopper(Battery):
    backend = "hopper"
    dtypes = (torch.bfloat16, torch.float16)

    keeps_nan_apart = False


@pytest.mark.gpu
class TestHopper(Hopper):
    device = "cuda"


class TestEmulated(Hopper):
    """Some of it on CPU tensors, which the backend takes for those of a card here."""

    most_rows = 12

    @pytest.fixture(autouse=True)
    def emulated(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip("triton", reason="Triton exists on Linux only")
        from gluon_emulator import emulate

        refuse = hopper._hardware
        served = Device("cuda", "emulated", frozenset({"wgmma"}))
        monkeypatch.setattr(
            hopper, "_hardware", lambda device: refuse(served if device.type == "cpu" else device)
        )
        pretend_a_card(monkeypatch)
        _forget_choices()
        with emulate(seed=0, races=False):
            yield
        _forget_choices()

    def test_other_devices_are_refused(self, dtype: torch.dtype) -> None:
        """The one thing that is not as on a card."""


def pretend_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def _forget_choices() -> None:
    dispatch.select.cache_clear()
    calls._checked.clear()


# Refusals, whatever machine this is.

HOPPER = Device("cuda", "NVIDIA H200", frozenset({"sm_90", "wgmma"}))
AMPERE = Device("cuda", "NVIDIA A100", frozenset({"sm_80"}))


def problem(
    shape: tuple[int, ...] = (1, 4, 70, 64), keys: int | None = None, dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16, mask: Mask | None = None, precision: str | None = None,
    gradient: bool = False, **tensors: Tensor,
) -> Problem:  # fmt: skip
    """A call without memory: tensors of one element, expanded."""
    one = torch.zeros((), dtype=dtype)
    batch, heads, queries, dim = shape
    keys, dim_v = queries if keys is None else keys, dim if dim_v is None else dim_v
    sizes = (queries, dim), (keys, dim), (keys, dim_v)
    q, k, v = (one.expand(batch, heads, *size) for size in sizes)
    inputs = Inputs(q, k, v, mask=mask, **tensors)
    return Problem.of(inputs, Options(0.125, precision=precision), gradient)


IDS = torch.arange(70) % 3  # documents that are torn apart
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "float16 and bfloat16, not float32"),
    "float64": ({"dtype": torch.float64}, "not float64"),
    "D": ({"shape": (1, 4, 70, 257)}, "1 to 256 columns, and those of q and k have 257"),
    "Dv": ({"dim_v": 512}, "1 to 256 columns, and those of v have 512"),
    "D of 0": ({"shape": (1, 4, 70, 0), "dim_v": 8}, "those of q and k have 0"),
    "Dv of 0": ({"dim_v": 0}, "those of v have 0"),
    "bias": ({"bias": torch.zeros(70, 70)}, "no bias"),
    "alibi": ({"alibi": torch.zeros(4)}, "no ALiBi"),
    "fp8": ({"precision": "fp8"}, "precision"),
    "queries": ({"shape": (1, 1, 2**30 + 1, 64), "keys": 1}, "at most 1073741824 queries"),
    "keys": ({"shape": (1, 1, 1, 64), "keys": 2**31}, "at most 1073741824 keys, not 2147483648"),
    "blocks": ({"shape": (2**20, 2**11, 1, 64)}, "fewer than 2147418112 blocks"),
}  # fmt: skip


def said(sentence: str | None) -> str:
    assert isinstance(sentence, str) and sentence.strip() and "\n" not in sentence
    return sentence


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_triton", lambda: "3.6.0")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    changes, words = REFUSED[name]
    assert words in said(hopper.refusal(problem(**changes), HOPPER))


def packed_with_a_map(device: torch.device) -> Inputs:
    x = torch.zeros((), dtype=torch.bfloat16, device=device).expand(70, 1, 64)
    starts = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    mask = af.from_function(lambda b, h, i, j: (i + j) % 3 != 0)
    return Inputs(x, x, x, mask=mask, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.usefixtures("triton")
def test_a_tile_map_of_packed_sequences() -> None:
    described = Problem.of(packed_with_a_map(torch.device("cpu")), Options(1.0))
    assert "of packed sequences" in said(hopper.refusal(described, HOPPER))


@pytest.mark.usefixtures("triton")
def test_a_packed_batch_that_is_too_long() -> None:
    """Though each of its sequences is short enough."""
    starts = torch.tensor([0, 2**29, 2**30, 2**30 + 1], dtype=torch.int32)
    x = torch.zeros((), dtype=torch.bfloat16).expand(2**30 + 1, 1, 64)
    packed = Problem.of(Inputs(x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts), Options(1.0))
    assert "packed batches of at most 1073741824 rows" in said(hopper.refusal(packed, HOPPER))
    shorter, starts = x[1:], starts.clamp(max=2**30)
    packed = Problem.of(
        Inputs(shorter, shorter, shorter, cu_seqlens_q=starts, cu_seqlens_k=starts), Options(1.0)
    )
    assert hopper.refusal(packed, HOPPER) is None


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "widest": {"shape": (1, 4, 70, 256)},
    "narrowest": {"shape": (1, 4, 70, 1), "dim_v": 256},
    "longest": {"shape": (1, 1, 2**30, 64)},
    "nothing": {"shape": (0, 4, 0, 64), "keys": 0},
    "window": {"mask": af.window(3, 0)},
    "documents": {"mask": af.documents(IDS.sort().values) & af.causal()},
    "two": {"mask": af.prefix(3) | af.window(2, 0)},
    "tensor": {"mask": af.from_tensor(torch.ones(70, 70, dtype=torch.bool))},
    "function": {"mask": af.from_function(lambda b, h, i, j: i != j), "gradient": True},
    "scattered": {"mask": af.documents(IDS)},
    "three": {"mask": ~(af.window(2, 2) | af.prefix(3)) | af.window(0, 0)},
    "sink": {"sink": torch.zeros(4)},
}


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name: str) -> None:
    assert hopper.refusal(problem(**SERVED[name]), HOPPER) is None


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_other_devices(device: str) -> None:
    sentence = hopper.refusal(problem(), Device(device, "another", frozenset()))
    assert f"tensors are on {device}" in said(sentence)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("device", [AMPERE, Device("cuda", "not present", frozenset())])
def test_other_cards(device: Device) -> None:
    sentence = said(hopper.refusal(problem(), device))
    assert "wgmma" in sentence and device.name in sentence


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "there is none"),
        ("3.5.1", "it is 3.5.1"),
        ("2.1", "it is 2.1"),
        ("3.6.0", None),
        ("3.10.0+git1234", None),
        ("4.0", None),
    ],
)
def test_versions_of_triton(
    version: str | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "_triton", lambda: version)
    sentence = hopper.refusal(problem(), HOPPER)
    if words is None:
        assert sentence is None
    else:
        assert words in said(sentence) and "pip install 'triton>=3.6'" in sentence


def test_the_version_of_triton_is_asked_for_last() -> None:
    """It has to be imported for that, which a call on another device must not pay for."""
    code = """
import sys, torch, anyflash as af
from anyflash.backends import hopper
q = torch.zeros(1, 1, 8, 16)
af.attention(q, q, q)
af.explain(q, q, q, device="cuda")
print("triton" in sys.modules, hopper._triton.cache_info().currsize)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["False", "0"]


def test_the_version_found_is_that_of_the_module() -> None:
    assert hopper._triton() == pytest.importorskip("triton").__version__


@pytest.mark.parametrize(
    ("hip", "features"),
    [(None, {"sm_94", "wgmma"}), ("6.4", {"gfx942"})],
)
def test_features_of_a_card(
    hip: str | None, features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's MI300 reports a capability of (9, 4), and has no wgmma."""
    card = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    devices.probe.cache_clear()
    try:
        assert devices.probe("cuda:1") == Device("cuda", "a card", frozenset(features))
    finally:
        devices.probe.cache_clear()


# What it does with a call, from tensors to results.


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, gluon: Gluon) -> Gluon:
    """A card of three multiprocessors, where there is none."""
    if gluon.emulated:
        pretend_a_card(monkeypatch)
    return gluon


def check(
    card: Gluon, q: Tensor, k: Tensor, v: Tensor, seen: Seen | None, at: Packing | None = None,
    used: list[int] | None = None, options: Options | None = None, **tensors: Any,
) -> None:  # fmt: skip
    """A call of the backend, held against plain PyTorch."""
    given = {n: x.to(card.device) if isinstance(x, Tensor) else x for n, x in tensors.items()}
    if at is not None:
        starts = (at.starts_q, at.starts_k, at.used_k)
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        given |= {
            n: None if x is None else torch.tensor(x, dtype=torch.int32, device=card.device)
            for n, x in zip(names, starts, strict=True)
        }
    inputs = Inputs(*(x.to(card.device) for x in (q, k, v)), **given)
    options = options or Options(q.shape[-1] ** -0.5)
    described = Problem.of(inputs, options)
    assert hopper.refusal(described, HOPPER) is None
    out, lse = hopper.forward(described, inputs)

    def by_hand(dtype: torch.dtype, *given: Tensor) -> tuple[Tensor, Tensor]:
        sink, seed = (None if x is None else x.cpu() for x in (inputs.sink, inputs.seed))
        sink = given[3] if len(given) > 3 else None if sink is None else sink.to(dtype)
        terms = Terms(
            options.scale, options.softcap, seen, sink=sink, dropout=options.dropout, seed=seed
        )
        qkv = given[:3] or [x.to(dtype) for x in (q, k, v)]
        return plain.attention(*qkv, terms) if at is None else plain.packed(*qkv, terms, at)

    exact = by_hand(torch.float64)
    capped = bool(options.softcap)
    assert_close("out", out, by_hand(q.dtype)[0], exact[0], softcap=capped)
    # float32, but for a tanh that is good to 11 bits.
    like = by_hand(q.dtype if capped else torch.float32)
    assert_close("lse", lse, like[1], exact[1], softcap=capped)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    check_gradients(card, described, inputs, (out, lse), by_hand)


def check_gradients(
    card: Gluon, described: Problem, inputs: Inputs, results: tuple[Tensor, Tensor],
    by_hand: Callable[..., tuple[Tensor, Tensor]],
) -> None:  # fmt: skip
    """The backward pass of a call, with gradients of out and of lse."""
    out, lse = results

    def incoming(seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        dout, dlse = (torch.randn(x.shape, generator=g).to(x) for x in results)
        return [dout, torch.where(lse == -torch.inf, 0.0, dlse)]

    dout, dlse = incoming(7)
    saved = Saved(out, lse, dout, dlse)
    needs = Needs(True, True, True, False, inputs.sink is not None)
    found = hopper.backward(described, inputs, saved, needs)
    assert hopper.backward(described, inputs, saved, Needs(*[False] * 5)) == Gradients(*[None] * 5)

    def gradients(dtype: torch.dtype, seed: int = 7) -> tuple[Tensor, ...]:
        names = [n for n in ("q", "k", "v", "sink") if getattr(inputs, n) is not None]
        leaves = [getattr(inputs, n).cpu().to(dtype).requires_grad_() for n in names]
        given = [x.cpu().to(dtype) for x in incoming(seed)]
        return torch.autograd.grad(by_hand(dtype, *leaves), leaves, given)

    like, exact = gradients(out.dtype), gradients(torch.float64)
    several = [x for x in found if x is not None]
    assert len(several) == len(exact)
    for n, name in enumerate(("dq", "dk", "dv", "dsink")[: len(several)]):
        others = ((gradients(out.dtype, s)[n], gradients(torch.float64, s)[n]) for s in range(3))
        capped = bool(described.options.softcap)
        assert_close(name, several[n], like[n], exact[n], softcap=capped, others=others)
    assert found.q is not None and found.q.dtype == inputs.q.dtype
    assert found.sink is None or found.sink.dtype == getattr(inputs.sink, "dtype", None)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(len(shapes) + sum(map(sum, shapes)))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def window(left: float, right: float) -> Seen:
    return lambda b, h, i, j, offset: (j >= i + offset - left) & (j <= i + offset + right)


def test_dense_causal(card: Gluon) -> None:
    q, k, v = tensors((1, 4, 150, 64), (1, 2, 200, 64), (1, 2, 200, 40), dtype=torch.float16)
    check(card, q, k, v, window(1e9, 0), mask=af.causal())


def test_window_and_softcap(card: Gluon) -> None:
    q, k, v = tensors(*[(2, 1, 140, 32)] * 3)
    check(card, q, k, v, window(30, 5), mask=af.window(30, 5), options=Options(-0.3, 5.0))


def test_sinks_of_any_dtype_and_stride(card: Gluon) -> None:
    q, k, v = tensors((1, 3, 70, 64), *[(1, 3, 60, 64)] * 2)
    sink = torch.randn(6, generator=torch.Generator().manual_seed(1)).bfloat16()[::2]
    check(card, q, k, v, window(1e9, 0), mask=af.causal(), sink=sink)


def test_row_intervals(card: Gluon) -> None:
    q, k, v = tensors(*[(2, 2, 140, 64)] * 3)
    ids = (torch.arange(140) // 60).to(card.device)
    lengths = torch.tensor([140, 70], device=card.device)
    mask = af.documents(ids) & (af.window(9, 0) | af.prefix(3)) & af.padding(lengths)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        near = ((j <= i) & (j >= i - 9)) | (j < 3)
        return near & (i // 60 == j // 60) & (j < lengths.cpu()[b])

    check(card, q, k, v, seen, mask=mask)


@pytest.mark.parametrize("columns", [64, 128])
def test_tile_maps(card: Gluon, columns: int) -> None:
    q, k, v = tensors((2, 4, 140, columns), *[(2, 2, 200, columns)] * 2)
    g = torch.Generator().manual_seed(3)
    some = torch.rand((2, 1, 140, 200), generator=g) < 0.5
    of_heads = torch.rand((4, 1, 200), generator=g) < 0.8

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: int) -> Tensor:
        return (some[b, 0, i, j] | (i == j)) & of_heads[h, 0, j]

    given = (x.to(card.device) for x in (some, of_heads))
    tensor, heads = map(af.from_tensor, given)
    mask = (tensor | af.from_function(lambda b, h, i, j: i == j)) & heads
    check(card, q, k, v, seen, mask=mask)


@pytest.mark.parametrize("mask", ["causal", "prefix-lm"])
def test_packed(card: Gluon, mask: str) -> None:
    q, k, v = tensors((150, 4, 64), (170, 2, 64), (170, 2, 64))
    at = Packing([0, 0, 70, 150], [0, 3, 90, 170], [3, 80, 80])
    near = window(1e9, 0)
    if mask == "causal":
        check(card, q, k, v, near, at, mask=af.causal())
    else:
        either: Seen = lambda b, h, i, j, offset: near(b, h, i, j, offset) | (j < 30)  # noqa: E731
        check(card, q, k, v, either, at, mask=af.causal() | af.prefix(30))


def test_packed_offsets_of_any_stride(card: Gluon) -> None:
    q, k, v = (x.to(card.device) for x in tensors(*[(90, 2, 64)] * 3))
    starts = torch.tensor([0, 7, 40, 7, 90, 7], dtype=torch.int32, device=card.device)[::2]
    found = []
    for given in (starts, starts.contiguous()):
        inputs = Inputs(q, k, v, cu_seqlens_q=given, cu_seqlens_k=given)
        found.append(hopper.forward(Problem.of(inputs, Options(0.125)), inputs))
    for name, x, y in zip(("out", "lse"), *found, strict=True):
        assert_same(name, x, y)


def test_dropout(card: Gluon) -> None:
    q, k, v = tensors(*[(2, 2, 100, 64)] * 3)
    check(
        card, q, k, v, window(1e9, 0), mask=af.causal(), seed=torch.tensor([2**40 + 5]),
        options=Options(0.125, dropout=0.3),
    )  # fmt: skip


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)])
def test_zero_sizes(shape: tuple[int, ...], has_sink: bool) -> None:
    """Nothing to launch: on any machine."""
    batch, heads, queries, keys = shape
    q, k, v = tensors((batch, heads, queries, 64), *[(batch, heads, keys, 64)] * 2)
    sink = torch.arange(heads).half() if has_sink else None
    inputs = Inputs(q, k, v, sink=sink)
    out, lse = hopper.forward(Problem.of(inputs, Options(0.125)), inputs)
    assert_same("out", out, torch.zeros_like(q))
    empty = torch.full((heads,), -torch.inf) if sink is None else sink.float()
    assert_same("lse", lse, empty.view(1, -1, 1).expand(batch, heads, queries))
    zero_gradients(inputs, out, lse)


def zero_gradients(inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """But for the sink's, which is all that lse is."""
    saved = Saved(out, lse, torch.ones_like(out), torch.ones_like(lse))
    needs = Needs(True, True, True, False, inputs.sink is not None)
    found = hopper.backward(Problem.of(inputs, Options(0.125)), inputs, saved, needs)
    for name, x in zip(("q", "k", "v"), found, strict=False):
        assert x is not None
        assert_same(f"d{name}", x, torch.zeros_like(getattr(inputs, name)))
    if found.sink is not None:
        keys, rows = inputs.k.numel(), lse.numel() // max(len(found.sink), 1)
        assert_same("dsink", found.sink, torch.full_like(found.sink, 0 if keys else rows))


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("lengths", [([], []), ([0], [9]), ([3, 2], [0, 0])])
def test_zero_sizes_packed(lengths: tuple[list[int], list[int]], has_sink: bool) -> None:
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in lengths]
    q, k, v = tensors(*[(int(s[-1]), 2, 64) for s in (starts[0], starts[1], starts[1])])
    sink = torch.tensor([1.0, 2.0]) if has_sink else None
    inputs = Inputs(q, k, v, sink=sink, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    out, lse = hopper.forward(Problem.of(inputs, Options(0.125)), inputs)
    assert_same("out", out, torch.zeros_like(q))
    empty = torch.full((2,), -torch.inf) if sink is None else sink
    assert_same("lse", lse, empty.view(2, 1).expand(2, len(q)))
    zero_gradients(inputs, out, lse)


LAYOUTS = {
    "plain": lambda q: q,
    "(B, S, H, D)": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": lambda q: torch.stack([q.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2),
    "packed": lambda q: q[0].transpose(0, 1).contiguous(),
    "packed, heads first": lambda q: q[0].transpose(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_laid_out_as_announced(card: Gluon, layout: str) -> None:
    """What the operator would otherwise copy: its fake kernels promise an order of axes."""
    q = LAYOUTS[layout](tensors((2, 3, 70, 64))[0]).to(card.device)
    starts = torch.tensor([0, 70], dtype=torch.int32, device=card.device) if q.ndim == 3 else None
    inputs = Inputs(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
    out, lse = hopper.forward(Problem.of(inputs, Options(0.125)), inputs)
    assert _laid_out(out, _swapped(q)).data_ptr() == out.data_ptr()
    assert lse.is_contiguous()
    saved, needs = Saved(out, lse, out, None), Needs(True, True, True, False, False)
    for x in hopper.backward(Problem.of(inputs, Options(0.125)), inputs, saved, needs)[:3]:
        assert x is not None and _laid_out(x, x.ndim == 4).data_ptr() == x.data_ptr()


def test_nothing_is_launched_for_another_problem(card: Gluon) -> None:
    """`forward` trusts `refusal`, but a tile map of packed sequences it could not even hand on."""
    inputs = packed_with_a_map(card.device)
    with pytest.raises(TypeError, match="tile map"):
        hopper.forward(Problem.of(inputs, Options(0.125)), inputs)
    assert not card.launches


@pytest.mark.parametrize(
    ("shape", "more", "expected"),
    [
        # Statistics are 512 bytes for each 64 rows, sums of fused 4 · 64 bytes a row.
        ((2, 4, 4096, 64), {}, "fused, 8.7 MB of scratch memory"),
        ((2, 4, 4096, 64), {"deterministic": True}, "split, 0.3 MB of scratch memory"),
        # dS of 4096 · 4096 · 16 bits for each of 8 heads; a triangle, with its diagonal; a band.
        ((2, 4, 4096, 128), {}, "stored, 268.7 MB of scratch memory"),
        ((2, 4, 4096, 128), {"causal": True}, "stored, 138.7 MB of scratch memory"),
        ((2, 4, 4096, 128), {"mask": af.window(512, 0)}, "stored, 50.6 MB of scratch memory"),
        ((2, 4, 4096, 128), {"dropout": 0.1}, "split, 0.3 MB of scratch memory"),
        ((2, 4, 4096, 256), {}, "split, 0.3 MB of scratch memory"),
        ((2, 4, 0, 128), {}, "nothing to compute"),
        ((0, 4, 64, 128), {}, "nothing to compute"),
        ((1, 16, 16384, 128), {"causal": True}, "stored, 1,084.2 MB of scratch memory"),
    ],
)
def test_the_algorithm_is_explained(
    card: Gluon, shape: tuple[int, ...], more: dict[str, Any], expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(dispatch, "probe", lambda device: HOPPER)
    x = torch.empty((), dtype=torch.bfloat16, device=card.device, requires_grad=True).expand(shape)
    explained = af.explain(x, x, x, **more)
    assert explained.chosen == "hopper" and explained.algorithm == expected
    assert f"backward: {expected}" in str(explained)
    assert af.explain(*[x.detach()] * 3, **more).algorithm is None


@pytest.mark.parametrize(("warn_only", "expected"), [(False, "split"), (True, "fused")])
@pytest.mark.usefixtures("card")
def test_all_of_pytorch_is_deterministic(
    warn_only: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "probe", lambda device: HOPPER)
    x = torch.empty((), dtype=torch.bfloat16, requires_grad=True).expand(1, 1, 256, 64)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        algorithm = af.explain(x, x, x).algorithm
    finally:
        torch.use_deterministic_algorithms(False)
    assert algorithm is not None and algorithm.startswith(expected)
