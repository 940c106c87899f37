"""What is measured: cases as data, and the tensors of a case.

Masks are written twice: as the user gives them to anyflash (`Workload.mask`) and in plain PyTorch
(`Workload.allowed`), so that the check of a case does not rest on the code that it checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from anyflash.errors import InvalidInput
from anyflash.masks import Mask, documents, window

FORWARD, BOTH = "forward", "forward+backward"
TIME, MEMORY = "time", "memory"
MASKS = ("none", "random", "random per head", "window", "documents")
# How `torch.nn.functional.scaled_dot_product_attention` is called, or that it is not.
PLAIN, IS_CAUSAL, BOOLEAN, NOT_CALLED = "no mask", "is_causal", "boolean mask", "not called"

DOCUMENTS = 8
PARTS = range(5, 5 + DOCUMENTS)  # their lengths, as shares of the sum: unequal, and not round


@dataclass(frozen=True)
class Case:
    """One measurement. Query and key lengths, head counts and head dimensions are equal.

    `bar` is the least time of the peer over ours (measure "time"), or the most megabytes of memory
    over the inputs (measure "memory"). `error_bar` is the most that our largest error may be of the
    peer's. `window` is how many earlier keys the mask "window" keeps besides the query's own.
    Masks "window" are causal by themselves; the others are intersected with `causal`.
    """

    name: str
    length: int
    head_dim: int
    bar: float
    peer: str
    mask: str = "none"
    causal: bool = False
    direction: str = FORWARD
    measure: str = TIME
    batch: int = 1
    heads: int = 8
    dtype: str = "float32"
    window: int = 512
    error_bar: float | None = None

    def __post_init__(self) -> None:
        for field, words in (
            ("peer", (PLAIN, IS_CAUSAL, BOOLEAN, NOT_CALLED)),
            ("mask", MASKS),
            ("direction", (FORWARD, BOTH)),
            ("measure", (TIME, MEMORY)),
        ):
            value = getattr(self, field)
            if value not in words:
                expected = f"one of {', '.join(map(repr, words))}"
                raise InvalidInput(f"Case({field}) of {self.name!r}", repr(value), expected)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, S, D) of q, k and v."""
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def quick(self) -> Case:
        """The same case at a sixteenth of its length: for tests, not for publication."""
        length, heads = max(128, self.length // 16), min(2, self.heads)
        return replace(self, length=length, heads=heads, window=max(16, self.window // 16))


CPU = (
    Case("dense, D=64", 2048, 64, 0.97, PLAIN),
    Case("dense, D=128", 2048, 128, 0.97, PLAIN),
    Case("causal, D=64", 2048, 64, 0.97, IS_CAUSAL, causal=True),
    Case("causal, D=128", 2048, 128, 0.97, IS_CAUSAL, causal=True),
    Case("dense, training", 2048, 64, 0.95, PLAIN, direction=BOTH),
    Case("causal, training", 2048, 64, 0.95, IS_CAUSAL, causal=True, direction=BOTH),
    Case("random mask", 2048, 64, 0.97, BOOLEAN, mask="random"),
    Case("random mask per head", 2048, 64, 0.97, BOOLEAN, mask="random per head"),
    Case("window 512", 8192, 64, 8, BOOLEAN, mask="window"),
    Case("window 512, training", 8192, 64, 5, BOOLEAN, mask="window", direction=BOTH),
    Case("8 documents, causal", 8192, 64, 8, BOOLEAN, mask="documents", causal=True),
    Case(
        "8 documents, causal, training", 8192, 64, 5, BOOLEAN,
        mask="documents", causal=True, direction=BOTH,
    ),
    Case("dense, bfloat16", 2048, 64, 1.5, PLAIN, dtype="bfloat16", error_bar=2.5),
    Case(
        "window 256, 32768 keys, memory", 32768, 64, 200, NOT_CALLED,
        mask="window", direction=BOTH, measure=MEMORY, heads=1, window=256,
    ),
)  # fmt: skip


class Named(Protocol):
    """What a pattern can select."""

    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


def select(cases: Iterable[NamedT], pattern: str | None, option: str = "--only") -> list[NamedT]:
    """The cases whose name contains `pattern`, ignoring case; all of them for None. `option` is
    where the pattern came from."""
    cases = list(cases)
    found = [c for c in cases if pattern is None or pattern.lower() in c.name.lower()]
    if not found:
        names = ", ".join(repr(c.name) for c in cases)
        raise InvalidInput(option, repr(pattern), f"a part of one of the names {names}")
    return found


@dataclass(frozen=True, eq=False)
class Workload:
    """The tensors of a case: q, k, v, dout (B, H, S, D), standard normal, none of them zero.

    `tensor` is what the mask is made of: the boolean tensor of a random mask, or the ids (S,) of
    documents.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    tensor: Tensor | None
    mask: Mask | Tensor | None

    @classmethod
    def of(cls, case: Case, device: str = "cpu", seed: int = 0) -> Workload:
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, case.dtype)

        def normal() -> Tensor:
            # Drawn in float32: what a seed gives must not depend on the case's dtype.
            return torch.randn(case.shape, generator=generator, device=device).to(dtype)

        q, k, v, dout = (normal() for _ in range(4))
        tensor, mask = None, None
        if case.mask == "window":
            mask = window(case.window, 0)
        elif case.mask == "documents":
            total = sum(PARTS)
            ends = [sum(PARTS[: n + 1]) * case.length // total for n in range(DOCUMENTS)]
            position = torch.arange(case.length, device=device)
            tensor = torch.searchsorted(torch.tensor(ends, device=device), position, right=True)
            mask = documents(tensor)
        elif case.mask != "none":
            heads = (case.heads,) if case.mask == "random per head" else ()
            shape = (1, *heads, case.length, case.length) if heads else (case.length,) * 2
            mask = tensor = torch.rand(shape, generator=generator, device=device) < 0.5
        return cls(case, q, k, v, dout, tensor, mask)

    def with_new_mask(self, n: int) -> Workload:
        """The same with a mask that nothing has seen yet: a copy of its tensor, or, since a window
        is known by its numbers, a window that is wider by n keys."""
        if self.case.mask == "window":
            return replace(self, mask=window(self.case.window + n, 0))
        if self.tensor is None:
            return self
        tensor = self.tensor.clone()
        mask = documents(tensor) if self.case.mask == "documents" else tensor
        return replace(self, tensor=tensor, mask=mask)

    def allowed(self, rows: slice) -> Tensor | None:
        """Which keys these query rows see, (1|H, rows, S) in plain PyTorch; None is all."""
        i = torch.arange(self.case.length, device=self.q.device)
        j, i = i, i[rows].unsqueeze(-1)
        seen = j <= i if self.case.causal or self.case.mask == "window" else None
        if self.case.mask == "window":
            extra = i - j <= self.case.window
        elif self.case.mask == "documents" and self.tensor is not None:
            extra = self.tensor[rows].unsqueeze(-1) == self.tensor
        elif self.tensor is not None:
            extra = self.tensor[..., rows, :]
        else:
            extra = None
        both = [x for x in (seen, extra) if x is not None]
        if not both:
            return None
        whole = both[0] if len(both) == 1 else both[0] & both[1]
        return whole[0] if whole.ndim == 4 else whole.unsqueeze(0)
