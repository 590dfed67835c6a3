"""Ways that are chosen automatically: the fewest bytes, as many as are sent, and the same gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from paper_models import alexnet
from polytempo.compression import int8
from polytempo.core import Port
from polytempo.partition.plan import given_plan, split_plan
from polytempo.partition.tensor import Rules
from polytempo.partition.wires import Wires
from split_models import assert_equal, made, on_ranks, outcome_of, split_pass, whole_pass


class Perceptron(nn.Module):
    """Linear layers of these widths, with a function and a dropout between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.drops = nn.ModuleList([nn.Dropout(0.2) for _ in self.layers])

    def forward(self, x: Tensor) -> Tensor:
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(functional.gelu(layer(x)))
        return x


def images() -> nn.Module:
    """Channels that are four of the linear layer's inputs each."""
    first, second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3)
    return nn.Sequential(
        *(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.Tanh(), nn.Flatten(), nn.Dropout(0.1)),
        *(nn.Linear(5 * 4, 8), nn.ReLU(), nn.Linear(8, 3)),
    )


def blocks() -> nn.Module:
    """Torch's own transformer, one node of a graph."""
    layer = nn.TransformerEncoderLayer(12, 4, 20, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(9, 12), nn.TransformerEncoder(layer, 2), nn.Linear(12, 9))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "perceptron": (lambda: Perceptron(5, 9, 4, 6, 7), drawn(3, 5)),
    "images": (images, drawn(2, 3, 8, 8)),
    "blocks": (blocks, torch.randint(0, 9, (2, 5), generator=torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_are_those_of_one_process(case: str, num_ranks: int) -> None:
    model, inputs = CASES[case]
    expected = whole_pass(model, inputs)
    rules = split_plan(made(model), inputs, num_ranks).rules
    for found in on_ranks(num_ranks, lambda port: split_pass(model, rules, inputs, port=port)):
        assert_equal(found, expected, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_what_the_plan_says(case: str) -> None:
    """The bytes of three steps over two steps', so without the checks at the start."""
    model, inputs = CASES[case]

    def sent(steps: int) -> int:
        def work(port: Port) -> None:
            net = pt.split(made(model), "auto", sample=inputs, port=port)
            for _ in range(steps):
                torch.manual_seed(1)
                net(inputs).sum().backward()

        return sum(outcome_of(3, work).trace.bytes_sent.values())

    plan = split_plan(made(model), inputs, 3)
    assert sent(3) - sent(2) == sum(plan.bytes_of(each, len(inputs)) for each in plan.layers) > 0


def cheapest(widths: tuple[int, ...]) -> int:
    """The fewest numbers of a sample, over all ways to make pairs, and to let other layers go alone."""

    def best(begin: int) -> int:
        if begin == len(widths) - 1:
            return 0
        given = widths[begin] * (begin > 0)
        made = widths[begin + 1]
        alone = min(made + 2 * given, 2 * made + given) + best(begin + 1)
        if begin + 2 < len(widths):
            return min(alone, 2 * given + 2 * widths[begin + 2] + best(begin + 2))
        return alone

    return best(0)


@pytest.mark.parametrize("widths", [(5, 9, 4, 6, 7), (8, 2, 30, 2, 9), (3, 20, 20, 20), (4, 4), (9, 30, 2, 30, 2, 3)])
def test_no_other_choice_sends_less(widths: tuple[int, ...]) -> None:
    plan = split_plan(Perceptron(*widths), torch.ones(2, widths[0]), 2)
    assert sum(each.numbers for each in plan.layers) == cheapest(widths)


def test_codecs_of_one_way_change_the_ways() -> None:
    """A column that gathers sends 10 numbers forward and 24 back, a row 20 and 12; in 8 bits a fourth, and 1 %."""
    inputs, model = torch.ones(2, 5), nn.Sequential(nn.Linear(5, 12), nn.Softmax(-1), nn.Linear(12, 10))
    plain = split_plan(model, inputs, 2)
    forward = split_plan(model, inputs, 2, Wires(activations=int8()))
    backward = split_plan(model, inputs, 2, Wires(gradients=int8()))
    assert [str(plan.rules["2"]) for plan in (plain, forward, backward)] == ["row", "row", "column(gather=True)"]


def test_the_ways_of_alexnet() -> None:
    """The first linear layer takes whole channels, of 36 inputs each."""
    with torch.device("meta"):
        net = alexnet()
    found = {
        name: str(way) for name, way in split_plan(net, torch.empty(2, 3, 224, 224, device="meta"), 2).rules.items()
    }
    assert len(found) == 8 + 1  # and one dropout
    assert sum(way == "row(heads=256)" for way in found.values()) <= 1
    assert set(found.values()) <= {"column", "row", "row(heads=256)", "column(gather=True)"}


def test_layers_that_cannot_be_split_stay_whole() -> None:
    """Fewer features than ranks both ways, other classes, tied weights, and layers that the model does not call."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thin, self.norm, self.idle = nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(9, 9)
            self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.out(self.table((self.norm(self.thin(x))[:, 0] > 0).long()))
            return answer

    plan = split_plan(Odd(), torch.ones(4, 1), 2)
    assert not plan.rules
    assert {each.volume.name for each in plan.layers} >= {"thin", "norm", "idle", "table", "out"}


def refused(model: nn.Module, rules: Any, **more: Any) -> str:
    def work(port: Port) -> str:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the tests compare its text
            pt.split(model, rules, port=port, **more)
        return str(error.value)

    return str(on_ranks(2, work)[0])


def test_mistakes() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if y.sum() > 0 else -y

    assert "ways cannot be chosen without the order of the layers" in refused(
        Decides(), "auto", sample=torch.ones(2, 4)
    )
    assert 'or give rules by name, such as {"*.up": "column"' in refused(Decides(), "auto", sample=torch.ones(2, 4))
    assert '"auto" with sample=x, which the model is called with' in refused(Decides(), "auto")
    assert "rules='best'" in refused(Decides(), "best", sample=torch.ones(2, 4))
    assert "sequence=True needs rules" in refused(Decides(), "auto", sample=torch.ones(2, 4), sequence=True)


GIVEN: Rules = {"layers.0": "column", "drops.0": "column", "layers.1": "row"}


def told_of(rules: Any, link: Any, **codecs: str) -> list[str]:
    """The warnings of `pt.split` on the first of two ranks, for a perceptron of 8, 6 and 4 features and 5 samples."""

    def work(port: Port) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model = made(lambda: Perceptron(8, 6, 4))
            pt.split(model, rules, sample=drawn(5, 8), link=link, gflops=1e-6, port=port, **codecs)
        return [str(each.message) for each in found]

    told: list[str] = on_ranks(2, work)[0]
    return told


@pytest.mark.parametrize("rules", ["auto", GIVEN])
def test_a_link_that_makes_the_split_slower(rules: Any) -> None:
    """A sum of 5 · 4 doubles is 160 bytes of a rank, in two rounds. Each rank leaves half of 6 · 5 · (8 · 6 + 6 · 4)
    operations to the other one."""
    assert told_of(rules, pt.cluster.Link(1.0, 8.0)) == [
        "on this link the split makes a step slower: exchanges take 2.2e+04 ms, and each worker computes 1.08e+03 ms "
        "less; most of it is layer layers.1, 2.2e+04 ms against 360 ms. It still divides the memory by 2"
    ]
    assert told_of(rules, "10gbit") == []


def test_codecs_make_exchanges_shorter() -> None:
    """A rank sends 20 doubles in all: 2 bytes a number, or 1 and 4 for a scale."""
    whole, half, eight = (
        told_of("auto", pt.cluster.Link(0.0, 8.0), **codecs)[0]
        for codecs in ({}, {"activations": "bf16"}, {"activations": "int8"})
    )
    assert "exchanges take 2e+04 ms" in whole
    assert "exchanges take 5e+03 ms" in half
    assert "exchanges take 3e+03 ms" in eight


def test_a_link_needs_a_sample() -> None:
    def work(port: Port) -> None:
        with pytest.raises(ValueError, match="depends on the batch; give sample=x"):
            pt.split(Perceptron(8, 6, 4), GIVEN, link="1gbit", port=port)
        with pytest.raises(ValueError, match="gflops=0: must be above 0"):
            pt.split(Perceptron(8, 6, 4), GIVEN, sample=torch.ones(5, 8), link="1gbit", gflops=0, port=port)

    on_ranks(2, work)


@pytest.mark.parametrize("case", ["perceptron", "images"])
def test_the_ways_of_a_plan_as_given(case: str) -> None:
    """The same bytes and rounds, whether ways are chosen or given."""
    model, inputs = CASES[case]
    plan = split_plan(made(model), inputs, 2)
    given = given_plan(made(model), inputs, plan.rules, 2)
    assert given.rules == plan.rules
    for one, other in zip(given.layers, plan.layers, strict=True):
        assert one.forward == other.forward, one.volume.name
        assert one.backward <= other.backward, one.volume.name
