"""Convolutions with some output channels on each rank (column) or some input channels (row).

    column     y_r = x ∗ W_r + b_r         rank r has some filters                x ──▶ [y_0 │ y_1]
    row        y = Σ_r x_r ∗ W_r + b       rank r takes some of the channels      [x_0 │ x_1] ──▶ y

As linear layers, with channels for features. torch stores a weight as (outputs, inputs, …).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.exchange import copied, gathered, scattered, summed
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The output of an input, a weight and a bias."""


def convolve(module: Convolution) -> Convolve:
    """The layer's function of inputs, a weight with any number of channels, and a bias. ValueError for groups and
    padding."""
    if module.groups > 1 or module.padding_mode != "zeros":
        raise ValueError(
            f"it has groups={module.groups} and padding_mode={module.padding_mode!r}; convolutions are split that have "
            'one group and padding_mode="zeros"'
        )
    options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
    return partial(_FUNCTIONS[type(module)], **options)


def channel_dim(module: Convolution) -> int:
    """The dimension of channels in inputs and outputs, counted from the end."""
    return -len(module.kernel_size) - 1


class ColumnConvolution(SplitLayer):
    """Output channels of a convolution. With `gathers` all ranks get all of them, else each its own.

    Cost of N ranks: backward a sum of the inputs; `gathers`: forward a gather of the outputs.
    """

    def __init__(self, cutter: Cutter, name: str, whole: Convolution, outputs: Division, *, gathers: bool) -> None:
        super().__init__(cutter.group, {"weight": outputs, "bias": outputs})
        self.convolve, self.channel_dim = convolve(whole), channel_dim(whole)
        self.outputs, self.gathers = outputs, gathers
        self.weight = cutter.cut(f"{name}.weight", whole.weight, outputs)
        self.bias = cutter.cut_if_any(f"{name}.bias", whole.bias, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, inputs, places) to (…, this rank's outputs, places), or (…, outputs, places)."""
        own = self.convolve(copied(self.group, inputs), self.weight, self.bias)
        return gathered(self.group, own, self.outputs.sizes, self.channel_dim) if self.gathers else own


class RowConvolution(SplitLayer):
    """Input channels of a convolution. It takes this rank's channels, or all of them and uses its own.

    Cost of N ranks: forward a sum of the outputs; where it takes all inputs, backward a gather of them.
    """

    def __init__(self, cutter: Cutter, name: str, whole: Convolution, inputs: Division) -> None:
        super().__init__(cutter.group, {"weight": inputs})
        self.convolve, self.channel_dim = convolve(whole), channel_dim(whole)
        self.in_channels, self.inputs = whole.in_channels, inputs
        self.weight = cutter.cut(f"{name}.weight", whole.weight, inputs)
        self.bias: Tensor | None = whole.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, this rank's inputs, places) or (…, inputs, places) to (…, outputs, places)."""
        if inputs.shape[self.channel_dim] == self.in_channels:
            inputs = scattered(self.group, inputs, self.inputs.sizes, self.channel_dim)
        own = self.inputs.sizes[self.group.rank]
        if inputs.shape[self.channel_dim] != own:
            raise ValueError(
                f"rank {self.group.rank} has {own} of the {self.in_channels} input channels of a row layer, and got "
                f"{inputs.shape[self.channel_dim]}; let the column layer before it be split into the same sizes"
            )
        answer = summed(self.group, self.convolve(inputs, self.weight, None))
        return answer if self.bias is None else answer + self.bias.view(-1, *[1] * (-self.channel_dim - 1))


_FUNCTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
"""Functions by exact class: a subclass may compute something else."""
CONVOLUTIONS = frozenset(_FUNCTIONS)
