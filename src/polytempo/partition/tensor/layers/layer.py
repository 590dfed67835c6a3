"""`SplitLayer`: a layer of which this rank holds a part; and `Cutter`, which makes its parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polytempo.partition.tensor.division import Division
from polytempo.partition.tensor.model_group import ModelGroup


class SplitLayer(nn.Module):
    """Takes a layer's place under its name. Its parameters have the names that they had."""

    def __init__(self, group: ModelGroup, parts: dict[str, Division] | None = None) -> None:
        super().__init__()
        self.group = group
        self.parts = parts or {}
        """How the parameters of these names are cut; of the others every rank has the whole."""
        self.shown: str | None = None
        """The layer's name in the model; None within another split layer, which counts what both send."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; what is sent meanwhile is counted for this layer."""
        with self.group.of_layer(self.shown):
            return super().__call__(*args, **kwargs)


class Cutter:
    """Makes local parameters: one for each of the model's, however many layers share it."""

    def __init__(self, group: ModelGroup) -> None:
        self.group = group
        self.made: dict[int, tuple[nn.Parameter, Division, nn.Parameter, str]] = {}
        """By identity: the whole parameter, how it is cut, this rank's part, and the first name."""

    def cut_if_any(self, name: str, whole: Tensor | None, parts: Division) -> nn.Parameter | None:
        """`cut` of what a layer may lack, such as a bias."""
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
