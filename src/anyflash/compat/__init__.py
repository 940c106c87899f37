"""The same attention under other libraries' signatures; each module loads when it is first used.

flash_attn    FlashAttention-2's functions, tensors (B, S, H, D)
sdpa          PyTorch's scaled_dot_product_attention
transformers  an attention implementation for Hugging Face transformers
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyflash.compat import flash_attn, sdpa, transformers

__all__ = ["flash_attn", "sdpa", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
