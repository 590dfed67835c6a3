"""The mean per token: texts of unequal length train as one large batch would, on any number of workers.

A worker's batch has as many tokens as its texts happen to have. The mean of the workers' means lets each token of a
worker with few of them count more; with `weight` all tokens of a step count the same.

    python examples/mean_per_token.py
    polytempo train examples/mean_per_token.py:job --workers 2 --accumulate 4
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import polytempo as pt

WORDS, PADDING = 20, 0


def texts(number: int = 240) -> list[Tensor]:
    """Texts of 2 to 40 words, each word the successor of the one before, or any other."""
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 41, (number,), generator=drawn).tolist()
    steps = [torch.randint(1, 3, (length,), generator=drawn) for length in lengths]
    return [step.cumsum(0) % (WORDS - 1) + 1 for step in steps]


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Words, and the word behind each."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PADDING)
    return ids[:, :-1], ids[:, 1:]


def mean_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the words of a batch."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


job = pt.Job(
    model=lambda: nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)),
    data=lambda path: pt.Data(texts(), texts(40), collate=padded),  # type: ignore[arg-type]  # a list is a data set
    loss=mean_of_tokens,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    lr=0.5,
    batch_size=8,
    weight=lambda batch: (batch[1] != PADDING).sum(),
    name="mean_per_token",
)

if __name__ == "__main__":
    alone = pt.simulate(job, "sync_sgd()", workers=1, global_batch_size=24, steps=20)
    together = pt.simulate(job, "sync_sgd()", workers=3, global_batch_size=24, steps=20, accumulate=4)
    print(f"by tokens:  1 worker {alone.loss:.6f}, 3 workers in 4 micro-batches each {together.loss:.6f}")
    by_samples = replace(job, weight=None)
    together = pt.simulate(by_samples, "sync_sgd()", workers=3, global_batch_size=24, steps=20, accumulate=4)
    print(f"by samples: 3 workers in 4 micro-batches each {together.loss:.6f}")
