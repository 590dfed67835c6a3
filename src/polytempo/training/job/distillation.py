"""The loss of a job for its strategy, and groups that learn from each other's predictions: their places and data."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from polytempo.aggregation.peer_models import GROUP, PeerModelsState
from polytempo.core import Port
from polytempo.core.state import nodes
from polytempo.core.strategy import Distillation
from polytempo.data.shard import DataShard
from polytempo.data.streams.stream_pieces import RowsHeard
from polytempo.federated.clients import only
from polytempo.partition.tensor import SplitModel
from polytempo.partition.tensor.layers.linear import VocabularyLinear
from polytempo.spec.job import Data, Job, OfBatch
from polytempo.spec.objective import loss_of, loss_of_pair, output_of, pair_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.federated.client_turns import cohorts_of
from polytempo.training.model.epoch_lengths import check_stream
from polytempo.training.model.ports import DATA, ports_of
from polytempo.training.step.replica import Replica

Objective = Callable[[Any], Tensor]

_APART = 7919
"""Distance between the seeds of two groups."""
_FORWARD = 1 / 3
"""A forward pass's part of a training step's computation."""


def grouped(port: Port, groups: int) -> Port:
    """The ranks as so many groups; rank r is in group r mod groups. ValueError where they cannot be."""
    if groups == 1:
        return port
    if port.mesh is not None:
        raise ValueError(f"a strategy lays its groups out, and this world is a {port.mesh}; leave out its mesh")
    if port.size % groups:
        raise ValueError(f"{port.size} ranks cannot be {groups} groups of one size; start a multiple of {groups}")
    return port.meshed(**{DATA: port.size // groups, GROUP: groups})


def of_group(spec: RunSpec, port: Port) -> RunSpec:
    """The run as the group of `port` begins it: from parameters of its own."""
    group = port.coordinates.get(GROUP, 0)
    return replace(spec, options=replace(spec.options, seed=spec.seed + _APART * group)) if group else spec


def data_of_group(data: Data, port: Port) -> Data:
    """The samples g, g + G, … of the training set for group g of G, as many for each: a rest is left out."""
    if port.mesh is None or GROUP not in port.mesh.lengths:
        return data
    groups, group, train = port.mesh.lengths[GROUP], port.coordinates[GROUP], data.train
    if isinstance(train, DataLoader | IterableDataset):
        raise ValueError(
            f"groups train on parts of a data set with numbered samples, and the training data are a "
            f"{type(train).__name__}; give pt.Data a map-style data set"
        )
    end = len(train) // groups * groups  # type: ignore[arg-type]
    if isinstance(train, TensorDataset):
        return data._replace(train=TensorDataset(*(tensor[group:end:groups] for tensor in train.tensors)))
    return data._replace(train=Subset(train, range(group, end, groups)))


def shard_of_group(spec: RunSpec, data: Data, port: Port, **more: Any) -> DataShard:
    """This rank's shard of its group's samples; `more` goes to `DataShard`."""
    place = ports_of(port).data
    source = data_of_group(data, port).training()
    if spec.strategy.rounds is not None:
        cohorts = cohorts_of(spec, data)
        source, more["order"] = DataLoader(cohorts, collate_fn=only), cohorts.order
        more["device"] = None  # a client's batches are moved in its turn, and its samples' numbers stay
    shard = DataShard(
        source,
        rank=place.rank,
        size=place.size,
        batch_size=spec.batch_size,
        seed=spec.seed,
        global_batch_size=spec.options.global_batch_size,
        slices=spec.strategy.slices,
        micro_batches=spec.options.accumulate,
        agree=RowsHeard(),
        **more,
    )
    check_stream(spec, shard)
    return shard


def objective_of(job: Job, replica: Replica, distillation: Distillation | None) -> Objective:
    """The loss of the job; with `distillation` also the distance to the other groups' predictions."""
    if distillation is not None:
        return Distiller(job, replica, distillation.weight)
    if isinstance(replica.model, SplitModel):
        return partial(loss_of_split, job, replica.model)
    return partial(loss_of, job, replica.model)


class Distiller:
    """φ + w ψ on a batch, ψ the cross-entropy with the mean of the other groups' predictions."""

    def __init__(self, job: Job, replica: Replica, weight: float) -> None:
        if isinstance(job.loss, OfBatch):
            raise ValueError(
                f"job {job.name}: groups compare their models' outputs, which loss=pt.of_batch(…) hides; "
                "let the job have loss(output, target)"
            )
        for name, module in replica.model.named_modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                raise ValueError(
                    f"job {job.name}: groups exchange parameters, and {type(module).__name__} {name!r} has running "
                    "statistics beside these; use GroupNorm, or track_running_stats=False"
                )
        self._job, self._replica, self._weight = job, replica, weight
        self._teacher = deepcopy(replica.model).eval().requires_grad_(False)

    def __call__(self, batch: Any) -> Tensor:
        inputs, target = pair_of(self._job, batch)
        output = output_of(self._job, self._replica.model, inputs)
        loss = loss_of_pair(self._job, output, target)
        models = self.models
        if not models:
            return loss
        with torch.no_grad():
            predictions = [functional_call(self._teacher, model, (inputs,)).softmax(-1) for model in models]
            mean = torch.stack(predictions).mean(0)
        distance: Tensor = -(mean * output.log_softmax(-1)).sum(-1).mean()
        return loss + self._weight * distance

    @property
    def models(self) -> list[dict[str, Tensor]]:
        """The other groups' parameters by name; none before the first exchange, and none where they count nothing."""
        parameters = self._replica.parameters
        assert parameters is not None, "groups exchange parameters"
        states = [found for state in parameters.states for found in nodes(state, PeerModelsState)]
        if not self._weight or not all(state.exchanges for state in states):
            return []
        return [
            {name: view for bundle in bundles for name, view in bundle.views.items()}
            for bundles in zip(*(state.models for state in states), strict=True)
        ]

    @property
    def work(self) -> float:
        """The computation of a step, relative to a step without the other groups' forward passes."""
        return 1 + _FORWARD * len(self.models)


def loss_of_split(job: Job, model: SplitModel, batch: Any) -> Tensor:
    """`loss_of` for a split model. Divided classes' logits are gathered, but for torch's cross-entropy of class
    indices.

    Errors: the errors of `loss_of`; ValueError for a job with a loss of divided logits, or without whole ones.
    """
    if not any(isinstance(module, VocabularyLinear) for module in model.modules()):
        return loss_of(job, model, batch)
    if isinstance(job.loss, OfBatch):
        raise ValueError(
            f"job {job.name}: its loss calls the model itself, and would get divided logits of a layer split by "
            '"vocabulary"; let the job have loss(output, target), or split that layer by column(gather=True)'
        )
    inputs, target = pair_of(job, batch)
    output = output_of(job, model, inputs)
    if not isinstance(output, Tensor):
        raise ValueError(
            f'job {job.name}: a layer is split by "vocabulary", so the model answers a tensor of logits, and this is '
            f"a {type(output).__name__}; split that layer by column(gather=True)"
        )
    of_indices = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
    if job.loss is functional.cross_entropy and output.dim() == 2 and of_indices:
        return model.cross_entropy(output, target)
    return loss_of_pair(job, model.all_logits(output), target)
