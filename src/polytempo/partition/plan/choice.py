"""`LayerPlan`: the layers that go by data and by model parallelism, the bytes that both send, and the speed-up.

             data: a worker has all weights, and some samples       model: some weights, and all samples
             sends ∇W, gets the sum back: 2·|W|                     sends its inputs and their gradients: 2·|D|

Convolutions have few weights that meet many positions, so |W| < |D|; fully connected layers the other way around,
until the batch is as large as the layer is wide.

    time of a step of B samples on p workers   t(p) = t₁·B/p + s(p)
    speed-up                                   1/S = 1/p + c · s(p)/B

s(p) is the cost of a reduction over p workers by the cost model: ∝ log₂p for a tree, ∝ p for a parameter server. The
constant c, which holds the network's speed and the sample's time, follows from one measured speed-up.

Source: F. Iandola et al., "FireCaffe", 2016, section 3; A. Krizhevsky, "One weird trick for parallelizing convolutional
neural networks", 2014. For the speed-up, the measurements of "FireCaffe", section 6, and the argument of its section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from polytempo.core import Price
from polytempo.partition.hybrid.traffic import Exchange, rounds, volume
from polytempo.partition.plan.volume import LayerVolume
from polytempo.partition.wires import AS_THEY_ARE, WAYS, Way, Wires, without_memory

LayerWay = Literal["data", "model"]
Scheme = Literal["data", "model", "hybrid"]
By = Literal["bytes", "seconds"]
SCHEMES: tuple[Scheme, ...] = ("data", "model", "hybrid")
_EXCHANGES = 4
"""Exchanges of a layer with divided weights: inputs, outputs, and the gradients of both."""


class Reduction(NamedTuple):
    """A way to sum gradients over the workers, and its cost by the α–β model."""

    name: str
    price: PriceOf


@dataclass(frozen=True)
class PlannedLayer:
    """One layer, by both ways. Bytes are the source's |W|, and its |D| by codecs; seconds are of a whole step."""

    volume: LayerVolume
    way: LayerWay
    data_bytes: int
    model_bytes: float
    data_s: float
    """Seconds of the reduction of its gradient, alone; several layers' gradients are reduced together."""
    model_s: float
    flops_per_byte: float
    """`LayerVolume.flops_per_byte` of a worker's samples."""


@dataclass(frozen=True)
class LayerPlan:
    """The layers of a model, each with its way, for so many workers and samples of a step of all of them."""

    layers: tuple[PlannedLayer, ...]
    workers: int
    batch_size: int
    latency_s: float
    bytes_per_s: float
    reduction: Reduction
    wires: Wires = AS_THEY_ARE
    """The codecs of divided layers' exchanges."""

    @property
    def model_parallel(self) -> tuple[str, ...]:
        """Names of the layers with divided weights: `pt.hybrid` takes the plan, or these."""
        return tuple(each.volume.name for each in self.layers if each.way == "model")

    @property
    def weight_bytes(self) -> int:
        """|W| of the model."""
        return sum(each.data_bytes for each in self.layers)

    @property
    def input_bytes(self) -> float:
        """|D| of the model."""
        return sum(each.model_bytes for each in self.layers)

    @property
    def flops(self) -> float:
        """Operations of a step, forward and backward, of all workers."""
        return sum(each.volume.flops for each in self.layers) * self.batch_size

    def ways(self, scheme: Scheme) -> tuple[LayerWay, ...]:
        """Each layer's way; with "model", of every layer that can go so."""
        if scheme == "hybrid":
            return tuple(each.way for each in self.layers)
        return tuple(scheme if can_divide(each.volume, self.workers) else "data" for each in self.layers)

    def bytes_of(self, scheme: Scheme) -> float:
        """The source's volume of a step: |W| of the layers by data, |D| of the layers by model parallelism."""
        pairs = zip(self.layers, self.ways(scheme), strict=True)
        return sum(each.data_bytes if way == "data" else each.model_bytes for each, way in pairs)

    def seconds_of(self, scheme: Scheme, reduction: Reduction | None = None) -> float:
        """Seconds of a step's messages, not hidden: one reduction of all gradients, and each layer's exchanges."""
        pairs = list(zip(self.layers, self.ways(scheme), strict=True))
        gradients = sum(each.volume.gradient_bytes for each, way in pairs if way == "data")
        price = (reduction or self.reduction).price
        reduced = price(self.workers, gradients, self.latency_s, self.bytes_per_s).seconds if gradients else 0.0
        return reduced + sum(each.model_s for each, way in pairs if way == "model")


def can_divide(layer: LayerVolume, workers: int) -> bool:
    """True if each worker can have some of the layer's outputs, and no other layer has its weights."""
    return workers > 1 and layer.features >= workers and not layer.tied


