"""`attach_replica`: hooks that run a strategy's exchanges in an ordinary training loop.

loss.backward()      each bucket's transform starts as soon as its last gradient is there;
                     when backward returns, every `.grad` is the strategy's answer
optimizer.step()     afterwards the parameters' transform runs, then buffers meet
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from polytempo.core import Port, Strategy, identity, is_idle
from polytempo.core.calls.refusals import refuse
from polytempo.device import on_accelerator
from polytempo.large_batch.noise_scale import NoiseProbe
from polytempo.native.arena import shared_empty
from polytempo.native.group import Group
from polytempo.one_host.hogwild import in_turns
from polytempo.one_host.one_copy import host_group, one_copy_of
from polytempo.spec.precision import Precision
from polytempo.spec.run_spec import check_precision
from polytempo.spec.text.catalogue import strategy_from
from polytempo.training.checkpoint.optimizer_state import broadcast_optimizer
from polytempo.training.hooks.attached_models import handle_of, set_handle
from polytempo.training.hooks.drift_watch import OnDrift, watch
from polytempo.training.hooks.handle import Handle
from polytempo.training.model.agree import agree_to_train, broadcast_model, next_series
from polytempo.training.model.ownership import check_bare, check_hooks
from polytempo.training.model.parted_parameters import check_divided, check_restorable, own_parameters
from polytempo.training.model.ports import ports_of
from polytempo.training.model.requirements import fitted
from polytempo.training.model.trainable_parameters import sparse_tables, trainable
from polytempo.training.precision.masters import check as check_masters
from polytempo.training.precision.masters import masters_of
from polytempo.training.step.bucket_cuts import DEFAULT_BUCKET_BYTES
from polytempo.training.step.buffers import BufferRule
from polytempo.training.step.loss_scale import facts as scaler_facts
from polytempo.training.step.noise_post import watch_noise
from polytempo.training.step.pace_store import watch_pace
from polytempo.training.step.parameter_exchange import Commit
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld, current


class AttachOptions(NamedTuple):
    """The options of `attach`."""

    buffers: BufferRule = "average"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    seed: int | None = None
    scaler: GradScaler | None = None
    on_drift: OnDrift = "stop"
    allow_nan: bool = True
    noise_scale: NoiseProbe | None = None
    precision: Precision | None = None
    callbacks: str = ""
    """The loop's callbacks, which all ranks are given."""
    commit: Commit | None = None
    """Of an elastic run: see `ParameterExchange`. Others may join a rank that is alone, so it counts its steps."""

    @property
    def facts(self) -> dict[str, Any]:
        """Options as plain values, for a comparison between ranks."""
        every = None if self.noise_scale is None else self.noise_scale.every
        bits = None if self.precision is None else str(self.precision)
        plain = {"scaler": scaler_facts(self.scaler), "noise_scale": every, "precision": bits}
        return self._asdict() | plain | {"commit": self.commit is not None}


def attach_replica(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    *,
    world: ProcessWorld | None = None,
    options: AttachOptions = AttachOptions(),  # noqa: B008 - it is immutable
) -> Handle:
    """Attach a strategy between ranks: each holds a replica of the model."""
    check_attachable(model, optimizer, strategy)
    check_options(model, optimizer, strategy, options)
    world = world or current()
    _check_meeting(world, strategy)
    handle = _handle(world, model, optimizer, strategy, options)
    set_handle(model, handle)
    return handle


