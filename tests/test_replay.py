"""Calls that are replayed: which, and that nothing but time tells them from the others.

The backend here is the CPU's under a `prepare` that counts; what a replay launches on a card is
shown in test_hopper_launcher.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import anyflash as af
from anyflash import calls
from anyflash.backends import cpu
from anyflash.backends.base import Preparing, Replay
from anyflash.devices import Device
from anyflash.problem import Gradients, Inputs, Needs, Problem, Saved


class Fake:
    """The CPU backend, which counts what it is asked for."""

    name = "fake"

    def __init__(self) -> None:
        self.forwards = self.prepared = self.replays = 0
        self.knows = self.ready = True
        self.results: list[tuple[Tensor, Tensor]] = []

    def refusal(self, problem: Problem, device: Device) -> str | None:
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        return cpu.forward(problem, inputs)

    def backward(self, problem: Problem, inputs: Inputs, saved: Saved, needs: Needs) -> Gradients:
        return cpu.backward(problem, inputs, saved, needs)

    def prepare(self, problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> Replay | None:
        assert inputs[3:10] == (None,) * 7 and problem.mask in ("none", "window")
        self.prepared += 1
        self.results.append((out, lse))

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
            if not self.ready:
                return None
            self.replays += 1
            return cpu.forward(problem, inputs._replace(q=q, k=k, v=v))

        return run if self.knows else None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    found = Fake()
    assert isinstance(found, Preparing) and not isinstance(cpu, Preparing)
    monkeypatch.setattr(calls, "select", lambda problem, requested: found)
    for table in ("_checked", "_replays"):
        monkeypatch.setattr(calls, table, {})
    torch.manual_seed(0)
    yield found


# The options of a call without any, in the order of KINDS.
PLAIN = (None, False, None, None, None, None, 0.0, False, None, None)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    return q, k, v


def test_a_call_like_one_before_is_replayed(fake: Fake) -> None:
    for n in range(3):
        q, k, v = qkv()
        out, lse = af.attention(q, k, v, causal=True, return_lse=True)
        assert (fake.forwards, fake.prepared, fake.replays) == (1, 1, n)
        expected = af.attention(q, k, v, mask=af.causal(), return_lse=True)
        fake.forwards -= 1
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(af.attention(q, k, v, causal=True), out) and fake.replays == 3


def test_it_is_prepared_with_what_the_caller_got(fake: Fake) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    out, lse = af.attention(q, k, v, return_lse=True)
    assert fake.results[0][0] is out and fake.results[0][1] is lse
    assert out.stride() == q.stride()


class Subclass(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def escaped(x: Tensor) -> Tensor:
    """What a function under torch.func.grad was given, after it has returned."""
    found = []

    def leak(x: Tensor) -> Tensor:
        found.append(x)
        return x.sum()

    torch.func.grad(leak)(x)
    return found[0]


def under(context: Callable[[], Any]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context():
            return af.attention(q, k, v)

    return call


def vmapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(af.attention)(*(x.expand(1, *x.shape) for x in (q, k, v)))[0]


def differentiated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = []

    def loss(q: Tensor) -> Tensor:
        out.append(af.attention(q, k, v))
        return out[0].sum()

    torch.func.grad(loss)(q)
    return out[0] * 1.0


def inside_of_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Under a transform that has nothing to do with the call."""
    return torch.func.grad(lambda x: (x * af.attention(q, k, v)).sum())(torch.ones_like(q))


def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(af.attention, fullgraph=True, backend="eager")(q, k, v)


