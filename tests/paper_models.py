"""The networks of FireCaffe's table, as modules: NiN, AlexNet without groups, GoogLeNet with both heads, and VGG-19."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU())


def pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


def nin() -> nn.Module:
    """M. Lin et al., "Network in network", 2014: its network for ImageNet."""

    def block(inputs: int, outputs: int, kernel: int, stride: int, padding: int, last: int | None = None) -> nn.Module:
        return nn.Sequential(
            convolution(inputs, outputs, kernel, stride, padding),
            convolution(outputs, outputs, 1),
            convolution(outputs, last or outputs, 1),
        )

    return nn.Sequential(
        *(block(3, 96, 11, 4, 0), pool()),
        *(block(96, 256, 5, 1, 2), pool()),
        *(block(256, 384, 3, 1, 1), pool()),
        block(384, 1024, 3, 1, 1, 1000),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def alexnet() -> nn.Module:
    """A. Krizhevsky et al., 2012, without its groups, as one GPU computes it."""
    return nn.Sequential(
        *(convolution(3, 96, 11, 4, 2), nn.MaxPool2d(3, 2)),
        *(convolution(96, 256, 5, 1, 2), nn.MaxPool2d(3, 2)),
        convolution(256, 384, 3, 1, 1),
        convolution(384, 384, 3, 1, 1),
        *(convolution(384, 256, 3, 1, 1), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()),
        nn.Linear(4096, 1000),
    )


def vgg19() -> nn.Module:
    """K. Simonyan and A. Zisserman, 2015: configuration E."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, repeats in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(repeats):
            layers.append(convolution(inputs, outputs, 3, 1, 1))
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


class Inception(nn.Module):
    """Four branches, joined by channels."""

    def __init__(self, inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                convolution(inputs, one, 1),
                nn.Sequential(convolution(inputs, reduce3, 1), convolution(reduce3, three, 3, 1, 1)),
                nn.Sequential(convolution(inputs, reduce5, 1), convolution(reduce5, five, 5, 1, 2)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(inputs, pooled, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def head(inputs: int) -> nn.Module:
    """A layer that scores within the network while it trains."""
    return nn.Sequential(
        *(nn.AvgPool2d(5, 3), convolution(inputs, 128, 1), nn.Flatten()),
        *(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1000)),
    )


class GoogLeNet(nn.Module):
    """C. Szegedy et al., "Going deeper with convolutions", 2015, with its two heads for training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            *(convolution(3, 64, 7, 2, 3), pool(), convolution(64, 64, 1), convolution(64, 192, 3, 1, 1), pool()),
            *(Inception(192, 64, 96, 128, 16, 32, 32), Inception(256, 128, 128, 192, 32, 96, 64), pool()),
            Inception(480, 192, 96, 208, 16, 48, 64),
        )
        self.second = nn.Sequential(
            Inception(512, 160, 112, 224, 24, 64, 64),
            Inception(512, 128, 128, 256, 24, 64, 64),
            Inception(512, 112, 144, 288, 32, 64, 64),
        )
        self.third = nn.Sequential(
            *(Inception(528, 256, 160, 320, 32, 128, 128), pool(), Inception(832, 256, 160, 320, 32, 128, 128)),
            *(Inception(832, 384, 192, 384, 48, 128, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(1024, 1000),
        )
        self.heads = nn.ModuleList([head(512), head(528)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = self.first(x)
        two = self.second(one)
        return self.third(two), self.heads[0](one), self.heads[1](two)


IMAGE: Shape = (3, 224, 224)
