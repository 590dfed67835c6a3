"""Linear layers of which each rank holds some output features (column) or some input features (row).

    column     y_r = x · W_rᵀ + b_r            rank r has some of the outputs          x ──▶ [y_0 │ y_1]
    row        y = Σ_r x_r · W_rᵀ + b          rank r takes some of the inputs         [x_0 │ x_1] ──▶ y

A column layer followed by a row layer, with functions of single features between them, needs one sum forward (behind
the row layer) and one backward (before the column layer). torch stores a weight as (outputs, inputs).

Source: M. Shoeybi et al., "Megatron-LM", 2019; the split by outputs is model parallelism of J. Dean et al., 2012.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.exchange import gathered, scattered
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer
from polytempo.partition.tensor.stream import entered, left, own_parameter


class ColumnLinear(SplitLayer):
    """Output features of a linear layer. With `gathers` all ranks get all of them, else each its own.

    Cost of N ranks, for P positions: backward a sum of P · inputs; `gathers`: forward a gather of P · outputs. With
    `sequence`, a gather of P · inputs forward and a reduction of as many backward instead of the sum.
    """

    def __init__(self, cutter: Cutter, name: str, whole: nn.Linear, outputs: Division, *, gathers: bool) -> None:
        super().__init__(cutter.group, {"weight": outputs, "bias": outputs})
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.outputs, self.gathers = outputs, gathers
        self.weight = cutter.cut(f"{name}.weight", whole.weight, outputs)
        self.bias = cutter.cut_if_any(f"{name}.bias", whole.bias, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, inputs) to (…, this rank's outputs), or (…, outputs)."""
        own = functional.linear(entered(self.group, inputs), self.weight, self.bias)
        return gathered(self.group, own, self.outputs.sizes, -1) if self.gathers else own


class VocabularyLinear(ColumnLinear):
    """An output layer whose logits stay divided by class: see `split_cross_entropy`."""


class RowLinear(SplitLayer):
    """Input features of a linear layer. It takes this rank's inputs, or all of them, of which it uses its own.

    Cost of N ranks, for P positions: forward a sum of P · outputs; where it takes all inputs, backward a gather of
    P · inputs. With `sequence`, a reduction of P · outputs forward and a gather of as many backward instead.
    """

    def __init__(self, cutter: Cutter, name: str, whole: nn.Linear, inputs: Division) -> None:
        super().__init__(cutter.group, {"weight": inputs})
        self.in_features, self.out_features, self.inputs = whole.in_features, whole.out_features, inputs
        self.weight = cutter.cut(f"{name}.weight", whole.weight, inputs)
        self.bias: nn.Parameter | None = whole.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, this rank's inputs) or (…, inputs) to (…, outputs)."""
        if inputs.shape[-1] == self.in_features:
            inputs = scattered(self.group, inputs, self.inputs.sizes, -1)
        own = self.inputs.sizes[self.group.rank]
        if inputs.shape[-1] != own:
            raise ValueError(
                f"rank {self.group.rank} has {own} of the {self.in_features} inputs of a row layer, and got "
                f"{inputs.shape[-1]}; let the column layer before it be split into the same sizes (the same heads)"
            )
        answer = left(self.group, functional.linear(inputs, self.weight))
        return answer if self.bias is None else answer + own_parameter(self.group, self.bias)
