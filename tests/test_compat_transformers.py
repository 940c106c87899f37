"""anyflash as an attention implementation of transformers: small random models against their own.

Plain is transformers' eager attention in float32. It cannot be exact: in float64 it still takes the
softmax in float32, where the lowest float64 is −inf and rows of padding become NaN. Exact is the
model in float64 with `exact_attention`, below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anyflash import InvalidInput, Unsupported, causal, documents
from anyflash.masks.algebra import Everything
from anyflash.numerics import max_error, tolerance

transformers = pytest.importorskip(
    "transformers", reason="the extra anyflash[transformers] is not installed"
)

from transformers import masking_utils as words  # noqa: E402

from anyflash.compat import transformers_masks  # noqa: E402
from anyflash.compat.transformers import INTERNAL, NAME, MaskTensor, attention_forward, register  # noqa: E402

register()


def exact_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The definition, in the dtype of its inputs; rows that see nothing give 0."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    seen = torch.ones_like(scores, dtype=torch.bool) if attention_mask is None else attention_mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(~seen, 0)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def boolean_mask(*arguments: Any, **options: Any) -> Tensor:
    return words.sdpa_mask(*arguments, **options | {"allow_is_causal_skip": False})


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", boolean_mask)

# Every initialised weight is large enough for attention to matter: with the usual 0.02, random
# models attend everything alike and an error in a mask would not show.
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 61, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = 9
LENGTH = 40


class Case(NamedTuple):
    model: str
    config: str
    arguments: dict[str, Any]
    softcap: bool = False


CASES = {
    "bert": Case("BertModel", "BertConfig", SIZES),
    "gpt2": Case(
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "initializer_range": 0.3},
    ),
    "llama": Case("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": Case("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": WINDOW}),
    "gemma2": Case(
        "Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"sliding_window": WINDOW}, softcap=True
    ),
    "gpt_oss": Case(
        "GptOssForCausalLM", "GptOssConfig",
        # All experts are used, or a rounding error could choose another one.
        GROUPED | {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
DECODERS = [name for name in CASES if name != "bert"]


def build(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    """The same weights for every implementation and dtype."""
    case = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(
        **case.arguments, bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    model = getattr(transformers, case.model)._from_config(
        config, attn_implementation=implementation, experts_implementation="eager"
    )
    return model.to(dtype).eval()


def padding(side: str) -> Tensor | None:
    if side == "none":
        return None
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :17], mask[1, :3] = 0, 0
    if side == "both":
        mask[0, -5:], mask[2, -1:] = 0, 0
    return mask.flip(1) if side == "right" else mask


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def measure(model: Any, mask: Tensor | None, **inputs: Any) -> dict[str, Tensor]:
    """Outputs of the tokens that are no padding, and gradients of all parameters."""
    model.zero_grad()
    # Positions by order, not by mask: a padded row must not depend on what is left undefined.
    out = model(input_ids=tokens(), attention_mask=mask, **inputs)[0]
    real = torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    out = out[real]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    (out * weights).mean().backward()
    found = {"out": out.detach()}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("side", ["none", "left", "right", "both"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, side: str) -> None:
    mask = padding(side)
    exact = measure(build(name, "exact"), mask)
    plain = measure(build(name, "eager", torch.float32), mask)
    assert max_error(plain["out"], exact["out"]) <= 1e-3
    for dtype in (torch.float32, torch.float64):
        mine = measure(build(name, NAME, dtype), mask)
        assert mine.keys() == exact.keys()
        for part, value in mine.items():
            reference = plain[part] if dtype == torch.float32 else exact[part]
            allowed = tolerance(reference, exact[part], softcap=CASES[name].softcap)
            assert max_error(value, exact[part]) <= allowed, (part, dtype)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str, side: str, cache: str) -> None:
    """Greedy decoding, past the window: the same tokens."""
    mask = torch.ones(3, LENGTH, dtype=torch.long) if side == "none" else padding(side)
    options = {
        "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0,
        "cache_implementation": cache,
    }  # fmt: skip
    expected = build(name, "exact").generate(tokens(), **options)
    assert torch.equal(build(name, NAME).generate(tokens(), **options), expected)


@torch.no_grad()
def test_generate_in_chunks() -> None:
    """Several queries on top of a cache: they stand at its end."""
    whole = build("llama", "exact")(input_ids=tokens()).logits
    model, cache = build("llama", NAME), transformers.DynamicCache()
    parts = [model(input_ids=part, cache=cache).logits for part in tokens().split(15, 1)]
    assert max_error(torch.cat(parts, 1), whole) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_packed_positions(name: str) -> None:
    """Restarting position_ids: each sequence as if alone."""
    lengths = (13, 1, 20, 6)
    model, plain = build(name, NAME), build(name, "exact")
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = tokens(1, sum(lengths))
    alone = torch.cat([plain(input_ids=part).logits for part in ids.split(lengths, 1)], 1)
    # transformers looks for restarts only without a cache.
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert max_error(packed, alone) <= 1e-5
    packed = model(
        input_ids=ids, position_ids=positions, cu_seq_lens_q=starts, cu_seq_lens_k=starts,
        max_length_q=20, max_length_k=20, use_cache=False,
    ).logits  # fmt: skip
    assert max_error(packed, alone) <= 1e-5
    with pytest.raises(InvalidInput, match=r"cu_seq_lens_q.*position_ids"):
        model(input_ids=ids, cu_seq_lens_q=starts)


@torch.no_grad()
def test_packed_encoder() -> None:
    """An encoder with a mask of the algebra: each sentence as if alone."""
    lengths = (13, 1, 20, 6)
    ids = tokens(1, sum(lengths))
    parts = ids.split(lengths, 1)
    alone = torch.cat([build("bert", "exact")(input_ids=part)[0] for part in parts], 1)
    which = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    mask = MaskTensor(documents(which), (1, 1, 40, 40))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = build("bert", NAME)(input_ids=ids, position_ids=positions, attention_mask=mask)[0]
    assert max_error(packed, alone) <= 1e-5


def test_position_bias_and_cross_attention() -> None:
    """T5: a learned bias on the scores, no scale, an encoder with padding seen from a decoder."""
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=61,
        decoder_start_token_id=0, dropout_rate=0.0, initializer_factor=3.0,
    )  # fmt: skip
    found = {}
    for name in ("exact", NAME):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration._from_config(
            copy.deepcopy(config), attn_implementation=name
        ).double()
        out = model(input_ids=tokens(), attention_mask=padding("left"), labels=tokens(3, 11))
        out.loss.backward()
        found[name] = {n: p.grad for n, p in model.named_parameters()} | {
            "out": out.logits.detach()
        }
    for part, value in found["exact"].items():
        assert max_error(found[NAME][part], value) <= 1e-5, part
    biases = [n for n in found[NAME] if "relative_attention_bias" in n]
    assert biases
    assert all(found[NAME][n].abs().max() > 0 for n in biases)


@torch.no_grad()
def test_four_dimensional_masks() -> None:
    """A user's own mask goes through: boolean as a mask, float as a bias."""
    seen = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e300)
    expected = build("llama", "exact")(input_ids=tokens(), attention_mask=seen).logits
    for mask in (seen, added):
        mine = build("llama", NAME)(input_ids=tokens(), attention_mask=mask).logits
        assert max_error(mine, expected) <= 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    mask = padding("left")
    expected = measure(build("llama", NAME), mask)
    model = build("llama", NAME)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    found = measure(model, mask)
    assert all(torch.equal(found[part], expected[part]) for part in expected)


