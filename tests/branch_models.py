"""Models with branches: drawn at random, of every kind of operation that could change a bit when branches run apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6
"""Features of every value."""
_LAYERS: dict[str, Callable[[random.Random], nn.Module]] = {
    "linear": lambda _: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda _: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "dropout": lambda _: nn.Dropout(0.3),
    "identity": lambda _: nn.Identity(),
    "norm": lambda _: nn.BatchNorm1d(WIDTH),
    "recurrent": lambda _: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "attention": lambda draw: nn.MultiheadAttention(WIDTH, 2, dropout=draw.choice([0, 0.2]), batch_first=True),
}
_FUNCTIONS = ("relu", "in_place", "add", "square", "weight", "view", "added_to", "tanh", "cat", "unused", "size")
_USED_AGAIN = {"linear", "norm", "frozen"}


def _in_place(a: Tensor, b: Tensor) -> Tensor:
    y = a + 1
    y += b
    return y.mul_(0.7)


def _unused(a: Tensor, b: Tensor) -> Tensor:
    torch.sigmoid(b)
    return a - b


class Drawn(nn.Module):
    """A program of 4 to 21 operations on earlier values; some layers are used several times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList()
        self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.program: list[tuple[str, int, int, int, int]] = []
        for _ in range(draw.randint(4, 21)):
            kind = draw.choice(["linear", "linear", "linear", *_LAYERS, *_FUNCTIONS])
            layer = self._layer(kind, draw) if kind in _LAYERS else -1
            given = range(max(0, len(self.program) - 5), len(self.program) + 1)
            self.program.append((kind, *(draw.choice(given) for _ in range(3)), layer))
        last = len(self.program)
        self.answers = sorted({last, draw.randint(1, last)})

    def _layer(self, kind: str, draw: random.Random) -> int:
        """A new layer, or a present one."""
        alike = [number for number, each in enumerate(self.layers) if type(each) is type(_LAYERS[kind](draw))]
        if alike and kind in _USED_AGAIN and draw.random() < 0.4:
            return draw.choice(alike)
        self.layers.append(_LAYERS[kind](draw))
        return len(self.layers) - 1

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Values of shape (samples, WIDTH)."""
        values = [x]
        for kind, a, b, c, layer in self.program:
            values.append(self._computed(kind, values[a], values[b], values[c], layer))
        return tuple(values[each] for each in self.answers)

    def _computed(self, kind: str, a: Tensor, b: Tensor, c: Tensor, layer: int) -> Tensor:
        if kind == "recurrent":
            out, (hidden, _) = self.layers[layer](a.unsqueeze(1))
            return out.squeeze(1) + hidden[0]
        if kind == "attention":
            return self.layers[layer](a.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0))[0].squeeze(0)
        if kind in _LAYERS:
            return self.layers[layer](a)
        functions: dict[str, Callable[[], Tensor]] = {
            "relu": lambda: functional.relu(a),
            "in_place": lambda: functional.relu(torch.sin(a), inplace=True),
            "add": lambda: a + b,
            "square": lambda: 0.1 * (a * a),
            "weight": lambda: 0.5 * (a @ self.weight) + self.shift,
            "view": lambda: a.reshape(-1).view(a.shape[0], -1),
            "added_to": lambda: _in_place(a, b),
            "tanh": lambda: torch.tanh(a),
            "cat": lambda: torch.cat([a, b, c], 1)[:, ::3].contiguous(),
            "unused": lambda: _unused(a, b),
            "size": lambda: a / b.shape[1],
        }
        return functions[kind]()


class Towers(nn.Module):
    """Branches of equal depth between two layers."""

    def __init__(self, width: int = 8, towers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width))
            for _ in range(towers)
        )
        self.scores = nn.Linear(towers * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, width) and (samples, 3)."""
        shared = torch.tanh(self.embed(x))
        scores: Tensor = self.scores(torch.cat([tower(shared) for tower in self.towers], 1))
        return scores


def trained(model: nn.Module, x: Tensor, *, needs_gradient: bool = False) -> dict[str, Any]:
    """The results of one forward and backward pass: answers, gradients, buffers, the generator's state."""
    given = x.clone().requires_grad_(needs_gradient)
    answers = model(given)
    answers = answers if isinstance(answers, tuple) else (answers,)
    loss = sum((number + 1) * each.square().sum() for number, each in enumerate(answers))
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return {
        "answers": [each.detach() for each in answers],
        "random": torch.get_rng_state(),
        "input": given.grad,
        **{name: parameter.grad for name, parameter in model.named_parameters()},
        **dict(model.named_buffers()),
    }
