"""Pictures with some places on each rank: output, loss and all gradients are one process's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.core import Port
from polytempo.partition.tensor import Rules, places
from split_models import Pass, assert_equal, on_ranks, split_pass, whole_pass

GRIDS = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2)]
TOLERANCE = 1e-10


def check(model: Callable[[], nn.Module], inputs: Tensor, *grids: tuple[int, int], rules: str = "*") -> None:
    """All ranks of each grid against one process; `rules` name layers by places."""
    expected = whole_pass(model, inputs)
    for rows, columns in grids:
        ways: Rules = {pattern: places(rows=rows, columns=columns) for pattern in rules.split(", ")}

        def work(port: Port, ways: Rules = ways) -> Pass:
            return split_pass(model, ways, inputs, port=port)

        for found in on_ranks(rows * columns, work):
            assert_equal(found, expected, TOLERANCE)


def pictures(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def small() -> nn.Module:
    """The stack of a classifier; sizes are odd, and channels are flattened for the classifier."""
    features = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(3 * 4 * 3, 5))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_classifier(grid: tuple[int, int]) -> None:
    check(small, pictures(2, 2, 13, 11), grid, rules="0")
    check(small, pictures(2, 2, 13, 11), grid, rules="0, 3")


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "same": lambda: nn.Conv2d(2, 3, 3, padding=1),
    "no bias": lambda: nn.Conv2d(2, 3, 3, bias=False),
    "one place": lambda: nn.Conv2d(2, 3, 1),
    "strides": lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "strides past the kernel": lambda: nn.Conv2d(2, 3, 1, stride=3),
    "uneven": lambda: nn.Conv2d(2, 3, (5, 2), stride=(1, 2), padding=(3, 0)),
    "dilation": lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2),
    "past the neighbour": lambda: nn.Conv2d(2, 3, 7, padding=3),
    "further": lambda: nn.Conv2d(2, 3, 9, padding=4, stride=2),
    "same, by name": lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)),
    "valid, by name": lambda: nn.Conv2d(2, 3, 2, padding="valid"),
    "groups": lambda: nn.Conv2d(2, 6, 3, padding=1, groups=2),
    "around": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "too far padded": lambda: nn.Conv2d(2, 3, 1, padding=9, stride=4),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 3),
    "transposed, strides": lambda: nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1),
    "transposed, more": lambda: nn.ConvTranspose2d(2, 4, 3, stride=(3, 2), padding=1, output_padding=1, groups=2),
    "transposed, gaps": lambda: nn.ConvTranspose2d(2, 3, 1, stride=3, output_padding=2),
    "transposed, dilation": lambda: nn.ConvTranspose2d(2, 3, 3, dilation=3, padding=2, bias=False),
    "max": lambda: nn.MaxPool2d(2),
    "max, overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "max, ceil": lambda: nn.MaxPool2d((3, 2), stride=2, ceil_mode=True, dilation=(2, 1)),
    "mean": lambda: nn.AvgPool2d(2),
    "mean, padding": lambda: nn.AvgPool2d(3, stride=2, padding=1),
    "mean, padding not counted": lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
    "mean, ceil": lambda: nn.AvgPool2d((3, 2), stride=2, padding=1, ceil_mode=True),
    "mean, ceil, not counted": lambda: nn.AvgPool2d(4, stride=3, ceil_mode=True, count_include_pad=False),
    "mean, divisor": lambda: nn.AvgPool2d(3, stride=1, divisor_override=7),
    "adaptive mean": lambda: nn.AdaptiveAvgPool2d((5, 3)),
    "adaptive mean of all": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive mean, other sizes": lambda: nn.AdaptiveAvgPool2d((4, None)),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d((5, 3)),
    "adaptive max, other sizes": lambda: nn.AdaptiveMaxPool2d(4),
    "batch norm": lambda: nn.BatchNorm2d(2),
    "batch norm without parameters": lambda: nn.BatchNorm2d(2, affine=False, track_running_stats=False),
    "batch norm, cumulative": lambda: nn.BatchNorm2d(2, momentum=None),
    "batch norm, evaluated": lambda: nn.BatchNorm2d(2).eval(),
    "instance norm": lambda: nn.InstanceNorm2d(2, affine=True),
    "instance norm with statistics": lambda: nn.InstanceNorm2d(2, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "layer norm": lambda: nn.LayerNorm([2, 15, 9]),
    "dropout": lambda: nn.Dropout(0.4),
    "dropout of channels": lambda: nn.Dropout2d(0.4),
    "prelu": lambda: nn.PReLU(2),
    "softmax of channels": lambda: nn.Softmax(1),
    "softmax of rows": lambda: nn.Softmax(2),
    "in place": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True)),
    "larger": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "shuffled": lambda: nn.PixelUnshuffle(3),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """Each between two convolutions, the second one behind the gather that some of them need."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), LAYERS[name](), nn.Tanh())

    check(model, pictures(2, 2, 15, 9), (2, 2), (3, 1), rules="0")
    check(model, pictures(2, 2, 15, 9), (1, 3), rules="1")


