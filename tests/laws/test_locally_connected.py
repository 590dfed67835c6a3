"""Layers with weights of their own at each place: their outputs, and the same with some places on each rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from polytempo.core import Port
from polytempo.partition.tensor import LocallyConnected2d, Rules, places
from polytempo.partition.tensor.division import Division, cuts_of, described, grid_division
from split_models import assert_equal, made, on_ranks, split_pass, squares, whole_pass

GRIDS = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2)]


def pictures(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def one(**options: Any) -> LocallyConnected2d:
    given = {"input_size": (7, 6), "kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)} | options
    return LocallyConnected2d(2, 3, **given).double()


# ---------------------------------------------------------------------- one process


def test_a_place_is_a_linear_layer_of_its_window() -> None:
    layer, x = one(), pictures(4, 2, 7, 6)
    padded, found = functional.pad(x, (0, 0, 1, 1)), layer(x)
    assert layer.bias is not None
    assert found.shape == (4, 3, *layer.output_size) == (4, 3, 4, 5)
    assert (tuple(layer.weight.shape), tuple(layer.bias.shape)) == ((4, 5, 3, 2 * 3 * 2), (4, 5, 3))
    for row in range(4):
        for column in range(5):
            window = padded[:, :, 2 * row : 2 * row + 3, column : column + 2].flatten(1)
            expected = functional.linear(window, layer.weight[row, column], layer.bias[row, column])
            assert torch.allclose(found[:, :, row, column], expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous()
    assert one(bias=False)(x).is_contiguous()
    assert torch.allclose(layer(x[0]), found[0], rtol=1e-12, atol=1e-12)
    bound = (2 * 3 * 2) ** -0.5
    assert 0.9 * bound < layer.weight.abs().max() <= bound


def test_with_equal_weights_it_is_a_convolution() -> None:
    conv, x = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)).double(), pictures(4, 2, 7, 6)
    layer = one()
    with torch.no_grad():
        layer.weight.copy_(conv.weight.flatten(1).expand_as(layer.weight))
        layer.bias.copy_(conv.bias.expand_as(layer.bias))  # type: ignore[union-attr, operator]
    assert torch.allclose(layer(x), conv(x), rtol=1e-12, atol=1e-12)
    squares(layer(x)).backward()
    squares(conv(x)).backward()
    assert layer.weight.grad is not None
    assert conv.weight.grad is not None
    summed = layer.weight.grad.sum((0, 1)).view_as(conv.weight)
    assert torch.allclose(summed, conv.weight.grad, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_differences() -> None:
    assert torch.autograd.gradcheck(one(), (pictures(1, 2, 7, 6).requires_grad_(),))


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ValueError, match="the kernel is larger than the padded picture; enlarge"):
        LocallyConnected2d(1, 1, 4, 5)
    with pytest.raises(ValueError, match="are 1 or more"):
        LocallyConnected2d(1, 0, 4, 3)
    with pytest.raises(ValueError, match=r"of \(2, 7, 6\) .* got a tensor of shape \(1, 2, 6, 7\); .* let input_size"):
        one()(torch.ones(1, 2, 6, 7))
    with pytest.raises(ValueError, match="input_size"):
        one()(torch.ones(7, 6))


# ---------------------------------------------------------------------- places on ranks


def network() -> nn.Module:
    """A network of the kind of Le et al., with sizes that no grid divides evenly."""
    first = [LocallyConnected2d(2, 3, (13, 11), 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2, 1)]
    second = [LocallyConnected2d(3, 2, (12, 10), (4, 3), stride=(2, 1), bias=False), nn.Dropout(0.2), nn.Tanh()]
    return nn.Sequential(nn.Sequential(*first), nn.Sequential(*second), nn.Flatten(), nn.Linear(2 * 5 * 8, 4))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("rules", [["0", "1"], ["0.0"], ["0", "1.0"]], ids=str)
def test_output_and_gradients_are_those_of_one_process(grid: tuple[int, int], rules: list[str]) -> None:
    """Also with a layer that no rule names, which is whole on all ranks."""
    ways: Rules = {name: places(rows=grid[0], columns=grid[1]) for name in rules}
    expected = whole_pass(network, pictures(2, 2, 13, 11))
    for found in on_ranks(grid[0] * grid[1], lambda port: split_pass(network, ways, pictures(2, 2, 13, 11), port=port)):
        assert_equal(found, expected, 1e-10)


LAYERS: dict[str, LocallyConnected2d] = {
    "one place": one(kernel_size=1, padding=0),
    "past the neighbour": one(kernel_size=7, padding=3, stride=1),
    "strides past the kernel": one(kernel_size=1, stride=2, padding=0),
    "padding alone": one(kernel_size=2, padding=4, stride=1),
    "fewer places than ranks": one(kernel_size=(6, 3), stride=1, padding=0),
    "frozen": one().requires_grad_(False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_options(name: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 2, 1), copy.deepcopy(LAYERS[name]), nn.Tanh())

    for shape in [(2, 2, 7, 6), (2, 7, 6)]:
        for rows, columns in [(2, 2), (4, 1), (1, 3)]:
            ways: Rules = {"1": places(rows=rows, columns=columns)}
            x = pictures(*shape)
            learns = {n: p for n, p in made(model).named_parameters() if p.requires_grad}
            whole = whole_pass(model, x)
            expected = whole._replace(gradients={n: g for n, g in whole.gradients.items() if n in learns})
            for found in on_ranks(rows * columns, lambda port, ways=ways, x=x: split_pass(model, ways, x, port=port)):
                assert_equal(found, expected, 1e-10)


def test_a_rank_holds_the_weights_of_its_places() -> None:
    def work(port: Port) -> Any:
        net = pt.split(made(network), {"0": "places", "1": "places"}, port=port)
        return {n: tuple(p.shape) for n, p in net.named_parameters()}, net.parts.keys(), net.full_parameters()

    whole = dict(made(network).named_parameters())
    found = on_ranks(4, work)
    assert [held["0.0.weight"] for held, _, _ in found] == [(r, c, 3, 18) for r in (7, 6) for c in (6, 5)]
    assert [held["0.0.bias"] for held, _, _ in found] == [(r, c, 3) for r in (7, 6) for c in (6, 5)]
    assert [held["1.0.weight"] for held, _, _ in found] == [(r, 4, 2, 36) for r in (3, 3, 2, 2)]
    for _, parts, full in found:
        assert parts == {"0.0.weight", "0.0.bias", "1.0.weight"}
        assert full.keys() == whole.keys()
        assert all(torch.equal(full[name], tensor) for name, tensor in whole.items())


def test_steps_are_those_of_one_process() -> None:
    """Momentum, weight decay and a clipped norm, which is the whole gradient's."""

    def trained(net: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
        norms = []
        for step in range(5):
            optimizer.zero_grad()
            squares(net(pictures(2, 2, 13, 11) * (step + 1))).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
            optimizer.step()
        return norms

    def work(port: Port) -> Any:
        net = pt.split(made(network), {"0": "places", "1": "places"}, port=port)
        return trained(net), net.full_parameters()

    alone = made(network)
    expected = trained(alone)
    for norms, full in on_ranks(4, work):
        assert norms == pytest.approx(expected, rel=1e-10)
        for name, tensor in alone.named_parameters():
            assert torch.allclose(full[name], tensor, rtol=1e-10, atol=1e-10), name


def test_whole_parameters_are_loaded_in_parts() -> None:
    saved = {name: tensor + 1 for name, tensor in made(network).named_parameters()}

    def work(port: Port) -> Any:
        net = pt.split(made(network), {"0": places(rows=3)}, port=port)
        net.load_full_parameters(saved)
        return net.full_parameters()

    for full in on_ranks(3, work):
        assert all(torch.equal(full[name], tensor) for name, tensor in saved.items())


def test_hooks_are_not_lost() -> None:
    def work(port: Port) -> None:
        net = made(network)
        net.get_submodule("0.0").register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"0\.0 has hooks or parametrizations"):
            pt.split(net, {"0": "places"}, port=port)

    on_ranks(2, work)