def traced(pre_dispatch: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        graph = make_fx(lambda *x: af.attention(*x), pre_dispatch=pre_dispatch)(q, k, v)
        assert any("attention_forward" in str(node.target) for node in graph.graph.nodes)
        return graph(q, k, v)

    return call


ORDINARY: dict[str, Callable[..., Tensor]] = {
    "a subclass": lambda q, k, v: af.attention(q, k.as_subclass(Subclass), v).as_subclass(Tensor),
    "a parameter": lambda q, k, v: af.attention(q, k, torch.nn.Parameter(v)),
    "a gradient for q": lambda q, k, v: af.attention(q.clone().requires_grad_(), k, v),
    "for k": lambda q, k, v: af.attention(q, k.clone().requires_grad_(), v),
    "for v": lambda q, k, v: af.attention(q, k, v.clone().requires_grad_()),
    "another sign": lambda q, k, v: af.attention(torch._neg_view(-q), k, v),
    "escaped": lambda q, k, v: af.attention(q, escaped(k), v),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "forward mode": under(forward_ad.dual_level),
    "functions": under(Functions),
    "operators": under(Operators),
    "default device": under(lambda: torch.device("cpu")),
    "profiler": under(profile),
    "vmap": vmapped,
    "grad": differentiated,
    "another's grad": inside_of_another,
    "torch.compile": compiled,
    "make_fx": traced(False),
    "make_fx above autograd": traced(True),
    "mask": lambda q, k, v: af.attention(q, k, v, mask=af.window(9, 9)),
    "bias": lambda q, k, v: af.attention(q, k, v, bias=torch.zeros(5, 5)),
    "sink": lambda q, k, v: af.attention(q, k, v, sink=torch.full((4,), -1e9)),
    "dropout": lambda q, k, v: af.attention(q, k, v, dropout=1e-30),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_not_plain_goes_the_ordinary_way(fake: Fake, name: str) -> None:
    q, k, v = qkv()
    for _ in range(2):
        expected = af.attention(q, k, v)
    before = (fake.forwards, fake.prepared)
    for n in (1, 2):
        found = ORDINARY[name](q, k, v)
        assert fake.replays == 1 and fake.prepared == before[1]
        assert fake.forwards >= before[0] + n or name.startswith(("torch.compile", "make_fx"))
        close = {"rtol": 0.02, "atol": 0.02} if name == "autocast" else {"rtol": 0, "atol": 1e-6}
        torch.testing.assert_close(found.detach(), expected, check_dtype=False, **close)


def test_nothing_is_looked_at_under_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert calls.replayable(*qkv(), *PLAIN) is None


def test_a_trace_by_jit_goes_the_ordinary_way(fake: Fake) -> None:
    q, k, v = qkv()
    for _ in range(2):
        expected = af.attention(q, k, v)
    trace = torch.jit.trace(lambda *x: af.attention(*x), (q, k, v), check_trace=False)
    assert fake.replays == 1
    assert "attention_forward" in str(trace.graph)
    assert torch.equal(trace(q, k, v), expected)


def test_whether_a_gradient_is_recorded_counts_each_time(fake: Fake) -> None:
    q, k, v = qkv()
    q.requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not af.attention(q, k, v).requires_grad
    af.attention(q, k, v).sum().backward()
    assert q.grad is not None and fake.replays == 1
    with torch.inference_mode():
        assert af.attention(q, k, v).is_inference()
    assert fake.replays == 2


OTHERS: dict[str, Callable[..., Any]] = {
    "causal": lambda q, k, v: af.attention(q, k, v, causal=True),
    "scale": lambda q, k, v: af.attention(q, k, v, scale=0.25),
    "softcap": lambda q, k, v: af.attention(q, k, v, softcap=2.0),
    "deterministic": lambda q, k, v: af.attention(q, k, v, deterministic=True),
    "backend": lambda q, k, v: af.attention(q, k, v, backend="cpu"),
    "dtype": lambda q, k, v: af.attention(q.double(), k.double(), v.double()),
    "length": lambda q, k, v: af.attention(q, k[:, :, 1:], v[:, :, 1:]),
    "batch": lambda q, k, v: af.attention(q.expand(2, -1, -1, -1), *[torch.cat([k, k])] * 2),
    "strides of q": lambda q, k, v: af.attention(swapped(q), k, v),
    "strides of k": lambda q, k, v: af.attention(q, swapped(k), v),
    "strides of v": lambda q, k, v: af.attention(q, k, swapped(v)),
    "Dv": lambda q, k, v: af.attention(q, k, v[..., :4]),
}


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_not_taken_for_one(fake: Fake, name: str) -> None:
    q, k, v = qkv()
    for _ in range(2):
        af.attention(q, k, v)
    first = OTHERS[name](q, k, v)
    assert (fake.forwards, fake.prepared, fake.replays) == (2, 2, 1)
    again = OTHERS[name](q, k, v)
    assert fake.forwards == 2 and fake.replays == 2
    assert torch.equal(first, again) and again.dtype == first.dtype


def test_devices_and_dtypes_of_all_three_are_told_apart() -> None:
    q, k, v = qkv()
    keys = {calls.replayable(q, k, v, *PLAIN)}
    for n in range(3):
        for change in (Tensor.half, lambda x: x.to("meta"), lambda x: x[..., 1:]):
            given = [q, k, v]
            given[n] = change(given[n])
            keys.add(calls.replayable(*given, *PLAIN))
    assert len(keys) == 10 and None not in keys
    assert calls.replayable(q, k, v, *PLAIN) == calls.replayable(*qkv(), *PLAIN)


WRONG: dict[str, dict[str, Any]] = {
    "causal=1": {"causal": 1},
    "causal=None": {"causal": None},
    "scale=True": {"scale": True},
    "scale=tensor": {"scale": torch.tensor(1.0)},
    "scale=nan": {"scale": float("nan")},
    "softcap=False": {"softcap": False},
    "softcap=[]": {"softcap": []},
    "dropout=None": {"dropout": None},
    "dropout=False": {"dropout": False},
    "dropout=2": {"dropout": 2},
    "deterministic=1": {"deterministic": 1},
    "precision=fp9": {"precision": "fp9"},
    "backend=[]": {"backend": []},
    "mask=[]": {"mask": []},
    "bias=0": {"bias": 0},
    "sink=False": {"sink": False},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_stays_refused(fake: Fake, name: str) -> None:
    q, k, v = qkv()
    af.attention(q, k, v)
    for equal in ({"causal": True}, {"scale": 1.0}, {"softcap": 0.0}, {"deterministic": True}):
        af.attention(q, k, v, **equal)
    before = dict(calls._replays)
    for _ in range(2):
        with pytest.raises(af.InvalidInput, match=name.split("=")[0]):
            af.attention(q, k, v, **WRONG[name])
    assert calls._replays == before and fake.replays == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_strides_are_refused(fake: Fake) -> None:
    q, k, v = qkv()
    nested = torch.nested.nested_tensor(list(q))
    for wrong in (nested, q.to_sparse(), q[0, 0].to_sparse_csr(), q.to_mkldnn(), None, 3):
        for given in ((wrong, k, v), (q, wrong, v), (q, k, wrong)):
            with pytest.raises(af.InvalidInput):
                af.attention(*given)  # type: ignore[arg-type]
    assert not calls._replays


def test_a_call_that_fails_is_not_remembered(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(fake, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            af.attention(*qkv())
    assert not calls._replays
    af.attention(*qkv())
    af.attention(*qkv())
    assert fake.replays == 1


def test_where_there_is_no_shorter_way(fake: Fake) -> None:
    fake.knows = False
    for _ in range(3):
        af.attention(*qkv())
    assert (fake.forwards, fake.prepared, fake.replays) == (3, 1, 0)


def test_a_backend_without_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "select", lambda problem, requested: cpu)
    for _ in range(2):
        af.attention(*qkv())
    assert list(calls._replays.values()) == [None]


def test_where_it_is_not_possible_this_once(fake: Fake) -> None:
    for fake.ready in (True, False, True):
        af.attention(*qkv())
    assert (fake.forwards, fake.prepared, fake.replays) == (2, 1, 1)


def test_no_more_than_so_many_are_remembered(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CHECKED", 3)
    for n in range(1, 20):
        af.attention(*qkv(), scale=float(n))
        assert 1 <= len(calls._replays) <= 3


def test_threads(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CHECKED", 4)
    faults = []
    given = qkv()
    expected = [af.attention(*given, scale=float(n)) for n in range(8)]

    def work(n: int) -> None:
        try:
            for _ in range(50):
                assert torch.equal(af.attention(*given, scale=float(n)), expected[n])
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(calls._replays) <= 4 + len(threads)
