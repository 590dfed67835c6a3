"""The models of the page: a convolutional net, a transformer, and a table of embeddings; each also in a tiny size."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.bench.models import Bag, Workload


class Block(nn.Module):
    """Two 3 × 3 convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.around = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.around(x))


def resnet(width: int = 64) -> nn.Module:
    """ResNet-18 for 32 × 32 pixels: four stages of two blocks, of `width` to 8 · `width` channels."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = []
    for stage, (inputs, outputs) in enumerate(pairwise(widths)):
        blocks += [Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


class Gpt(nn.Module):
    """A causal transformer with norms before attention and perceptron; the last layer shares the embedding."""

    def __init__(self, symbols: int = 4096, length: int = 256, width: int = 448, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of the next symbol, shape (batch, symbols, length), for symbols of shape (batch, length)."""
        hidden = self.layers(self.embed(inputs) + self.place, mask=self.mask, is_causal=True)
        return functional.linear(hidden, self.embed.weight).transpose(1, 2)


def workloads(tiny: bool) -> dict[str, Workload]:
    """Models by name: like ResNet-18, like a GPT of 30 million parameters, embeddings with sparse gradients."""
    batch, pixels, width = (4, 8, 4) if tiny else (128, 32, 64)
    symbols, length = (32, 8) if tiny else (4096, 256)
    rows = 100 if tiny else 1_000_000
    gpt = {"symbols": symbols, "length": length, **({"width": 16, "layers": 2} if tiny else {})}
    return {
        "resnet": Workload(
            lambda: resnet(width),
            lambda n: (torch.randn(n, 3, pixels, pixels), torch.randint(10, (n,))),
            batch,
            0.01,
        ),
        "gpt": Workload(
            lambda: Gpt(**gpt),
            lambda n: (torch.randint(symbols, (n, length)), torch.randint(symbols, (n, length))),
            max(2, batch // 8),
            0.01,
        ),
        "embedding": Workload(
            lambda: Bag(rows),
            lambda n: (torch.randint(rows, (n, 10)), torch.randint(10, (n,))),
            8 * batch,
            0.1,
            sparse=True,
        ),
    }
