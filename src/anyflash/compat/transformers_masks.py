"""transformers' masks as masks of the algebra.

transformers describes a mask as a function (batch, head, query position, key position) → bool, put
together from a small vocabulary of its `masking_utils`. `_translate` reads those words, so that
padding, causal, windows, chunks and packed sequences need no S×S tensor. What it cannot read is
evaluated by transformers' own code to a boolean tensor, and attention is fused all the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anyflash.errors import InvalidInput, Unsupported
from anyflash.masks import Mask, documents, window
from anyflash.masks.algebra import Everything


class MaskTensor(Tensor):
    """A mask of the algebra that passes for transformers' boolean mask (B, 1, Sq, Sk).

    For `attention_mask=` of a model, which hands a 4-D mask through as it is:

        ids = ...                                               # (total,): which document
        mask = MaskTensor(documents(ids), (1, 1, total, total))
        model(input_ids=packed, position_ids=positions, attention_mask=mask)

    It holds no scores. Operations on it (slices, `&`, moves to a device) first build the boolean
    tensor, so they mean what they say; only adding it to something is refused, since a model that
    does so expects an additive mask and does not call this attention. `packed` says that it keeps
    packed sequences apart, for models that are given their lengths as well.
    """

    mask: Mask
    packed: bool

    @staticmethod
    def __new__(cls, mask: Mask, shape: tuple[int, ...], device: Any = "cpu", **_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(
        self, mask: Mask, shape: tuple[int, ...], device: Any = "cpu", packed: bool = True
    ) -> None:
        self.mask, self.packed = mask, packed

    def dense(self) -> Tensor:
        """The boolean tensor (B, 1, Sq, Sk)."""
        batch, _, queries, keys = self.shape
        return self.mask.materialise(batch, 1, queries, keys, self.device)

    def __repr__(self, **_: Any) -> str:
        return f"MaskTensor({self.mask.text}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # checkpointing; nothing to detach from
            return args[0]
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            advice = "use attn_implementation='eager' or 'sdpa' for it"
            raise Unsupported("a model that adds the mask to scores of its own", {}, advice)
        dense: Any = tree_map_only(MaskTensor, MaskTensor.dense, (args, kwargs or {}))
        return func(*dense[0], **dense[1])


class Place(NamedTuple):
    """Where queries and keys of one forward stand in their sequence."""

    rows: Tensor  # int64 (Sq,)
    keys: Tensor  # int64 (Sk,)
    aligned: bool  # the last query stands at the last key, as in anyflash
    packed: bool = False  # inside an intersection with packed sequences

    def window(self, left: int | None, right: int | None) -> Mask:
        """The window, without the bounds that no score reaches."""
        if not self.aligned:
            return window(left, right).at(self.rows, self.keys)
        left = None if left is None or left >= len(self.keys) - 1 else left
        right = None if right is None or right >= len(self.rows) - 1 else right
        return Everything() if left is None and right is None else window(left, right)


@torch.compiler.disable
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """transformers' mask of one forward, as a MaskTensor (B, 1, Sq, Sk) or a boolean tensor.

    Queries stand at q_offset … q_offset + q_length − 1, keys at kv_offset … kv_offset + kv_length
    − 1 (static caches have more keys than there are tokens). attention_mask (B, ≥ 0) is True for
    tokens and False for padding, by key position; positions beyond it are padding.
    """
    from transformers import masking_utils

    function = mask_function or masking_utils.causal_mask_function
    with torch.inference_mode(False):  # inference tensors have no version, and masks are kept by it
        # Static caches count in a tensor; reading it would wait for the device.
        known = isinstance(q_offset, int) and isinstance(kv_offset, int)
        aligned = known and bool(q_offset - kv_offset == kv_length - q_length)
        rows = torch.arange(q_length, device=device) + q_offset
        keys = torch.arange(kv_length, device=device) + kv_offset
        mask = _translate(function, Place(rows, keys, aligned))
        if mask is None:
            others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            evaluate: Any = masking_utils.sdpa_mask
            sizes = batch_size, q_length, kv_length, q_offset, kv_offset
            return evaluate(*sizes, function, attention_mask, device=device, **others)
        if attention_mask is not None:
            mask = _both(mask, _tokens(attention_mask, keys, q_length))
        shape = (batch_size, 1, q_length, kv_length)
        return MaskTensor(mask, shape, device, packed=_packs(function))


def _tokens(attention_mask: Tensor, keys: Tensor, queries: int) -> Mask:
    """Keys that are no padding, and exist."""
    if attention_mask.ndim != 2:
        expected = "(B, keys), True for tokens; or a 4-D mask"
        raise InvalidInput("attention_mask", f"shape {tuple(attention_mask.shape)}", expected)
    length = attention_mask.shape[1]
    seen = attention_mask.bool()[:, keys.clamp(max=length - 1)] & (keys < length)
    if bool(seen.all()):
        return Everything()
    ids_q = torch.zeros((1, queries), dtype=torch.int64, device=keys.device)
    return documents(ids_q, _apart(seen.long() - 1))


def _apart(ids_k: Tensor) -> Tensor:
    """Another negative id for each key that has a negative one.

    Equal ids then stand together, so that documents are intervals with padding on both sides too.
    """
    alone = -1 - torch.arange(ids_k.shape[-1], device=ids_k.device)
    return torch.where(ids_k < 0, alone, ids_k)


def _both(first: Mask, second: Mask) -> Mask:
    if isinstance(first, Everything):
        return second
    return first if isinstance(second, Everything) else first & second


# The vocabulary of transformers.masking_utils.


def _read(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Which function of masking_utils made this closure, and the variables it closes over."""
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != "transformers.masking_utils":
        return "", {}
    cells = function.__closure__ or ()
    values = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    return function.__qualname__.split(".")[0], values


