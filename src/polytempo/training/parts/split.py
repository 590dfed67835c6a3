"""`split` and `place`: the layers, or the branches, of a model on several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polytempo.cluster import Link
from polytempo.cluster.cluster import rate_of
from polytempo.core import Codec, Port
from polytempo.core.suspension import drive
from polytempo.partition.branches.placed_model import PlacedModel, placed
from polytempo.partition.plan import SplitPlan, given_plan, split_plan
from polytempo.partition.tensor import ModelGroup, Rules, SplitModel, apply_rules
from polytempo.partition.tensor.rules import EXAMPLE, matched
from polytempo.partition.tensor.way import AUTO, SplitLayers
from polytempo.partition.wires import Wires
from polytempo.spec.text.catalogue import codec_of
from polytempo.training.model.agree import agree
from polytempo.training.model.ports import MODEL
from polytempo.training.parts.layer_plan import LATENCY_S
from polytempo.worlds import ProcessWorld, current


def split(
    model: nn.Module,
    rules: Rules | Literal["auto"],
    *,
    sample: Any = None,
    sequence: bool = False,
    activations: Codec | str | None = None,
    gradients: Codec | str | None = None,
    link: str | Link | None = None,
    gflops: float = 10.0,
    world: ProcessWorld | None = None,
    port: Port | None = None,
) -> SplitModel:
    """Keep this rank's part of the layers that `rules` name; returns the split model, which takes the place of `model`.

        pt.init(mesh={"data": 2, "model": 2})
        model = pt.split(net, {"*.mlp.up": "column", "*.mlp.down": "row", "*.attention": "heads"})
        optimizer = torch.optim.AdamW(model.parameters())
        pt.attach(model, optimizer, pt.strategies.sync_sgd())

    Every rank makes the whole model and takes the parameters of the first rank along the axis "model" of the mesh.
    Ranks along that axis need the same batches, as `pt.shard` deals them, and the same random seed. Parameters keep
    their names; `full_parameters()` and `full_gradients()` show the whole model's.

    | way | layers | a rank's part |
    |---|---|---|
    | "column" | `Linear`, convolutions, `Embedding`, `Dropout` | some output features, or channels |
    | "row" | `Linear`, convolutions | some input features, or channels |
    | "embedding" | `Embedding` | some rows of the table |
    | "vocabulary" | `Linear`, `Embedding` | some classes: the loss is `model.cross_entropy(logits, target)` |
    | "heads" | `MultiheadAttention`, `Dropout` | some heads |
    | "places" | any module of pictures | some places of its pictures, and of the weights of `LocallyConnected2d` |
    | "sequence" | `LayerNorm`, `RMSNorm`, `Linear`, `Dropout` | some positions, with `sequence=True` |
    | "scatter" | `Embedding`, `Linear`, `LayerNorm` | the whole; some positions of its answer, with `sequence=True` |

    `pt.partition.tensor.column(heads=8, packed=3)` and `row(heads=8)` split by whole heads the linear layers of an
    attention of one's own. With `sequence` each rank has some positions between split layers, so norms and dropouts are
    computed once and not on all ranks; tensors are then (batch, positions, features). "auto" in place of rules splits
    all layers that can be by the fewest bytes (`partition.plan.split_choice`), as `sample`, the model's arguments,
    shows.

    `activations` and `gradients`: codecs (`pt.compression`), also as text such as "int8", for the layers' exchanges. A
    sum over ranks of p_r is Q(s_j) for each piece j, with s_j = p_j[j] + Σ_{r≠j} Q(p_r[j]), in the order of ranks, so
    that all ranks hold the same bits (`partition.tensor.model_group`).

    `link`: the network between these ranks, as its rate, such as "1gbit" (with 50 microseconds of latency), or a
    `pt.cluster.Link`. With it and a `sample`, which then has a whole batch, a UserWarning says where exchanges take
    longer than the computing that they save, at `gflops` (1e9 floating-point operations a second) of each rank. `port`:
    this rank's place in another world than a process world, such as a virtual one. There, `split`, forward and backward
    passes are called inside of `await suspendable(…)` (`polytempo.core.suspension`).

    Errors: `Mismatch` where ranks of a model give other rules, codecs or models; ValueError for names that fit no
    layer, layers that cannot be split so, tied parameters that are not split alike, ranks without a mesh that has the
    axis "model", and codecs with a memory or with wires of varying length.
    """
    group = _group(world, port, sequence, Wires(codec_of(activations), codec_of(gradients)))
    named, plan = _named(model, rules, sample, group)
    if link is not None:
        _warn_of_link(plan or _given(model, named, sample, group), group.wires, sample, link, gflops)
    ways = {pattern: str(way) for pattern, way in named.items()}
    begin_parts(group, model, {"rules": ways, "sequence": sequence, "codecs": str(group.wires)})
    return apply_rules(model, named, group)


def _group(world: ProcessWorld | None, port: Port | None, sequence: bool, wires: Wires) -> ModelGroup:
    if port is not None:
        return ModelGroup(model_port(port), drive, sequence, wires)
    real = world or current()
    return ModelGroup(model_port(real.port), real.drive, sequence, wires)


def _named(model: nn.Module, rules: Rules | str, sample: Any, group: ModelGroup) -> tuple[Rules, SplitPlan | None]:
    if isinstance(rules, Mapping):
        return rules, None
    if not isinstance(rules, str):
        raise ValueError(f"{EXAMPLE}, not {rules!r}")
    SplitLayers(rules, group.size, group.sequence)
    if rules != AUTO or sample is None:
        raise ValueError(
            f'rules={rules!r}: give a dictionary such as {{"*.up": "column", "*.down": "row"}}, or "auto" with '
            "sample=x, which the model is called with"
        )
    plan = split_plan(model, sample, group.size, group.wires)
    return plan.rules, plan


def _given(model: nn.Module, rules: Rules, sample: Any, group: ModelGroup) -> SplitPlan:
    if sample is None:
        raise ValueError("a split's cost on a link depends on the batch; give sample=x, which the model is called with")
    return given_plan(model, sample, matched(model, rules), group.size)


def _warn_of_link(plan: SplitPlan, wires: Wires, sample: Any, link: str | Link, gflops: float) -> None:
    if not 0 < gflops < float("inf"):
        raise ValueError(f"gflops={gflops:g}: must be above 0")
    network = Link(LATENCY_S, rate_of(link)) if isinstance(link, str) else link
    [samples, *_] = (len(each) for each in tree_leaves(sample) if isinstance(each, Tensor) and each.dim())
    rates = {"latency_s": network.latency_s, "bytes_per_s": network.bytes_per_s, "flops_per_s": 1e9 * gflops}
    if slower := replace(plan, wires=wires).slower(samples, **rates):
        warnings.warn(slower, UserWarning, stacklevel=3)


def model_port(whole: Port) -> Port:
    """The ranks of this rank's model. ValueError for a mesh without the axis."""
    if whole.size == 1 and whole.mesh is None:
        return whole
    lengths = {} if whole.mesh is None else whole.mesh.lengths
    if MODEL not in lengths:
        raise ValueError(
            f"a model is split along the axis {MODEL!r} of the mesh, and this one is {lengths or 'none'}; call "
            f'pt.init(mesh={{"data": …, "{MODEL}": …}}) with lengths that multiply to {whole.size}'
        )
    return whole.along(MODEL)


