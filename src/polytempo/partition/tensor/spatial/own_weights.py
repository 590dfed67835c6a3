"""Locally connected layers with some places on each rank, and the weights of these places alone.

    rank r    weight[rows of r, columns of r], bias alike      from the places of the input that their windows reach

Halos of the input travel as for a convolution, and no gradients of weights: no place is another's.
"""

from __future__ import annotations

from torch import Tensor, nn

from polytempo.partition.tensor.division import even_sizes, grid_division
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer, check_plain
from polytempo.partition.tensor.layers.locally_connected import LocallyConnected2d, check_picture, locally_connected
from polytempo.partition.tensor.spatial.areas import PictureGrid
from polytempo.partition.tensor.spatial.picture_part import entered
from polytempo.partition.tensor.spatial.spatial_tensor import SpatialTensor, spatial, whole
from polytempo.partition.tensor.spatial.windows import outputs_of, slid, windows_of


class SplitLocallyConnected(SplitLayer):
    """This rank's places of `layer`, on pictures cut as `inputs`. A whole picture is cut.

    Cost: the halos of its inputs (`spatial.windows`).
    """

    def __init__(self, cutter: Cutter, name: str, layer: LocallyConnected2d, inputs: PictureGrid) -> None:
        rows, columns = (even_sizes(size, ranks) for size, ranks in zip(layer.output_size, inputs.grid, strict=True))
        cut = grid_division(rows, columns)
        super().__init__(cutter.group, {"weight": cut, "bias": cut})
        self.in_channels, self.inputs, self.windows = layer.in_channels, inputs, windows_of(layer)
        self.kernel_size, self.stride = layer.kernel_size, layer.stride
        self.weight = cutter.cut(f"{name}.weight", layer.weight, cut)
        self.bias = cutter.cut_if_any(f"{name}.bias", layer.bias, cut)

    def forward(self, picture: Tensor) -> Tensor:
        """(…, channels, rows, columns) to (…, outputs, rows, columns), each this rank's places."""
        check_picture(picture, self.in_channels, self.inputs.sizes)
        if isinstance(picture, SpatialTensor) and picture.places == self.inputs:
            part = picture.part()
        else:
            part = entered(self.group, self.inputs, whole(picture))
        given = slid(part, self.windows)
        assert given is not None, "checked by `with_own_weights`"
        answer = locally_connected(given.tensor, self.weight, self.bias, self.kernel_size, self.stride)
        return spatial(given.of(answer))


def with_own_weights(cutter: Cutter, name: str, module: nn.Module, grid: tuple[int, int]) -> nn.Module:
    """The module, with this rank's weights alone in its locally connected layers; a split layer where it is one itself.

    Layers with fewer places than ranks stay whole on all of them, as their pictures do.
    """
    if cutter.group.size == 1:
        return module
    for inner, layer in list(module.named_modules(remove_duplicate=False)):
        if type(layer) is not LocallyConnected2d:
            continue
        inputs = PictureGrid(layer.input_size, grid)
        if not inputs.divide or outputs_of(inputs, windows_of(layer)) is None:
            continue
        path = ".".join(filter(None, (name, inner)))
        check_plain(path, layer)
        split = SplitLocallyConnected(cutter, path, layer, inputs)
        split.training = layer.training
        if not inner:
            return split
        owner, _, field = inner.rpartition(".")
        setattr(module.get_submodule(owner), field, split)
    return module
