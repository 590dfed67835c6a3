"""`HybridModel`: every rank has some layers whole and sees its own samples; of the other layers each has a part.

    rank 0   images ──▶ convolutions ──┐            ┌── scores of its images
                                       ├── fc, ½ ───┤
    rank 1   images ──▶ convolutions ──┘  fc, ½     └── scores of its images

Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from polytempo.partition.hybrid.exchange import Compute, Divided, DividedCall, forward
from polytempo.partition.hybrid.traffic import EXCHANGES, Exchange, rounds
from polytempo.partition.tensor.division import Division, even_sizes
from polytempo.partition.tensor.layers.convolution import CONVOLUTIONS, Convolution, channel_dim, convolve
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer
from polytempo.partition.tensor.layers.linear import check_embedding
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.parted_model import PartedModel
from polytempo.partition.tensor.rules import matched, replace_module


@dataclass(eq=False)
class DataGroup:
    """The ranks that divide layers, each with samples of its own, and the order of their exchanges."""

    ranks: ModelGroup
    exchange: Exchange = "joined"
    samples: tuple[int, ...] = field(default=(), init=False)
    """Samples of each rank in the present pass."""
    share: float | None = field(default=None, init=False)
    """This rank's weight in the step's mean; None: its part of the samples of each pass."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r}: must be one of {', '.join(EXCHANGES)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> DataGroup:
        """Return this group: a copied model is of the same ranks."""
        return self


class Divisible(NamedTuple):
    """A layer's division by output features, while every rank has samples of its own."""

    compute: Compute
    features: int
    """Outputs to divide."""
    weight_dim: int
    """The dimension of outputs in the weight."""
    output_dim: int
    """The dimension of outputs in the output, counted from its end."""


def divisible(module: nn.Module) -> Divisible:
    """The division of this layer. ValueError, with the reason, where there is none."""
    if is_parametrized(module) or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError("it has hooks or parametrizations, which would be lost; divide the model before they are set")
    if type(module) is nn.Linear:
        return Divisible(functional.linear, module.out_features, 0, -1)
    if type(module) is nn.Embedding:
        check_embedding("it", module)
        table = partial(_rows, padding_idx=module.padding_idx)
        return Divisible(table, module.embedding_dim, 1, -1)
    if isinstance(module, Convolution) and type(module) in CONVOLUTIONS:
        return Divisible(convolve(module), module.out_channels, 0, channel_dim(module))
    raise ValueError(f"{type(module).__name__} is none of Linear, Embedding, Conv1d, Conv2d and Conv3d")


def divisible_features(module: nn.Module) -> int:
    """Outputs of this layer that can be divided, or 0."""
    try:
        return divisible(module).features
    except ValueError:
        return 0


def _rows(indices: Tensor, table: Tensor, bias: Tensor | None, *, padding_idx: int | None) -> Tensor:
    return functional.embedding(indices, table, padding_idx)


class DividedLayer(SplitLayer):
    """Some output features of a layer, of all ranks' samples; each rank gets all features of its own samples.

    Cost of N ranks with B samples of I numbers in and O out: gathers of B · I, forward and backward, and B · O / N
    numbers dealt, forward and backward, by the codecs of `group.ranks`; no gradient of the weights. Memory: the inputs
    of all ranks.
    """

    def __init__(self, cutter: Cutter, group: DataGroup, name: str, whole: nn.Module) -> None:
        how = divisible(whole)
        outputs = Division(how.weight_dim, even_sizes(how.features, group.ranks.size))
        held = {"weight": outputs, "bias": Division(0, outputs.sizes)}
        super().__init__(group.ranks, held)
        self.data_group, self.how, self.outputs, self.shown = group, how, outputs, name
        self.weight = cutter.cut(f"{name}.weight", whole.get_parameter("weight"), outputs)
        self.bias = cutter.cut_if_any(f"{name}.bias", getattr(whole, "bias", None), held["bias"])

    def forward(self, inputs: Tensor) -> Tensor:
        """(this rank's samples, …) to the same with all output features."""
        if self.group.size == 1:
            return self.how.compute(inputs, self.weight, self.bias)
        call = self._call(inputs)
        parameters = [each for each in (self.weight, self.bias) if each is not None]
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in (inputs, *parameters))
        if learns:
            answer: Tensor = Divided.apply(call, self.group.drive, inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            answer, _ = self.group.drive(forward(call, inputs, self.weight, self.bias, keep=False))
        sent = call.volume(inputs, answer)
        self.group.count(sent.forward, sent.backward * learns)
        return answer

    def _call(self, inputs: Tensor) -> DividedCall:
        group = self.data_group
        own = group.samples[self.group.rank] if group.samples else None
        if not inputs.dim() or len(inputs) != own:
            raise ValueError(
                f"layer {self.shown} is divided over ranks by samples; this rank has {own}, and got a tensor "
                f"of shape {tuple(inputs.shape)}; keep samples in the first dimension, and call the whole model"
            )
        plan = rounds(group.exchange, group.samples)
        return DividedCall(
            self.group.port,
            self.how.compute,
            plan,
            self.outputs.sizes,
            self.how.output_dim,
            group.samples,
            self.group.wires,
            self.group.next_occasion(),
            str(self.shown),
            group.share,
        )


class HybridModel(PartedModel):
    """`model` with some layers divided: called as it was, with this rank's samples.

    All ranks call it together, also where they only evaluate. The first tensor among its arguments has the samples in
    its first dimension. Cost in addition to the layers': 8 bytes a rank and pass for the numbers of samples; 16 where
    codecs draw random numbers, all by the first rank's number.
    """

    def __init__(self, model: nn.Module, group: DataGroup) -> None:
        super().__init__(model, group.ranks)
        self.data_group = group
        self._divided = bool(divided_layers(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer for this rank's samples."""
        if not self._divided:  # a plan may find that no layer is worth it
            return self.__dict__["model"](*args, **kwargs)
        tensors = [each for each in tree_leaves([args, kwargs]) if isinstance(each, Tensor) and each.dim()]
        if not tensors:
            raise ValueError("the model was given no tensor with samples, and its layers are divided by samples")
        drawn = [self.group.drawn(training=self.training)] if self.group.wires.draws else []
        told = self.group.all(torch.tensor([len(tensors[0]), *drawn]))
        self.data_group.samples = tuple(int(each[0]) for each in told)
        self.group.begin_pass(int(told[0][1]) if drawn else 1)
        return self.__dict__["model"](*args, **kwargs)


def divide(model: nn.Module, patterns: Iterable[str], group: DataGroup) -> HybridModel:
    """Keep this rank's part of the layers that `patterns` name. The answer takes the place of `model`.

    Errors: ValueError for names that fit no layer (with the nearest), for layers that cannot be divided, and for
    weights that another layer has, too.
    """
    names = list(matched(model, dict.fromkeys(patterns, "column")))
    cutter = Cutter(group.ranks)
    holders: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(path)
    for name in names:
        module = model.get_submodule(name)
        tied = [holders[id(p)] for p in module.parameters() if len(holders[id(p)]) > 1]
        if tied:
            raise ValueError(f"{' and '.join(tied[0])} are one parameter, so {name} cannot be divided; leave it out")
        try:
            layer = DividedLayer(cutter, group, name, module)
        except ValueError as error:
            raise ValueError(f"layer {name} cannot be divided over {group.ranks.size} ranks: {error}") from None
        replace_module(model, name, layer)
    return HybridModel(model, group)


def divided_layers(model: nn.Module) -> dict[str, DividedLayer]:
    """The divided layers in a module, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DividedLayer)}
