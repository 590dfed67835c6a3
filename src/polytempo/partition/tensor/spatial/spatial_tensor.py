"""`SpatialTensor`: a tensor (…, places) with some places on this rank, in functions of torch.

    whole picture ──▶ a layer by "places" ──▶ SpatialTensor ──▶ convolution, pooling, norm, ReLU, + ──▶ SpatialTensor
                                                           └──▶ other functions, such as flatten ──▶ the whole picture

Functions of single places compute with this rank's area; functions in `_DIVIDED` exchange halos or statistics. Every
other function gets the whole picture, which is gathered for it on all ranks: so the result of any function is one
process's. Sizes that a program asks for are the whole picture's.

Parameters that a divided function uses have the sum over all places as their gradient. Source: the halo exchanges of N.
Dryden et al., 2019; J. Dean et al., "Large scale distributed deep networks", 2012, figure 1, divides a locally
connected network over four machines by places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from polytempo.partition.tensor.exchange import copied
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.spatial import place_norms, windows
from polytempo.partition.tensor.spatial.areas import PictureGrid, cut_out
from polytempo.partition.tensor.spatial.picture_part import PicturePart


class SpatialTensor(Tensor):
    """This rank's area; `whole()` is the picture. Made by `spatial`."""

    group: ModelGroup
    places: PictureGrid

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The area, without an exchange: one rank may print it alone."""
        return f"SpatialTensor(rank {self.group.rank}'s {self.places.areas[self.group.rank]} of {self.places.sizes})"

    def part(self) -> PicturePart:
        """The same as a part."""
        with DisableTorchFunctionSubclass():
            return PicturePart(self.group, self.places, self.as_subclass(Tensor))

    def whole(self) -> Tensor:
        """The picture, on every rank. All ranks call it."""
        with DisableTorchFunctionSubclass():
            return self.part().whole()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See above."""
        options = dict(kwargs or {})
        if func in _FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **options)
        own = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, SpatialTensor)]
        if func in _SIZES:
            return _SIZES[func](own[0], *args[1:], **options)
        alike = len({each.places for each in own}) == 1
        if alike and func in _SINGLE and _fits(func, args, options):
            return _of_single_places(func, own[0], args, options)
        if alike and func in _DIVIDED and args and args[0] is own[0] and len(own) == 1:
            with DisableTorchFunctionSubclass():
                answer = _DIVIDED[func](own[0].part(), *args[1:], **options)
            if answer is not None:
                return spatial(answer) if isinstance(answer, PicturePart) else answer
        if alike and func in _JOINS and (joined := _joined(func, own, args, options)) is not None:
            return joined
        return func(*tree_map(whole, args), **tree_map(whole, options))


def spatial(part: PicturePart) -> SpatialTensor:
    """The part as a tensor that knows its places."""
    with DisableTorchFunctionSubclass():
        found = part.tensor.as_subclass(SpatialTensor)
    found.group, found.places = part.group, part.places
    return found


def whole(value: Any) -> Any:
    """The picture of a spatial tensor; anything else as it is."""
    return value.whole() if isinstance(value, SpatialTensor) else value


def _of_single_places(func: Any, first: SpatialTensor, args: Any, options: Any) -> Any:
    part = first.part()

    def fitting(value: Any) -> Any:
        return part.fitted(value) if isinstance(value, Tensor) and not isinstance(value, SpatialTensor) else value

    with DisableTorchFunctionSubclass():
        given, more = tree_map(fitting, args), tree_map(fitting, options)
        answer = func(*given, **more)
        if not isinstance(answer, Tensor) or isinstance(answer, SpatialTensor):
            return answer
        return spatial(part.of(answer))


