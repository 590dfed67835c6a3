"""A job with layers in parts on several ranks: one rank's model, and the ranks' layout."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from polytempo.core import Port, Strategy
from polytempo.core.port import world_port
from polytempo.core.strategy import Parted
from polytempo.core.suspension import drive
from polytempo.partition.hybrid import DataGroup, divide
from polytempo.partition.hybrid.divided_names import DividedNames
from polytempo.partition.plan import split_plan
from polytempo.partition.tensor import ModelGroup, apply_rules
from polytempo.partition.tensor.model_group import Drive
from polytempo.partition.tensor.parted_model import PartedModel
from polytempo.partition.tensor.split_model import split_models
from polytempo.partition.tensor.way import SplitLayers
from polytempo.spec.job import Data
from polytempo.spec.job_calls import optimizer_of
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.distillation import grouped
from polytempo.training.model.parted_parameters import check_optimizer, check_restorable, own_parameters
from polytempo.training.model.ports import DATA, MODEL, check_mesh, ports_of
from polytempo.training.model.run_device import beside
from polytempo.training.parts.layer_plan import plan_layers
from polytempo.training.parts.staged_training import cut_of, sample_of, staged
from polytempo.training.pipeline.pipeline_stage import laid_out

_RATE = "10gbit"
"""Of a plan by bytes, which asks for no rate."""


def laid_out_run(port: Port, strategy: Strategy) -> Port:
    """The ranks of a run as its strategy lays them out: replicas, stages and parts of layers. ValueError as below."""
    held = grouped(port, strategy.groups)
    if strategy.schedule is None:
        return laid_out_parts(held, strategy.parted)
    return laid_out(held, strategy.stages, 1 if strategy.parted is None else strategy.parted.ranks)


def laid_out_parts(port: Port, parted: Parted | None) -> Port:
    """The ranks as models of so many ranks each. ValueError where they cannot be."""
    check_mesh(port)
    if parted is None:
        return port
    lengths = {} if port.mesh is None else port.mesh.lengths
    wanted = {MODEL: parted.ranks} if parted.ranks > 1 else {}
    if {axis: length for axis, length in lengths.items() if axis != DATA and length > 1} == wanted:
        return port
    if port.mesh is not None:
        raise ValueError(
            f"this world is a {port.mesh}, and the strategy's models are of {parted.ranks} ranks each, along the axis "
            f"{MODEL!r}; leave out pt.init(mesh=…), and the strategy lays ranks out"
        )
    if port.size % parted.ranks:
        raise ValueError(
            f"{port.size} ranks cannot be models of {parted.ranks} ranks each; start "
            f"{-(-port.size // parted.ranks) * parted.ranks}"
        )
    return port.meshed(**{DATA: port.size // parted.ranks, MODEL: parted.ranks})


def parted_model(spec: RunSpec, model: nn.Module, data: Data, port: Port, drive: Drive) -> PartedModel:
    """This rank's parts of `model`; `port` is laid out. Sends nothing; changes `model`.

    Errors: ValueError for rules and names that do not fit the model, and for a plan if the loss calls the model.
    """
    ports, parted = ports_of(port), spec.strategy.parted
    if isinstance(parted, SplitLayers):
        rules = parted.rules
        if isinstance(rules, str):
            sample = beside(model, sample_of(spec.job, data, spec.batch_size, spec.seed))
            rules = split_plan(model, sample, parted.ranks, parted.wires).rules
        return apply_rules(model, rules, ModelGroup(ports.model, drive, parted.sequence, parted.wires))
    assert isinstance(parted, DividedNames)
    names = planned_names(spec, model, data) if parted.names is None else parted.names
    ranks = ModelGroup(ports.data, drive, wires=parted.wires)
    return divide(model, names, DataGroup(ranks, parted.exchange))


def check_parted_model(spec: RunSpec, model: nn.Module, data: Data) -> None:
    """Raise ValueError where the first rank of the run could not have its parts of the job's model."""
    port = laid_out_run(world_port(0, [0] * spec.workers), spec.strategy)
    if spec.strategy.schedule is not None:
        staged(spec, model := deepcopy(model), cut_of(spec, model, data), port)
        return
    own = parted_model(spec, deepcopy(model), data, port, drive)
    optimizer = optimizer_of(spec.job, own, spec.lr)
    check_optimizer(optimizer, split_models(own), own_parameters(own))
    if spec.options.on_drift == "restore":
        check_restorable(own, "restore")


def planned_names(spec: RunSpec, model: nn.Module, data: Data) -> tuple[str, ...]:
    """The layers that a plan for the run's workers and batch divides; the same on all ranks."""
    parted = spec.strategy.parted
    assert isinstance(parted, DividedNames)
    plan = plan_layers(
        model,
        beside(model, sample_of(spec.job, data, spec.batch_size, spec.seed)),
        workers=spec.workers,
        link=parted.link or _RATE,
        batch_size=spec.options.global_batch_size or spec.workers * spec.batch_size,
        by="bytes" if parted.link is None else "seconds",
        activations=parted.wires.activations,
        gradients=parted.wires.gradients,
    )
    return plan.model_parallel
