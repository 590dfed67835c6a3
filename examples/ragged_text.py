"""Texts of different lengths, and a model in the style of Hugging Face: batches are dicts, the model returns its loss.

The loss is called with the model and the whole batch, `pt.of_batch(lambda model, batch: ...)`, so a batch may have any
form that the model takes. The data bring the function that pads texts to a batch. With transformers installed, put
`AutoModelForSequenceClassification` in the place of `Classifier`; nothing else changes.

    python examples/ragged_text.py
    polytempo train examples/ragged_text.py:job --strategy 'local_sgd(period=8)' --workers 2
    polytempo simulate examples/ragged_text.py:job --strategy 'ssp(bound=3)' --workers 8
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import polytempo as pt

VOCABULARY, LONGEST, CLASSES, PADDING = 50, 24, 4, 0


class Output(NamedTuple):
    """Such models' return value: attributes, with `loss` if labels were given."""

    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """Words that look at each other once, and the mean of their votes on the text."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        """Ids and mask are (batch, length), labels (batch,)."""
        x = self.words(input_ids)
        x = x + self.attention(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        mask = attention_mask.unsqueeze(-1)
        logits = self.classes((x * mask).sum(1) / mask.sum(1))
        return Output(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


class Texts(Dataset[dict[str, Any]]):
    """Texts of 3 to 24 words. Each word speaks for one class; a text is of the class that most of its words name."""

    def __init__(self, num_texts: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LONGEST + 1, (num_texts,), generator=generator).tolist()
        self.texts = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.texts[index]
        return {"input_ids": words.tolist(), "label": int((words % CLASSES).bincount(minlength=CLASSES).argmax())}


def padded(texts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of texts, as long as the longest of them."""
    longest = max(len(text["input_ids"]) for text in texts)
    ids = torch.full((len(texts), longest), PADDING)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text["input_ids"])] = torch.tensor(text["input_ids"])
    labels = torch.tensor([text["label"] for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def read(path: Path | None) -> pt.Data:
    """The texts; this job makes its own, so `path`, the value of `--data`, is not needed."""
    return pt.Data(Texts(1_000, seed=0), Texts(300, seed=1), collate=padded)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the batch, as the model says it."""
    value: Tensor = model(**batch).loss
    return value


def correct(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """True for texts that the model puts where they belong."""
    logits: Tensor = model(batch["input_ids"], batch["attention_mask"]).logits
    return logits.argmax(-1) == batch["labels"]


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer that each worker, or the server, steps with."""
    return torch.optim.Adam(parameters, lr=lr)


job = pt.Job(
    name="ragged_text",
    model=Classifier,
    data=read,
    loss=pt.of_batch(loss),
    correct=pt.of_batch(correct),
    optimizer=adam,
    lr=0.01,
    batch_size=25,
    epochs=4,
)

if __name__ == "__main__":
    for strategy in (pt.strategies.sync_sgd(), pt.strategies.local_sgd(period=8), pt.strategies.ssp(bound=3)):
        real = pt.run(job, strategy, workers=2, threads=1)
        virtual = pt.simulate(job, strategy, workers=2)
        print(f"{strategy}: {real.accuracy:.1%} right on processes, {virtual.accuracy:.1%} in a simulation")
