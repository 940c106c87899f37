"""Hugging Face transformers: `attn_implementation="anyflash"` runs a model's attention here.

transformers asks for a mask once per forward (`transformers_masks`) and for attention once per
layer.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from anyflash.api import attention
from anyflash.compat.transformers_masks import MaskTensor, attention_mask, check_vocabulary
from anyflash.errors import InvalidInput, Unsupported
from anyflash.masks import Mask, window
from anyflash.masks.algebra import Everything

__all__ = ["INTERNAL", "NAME", "MaskTensor", "attention_forward", "register"]

NAME = "anyflash"  # what users ask for

# transformers takes every name that contains "flash" for a build of the flash-attn package: it
# tries to load one from its hub, and some models swap in classes of their own. So models run under
# this name, and `register` makes transformers' own check of the name turn one into the other.
INTERNAL = "anyfa"

# What models pass along that is no business of attention. Anything else could change the result.
HARMLESS = {
    "position_ids", "cache_position", "position_embeddings", "use_cache", "return_dict", "labels",
    "output_hidden_states", "output_router_logits", "num_items_in_batch", "max_length_q",
    "max_length_k",
}  # fmt: skip
# Lengths of packed sequences, which the mask already knows if it comes from restarting positions.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def register() -> str:
    """Make anyflash an attention implementation of transformers; returns its name, "anyflash".

        from anyflash.compat.transformers import register

        register()
        model = AutoModel.from_pretrained(path, attn_implementation="anyflash")

    or `model.set_attn_implementation("anyflash")`; the model's config then says `INTERNAL`. May be
    called any number of times. Nothing else of transformers changes. Covered:
    encoders, decoders and cross-attention that use transformers' attention interface, grouped
    heads, padding on either side, position_ids that restart (packed sequences), sliding windows,
    chunks, dynamic and static caches, softcap, sinks, position biases, dropout. Attention weights
    are not returned. Rows that see nothing (queries of left padding) give 0.

    Raises Unsupported if this transformers is too old, or means something else by its masks than
    the translation does (checked here on small examples).
    """
    import transformers
    from transformers import masking_utils

    known = inspect.signature(masking_utils.sdpa_mask).parameters
    if not {"q_length", "q_offset"} <= set(known):
        advice = "upgrade it: the mask interface with q_length and q_offset is needed (version 5)"
        raise Unsupported(f"transformers {transformers.__version__}", {}, advice)
    check_vocabulary(masking_utils, transformers.__version__)
    transformers.AttentionMaskInterface.register(INTERNAL, attention_mask)
    transformers.AttentionInterface.register(INTERNAL, attention_forward)
    _translate_name(transformers.PreTrainedModel)
    return NAME


def _translate_name(model_class: Any) -> None:
    """Let models accept NAME: the one method through which every requested name passes."""
    check = getattr(model_class, "_check_and_adjust_attn_implementation", None)
    if check is None:
        advice = f"use attn_implementation={INTERNAL!r} instead"
        raise Unsupported("attn_implementation='anyflash' in this transformers", {}, advice)
    if getattr(check, "knows_anyflash", False):
        return

    @functools.wraps(check)
    def adjusted(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        name = INTERNAL if attn_implementation == NAME else attn_implementation
        return check(self, name, *args, **kwargs)

    adjusted.knows_anyflash = True  # type: ignore[attr-defined]
    model_class._check_and_adjust_attn_implementation = adjusted


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention of one layer: `anyflash.attention` under its names.

    query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv). attention_mask, if there is
    one, says all about which scores exist: a MaskTensor, a boolean (B, 1 or Hq, Sq, Sk), or a
    float one, which is added to the scores. Without one, `is_causal` (or the module's) and
    `sliding_window` do. position_bias (1 or B, Hq, Sq, Sk) is added; s_aux (Hq,) are sinks.

    Returns (out (B, Sq, Hq, Dv), None). Raises Unsupported for an argument that is not known, if
    it could change the result; InvalidInput for packing that the mask does not know of.
    """
    _refuse_unknown(others, attention_mask)
    mask: Mask | Tensor | None = attention_mask
    bias = position_bias
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _mask_by_flags(causal, sliding_window, query.shape[2], key.shape[2])
    elif isinstance(attention_mask, MaskTensor):
        mask = None if isinstance(attention_mask.mask, Everything) else attention_mask.mask
    elif attention_mask.ndim != 4:
        expected = "None, a MaskTensor, or a tensor (B, 1 or Hq, Sq, Sk)"
        raise InvalidInput("attention_mask", f"shape {tuple(attention_mask.shape)}", expected)
    elif attention_mask.is_floating_point():
        mask, bias = None, attention_mask if bias is None else bias + attention_mask
    out = attention(
        query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sink=s_aux,
        dropout=dropout, deterministic=bool(deterministic),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(others: dict[str, Any], mask: Tensor | None) -> None:
    for name, value in others.items():
        if value is None or value is False or name in HARMLESS:
            continue
        if name not in PACKING:
            advice = "use attn_implementation='eager', or leave that argument out"
            raise Unsupported(f"transformers' attention argument {name!r}", {}, advice)
        one_sequence = name != "seq_idx" and value.numel() <= 2
        if not (one_sequence or (isinstance(mask, MaskTensor) and mask.packed)):
            advice = "pass position_ids that restart at each sequence, and no attention_mask"
            raise InvalidInput(name, "packed sequences", "a mask that separates them", advice)


def _mask_by_flags(causal: bool, width: int | None, queries: int, keys: int) -> Mask | None:
    """The mask of a model that did not ask for one."""
    if causal and queries > 1 and queries != keys:
        got = f"None for {queries} queries and {keys} keys in a causal layer"
        advice = (
            "where the queries stand is not known; build the mask with transformers' masking_utils"
        )
        raise InvalidInput("attention_mask", got, "a mask", advice)
    if not causal and width is not None:
        got = f"None with sliding_window={width} in a layer that is not causal"
        raise InvalidInput("attention_mask", got, "a mask that holds the window")
    left = None if width is None else width - 1
    if not causal or (queries == 1 and left is None):
        return None
    return window(left, 0)