def check_attachable(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
    """Raise TypeError or ValueError for other arguments, and for a model that is attached already."""
    strategy_from(strategy)
    away = next((p.device for p in model.parameters() if on_accelerator(p)), None)
    refuse(strategy.features | {"own loop"} | ({"device"} if away else set()), strategy=strategy, device=away)
    if handle_of(model) is not None:
        raise ValueError("this model is attached already; call detach() on its handle first")
    check_bare(model)
    check_hooks(optimizer)
    check_divided(model, optimizer, strategy)


def check_options(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: AttachOptions) -> None:
    """Raise ValueError for options that do not suit the model, the optimizer or the strategy."""
    check_restorable(model, options.on_drift)
    if options.precision is not None:
        _check_precision(options.precision, model, optimizer, strategy, options)


def check_kinds(model: object, optimizer: object) -> None:
    """Raise TypeError for an object that is not a model or not an optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a model, an nn.Module, and its optimizer, got {_kind(model)} as the model")
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, list | tuple) and all(isinstance(each, Optimizer) for each in optimizer)
        remedy = (
            "give one optimizer of all parameters, with groups for settings that differ"
            if several
            else ("write pt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))")
        )
        raise TypeError(f"attach takes one optimizer, a torch.optim.Optimizer, got {_kind(optimizer)}; {remedy}")


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _check_precision(
    precision: Precision, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: AttachOptions
) -> None:
    check_precision(precision, strategy)
    check_masters(model, optimizer, precision)
    if options.scaler is not None:
        raise ValueError(
            f"precision={precision} scales losses itself, where it is needed, and a GradScaler would do it once more; "
            "leave out scaler, and write handle.scaled(loss).backward() under fp16"
        )


def _check_meeting(world: ProcessWorld, strategy: Strategy) -> None:
    """Raise ValueError if this rank can meet no others, and for server processes that the strategy does not use."""
    if world.life > 1:
        raise ValueError(
            f"rank {world.rank} has been started again while the others train on, and the ranks of {strategy} meet in "
            "a process group, which no process can join again; start all of them again"
        )
    if world.servers is not None:
        raise ValueError(
            f"{strategy} has no parameter server, and {len(world.servers.ranks)} of the launcher's processes serve; "
            "leave out pt.init(servers=…), or use a strategy with a server, such as async_sgd()"
        )


def attach_alike(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, *, world: ProcessWorld, options: AttachOptions
) -> Handle:
    """`attach` for ranks that hold the same state already, each its own copy: it compares and sends nothing."""
    check_attachable(model, optimizer, strategy)
    handle = _hooked(world, model, optimizer, strategy, options)
    handle.replica.pace = watch_pace(world, strategy, 0, compares=False)
    set_handle(model, handle)
    return handle


def _handle(
    world: ProcessWorld, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: AttachOptions
) -> Handle:
    ports = ports_of(world.port)
    world.drive(agree_to_train(ports, model, optimizer, strategy, options.facts))
    group = host_group(world, ports.data, strategy)
    if ports.data.size > 1:
        world.drive(begin_alike(ports.data, model, optimizer, shares=group is not None))
    series = next_series(world)
    handle = _hooked(world, model, optimizer, strategy, options, group, series=series)
    compares = options.commit is None  # members of an elastic run come and go
    handle.replica.pace = watch_pace(world, strategy, series, compares=compares)
    return handle


def _hooked(
    world: ProcessWorld,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    options: AttachOptions,
    group: Group | None = None,
    series: int = 0,
) -> Handle:
    """Install the hooks on ranks with equal states. `group`: the ranks of one copy of the parameters. `series`: the
    model's number in its world."""
    ports = ports_of(replace(world.port, series=series))
    own = strategy if group is None else replace(strategy, gradients=identity())  # the step exchanges them
    grows = options.commit is not None and not is_idle(fitted(own, optimizer).parameters, 2)
    replica = Replica(
        model,
        optimizer,
        own,
        max(2, ports.data.size) if grows else ports.data.size,
        bucket_bytes=options.bucket_bytes,
        buffer_rule=options.buffers,
        empty=shared_empty if world.reads_arenas else None,  # the exchange copies nothing from there
        allow_nan=options.allow_nan or (options.scaler is not None and options.scaler.is_enabled()),
        masters=masters_of(model, optimizer, options.precision),
        commit=options.commit,
    )
    copy = one_copy_of(group, strategy, optimizer, replica.trainable, sparse_tables(model))
    turns = None if group is None or copy is not None else in_turns(world, replica.trainable, optimizer, strategy)
    replica.drift = watch(world, ports.data, replica, options.on_drift)
    if (noise := watch_noise(world, ports.data, replica, options.noise_scale)) is not None:
        replica.measure(noise)
    return Handle(world, ports, replica, copy=copy, turns=turns, scaler=options.scaler)


async def begin_alike(port: Port, model: nn.Module, optimizer: Optimizer, *, shares: bool = False) -> None:
    """Give all ranks rank 0's model and optimizer state; ranks that share one copy need no parameters."""
    own = own_parameters(model)
    await broadcast_model(port, model, own | (frozenset(trainable(model, optimizer)) if shares else frozenset()))
    if not own:
        await broadcast_optimizer(port, optimizer)