def test_signals_and_volumes() -> None:
    def signals() -> nn.Module:
        more = [nn.BatchNorm1d(3), nn.AvgPool1d(3, padding=1), nn.ConvTranspose1d(3, 2, 3, stride=2), nn.MaxPool1d(2)]
        return nn.Sequential(nn.Conv1d(2, 3, 4, stride=2, padding=2), *more, nn.AdaptiveAvgPool1d(1))

    def volumes() -> nn.Module:
        more = [nn.BatchNorm3d(3), nn.AvgPool3d(2, padding=1), nn.ConvTranspose3d(3, 2, 3, stride=2), nn.MaxPool3d(2)]
        return nn.Sequential(nn.Conv3d(2, 3, 3, stride=(1, 2, 1), padding=1), *more, nn.AdaptiveMaxPool3d(1))

    check(signals, pictures(2, 2, 37), (3, 1), (2, 2), rules="0")
    check(volumes, pictures(2, 2, 5, 12, 9), (2, 2), (1, 3), rules="0")


def test_one_picture_without_a_dimension_of_samples() -> None:
    check(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)), pictures(2, 9, 8), (2, 2), rules="0")


class Residual(nn.Module):
    """Two ways that meet again, channels that are joined, weights of a whole picture, a gate, and sizes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.one, self.two = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 1, stride=2)
        self.gate, self.place = nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(4, 6, 5))
        self.scale, self.head = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        x = functional.silu(self.one(x)) + self.two(x) * self.scale
        x += self.place
        gate = functional.adaptive_avg_pool2d(x, 1)
        x = torch.cat([x * self.gate(gate).sigmoid(), 1 - x], dim=1) / 2
        x = torch.cat((x, x.clamp(min=0.1) ** 2), dim=-3)
        assert x.shape == (2, 16, 6, 5)
        assert (x.size(2), len(x), x.numel(), x.dim()) == (6, 2, 960, 4)
        found: Tensor = self.head(functional.avg_pool2d(x, tuple(x.shape[2:])).view(len(x), -1))
        return found


def test_a_network_with_two_ways() -> None:
    check(Residual, pictures(2, 2, 11, 10), *GRIDS, rules="stem")
    check(Residual, pictures(2, 2, 11, 10), (2, 2), rules="stem, one, two")


def test_a_picture_with_fewer_places_than_ranks_is_whole_on_all() -> None:
    check(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2)), pictures(2, 2, 5, 4), (3, 2), rules="0, 1")
    check(lambda: nn.Sequential(nn.Conv2d(2, 3, 3)), pictures(2, 2, 3, 3), (4, 1), rules="0")


def test_a_module_of_several_layers_and_a_convolutional_answer() -> None:
    def model() -> nn.Module:
        features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        return nn.Sequential(features, nn.ConvTranspose2d(4, 2, 2, stride=2))

    check(model, pictures(2, 2, 9, 8), (2, 2), (3, 1), rules="0")
