"""A split model's messages follow from its shapes, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core import Port
from polytempo.partition.tensor import LocallyConnected2d, Rules, column, places
from polytempo.partition.tensor.traffic import convolution_traffic, loss_traffic, model_traffic
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


HALOS = [
    (nn.Conv2d(3, 4, 3, padding=1), (2, 2), (10, 9)),
    (nn.Conv2d(3, 4, 5, padding=2, bias=False), (3, 2), (11, 8)),
    (nn.Conv2d(3, 4, 5, padding="same"), (1, 4), (9, 12)),
    (nn.Conv2d(3, 4, 3, stride=2, padding=1, groups=1), (2, 2), (11, 9)),
    (nn.Conv2d(3, 6, (7, 2), dilation=(1, 2), groups=3), (3, 1), (13, 7)),
    (nn.Conv1d(3, 4, 4), (3,), (17,)),
    (LocallyConnected2d(3, 4, (10, 9), 3, padding=1), (2, 2), (10, 9)),
    (LocallyConnected2d(3, 2, (13, 8), (4, 2), stride=(2, 1), bias=False), (3, 1), (13, 8)),
]


@pytest.mark.parametrize(("layer", "grid", "sizes"), HALOS, ids=[str(number) for number in range(len(HALOS))])
def test_halos_are_sent_to_the_byte(layer: Any, grid: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Two pictures; the picture that enters, and the answer, which is gathered, are not the layer's."""
    rows, columns = (1, *grid)[-2:]
    pictures = torch.ones(2, 3, *sizes, dtype=torch.float64)
    ranks = rows * columns

    def work(port: Port) -> Any:
        net = pt.split(
            made(lambda: nn.Sequential(nn.Tanh(), layer)), {"*": places(rows=rows, columns=columns)}, port=port
        )
        net(pictures.clone().requires_grad_()).sum().backward()
        return net.group.sent

    expected = convolution_traffic(layer, sizes, grid, samples=2, itemsize=8)
    for counted in on_ranks(ranks, work):
        assert tuple(counted["1"]) == expected
        assert tuple(counted["0"]) == (0, (ranks - 1) * pictures.nbytes)  # the gradient of the input is gathered

    def step(net: Any) -> None:
        net(pictures).sum().backward()  # a picture that needs no gradient sends none

    rules: Rules = {"1": places(rows=rows, columns=columns)}
    found, answer = sent(
        ranks, lambda: nn.Sequential(nn.Tanh(), layer), rules, step, lambda net: (ranks - 1) * 8 * net(pictures).numel()
    )
    forward, backward = convolution_traffic(layer, sizes, grid, samples=2, itemsize=8, learns=False)
    assert found == forward + backward + answer


def test_halos_of_square_kernels_follow_the_formula() -> None:
    """B · I · [(R-1)·(k-1)·W + (C-1)·(k-1)·H + (R-1)·(C-1)·(k-1)²] numbers, each way."""
    for k, (rows, columns), (height, width) in [(3, (2, 2), (10, 9)), (5, (3, 2), (13, 9)), (7, (4, 3), (28, 30))]:
        layer = nn.Conv2d(6, 2, k, padding=k // 2)
        halo = (
            (rows - 1) * (k - 1) * width + (columns - 1) * (k - 1) * height + (rows - 1) * (columns - 1) * (k - 1) ** 2
        )
        found = convolution_traffic(layer, (height, width), (rows, columns), samples=5, itemsize=4)
        assert found.forward_bytes == 5 * 6 * halo * 4
        parameters = 2 * 6 * k * k + 2
        assert found.backward_bytes == 5 * 6 * halo * 4 + 2 * (rows * columns - 1) * parameters * 4
    with pytest.raises(ValueError, match="are not divided by a grid"):
        convolution_traffic(nn.Conv2d(1, 1, 3), (4, 4), (3, 1), samples=1, itemsize=4)


def test_weights_of_places_do_not_travel() -> None:
    """B · I · [(R-1)·(k-1)·W + (C-1)·(k-1)·H + (R-1)·(C-1)·(k-1)²] numbers each way, and nothing else."""
    layer = LocallyConnected2d(3, 4, (10, 9), 3, padding=1)
    halo = 2 * 3 * (2 * 9 + 2 * 10 + 2 * 2) * 8
    found = convolution_traffic(layer, (10, 9), (2, 2), samples=2, itemsize=8)
    assert found == (halo, halo)
    shared = convolution_traffic(nn.Conv2d(3, 4, 3, padding=1), (10, 9), (2, 2), samples=2, itemsize=8)
    assert shared == (halo, halo + 2 * 3 * (4 * 3 * 9 + 4) * 8)


def test_statistics_of_a_batch_norm_travel_once_each_way() -> None:
    pictures = torch.ones(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)

    def work(port: Port) -> Any:
        net = pt.split(made(lambda: nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())), {"0": "places"}, port=port)
        net(pictures).sum().backward()
        return net.group.sent["0"]

    statistics, parameters, gathered = 4 * 3 * 2 * 3 * 8, 2 * 3 * 2 * 3 * 8, 3 * pictures.nbytes
    for forward, backward in on_ranks(4, work):
        assert (forward, backward) == (statistics, statistics + parameters + gathered)


def test_halos_in_fewer_bytes() -> None:
    """A halo of 2 x 8 rows of 512 numbers with int8: a byte a number, and four for each 256."""
    layer, pictures = nn.Conv2d(8, 8, 3, padding=1), torch.ones(1, 8, 16, 512, dtype=torch.float64)

    def work(port: Port) -> Any:
        net = pt.split(
            made(lambda: nn.Sequential(layer)), {"0": "places"}, port=port, activations="int8", gradients="bf16"
        )
        net(pictures.clone().requires_grad_()).square().sum().backward()
        return net.group.sent["0"]

    halo, parameters = 2 * 8 * 512, sum(p.numel() for p in layer.parameters())
    for forward, backward in on_ranks(2, work):
        assert forward == halo + 4 * (halo // 256)
        assert backward == 2 * halo + 2 * parameters * 8 + 2 * pictures.numel()
