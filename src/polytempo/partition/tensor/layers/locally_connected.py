"""`LocallyConnected2d`: a convolution with weights of its own at each output place.

    y[b, o, r, c] = Σ_{i, u, v} W[r, c, o, (i, u, v)] · x[b, i, r·s + u - p, c·s + v - p] + β[r, c, o]

Source: Q. Le et al., "Building high-level features using large scale unsupervised learning", 2012; J. Dean et al.,
"Large scale distributed deep networks", 2012, divided such layers over machines by places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Pair = int | tuple[int, int]


class LocallyConnected2d(nn.Module):
    """(samples, in_channels, *input_size) to (samples, out_channels, rows, columns), or both without samples.

        rows = (input_size[0] + 2 · padding[0] - kernel_size[0]) // stride[0] + 1, and columns alike

    Parameters: `weight` (rows, columns, out_channels, in_channels · kernel places), in the order (channel, row, column)
    of the last one, and `bias` (rows, columns, out_channels). They begin as torch's convolutions do. Padding is
    zeros. Cost: as many operations as a convolution's, and a copy of every window, samples · rows · columns ·
    in_channels · kernel places numbers.

    Errors: ValueError for sizes below 1, a kernel larger than the padded picture, and inputs of another shape.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        input_size: Pair,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.input_size, self.kernel_size = _pair(input_size), _pair(kernel_size)
        self.stride, self.padding = _pair(stride), _pair(padding)
        positive = (in_channels, out_channels, *self.input_size, *self.kernel_size, *self.stride)
        if min(positive) < 1 or min(self.padding) < 0:
            raise ValueError(f"{self}: channels, sizes, kernels and strides are 1 or more, and padding is 0 or more")
        room = [n + 2 * p - k for n, p, k in zip(self.input_size, self.padding, self.kernel_size, strict=True)]
        if min(room) < 0:
            raise ValueError(f"{self}: the kernel is larger than the padded picture; enlarge input_size or padding")
        rows, columns = (each // s + 1 for each, s in zip(room, self.stride, strict=True))
        self.output_size = rows, columns
        inputs = in_channels * self.kernel_size[0] * self.kernel_size[1]
        self.weight = nn.Parameter(torch.empty(rows, columns, out_channels, inputs, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, columns, out_channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly within ± 1 / √(inputs of a place)."""
        bound = self.weight.shape[-1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, picture: Tensor) -> Tensor:
        """See the class."""
        check_picture(picture, self.in_channels, self.input_size)
        rows, columns = self.padding
        padded = functional.pad(picture, (columns, columns, rows, rows)) if rows or columns else picture
        return locally_connected(padded, self.weight, self.bias, self.kernel_size, self.stride)

    def extra_repr(self) -> str:
        """The options."""
        options = {"input_size": self.input_size, "kernel_size": self.kernel_size, "stride": self.stride}
        shown = ", ".join(f"{name}={value}" for name, value in (options | {"padding": self.padding}).items())
        return f"{self.in_channels}, {self.out_channels}, {shown}"


def check_picture(picture: Tensor, channels: int, sizes: tuple[int, ...]) -> None:
    """Raise ValueError for a picture of another shape."""
    shape, expected = tuple(picture.shape), (channels, *sizes)
    if len(shape) not in (3, 4) or shape[-3:] != expected:
        raise ValueError(
            f"a locally connected layer of {expected} (channels, rows, columns) got a tensor of shape {shape}; its "
            "weights belong to places, so let input_size be the size of its pictures"
        )


def locally_connected(
    padded: Tensor, weight: Tensor, bias: Tensor | None, kernel_size: tuple[int, int], stride: tuple[int, int]
) -> Tensor:
    """(…, channels, rows, columns) with padding to (…, outputs, rows of the weight, its columns)."""
    windows = functional.unfold(padded, kernel_size, stride=stride)
    places = torch.einsum("...kp,pok->...op", windows, weight.flatten(0, 1))
    # contiguous, as a convolution's output: a dropout draws its mask in the order of memory
    answer = places.contiguous().view(*places.shape[:-1], *weight.shape[:2])
    return answer if bias is None else answer + bias.permute(2, 0, 1)


def _pair(given: Pair) -> tuple[int, int]:
    return (given, given) if isinstance(given, int) else (given[0], given[1])
