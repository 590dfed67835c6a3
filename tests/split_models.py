"""Models for tests of split layers, and how a split one is compared with the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from polytempo.cluster import one_host
from polytempo.core import Port
from polytempo.core.suspension import suspendable
from polytempo.partition.tensor import Rules, SplitModel, column, row
from polytempo.worlds import Outcome, VirtualWorld

VOCABULARY, FEATURES, HEADS, POSITIONS = 11, 24, 6, 7


class Own(nn.Module):
    """An attention of one's own: query, key and value from one layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, FEATURES // HEADS)).transpose(-3, -2) for each in self.qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        answer: Tensor = self.out((self.drop(weights) @ v).transpose(-3, -2).flatten(-2))
        return answer


class Block(nn.Module):
    """Both kinds of attention, and two linear layers, with norms before and dropouts behind."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(FEATURES) for _ in range(3)])
        self.attention = nn.MultiheadAttention(FEATURES, HEADS, dropout=dropout, batch_first=True)
        self.own = Own(dropout)
        self.up, self.down = nn.Linear(FEATURES, 10), nn.Linear(10, FEATURES)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.own(self.norms[1](x))
        return x + self.outer(self.down(self.inner(functional.gelu(self.up(self.norms[2](x))))))


class Transformer(nn.Module):
    """Characters to scores, with one table for both."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, FEATURES)
        self.places = nn.Embedding(POSITIONS, FEATURES)
        self.blocks = nn.Sequential(*[Block(dropout) for _ in range(blocks)])
        self.norm, self.scores = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.scores.weight = self.characters.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.characters(indices) + self.places(torch.arange(indices.shape[1]))
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


RULES: Rules = {
    "characters": "embedding",
    "scores": "vocabulary",
    "*.attention": "heads",
    "*.own.qkv": column(heads=HEADS, packed=3),
    "*.own.out": row(heads=HEADS),
    "*.own.drop": "heads",
    "*.up": "column",
    "*.inner": "column",
    "*.down": "row",
}
SEQUENCE_RULES: Rules = {
    **RULES,
    "places": "scatter",
    "*.norms.*": "sequence",
    "norm": "sequence",
    "*.outer": "sequence",
}


def made(model: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model, the same everywhere."""
    torch.manual_seed(3)
    return model().to(dtype)


class Pass(NamedTuple):
    """The results of a forward and a backward pass."""

    loss: Tensor
    output: Tensor
    gradients: dict[str, Tensor]
    inputs: Tensor | None = None


Loss = Callable[[nn.Module, Any], Tensor]


def squares(output: Tensor) -> Tensor:
    """A loss with a different gradient for each output."""
    weights = torch.linspace(-1.0, 2.0, output.numel(), dtype=output.dtype).view(output.shape)
    return (output.square() * weights).sum()


def whole_pass(model: Callable[[], nn.Module], inputs: Any, dtype: torch.dtype = torch.float64) -> Pass:
    """The pass in one process."""
    net = made(model, dtype)
    taken = inputs.clone().requires_grad_(inputs.is_floating_point())
    torch.manual_seed(5)
    output = net(taken)
    loss = squares(output)
    loss.backward()
    return Pass(loss.detach(), output.detach(), {n: p.grad for n, p in net.named_parameters()}, taken.grad)  # type: ignore[misc]


def split_pass(
    model: Callable[[], nn.Module],
    rules: Rules,
    inputs: Any,
    dtype: torch.dtype = torch.float64,
    *,
    sequence: bool = False,
    **place: Any,
) -> Pass:
    """The pass on one rank; `place` is its world or port."""
    net = pt.split(made(model, dtype), rules, sequence=sequence, **place)
    taken = inputs.clone().requires_grad_(inputs.is_floating_point())
    torch.manual_seed(5)
    output = net(taken)
    if any(way == "vocabulary" for way in rules.values()):
        output = net.all_logits(output)
    loss = squares(output)
    loss.backward()
    return Pass(loss.detach(), output.detach(), net.full_gradients(), taken.grad)


def on_ranks(num_ranks: int, work: Callable[[Port], Any], **mesh: int) -> list[Any]:
    """The value of `work(port)` on each virtual rank of a mesh, by default one model on all of them."""
    return outcome_of(num_ranks, work, **mesh).results


def outcome_of(num_ranks: int, work: Callable[[Port], Any], **mesh: int) -> Outcome[Any]:
    """The same, with its trace."""

    async def program(port: Port) -> Any:
        place = port.meshed(**(mesh or {"model": num_ranks}))
        return await suspendable(lambda: work(place))

    outcome = VirtualWorld(one_host(num_ranks), num_ranks).run(program)
    assert outcome.unreceived == 0
    return outcome


def assert_equal(found: Pass, expected: Pass, tolerance: float) -> None:
    """Loss, output and all gradients within `tolerance` of the largest value of each."""
    assert found.gradients.keys() == expected.gradients.keys()
    pairs = {"output": (found.output, expected.output), "loss": (found.loss, expected.loss)}
    pairs |= {name: (found.gradients[name], g) for name, g in expected.gradients.items()}
    if expected.inputs is not None:
        assert found.inputs is not None
        pairs["inputs"] = (found.inputs, expected.inputs)
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape, name
        scale = max(float(b.abs().max()), 1.0)
        assert float((a - b).abs().max()) <= tolerance * scale, f"{name}: {float((a - b).abs().max())}"


def copies(model: SplitModel) -> SplitModel:
    """A copy on the same ranks."""
    return copy.deepcopy(model)
