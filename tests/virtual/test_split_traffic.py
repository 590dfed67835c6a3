"""A split model's messages follow from its shapes, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core import Port
from polytempo.partition.tensor import Rules, column
from polytempo.partition.tensor.traffic import loss_traffic, model_traffic
from split_models import RULES, SEQUENCE_RULES, VOCABULARY, Transformer, made, on_ranks, outcome_of


def sent(
    num_ranks: int,
    model: Callable[[], nn.Module],
    rules: Rules,
    step: Callable[[Any], Any],
    price: Callable[[Any], int],
    *,
    sequence: bool = False,
    **codecs: str,
) -> tuple[int, int]:
    """The bytes of one step (three steps' minus two steps', so without the checks at the start), and their price."""

    def bytes_of(steps: int) -> tuple[int, int]:
        def work(port: Port) -> int:
            net = pt.split(made(model), rules, sequence=sequence, port=port, **codecs)
            for _ in range(steps):
                torch.manual_seed(1)
                step(net)
            return price(net)

        outcome = outcome_of(num_ranks, work)
        return sum(outcome.trace.bytes_sent.values()), outcome.results[0]

    (two, _), (three, priced) = bytes_of(2), bytes_of(3)
    return three - two, priced


CODECS: list[dict[str, str]] = [
    {},
    {"activations": "int8", "gradients": "bf16"},
    {"gradients": "dynamic8"},
    {"activations": "qsgd(levels=7)", "gradients": "int8(block=8)"},
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("codecs", CODECS, ids=str)
def test_a_transformer_sends_what_its_shapes_say(
    num_ranks: int, sequence: bool, smoothing: float, codecs: dict[str, str]
) -> None:
    indices = torch.randint(0, VOCABULARY, (2, 7))

    def step(net: Any) -> None:
        net.cross_entropy(net(indices), indices, label_smoothing=smoothing).backward()

    def price(net: Any) -> int:
        layers = model_traffic(net, indices.numel(), 8, {"places": 7}, samples=2).values()
        loss = loss_traffic(num_ranks, indices.numel(), 8, smooths=bool(smoothing))
        return sum(each.forward_bytes + each.backward_bytes for each in layers) + loss

    found, priced = sent(
        num_ranks,
        lambda: Transformer(0.1, blocks=1),
        SEQUENCE_RULES if sequence else RULES,
        step,
        price,
        sequence=sequence,
        **codecs,
    )
    assert found == priced > 0


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("codecs", CODECS, ids=str)
def test_what_a_model_counts_for_each_layer_is_what_its_shapes_say(sequence: bool, codecs: dict[str, str]) -> None:
    indices = torch.randint(0, VOCABULARY, (2, 7))

    def work(port: Port) -> tuple[dict[str, Any], dict[str, Any]]:
        rules = SEQUENCE_RULES if sequence else RULES
        net = pt.split(made(lambda: Transformer(0.1, blocks=1)), rules, sequence=sequence, port=port, **codecs)
        net.cross_entropy(net(indices), indices).backward()
        return net.group.sent, model_traffic(net, indices.numel(), 8, {"places": 7}, samples=2)

    for counted, priced in on_ranks(3, work):
        assert {name: tuple(each) for name, each in counted.items()} == {
            name: each for name, each in priced.items() if sum(each)
        }


def test_eight_bits_send_an_eighth_of_float64_and_a_scale_for_each_block() -> None:
    """2 x 512 outputs in two pieces, and their gradients."""
    inputs = torch.ones(2, 512, dtype=torch.float64, requires_grad=True)

    def bytes_of(**codecs: str) -> int:
        rules: Rules = {"0": "column", "1": "row"}
        net = lambda: nn.Sequential(nn.Linear(512, 4), nn.Linear(4, 512))  # noqa: E731
        return sent(2, net, rules, lambda net: net(inputs).sum().backward(), lambda net: 0, **codecs)[0]

    assert bytes_of() == 2 * 2 * 1024 * 8
    assert bytes_of(activations="int8", gradients="int8") == 2 * 2 * (1024 + 4 * 4)
    assert bytes_of(activations="int8", gradients="bf16") == 2 * (1024 + 4 * 4) + 2 * 2048


def test_columns_that_are_gathered() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 7), nn.Linear(7, 5))

    def price(net: Any) -> int:
        return sum(forward + backward for forward, backward in model_traffic(net, 6, 8).values())

    found, priced = sent(
        3,
        model,
        {"0": "column", "1": column(gather=True)},
        lambda net: net(torch.arange(6) % 5).sum().backward(),
        price,
    )
    assert found == priced == 2 * 8 * (6 * 7 + 6 * 5 + 2 * 6 * 7)


def test_logits_are_not_gathered() -> None:
    """The loss sends three numbers of each position, however many classes there are."""

    def bytes_of(classes: int) -> int:
        def step(net: Any) -> None:
            net.cross_entropy(net(torch.ones(6, 4, dtype=torch.float64)), torch.arange(6)).backward()

        return sent(2, lambda: nn.Sequential(nn.Linear(4, classes)), {"0": "vocabulary"}, step, lambda net: 0)[0]

    assert bytes_of(10) == bytes_of(1000) == loss_traffic(2, 6, 8)