def test_inference_mode() -> None:
    model, mask = build("mistral", NAME), padding("left")
    expected = model(input_ids=tokens(), attention_mask=mask).logits
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens(), attention_mask=mask).logits, expected)
        # Without a version counter a mask would be compiled anew in every layer.
        leaves = compare(FUNCTIONS["causal"], PLACES["static decode"], TOKENS["left"]).mask.leaves
        assert leaves
        assert not any(leaf.is_inference() for leaf in leaves)


def test_dropout() -> None:
    """Dropped in training only, by the generator."""
    config = transformers.LlamaConfig(**GROUPED, attention_dropout=0.5)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=NAME)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(input_ids=tokens()).logits

    model.eval()
    assert torch.equal(run(1), run(2))
    model.train()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


# The masks themselves.

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
BLOCKS = torch.tensor([[-1, 0, 0, -1, 1, 1, -1, -1, 2], [-1, -1, 3, 3, 3, -1, -1, -1, -1]])


def packs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    restarting = words.remap_positions_for_packed_sequence(function, POSITIONS)
    return words.and_masks(restarting, words.packed_sequence_mask_function(IDS))


FUNCTIONS = {
    "causal": words.causal_mask_function,
    "everything": words.bidirectional_mask_function,
    "sliding": words.sliding_window_causal_mask_function(3),
    "sliding wide": words.sliding_window_causal_mask_function(99),
    "sliding just not all": words.sliding_window_causal_mask_function(8),
    "sliding just all": words.sliding_window_causal_mask_function(9),
    "sliding both ways": words.sliding_window_bidirectional_mask_function(2),
    "sliding both ways, just not all": words.sliding_window_bidirectional_mask_function(7),
    "sliding both ways, just all": words.sliding_window_bidirectional_mask_function(8),
    "chunks": words.chunked_causal_mask_function(4, torch.tensor([2, 0])),
    "blocks": words.or_masks(words.causal_mask_function, words.blockwise_overlay(BLOCKS)),
}
SQUARE = {
    "packed": packs(words.causal_mask_function),
    "packed sliding": packs(words.sliding_window_causal_mask_function(2)),
    "packed both ways": packs(words.bidirectional_mask_function),
}
# (queries, keys, offset of queries, offset of keys)
PLACES = {
    "prefill": (9, 9, 0, 0),
    "decode": (1, 9, 8, 0),
    "chunk": (4, 9, 5, 0),
    "static prefill": (4, 9, 0, 0),
    "static decode": (1, 9, torch.tensor(5), 0),
    "sliding cache": (3, 5, 6, 4),
}
TOKENS = {
    "all": None,
    "none missing": torch.ones(2, 9, dtype=torch.bool),
    "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]).bool(),
    "both": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]).bool(),
    "holes": torch.tensor([[0, 1, 0, 1, 1, 0, 1, 1, 1], [1] * 9]).bool(),
    "short": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool(),
}


