"""`SplitLayer`: a layer with a part on each rank, or applied by each rank to its positions of a sequence.

`Cutter` makes the parameters of a part.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.exchange import check_positions, own_parameter, passed
from polytempo.partition.tensor.model_group import ModelGroup


class SplitLayer(nn.Module):
    """Takes a layer's place under its name. Its parameters have the names that they had."""

    def __init__(self, group: ModelGroup, parts: dict[str, Division] | None = None) -> None:
        super().__init__()
        self.group = group
        self.parts = parts or {}
        """The cut of the parameters of these names; every rank has the whole of the others."""
        self.shown: str | None = None
        """The layer's name in the model; None within another split layer, which counts the bytes of both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and count sent bytes for this layer."""
        with self.group.of_layer(self.shown):
            return super().__call__(*args, **kwargs)


class Cutter:
    """Makes local parameters: one for each of the model's, however many layers share it."""

    def __init__(self, group: ModelGroup) -> None:
        self.group = group
        self.made: dict[int, tuple[nn.Parameter, Division, nn.Parameter, str]] = {}
        """(id of the whole parameter) -> it, its cut, this rank's part, and the first name."""

    def cut_if_any(self, name: str, whole: Tensor | None, parts: Division) -> nn.Parameter | None:
        """`cut` for a parameter that a layer may lack, such as a bias."""
        return None if whole is None else self.cut(name, whole, parts)

    def cut(self, name: str, whole: Tensor, parts: Division) -> nn.Parameter:
        """This rank's part of a parameter. ValueError where tied layers cut it in different ways."""
        assert isinstance(whole, nn.Parameter)
        if id(whole) not in self.made:
            mine = nn.Parameter(parts.take(whole.detach(), self.group.rank), whole.requires_grad)
            self.made[id(whole)] = whole, parts, mine, name
        _, before, mine, first = self.made[id(whole)]
        if before != parts:
            raise ValueError(
                f"{first} and {name} are one tied parameter, cut along dimension {before.dim} into {before.sizes} and "
                f"along dimension {parts.dim} into {parts.sizes}; split both layers by the same dimension, for example "
                'the embedding by "embedding" and the output layer by "vocabulary"'
            )
        return mine


def check_plain(name: str, module: nn.Module) -> None:
    """Raise ValueError for a module that a split layer cannot replace without a loss."""
    if is_parametrized(module) or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(
            f"{name} has hooks or parametrizations, which would be lost; split the model before they are set"
        )


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
    """A layer that all ranks compute alike; each goes on with its positions of the answer.

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
