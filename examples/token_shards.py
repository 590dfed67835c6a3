"""A language model learns from documents in shards: tokenized, packed to one length, two corpora in proportion.

The example writes its corpora, 2 × 4 files of JSON lines, into a folder of its own. Workers read ranges of files; each
sequence of 48 tokens holds whole documents, and attention stays within a document.

    python examples/token_shards.py
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt

LENGTH, WIDTH, BYTES = 48, 32, 256


def write_corpus(folder: Path, words: list[str], seed: int) -> None:
    """Four files of 60 documents; a document has 2 to 9 words."""
    drawn = random.Random(seed)
    folder.mkdir()
    for part in range(4):
        texts = [" ".join(drawn.choices(words, k=drawn.randint(2, 9))) for _ in range(60)]
        (folder / f"part-{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def tokens_of(sample: dict[str, Any]) -> Tensor:
    """The bytes of a document as tokens."""
    return torch.tensor(list(sample["text"].encode()))


def corpus(folder: Path) -> pt.data.ShardedData:
    """Packed sequences: three of the rivers for each of the mountains."""
    packed = [
        pt.data.packed(pt.data.mapped(pt.data.json_lines(f"{folder}/{name}/*.jsonl"), tokens_of), LENGTH)
        for name in ("rivers", "mountains")
    ]
    return pt.data.mixture([(packed[0], 0.75), (packed[1], 0.25)])


class Model(nn.Module):
    """One layer of attention between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (B, LENGTH, BYTES)."""
        hidden = self.tokens(batch["tokens"]) + self.positions(batch["positions"])
        query, key, value = (each.unsqueeze(1) for each in self.project(hidden).chunk(3, dim=-1))
        mask = pt.data.document_mask(batch["segments"])
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(hidden + attended.squeeze(1))  # type: ignore[no-any-return]


@pt.of_batch
def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the batch's predictions."""
    return functional.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten())


def job(folder: Path) -> pt.Job:
    """The job; `weight` makes its mean one over tokens."""
    return pt.Job(
        model=Model,
        data=lambda path: pt.Data(corpus(folder)),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
        weight=lambda batch: (batch["labels"] != -100).sum(),
        lr=0.01,
        batch_size=8,
        name="token_shards",
    )


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["POLYTEMPO_CACHE"] = str(folder / "cache")
        write_corpus(folder / "rivers", ["the", "river", "runs", "to", "sea", "slowly"], seed=1)
        write_corpus(folder / "mountains", ["a", "mountain", "stands", "in", "snow"], seed=2)
        source = corpus(folder)
        print(f"{len(source)} sequences of {LENGTH} tokens in {len(source.counts)} shards")
        result = pt.run(job(folder), pt.strategies.sync_sgd(), workers=2, epochs=6)
        print(f"loss {result.loss:.3f} after {result.steps} steps of 2 workers")
