"""`SpatialLayer`: a layer, or a module of several, on a picture with some places on each rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polytempo.partition.tensor.layers.layer import SplitLayer
from polytempo.partition.tensor.layers.locally_connected import LocallyConnected2d
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.spatial.areas import PictureGrid, grid_of
from polytempo.partition.tensor.spatial.own_weights import SplitLocallyConnected
from polytempo.partition.tensor.spatial.picture_part import entered
from polytempo.partition.tensor.spatial.spatial_tensor import SpatialTensor, spatial
from polytempo.partition.tensor.way import Way

_WITH_DIMENSIONS = (nn.modules.conv._ConvNd, LocallyConnected2d, SplitLocallyConnected)
"""Layers with kernels that tell the dimensions of places."""


class SpatialLayer(SplitLayer):
    """The module, called with this rank's places of its first argument. Every rank has the whole parameters, and
    the weights of its own places in locally connected layers (`own_weights`).

    A whole picture is cut; a picture that is divided already stays so. Cost: `spatial.windows` and
    `spatial.place_norms`.
    """

    def __init__(self, group: ModelGroup, module: nn.Module, way: Way) -> None:
        super().__init__(group, module.parts if isinstance(module, SplitLayer) else None)
        self._parameters, self._modules, self._buffers = module._parameters, module._modules, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__["layer"] = module  # not registered: parameters keep their names
        self.grid = grid_of(group.size, way.rows, way.columns)
        self._dims = next((len(m.kernel_size) for m in module.modules() if isinstance(m, _WITH_DIMENSIONS)), None)

    def forward(self, picture: Tensor, *more: Any, **options: Any) -> Any:
        """The module's answer; a picture with fewer places than ranks is computed as a whole by all of them."""
        layer: nn.Module = self.__dict__["layer"]
        layer.training = self.training
        return layer(self._divided(picture), *more, **options)

    def _divided(self, picture: Tensor) -> Tensor:
        if self.group.size == 1 or isinstance(picture, SpatialTensor):
            return picture
        dims = self._dims or picture.dim() - 2
        if not 1 <= dims <= 3 or picture.dim() <= dims:
            raise ValueError(
                f"a layer by places got a tensor of shape {tuple(picture.shape)}; it takes (samples, channels, …) with "
                "one to three dimensions of places"
            )
        places = PictureGrid(tuple(picture.shape[-dims:]), self._of_dims(dims))
        return spatial(entered(self.group, places, picture)) if places.divide else picture

    def _of_dims(self, dims: int) -> tuple[int, ...]:
        rows, columns = self.grid
        if dims > 1:
            return (*[1] * (dims - 2), rows, columns)
        return (rows * columns,)
