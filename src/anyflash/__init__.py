"""FlashAttention for PyTorch on whatever accelerator is there: one function with one meaning."""

from anyflash import errors
from anyflash.api import alibi, attention, attention_varlen, explain
from anyflash.errors import AttentionError, InvalidInput, Unsupported
from anyflash.masks import (
    Mask,
    causal,
    documents,
    from_function,
    from_tensor,
    padding,
    prefix,
    window,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionError",
    "InvalidInput",
    "Mask",
    "Unsupported",
    "alibi",
    "attention",
    "attention_varlen",
    "causal",
    "documents",
    "errors",
    "explain",
    "from_function",
    "from_tensor",
    "padding",
    "prefix",
    "window",
]
