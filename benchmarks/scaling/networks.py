"""Networks of Horovod's scaling figures as jobs without data, for `simulate --meta`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt

CLASSES = 1000
BATCH = 64
IMAGES = 1_281_167
"""Samples for training in ImageNet's challenge."""
Size = int | tuple[int, int]


def convolution(inputs: int, outputs: int, kernel: Size, stride: int = 1, padding: Size = 0) -> nn.Sequential:
    """A convolution without bias, batch norm, and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


# ---------------------------------------------------------------------- Inception v3


class Branches(nn.Module):
    """Several ways for the same input, joined by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, height, width) to more channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def row(inputs: int, outputs: int, long: int = 7) -> nn.Sequential:
    """A convolution of 1 x `long`."""
    return convolution(inputs, outputs, (1, long), padding=(0, long // 2))


def column(inputs: int, outputs: int, long: int = 7) -> nn.Sequential:
    """A convolution of `long` x 1."""
    return convolution(inputs, outputs, (long, 1), padding=(long // 2, 0))


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    """The mean of 3 x 3, and a convolution of 1 x 1."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), convolution(inputs, outputs, 1))


def fives(inputs: int, pool: int) -> Branches:
    """Figure 5 of the paper: 5 x 5 as two convolutions of 3 x 3; 35 x 35 places."""
    return Branches(
        convolution(inputs, 64, 1),
        nn.Sequential(convolution(inputs, 48, 1), convolution(48, 64, 5, padding=2)),
        nn.Sequential(convolution(inputs, 64, 1), convolution(64, 96, 3, padding=1), convolution(96, 96, 3, padding=1)),
        pooled(inputs, pool),
    )


def sevens(inner: int) -> Branches:
    """Figure 6: 7 x 7 as rows and columns; 17 x 17 places, 768 channels."""
    return Branches(
        convolution(768, 192, 1),
        nn.Sequential(convolution(768, inner, 1), row(inner, inner), column(inner, 192)),
        nn.Sequential(
            *(convolution(768, inner, 1), column(inner, inner), row(inner, inner), column(inner, inner)),
            row(inner, 192),
        ),
        pooled(768, 192),
    )


def wide(inputs: int) -> Branches:
    """Figure 7: rows and columns of 3 beside each other; 8 x 8 places."""
    return Branches(
        convolution(inputs, 320, 1),
        nn.Sequential(convolution(inputs, 384, 1), Branches(row(384, 384, 3), column(384, 384, 3))),
        nn.Sequential(
            *(convolution(inputs, 448, 1), convolution(448, 384, 3, padding=1)),
            Branches(row(384, 384, 3), column(384, 384, 3)),
        ),
        pooled(inputs, 192),
    )


class InceptionV3(nn.Module):
    """C. Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016: images of 299 x 299.

    23.8 million parameters; with the `auxiliary` head, which scores within the network while it trains, 27.2 million.
    """

    def __init__(self, *, auxiliary: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            *(convolution(3, 32, 3, 2), convolution(32, 32, 3), convolution(32, 64, 3, padding=1), nn.MaxPool2d(3, 2)),
            *(convolution(64, 80, 1), convolution(80, 192, 3), nn.MaxPool2d(3, 2)),
            *(fives(192, 32), fives(256, 64), fives(288, 64)),
            Branches(
                convolution(288, 384, 3, 2),
                nn.Sequential(convolution(288, 64, 1), convolution(64, 96, 3, padding=1), convolution(96, 96, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            *(sevens(128), sevens(160), sevens(160), sevens(192)),
        )
        self.auxiliary = (
            nn.Sequential(
                *(nn.AvgPool2d(5, 3), convolution(768, 128, 1), convolution(128, 768, 5)),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, CLASSES)),
            )
            if auxiliary
            else None
        )
        self.second = nn.Sequential(
            Branches(
                nn.Sequential(convolution(768, 192, 1), convolution(192, 320, 3, 2)),
                nn.Sequential(convolution(768, 192, 1), row(192, 192), column(192, 192), convolution(192, 192, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            *(wide(1280), wide(2048), nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(2048, CLASSES)),
        )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(samples, 3, 299, 299) to scores of the classes, and the auxiliary head's where there is one."""
        x = self.first(x)
        scores: Tensor = self.second(x)
        return scores if self.auxiliary is None else (scores, self.auxiliary(x))


# ---------------------------------------------------------------------- ResNet-101


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 around a residual; the last has four times the channels."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(inputs, inner, 1),
            convolution(inner, inner, 3, stride, 1),
            convolution(inner, 4 * inner, 1)[:2],
        )
        shape = (inputs, 4 * inner, 1, stride)
        self.shortcut = nn.Identity() if inputs == 4 * inner and stride == 1 else convolution(*shape)[:2]

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, height, width) to 4 x `inner` channels."""
        return (self.shortcut(x) + self.residual(x)).relu()


def resnet101() -> nn.Sequential:
    """K. He et al., "Deep residual learning for image recognition", 2016, table 1: 44.5 million parameters."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (inner, blocks) in enumerate(((64, 3), (128, 4), (256, 23), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


# ---------------------------------------------------------------------- VGG-16


def vgg16() -> nn.Sequential:
    """K. Simonyan and A. Zisserman, 2015, configuration D: 138.4 million parameters."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(4096, CLASSES))


# ---------------------------------------------------------------------- jobs


def images(path: Any, side: int) -> pt.Data:
    """Black images, as many as ImageNet has, in the memory of one."""
    return pt.Data(
        TensorDataset(torch.zeros(1, 3, side, side).expand(IMAGES, -1, -1, -1), torch.zeros(1).long().expand(IMAGES))
    )


def made(name: str, model: Callable[[], nn.Module], side: int) -> pt.Job:
    """A job of that network, with 64 samples a worker as in TensorFlow's benchmarks."""
    return pt.Job(
        name=name,
        model=model,
        data=partial(images, side=side),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=BATCH,
    )


inception_v3 = made("inception_v3", InceptionV3, 299)
resnet_101 = made("resnet_101", resnet101, 224)
vgg_16 = made("vgg_16", vgg16, 224)
