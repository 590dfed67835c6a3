"""`chars`: a small transformer that learns which character of a text comes next."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from polytempo import data
from polytempo.jobs import file_of
from polytempo.spec.job import Data, Job, most_likely

VOCABULARY = 256
"""The most different characters of a text that the model has room for."""
CONTEXT = 64
WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 2


class Attention(nn.Module):
    """Each place looks at itself and the places before it (Vaswani et al., 2017, section 3.2)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return mixed


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after a normalization and around a residual (pre-norm)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, num_heads))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        x = x + self.attention(x)
        x = x + self.perceptron(x)
        return x


class Transformer(nn.Module):
    """A causal transformer: scores for the character after each place."""

    def __init__(self, vocabulary: int, context: int, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, num_heads) for _ in range(num_layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) int64 to (batch, length, vocabulary); length is at most the context."""
        x = self.characters(tokens) + self.places[: tokens.shape[1]]
        scores: Tensor = self.scores(self.blocks(x))
        return scores


def model() -> nn.Module:
    """Two layers of width 128 with four heads, 64 characters of context."""
    return Transformer(VOCABULARY, CONTEXT, WIDTH, NUM_HEADS, NUM_LAYERS)


def read(given: str | Path | None) -> Data:
    """The text file given as `--data`, or `input.txt` in that folder."""
    path = file_of(given, "chars", "input.txt")
    vocabulary, _ = data.read_characters(path)
    if len(vocabulary) > VOCABULARY:
        raise ValueError(f"{path} has {len(vocabulary)} different characters; job chars has room for {VOCABULARY}")
    return Data(*data.characters(path, CONTEXT))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy per character. Shapes (batch, length, vocabulary), (batch, length)."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """AdamW with its usual settings."""
    return torch.optim.AdamW(parameters, lr=lr)


job = Job(
    name="chars",
    model=model,
    data=read,
    loss=loss,
    optimizer=optimizer,
    lr=2e-3,
    batch_size=32,
    epochs=2,
    correct=most_likely,
)
"""The first 90 % of the text to train on, the rest to test with."""