# ---------------------------------------------------------------------- cuts


def test_a_grid_of_ranks_cuts_two_dimensions() -> None:
    cut, whole = grid_division((3, 2), (4, 3)), torch.arange(5 * 7 * 2).view(5, 7, 2)
    parts = [cut.take(whole, rank) for rank in range(4)]
    expected = [whole[:3, :4], whole[:3, 4:], whole[3:, :4], whole[3:, 4:]]
    assert all(torch.equal(part, each) for part, each in zip(parts, expected, strict=True))
    assert torch.equal(cut.join(parts), whole)
    assert cut.sizes == (12, 9, 8, 6)
    for rank, part in enumerate(parts):
        assert all(cut.shape(other.shape, rank) == list(part.shape) for other in parts)


def test_cuts_are_told_and_read() -> None:
    """A cut along one dimension is told as it was before there were grids."""
    cuts = {"grid": grid_division((3, 2), (4, 3)), "packed": Division(1, (2, 1), 3)}
    assert cuts_of(described(1, cuts)) == (1, cuts)
    assert described(0, {"a": Division(1, (2, 1), 3)}) == '{"number": 0, "cut": {"a": [1, [2, 1], 3]}}'
    assert Division(1, (2, 1), 3).shape([5, 3, 4], 0) == [5, 6, 4]
