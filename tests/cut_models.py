"""Models that are hard to cut, each in one way, and a reference that runs a cut model's stages one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.cut import Cut


def mlp() -> nn.Module:
    """A chain, nested, with dropout and operations in place."""
    middle = nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(12, 12), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), middle, nn.Linear(12, 3))


def cnn() -> nn.Module:
    """Convolutions with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout2d(0.2)),
        *(nn.Flatten(), nn.Linear(6 * 9, 3)),
    )


class Residual(nn.Module):
    """Skips over several layers; one value is used by three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(5))
        self.top = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = first = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % 2:
                x += skip
            x = skip = torch.relu(x) if number % 2 else x.tanh()
            first = x if number == 1 else first
        return self.top(x * first.sigmoid())


class Tied(nn.Module):
    """A transformer with its embedding as last layer, and with sizes and a mask computed at their use."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.characters = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(7, 8) / 10)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False) if by_name else None
        if self.head is not None:
            self.head.weight = self.characters.weight
        self.register_buffer("mask", torch.ones(7, 7).tril().bool(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.characters(tokens) + self.places[torch.arange(length)]
        x = functional.dropout(x, 0.1, training=self.training)
        for block in self.blocks:
            x = x + block(x, self.mask[:length, :length])
        x = self.norm(x)
        return functional.linear(x, self.characters.weight) if self.head is None else self.head(x)


class Attention(nn.Module):
    """Reads its sizes from its input, and cuts a tensor into a tuple of three."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.query_key_value(x).view(batch, length, 3, width).unbind(2)
        scores = (query @ key.transpose(1, 2) / math.sqrt(key.size(-1))).masked_fill(~mask, -math.inf)
        return self.out(scores.softmax(-1) @ value)


class Inception(nn.Module):
    """Branches that meet, and two outputs, one of an early layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.ReLU()) for _ in range(3))
        self.early, self.top = nn.Linear(8, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.stem(x))
        early = self.early(x)
        return {"late": self.top(torch.cat([branch(x) for branch in self.branches], 1)), "early": early}


class Recurrent(nn.Module):
    """A module with a tuple for an answer, another that cannot be traced, and a number that crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.opaque, self.top = nn.LSTM(5, 6, batch_first=True), Opaque(), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor, double: bool = False) -> Tensor:
        assert mask is None
        if not double:
            scale = scale * 2
        hidden, (last, _) = self.lstm(x)
        steps = hidden.size(1)
        y = self.opaque(last[0])
        return self.top(y * scale / steps)


class Opaque(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1000:
            return x
        return self.layer(x).tanh()


class Decides(nn.Module):
    """Python that `torch.fx` refuses and `torch.export` follows: types, sizes, a loop, and a list of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.drop, self.second, self.third = nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 8)
        self.top = nn.Linear(8, 6, bias=False)
        self.top.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        x = x.flatten(1) if x.dim() > 2 else x
        if x.shape[0] > 100 or scale is not None:
            return {"out": x}
        skip = h = self.drop(self.relu(self.norm(self.first(x))))
        for number in range(x.shape[1] // 2):
            h = h + number * self.shift
            h += torch.tensor([0.5, -0.5] * 4)
        h = functional.dropout(self.second(h).tanh(), 0.2, training=self.training)
        parts = [part * (1 + place) for place, part in enumerate(self.third(h).split(4, dim=1))]
        h = torch.cat(parts, 1) + skip
        return {"out": self.top(self.second(h)), "early": skip.sum(1) / x.size(0)}


def _tokens() -> tuple[Tensor]:
    return (torch.randint(0, 11, (4, 5)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: (torch.randn(5, 6),)),
    "cnn": (cnn, lambda: (torch.randn(4, 2, 6, 6),)),
    "residual": (Residual, lambda: (torch.randn(5, 8),)),
    "tied": (lambda: Tied(by_name=False), _tokens),
    "tied by name": (lambda: Tied(by_name=True), _tokens),
    "inception": (Inception, lambda: (torch.randn(5, 6),)),
    "decides": (Decides, lambda: {"x": torch.randn(5, 6), "scale": None}),
    "recurrent": (Recurrent, lambda: {"x": torch.randn(4, 3, 5), "scale": torch.rand(1), "double": True}),
}


def loss_of(output: Any) -> Tensor:
    """A scalar of any structure of tensors."""
    tensors = list(output.values()) if isinstance(output, dict) else [output]
    return torch.stack([(each * torch.linspace(-1, 1, each.numel()).view_as(each)).sum() for each in tensors]).sum()


def chained(cut: Cut, inputs: tuple[Any, ...]) -> Any:
    """The model's output by its stages, with gradients in the parameters: an executor's work, without processes."""
    known: dict[str, Tensor] = {}
    taken: list[list[Tensor]] = []
    given: list[tuple[Any, ...]] = []
    wants = {value.name: value.requires_grad for value in cut.values}
    for stage in cut.stages:
        taken.append([known[name].detach().clone().requires_grad_(wants[name]) for name in stage.takes])
        given.append(stage.module(*cut.inputs_of(stage.index, inputs), *taken[-1]))
        known |= dict(zip(stage.gives, given[-1], strict=False))
    output = given[-1][-1]
    back: dict[str, Tensor] = {}
    for stage in reversed(cut.stages):
        outputs = [
            (each, back[name]) for name, each in zip(stage.gives, given[stage.index], strict=False) if wants[name]
        ]
        outputs += [(loss_of(output), torch.tensor(1.0))] if stage.is_last else []
        torch.autograd.backward([each for each, _ in outputs], [gradient.to(each.dtype) for each, gradient in outputs])
        for name, each in zip(stage.takes, taken[stage.index], strict=True):
            if wants[name]:
                gradient = torch.zeros_like(each) if each.grad is None else each.grad
                back[name] = back[name] + gradient if name in back else gradient
    return output
