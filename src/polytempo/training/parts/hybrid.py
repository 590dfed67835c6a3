"""`hybrid`: some layers by data parallelism, the others by model parallelism."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from polytempo.core import Codec, Port
from polytempo.core.suspension import drive
from polytempo.partition.hybrid import DataGroup, Exchange, HybridModel, divide
from polytempo.partition.hybrid.divided_names import names_of
from polytempo.partition.plan import LayerPlan
from polytempo.partition.tensor import ModelGroup
from polytempo.partition.tensor.way import AUTO
from polytempo.partition.wires import AS_THEY_ARE, Wires
from polytempo.spec.text.catalogue import codec_of
from polytempo.training.model.ports import ports_of
from polytempo.training.parts.split import begin_parts
from polytempo.worlds import ProcessWorld, current


def hybrid(
    model: nn.Module,
    layers: LayerPlan | Iterable[str],
    *,
    exchange: Exchange = "joined",
    activations: Codec | str | None = None,
    gradients: Codec | str | None = None,
    world: ProcessWorld | None = None,
    port: Port | None = None,
) -> HybridModel:
    """Divide the weights of `layers` over all ranks, with own samples on each; returns a module in place of `model`.

        plan = pt.training.plan_layers(net, images, workers=4, link="1gbit")
        model = pt.hybrid(net, plan)                # or the names: pt.hybrid(net, ["classifier.*"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pt.attach(model, optimizer, pt.strategies.sync_sgd())

    A divided layer gets all ranks' samples, computes its part of the output features with them, and each rank gets all
    features of its samples. So its weights are used on their own rank, and their gradient is not sent; the strategy
    exchanges the gradients of all other layers. A rank's loss is the mean over its samples, which `pt.shard` deals, and
    the gradients equal one process's with all samples. Parameters keep their names; `full_parameters()` shows all.

    `exchange`: the rounds of samples: all together ("joined"), one rank's after the other's ("turns"), or a part of
    every rank's at a time ("slices"); `partition.hybrid.traffic` has their source. `port`: this rank's place in another
    world than a process world, inside of `await suspendable(…)` (`polytempo.core.suspension`).

    `activations` and `gradients`: codecs (`pt.compression`), also as text such as "int8", for the divided layers'
    exchanges of samples and outputs, and of their gradients (`partition.hybrid.exchange`). A rank that sends encodes,
    and all compute with decoded values; outputs and gradients for a rank itself are not encoded, and so are indices of
    an embedding. Without one the plan's are taken.

    Layers may be `Linear`, `Embedding` and convolutions of one group. All ranks call the model together, in evaluation,
    too.

    Errors: `Mismatch` where ranks give other layers, codecs or models; ValueError for names that fit no layer, for
    layers that cannot be divided or share weights, for a plan of another number of workers, for a mesh of more than
    data ranks, and for codecs with a memory or with wires of varying length.
    """
    whole = port or (world or current()).port
    ports = ports_of(whole)
    if ports.model.size > 1:
        raise ValueError(
            f"the mesh {ports.whole.mesh} has ranks that hold parts of one model, by pt.split or pipelines; pt.hybrid "
            "divides layers over ranks that see other samples: leave out pt.init(mesh=…)"
        )
    planned = layers.wires if isinstance(layers, LayerPlan) else AS_THEY_ARE
    wires = Wires(codec_of(activations) or planned.activations, codec_of(gradients) or planned.gradients)
    ranks = ModelGroup(ports.data, drive if port is not None else (world or current()).drive, wires=wires)
    names = _names(layers, ranks.size)
    begin_parts(ranks, model, {"layers": names, "exchange": exchange, "codecs": str(wires)})
    return divide(model, names, DataGroup(ranks, exchange))


def _names(layers: LayerPlan | Iterable[str], num_ranks: int) -> list[str]:
    if not isinstance(layers, LayerPlan):
        names = names_of([layers] if isinstance(layers, str) else layers)
        if names == (AUTO,):
            raise ValueError(
                f"{AUTO!r} names no layer; give a plan, pt.training.plan_layers(model, x, workers={num_ranks}, "
                "batch_size=…), which chooses layers for the workers and the batch of a step"
            )
        return list(names)
    if layers.workers != num_ranks:
        raise ValueError(
            f"the plan is for {layers.workers} workers, and there are {num_ranks}; plan again with workers={num_ranks}"
        )
    return list(layers.model_parallel)
