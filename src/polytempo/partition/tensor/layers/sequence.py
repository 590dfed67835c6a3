"""Layers between split layers with `sequence=True`: each rank applies them to its positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from polytempo.partition.tensor.layers.layer import SplitLayer
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.stream import check_positions, own_parameter, passed


class SequenceLayer(SplitLayer):
    """A layer that treats positions one by one, such as a norm. Cost: backward a sum of its parameters."""

    def __init__(self, group: ModelGroup, whole: nn.Module) -> None:
        super().__init__(group)
        self._parameters = whole._parameters
        self.__dict__["layer"] = whole  # not registered: the parameters keep their names

    def forward(self, part: Tensor) -> Tensor:
        """(…, this rank's positions, features) to the same."""
        check_positions(self.group, part)
        used = {name: own_parameter(self.group, p) for name, p in self._parameters.items() if p is not None}
        answer: Tensor = functional_call(self.__dict__["layer"], used, (part,))
        return answer


class ScatterLayer(SplitLayer):
    """A layer that all ranks compute alike, of whose answer each goes on with its positions.

    Cost of N ranks: backward a gather of the answer's size.
    """

    def __init__(self, group: ModelGroup, whole: nn.Module) -> None:
        super().__init__(group)
        self._parameters, self._modules, self._buffers = whole._parameters, whole._modules, whole._buffers
        self.__dict__["layer"] = whole

    @property
    def whole(self) -> nn.Module:
        """The layer itself."""
        layer: nn.Module = self.__dict__["layer"]
        return layer

    def forward(self, *inputs: Any) -> Tensor:
        """(…, positions, features) of the layer to (…, this rank's positions, features)."""
        return passed(self.group, self.whole(*inputs))