def chosen(
    layers: Sequence[LayerVolume],
    *,
    workers: int,
    batch_size: int,
    latency_s: float,
    bytes_per_s: float,
    reduction: Reduction,
    by: By = "bytes",
    overlap: float = 1.0,
    wires: Wires = AS_THEY_ARE,
) -> LayerPlan:
    """Each layer by the way that sends less.

    `by`: "bytes" compares |D| with |W|, which is the source's rule; "seconds" compares the times of the exchanges of
    `pt.hybrid` and of the reduction on this link. `batch_size`: samples of a step of all workers. `wires`: the codecs
    of these exchanges; |D| is then the mean of the inputs' bytes forward and their gradients' backward. Layers that
    cannot be divided, and layers that share weights, go by data parallelism.

    Raises ValueError for numbers below 1.
    """
    for name, number in (("workers", workers), ("batch_size", batch_size)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}={number!r}: must be a whole number, at least 1")
    if by not in ("bytes", "seconds"):
        raise ValueError(f'by={by!r}: must be "bytes" or "seconds"')
    planned = []
    for layer in layers:
        data_s = reduction.price(workers, layer.gradient_bytes, latency_s, bytes_per_s).seconds
        model_s = exchange_seconds(layer, workers, batch_size, latency_s, bytes_per_s, wires)
        given = [_given(layer, way, workers, batch_size, wires) for way in WAYS]
        data_bytes, model_bytes = layer.weight_bytes, sum(given) / len(given)
        less = model_bytes < data_bytes if by == "bytes" else model_s < data_s
        way: LayerWay = "model" if less and can_divide(layer, workers) else "data"
        ratio = layer.flops_per_byte(ceil(batch_size / workers), overlap) if layer.weights else 0.0
        planned.append(PlannedLayer(layer, way, data_bytes, model_bytes, data_s, model_s, ratio))
    return LayerPlan(tuple(planned), workers, batch_size, latency_s, bytes_per_s, reduction, wires)


def exchange_seconds(
    layer: LayerVolume,
    workers: int,
    batch_size: int,
    latency_s: float,
    bytes_per_s: float,
    wires: Wires = AS_THEY_ARE,
) -> float:
    """Seconds of a divided layer's messages in a step: inputs to all, outputs to their samples' workers, gradients
    back.

    4α + (N-1)/N · (2·|D| + 2·outputs/N) / B         half of |D|, and one α less, where no gradient goes back
    """
    if workers == 1:
        return 0.0
    there, its_gradient = (_given(layer, way, workers, batch_size, wires) for way in WAYS)
    numbers = layer.outputs * batch_size
    back = sum(wires.shared_bytes(way, numbers, layer.itemsize, workers * workers) for way in WAYS) / workers
    exchanges = _EXCHANGES - (not layer.gradient)
    sent = there + its_gradient * layer.gradient + back
    return exchanges * latency_s + (workers - 1) / workers * sent / bytes_per_s


def _given(layer: LayerVolume, way: Way, workers: int, batch_size: int, wires: Wires) -> float:
    """|D|, or as much of its gradient, as if each worker encoded an equal share. An embedding's indices are not."""
    if layer.kind == "embedding":
        return layer.input_bytes(batch_size)
    return wires.shared_bytes(way, layer.inputs * batch_size, layer.input_itemsize, workers)


def exchange_bytes(
    layer: LayerVolume,
    sizes: Sequence[int],
    parts: Sequence[int],
    wires: Wires = AS_THEY_ARE,
    exchange: Exchange = "joined",
) -> int:
    """Bytes of all ranks in a step of a divided layer: rank r has `sizes[r]` samples and `parts[r]` output features.

    The count is exact, whether sizes divide evenly or not, for a layer that the model calls once. `exchange` matters by
    codecs alone: a round's samples make a wire.
    """
    given = without_memory(round(layer.inputs), layer.input_itemsize, whole=layer.kind == "embedding")
    made = without_memory(round(layer.outputs), layer.itemsize)
    return sum(volume(rounds(exchange, sizes), parts, given, made, wires, of_inputs=layer.gradient))


def prices_of(plan: LayerPlan, reductions: Sequence[Reduction]) -> Mapping[str, dict[Scheme, float]]:
    """Seconds of a step's messages by each reduction and scheme."""
    return {each.name: {scheme: plan.seconds_of(scheme, each) for scheme in SCHEMES} for each in reductions}


PriceOf = Callable[[int, float, float, float], Price]
"""The cost of a reduction: `price(num_ranks, num_bytes, latency_s, bytes_per_s)`."""


@dataclass(frozen=True)
class ScalingLaw:
    """A reduction's price, and the constant c."""

    price: PriceOf
    constant: float

    @staticmethod
    def calibrated(price: PriceOf, speed_up: float, workers: int, batch_size: int) -> ScalingLaw:
        """The law that gives this speed-up for so many workers and samples of a step.

        Raises ValueError for a speed-up that is none, or more than the workers'.
        """
        if not 0 < speed_up <= workers or workers < 2:
            raise ValueError(f"{workers} workers cannot have been {speed_up:g} times as fast as one; measure again")
        return ScalingLaw(price, (1 / speed_up - 1 / workers) * batch_size / _growth(price, workers))

    def speed_up(self, workers: int, batch_size: int) -> float:
        """The speed-up over one worker."""
        return 1 / (1 / workers + self.constant * _growth(self.price, workers) / batch_size)


def _growth(price: PriceOf, workers: int) -> float:
    return price(workers, 1.0, 0.0, 1.0).seconds