def _fits(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """True if the function writes to no whole tensor, and no tensor has more dimensions than the spatial ones."""
    name = func.__name__
    writes = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    if "out" in options or (writes and not isinstance(args[0], SpatialTensor)):
        return False
    with DisableTorchFunctionSubclass():
        dims = {leaf.dim() for leaf in tree_leaves((args, options)) if isinstance(leaf, SpatialTensor)}
        others = [leaf.dim() for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    return len(dims) == 1 and max(others) <= max(dims)


def _joined(func: Any, own: list[SpatialTensor], args: Any, options: Mapping[str, Any]) -> SpatialTensor | None:
    """`torch.cat` along channels, or samples."""
    tensors = args[0] if args else options["tensors"]
    dim = args[1] if len(args) > 1 else options.get("dim", 0)
    part = own[0].part()
    if len(own) != len(tensors) or "out" in options or not -part.tensor.dim() <= dim < part.tensor.dim():
        return None
    if dim % part.tensor.dim() >= part.tensor.dim() - part.dims:
        return None
    with DisableTorchFunctionSubclass():
        return spatial(part.of(torch.cat([each.part().tensor for each in own], dim)))


def _dropout(part: PicturePart, p: float = 0.5, training: bool = True, inplace: bool = False) -> PicturePart:
    """This rank's area of the whole picture's mask, which all ranks draw from their common random state."""
    if not training or not p:
        return part
    mask = functional.dropout(part.tensor.new_ones([*part.before, *part.places.sizes]), p)
    return part.of(part.tensor * cut_out(mask, part.places.areas[part.group.rank], [0] * part.dims))


def _prelu(part: PicturePart, weight: Tensor) -> PicturePart:
    return part.of(functional.prelu(part.tensor, copied(part.group, weight) if weight.requires_grad else weight))


def _softmax(part: PicturePart, dim: int | None = None, *more: Any, **options: Any) -> PicturePart | None:
    if dim is None or not -part.tensor.dim() <= dim % part.tensor.dim() - part.tensor.dim() < -part.dims:
        return None
    return part.of(functional.softmax(part.tensor, dim, *more, **options))


_NAMES = (
    "abs add addcmul bfloat16 celu clamp clamp_max clamp_min clone contiguous cos detach div divide double "
    "dropout1d  dropout2d dropout3d elu eq erf exp expm1 feature_dropout float ge gelu gt half hardshrink "
    "hardsigmoid hardswish  hardtanh le leaky_relu lerp log log1p logsigmoid lt masked_fill maximum minimum mish "
    "mul multiply nan_to_num ne neg  pow reciprocal relu relu6 round rsqrt rsub selu sigmoid sign silu sin sinc "
    "softplus softshrink softsign sqrt square  sub subtract tanh tanhshrink threshold to type_as where"
)
_OPERATORS = ("add", "sub", "mul", "truediv", "div", "pow", "neg", "abs", "pos")
_SPACES = (torch, Tensor, functional, torch._C._nn)
_SINGLE = {
    found
    for name in [
        *_NAMES.split(),
        *(f"{name}_" for name in _NAMES.split()),
        *(f"__{i}{o}__" for o in _OPERATORS for i in ("", "r", "i")),
    ]
    for space in _SPACES
    if (found := getattr(space, name, None)) is not None
}
"""Functions of single places: outputs have the inputs' sizes, and no place depends on another."""
_JOINS = {torch.cat, torch.concat, torch.concatenate}


def _size(tensor: SpatialTensor, dim: int | None = None) -> Any:
    part = tensor.part()
    found = torch.Size([*part.before, *part.places.sizes])
    return found if dim is None else found[dim]


_SIZES: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: lambda tensor: _size(tensor)[0],
    Tensor.numel: lambda tensor: _size(tensor).numel(),
    Tensor.nelement: lambda tensor: _size(tensor).numel(),
    torch.numel: lambda tensor: _size(tensor).numel(),
}
"""Questions for sizes: the whole picture's."""
_PROPERTIES = (
    "dtype device requires_grad grad_fn is_leaf layout ndim is_meta is_sparse is_quantized is_mkldnn is_nested "
    "_version output_nr _backward_hooks itemsize"
)
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(Tensor.dim, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex, Tensor.register_hook),
    *(Tensor.retain_grad, Tensor.requires_grad_, Tensor.element_size, Tensor.get_device, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, Tensor.as_subclass, Tensor.is_inference),
}
"""Questions that a rank answers alone."""

_DIVIDED: dict[Any, Callable[..., Any]] = {
    **{each: windows.convolution(each) for each in (torch.conv1d, torch.conv2d, torch.conv3d)},
    **{
        each: windows.transposed(each)
        for each in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    },
    **{
        each: windows.max_pooling(each)
        for each in (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
    },
    **{
        each: windows.mean_pooling(each)
        for each in (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
    },
    functional.adaptive_avg_pool1d: windows.adaptive_mean(functional.avg_pool1d),
    functional.adaptive_avg_pool2d: windows.adaptive_mean(functional.avg_pool2d),
    functional.adaptive_avg_pool3d: windows.adaptive_mean(functional.avg_pool3d),
    functional.adaptive_max_pool1d: windows.adaptive_max(functional.max_pool1d),
    functional.adaptive_max_pool2d: windows.adaptive_max(functional.max_pool2d),
    functional.adaptive_max_pool3d: windows.adaptive_max(functional.max_pool3d),
    functional.batch_norm: place_norms.batch_norm,
    functional.group_norm: place_norms.group_norm,
    functional.instance_norm: place_norms.instance_norm,
    functional.dropout: _dropout,
    torch.prelu: _prelu,
    functional.softmax: _softmax,
}
"""Functions of several places, or of the picture's randomness, of parts; None: the whole is needed."""
