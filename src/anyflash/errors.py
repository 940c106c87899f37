"""The exceptions of anyflash. Every message says what was got, what is expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class AttentionError(Exception):
    """Base of everything that anyflash raises on purpose."""


class InvalidInput(AttentionError, ValueError):
    """An argument that no backend could ever serve; raised before any work starts.

    Attributes: `argument` (its name in the public function), `got`, `expected`, `advice`.
    """

    def __init__(self, argument: str, got: object, expected: str, advice: str = "") -> None:
        super().__init__(argument, got, expected, advice)  # the four args make it picklable
        self.argument, self.got, self.expected, self.advice = argument, got, expected, advice

    def __str__(self) -> str:
        text = f"{self.argument}: got {self.got}, expected {self.expected}"
        return f"{text}; {self.advice}" if self.advice else text


class Unsupported(AttentionError, NotImplementedError):
    """A valid request that no backend serves here.

    Attributes: `request` (what was asked), `refusals` (backend name → its one sentence).
    """

    def __init__(self, request: str, refusals: Mapping[str, str], advice: str = "") -> None:
        super().__init__(request, dict(refusals), advice)
        self.request, self.refusals, self.advice = request, dict(refusals), advice

    def __str__(self) -> str:
        lines = [f"nothing serves {self.request}"]
        lines += [f"  {name}: {sentence}" for name, sentence in self.refusals.items()]
        return "\n".join([*lines, self.advice] if self.advice else lines)


class NotCompiled(AttentionError, RuntimeError):
    """A kernel that this machine cannot compile. The compiler's own words are its `__cause__`.

    Attributes: `kernel` (its name), `cause`, `advice`.
    """

    def __init__(self, kernel: str, cause: str, advice: str) -> None:
        super().__init__(kernel, cause, advice)  # the three args make it picklable
        self.kernel, self.cause, self.advice = kernel, cause, advice

    def __str__(self) -> str:
        return f"{self.cause}; {self.advice} (when compiling {self.kernel})"