def _packs(function: Callable[..., Any]) -> bool:
    """Whether it keeps packed sequences apart."""
    maker, variables = _read(function)
    parts = variables["mask_functions"] if maker == "and_masks" else (function,)
    return any(_read(part)[0] == "packed_sequence_mask_function" for part in parts)


def _translate(function: Callable[..., Any], place: Place) -> Mask | None:
    """transformers' mask function as a mask of the algebra; None if a word is not known."""
    maker, variables = _read(function)
    word = WORDS.get((maker, *variables))
    return None if word is None else word(place, *variables.values())


def _causal(place: Place) -> Mask:
    return place.window(None, 0)


def _everything(place: Place) -> Mask:
    return Everything()


def _sliding(place: Place, width: int) -> Mask:
    return place.window(width - 1, None)


def _sliding_both_ways(place: Place, width: int) -> Mask:
    return place.window(width, width)


def _chunks(place: Place, size: int, left_padding: Tensor) -> Mask:
    start = left_padding.unsqueeze(-1)
    return documents((place.rows - start) // size, (place.keys - start) // size)


def _blocks(place: Place, ids: Tensor) -> Mask:
    ids_q, ids_k = ids[:, place.rows].long(), ids[:, place.keys].long()
    nobody = torch.iinfo(torch.int64).min
    return documents(ids_q.masked_fill(ids_q < 0, nobody), _apart(ids_k))


def _packed(place: Place, ids: Tensor) -> Mask:
    return documents(ids[:, place.rows], ids[:, place.keys])


def _restarting(place: Place, function: Callable[..., Any], position_ids: Tensor) -> Mask | None:
    """Positions that restart at each sequence.

    Within a sequence differences stay what they are, and a window reads nothing else. What reads
    positions themselves has tensors, and is not taken.
    """
    inner = _translate(function, place)
    within = place.packed and place.aligned and inner is not None and not inner.leaves
    return inner if within else None


def _and(place: Place, functions: tuple[Callable[..., Any], ...]) -> Mask | None:
    packed = place.packed or any(_packs(f) for f in functions)
    return _combine(functions, place._replace(packed=packed), _both)


def _or(place: Place, functions: tuple[Callable[..., Any], ...]) -> Mask | None:
    return _combine(functions, place, operator.or_)


def _combine(
    functions: tuple[Callable[..., Any], ...], place: Place, join: Callable[[Mask, Mask], Mask]
) -> Mask | None:
    parts = [_translate(f, place) for f in functions]
    known = [part for part in parts if part is not None]
    return reduce(join, known) if known and len(known) == len(parts) else None


# Maker and names of its variables: with other variables it is another word, and not known.
WORDS: dict[tuple[str, ...], Callable[..., Mask | None]] = {
    ("causal_mask_function",): _causal,
    ("bidirectional_mask_function",): _everything,
    ("sliding_window_overlay", "sliding_window"): _sliding,
    ("sliding_window_bidirectional_overlay", "sliding_window"): _sliding_both_ways,
    ("chunked_overlay", "chunk_size", "left_padding"): _chunks,
    ("blockwise_overlay", "block_sequence_ids"): _blocks,
    ("packed_sequence_mask_function", "packed_sequence_mask"): _packed,
    ("remap_positions_for_packed_sequence", "mask_function", "position_ids"): _restarting,
    ("and_masks", "mask_functions"): _and,
    ("or_masks", "mask_functions"): _or,
}


def check_vocabulary(masking: Any, version: str) -> None:
    """Each word against transformers' own evaluation of it, on six tokens in three sequences."""
    ids = torch.tensor([[0, 0, 0, 1, 1, -1]])
    values = {
        "sliding_window": 2, "chunk_size": 2, "left_padding": torch.tensor([1]),
        "block_sequence_ids": ids, "packed_sequence_mask": ids,
        "mask_function": masking.causal_mask_function,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]]),
    }  # fmt: skip
    translate: Any = attention_mask
    sequences = masking.packed_sequence_mask_function(ids)
    for maker, *names in WORDS:
        word = getattr(masking, maker, None)
        if word is None or names == ["mask_functions"]:
            continue
        function = word(**{name: values[name] for name in names}) if names else word
        for whole in (function, masking.and_masks(function, sequences)):
            seen = translate(1, 6, 6, mask_function=whole)
            expected = masking.sdpa_mask(1, 6, 6, mask_function=whole, allow_is_causal_skip=False)
            if not torch.equal(seen & True, expected):
                advice = "report this, and use attn_implementation='sdpa' until it is mended"
                request = f"transformers {version}, whose {maker} means something new"
                raise Unsupported(request, {}, advice)