def compare(function: Callable[..., Tensor], place: tuple[Any, ...], seen: Tensor | None) -> Tensor:
    sizes = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), place, strict=True))
    arguments = {"batch_size": 2, "mask_function": function, "attention_mask": seen, **sizes}
    mine = transformers_masks.attention_mask(**arguments)
    expected = words.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert mine.shape == expected.shape == (2, 1, *place[:2])
    assert torch.equal(mine.dense() if isinstance(mine, MaskTensor) else mine, expected)
    return mine


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask(name: str, place: str) -> None:
    for seen in TOKENS.values():
        mine = compare(FUNCTIONS[name], PLACES[place], seen)
        assert isinstance(mine, MaskTensor)
        assert not mine.packed


@pytest.mark.parametrize("name", SQUARE)
def test_packed_mask(name: str) -> None:
    mine = compare(SQUARE[name], PLACES["prefill"], None)
    assert isinstance(mine, MaskTensor)
    assert mine.packed


def test_simple_masks_stay_simple() -> None:
    """What the fastest kernels take whole."""
    assert compare(FUNCTIONS["causal"], PLACES["prefill"], TOKENS["none missing"]).mask.leaves == ()
    assert compare(FUNCTIONS["sliding wide"], PLACES["prefill"], None).mask.text == causal().text
    assert isinstance(compare(FUNCTIONS["causal"], PLACES["decode"], None).mask, Everything)
    for seen in ("left", "both"):
        mask = compare(FUNCTIONS["sliding"], PLACES["prefill"], TOKENS[seen]).mask
        assert mask.interval_bound() == 1  # O(S), no tile map