def begin_parts(group: ModelGroup, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Compare the ranks' `facts` and models, and give all ranks the first one's parameters and buffers."""
    if group.size > 1:
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        group.drive(agree(group.port, {**facts, "model": shapes}))
        group.drive(_take_first(group.port, model))


async def _take_first(port: Port, model: nn.Module) -> None:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        tensor.detach().copy_(await port.broadcast(tensor.detach().clone().contiguous()))


def place(model: nn.Module, *, sample: Any, world: ProcessWorld | None = None, port: Port | None = None) -> PlacedModel:
    """Keep this rank's branches of `model`; returns the placed model, which takes the place of `model`.

        pt.init(mesh={"data": 1, "model": 2})
        model = pt.training.place(net, sample=x)
        optimizer = torch.optim.AdamW(model.parameters())
        pt.attach(model, optimizer, pt.strategies.sync_sgd())

    The branches that `pt.partition.threads` finds for threads go to the ranks along the axis "model" of the mesh
    instead, each where it ends the soonest. A tensor that passes between two ranks is sent once to each that needs it,
    and its gradient once back; the model's answer is on all ranks, which compute the same loss and all call backward.
    Every rank makes the whole model and takes the parameters of the first; then it keeps its own branches' parameters,
    under their names. `full_parameters()` and `full_gradients()` show the whole model's, `places` the rank of each
    branch.

    `sample` holds the model's arguments; batches may have other sizes. `port`: this rank's place in another world
    than a process world, such as a virtual one. There, `place`, forward and backward passes are called inside of
    `await suspendable(…)` (`polytempo.core.suspension`).

    The results equal one process's, except for random numbers: a dropout draws from its own rank's. Clipping
    by `handle.clip_grad_norm_`, or by torch's, which all ranks call, is by the whole model's norm. The first pass with
    inputs of new sizes sends the sizes.

    Errors: `Mismatch` where ranks have other models; ValueError for a model without branches or that cannot be traced,
    for a parameter that branches of two ranks would share, and, in a pass, for inputs that need a gradient.

    Source: J. Dean et al., "Large scale distributed deep networks", 2012, section 3: a model partitioned across
    machines; each computes its nodes and sends values to the machines that need them. There the user places the nodes.
    """
    whole = port or (world or current()).port
    group = ModelGroup(model_port(whole), drive if port is not None else (world or current()).drive)
    begin_parts(group, model, {})
    return placed(model, sample, group)