def test_unknown_words_are_evaluated() -> None:
    """A function of the user's, a word in an unknown form, and words in an unknown place."""
    mine = words.and_masks(words.causal_mask_function, lambda b, h, q, k: (q + k) % 3 > 0)
    lone = words.remap_positions_for_packed_sequence(words.causal_mask_function, POSITIONS)
    chunked = packs(words.chunked_causal_mask_function(2, torch.tensor([0, 0])))
    for function in (mine, lone, chunked):
        assert type(compare(function, PLACES["prefill"], None)) is Tensor


def test_vocabulary_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        transformers_masks.WORDS, ("sliding_window_overlay", "sliding_window"),
        lambda place, width: place.window(width, None),
    )  # fmt: skip
    with pytest.raises(Unsupported, match="sliding_window_overlay means something new"):
        register()


def test_mask_tensor_means_what_it_says() -> None:
    mask = MaskTensor(causal(), (2, 1, 5, 7))
    dense = causal().materialise(2, 1, 5, 7)
    assert torch.equal(mask[:, :, 1:, :3], dense[:, :, 1:, :3])
    assert torch.equal(mask & torch.ones(7, dtype=torch.bool), dense)
    assert mask.detach() is mask
    assert "Window(None,0)" in repr(mask)
    with pytest.raises(Unsupported, match="adds the mask to scores"):
        torch.zeros(2, 4, 5, 7) + mask


# The attention function alone.


def call(mask: Tensor | None = None, causal: bool = False, keys: int = 8, **options: Any) -> Tensor:
    module = torch.nn.Module()
    module.is_causal = causal
    q, k, v = torch.randn(2, 4, 8, 4), torch.randn(2, 2, keys, 4), torch.randn(2, 2, keys, 4)
    return attention_forward(module, q, k, v, mask, **options)[0]


def test_layout() -> None:
    out = call()
    assert out.shape == (2, 8, 4, 4)
    assert out.is_contiguous()


def test_unknown_arguments_are_refused() -> None:
    call(position_ids=torch.arange(8), use_cache=True, block_indices=None, output_attentions=False)
    for argument in ("block_indices", "output_attentions", "some_new_bias"):
        with pytest.raises(Unsupported, match=argument):
            call(**{argument: True})


def test_ambiguous_masks_are_refused() -> None:
    with pytest.raises(InvalidInput, match="8 queries and 5 keys"):
        call(causal=True, keys=5)
    with pytest.raises(InvalidInput, match="sliding_window=3"):
        call(sliding_window=3)
    with pytest.raises(InvalidInput, match=r"attention_mask.*\(2, 8\)"):
        call(torch.ones(2, 8, dtype=torch.bool))


@pytest.mark.parametrize("width", [None, 3])
def test_mask_by_flags(width: int | None) -> None:
    torch.manual_seed(0)
    found = call(causal=True, sliding_window=width)
    row, key = torch.arange(8)[:, None], torch.arange(8)
    seen = (key <= row) & (key > row - (width or 99))
    torch.manual_seed(0)
    assert max_error(found, call(seen[None, None])) <= 1e-6


def test_register_twice() -> None:
    assert register() == register() == NAME
    assert NAME == "anyflash" and "flash" not in INTERNAL  # see the comment at INTERNAL
    model = build("llama", "sdpa")
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == INTERNAL
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_from_pretrained_takes_the_name(tmp_path: Path) -> None:
    build("bert", "sdpa").save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="anyflash")
    assert model.config._attn_implementation == INTERNAL
