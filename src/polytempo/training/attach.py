"""`attach`: one line makes an ordinary training loop distributed.

loss.backward()      each bucket's transform starts as soon as its last gradient is there;
                     when backward returns, every `.grad` is the strategy's answer
optimizer.step()     afterwards the parameters' transform runs, then buffers meet
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from polytempo.core import Port, Strategy, identity
from polytempo.native.arena import shared_empty
from polytempo.native.group import Group
from polytempo.one_host.hogwild import in_turns
from polytempo.one_host.one_copy import host_group, one_copy_of
from polytempo.strategies import sync_sgd
from polytempo.training.agree import agree_to_train
from polytempo.training.bucket import DEFAULT_BUCKET_BYTES
from polytempo.training.buffers import BufferRule
from polytempo.training.drift_watch import OnDrift, watch
from polytempo.training.handle import Handle
from polytempo.training.loss_scale import facts as scaler_facts
from polytempo.training.model_broadcast import broadcast_model
from polytempo.training.optimizer_state import broadcast_optimizer
from polytempo.training.ownership import check_hooks
from polytempo.training.ports import ports_of
from polytempo.training.replica import Replica
from polytempo.training.trainable_parameters import sparse_tables, trainable
from polytempo.worlds import ProcessWorld, current

_handles: WeakKeyDictionary[nn.Module, ref[Handle]] = WeakKeyDictionary()
"""Weak on both sides, because a handle holds its model; what keeps a handle alive is its optimizer."""


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | None = None,
    *,
    world: ProcessWorld | None = None,
    buffers: BufferRule = "average",
    find_unused: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    seed: int | None = None,
    scaler: GradScaler | None = None,
    on_drift: OnDrift = "stop",
    allow_nan: bool = True,
) -> Handle:
    """Make the training loop around `model` and `optimizer` distributed; the loop itself stays as it is.

        handle = pt.attach(model, optimizer, pt.strategies.local_sgd(period=8))
        for x, y in pt.shard(loader):
            optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()

    One model has exactly one optimizer, and all that it trains are parameters of the model: put two models that train
    together into one nn.ModuleList, and settings that differ into parameter groups of one optimizer. What begins to
    train later (`add_param_group`, thawed layers, a new optimizer) needs detach() and a new attach; `step` says so. Of
    an optimizer that wraps another, as SAM and Lookahead do, attach the one whose `step` is called.

    All ranks take rank 0's parameters, buffers and optimizer state, once all have the same strategy, model and versions
    (`Mismatch` names both values). In a mesh (`pt.init(mesh=…)`) "all ranks" are those along "data", for each part.

    When `backward()` returns, `.grad` holds the strategy's answer: clip it, scale it, look at it, then step. What the
    strategy remembers is tentative until `step()`, closures included: a backward pass whose gradients no step uses (a
    GAN's other loss, a first pass of SAM) leaves nothing behind. A step of gradients that were added to an answer is
    refused by all but plain means (RuntimeError): accumulate inside `no_sync()`. Frozen layers stay where they are.
    Gradients put into `.grad` by hand are exchanged by `step` where no backward pass came since the last step, and are
    edits of its answer where one did: let that pass be inside `no_sync()`. After `model.load_state_dict()` (by all
    ranks) the strategy begins anew from there; other changes in place, as clipped weights, are movements of the step.
    A parameter that this rank did not use counts as a zero gradient; with `find_unused` one that no rank used keeps
    `.grad` None, for one more small all-reduce a step. Under `shared_memory()` `.grad` is this rank's own gradient,
    `step` does all the rest and waits for all (so all take or skip it alike), clipping is the handle's
    `clip_grad_norm_`, and other changes of parameters are made by one rank.

    `buffers`: what happens when ranks meet: the running statistics of torch's batch and instance norms meet on the
    strategy's own way, with no other ranks (their mean; a gossip's mix; a robust merge), other buffers and counts of
    batches are left alone ("average"); all ranks get rank 0's buffers, all of them ("broadcast"); or nothing ("leave").
    `scaler`, the loop's GradScaler: gradients are exchanged without its scale, and all ranks skip the same steps, for
    one small all-reduce a backward pass where the strategy is no plain mean, which without it refuses a GradScaler.
    `on_drift`: where the strategy promises equal models, ranks compare hashes of all that is equal then, and find a
    flipped bit within 256 steps (`training.drift_watch`). Ranks that differ raise `Drifted` ("stop"), the minority of
    them takes over the others' state ("restore"), or nothing is compared ("ignore").
    `allow_nan`: NaN and infinities travel as in DDP; with False the rank that brings one raises `NotFinite`, with step
    and parameter, before another rank gets it (on the CPU; a `scaler` goes on skipping steps that overflow).
    `strategy` defaults to `sync_sgd()`; `world` to the one that `pt.init()` joined, or a world of one. `seed` must be
    the same everywhere. Cost alone: a counter a step. Memory: one flat copy of the gradients, where `.grad` points.
    """
    strategy = sync_sgd() if strategy is None else strategy
    _check(model, strategy)
    check_hooks(optimizer)
    options = _Options(buffers, find_unused, bucket_bytes, seed, scaler, on_drift, allow_nan)
    handle = _handle(world or current(), model, optimizer, strategy, options)
    _handles[model] = ref(handle)
    return handle


def attach_alike(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    *,
    world: ProcessWorld,
    on_drift: OnDrift = "stop",
    allow_nan: bool = True,
) -> Handle:
    """`attach` where all ranks hold the same state already, each its own copy: it compares and sends nothing."""
    _check(model, strategy)
    options = _Options("average", False, DEFAULT_BUCKET_BYTES, None, None, on_drift, allow_nan)
    handle = _hooked(world, model, optimizer, strategy, options)
    _handles[model] = ref(handle)
    return handle


def detach_from(model: nn.Module) -> None:
    """Take off the hooks of the handle that `attach(model, …)` returned, if there are some."""
    handle = _attached(model)
    if handle is not None:
        handle.detach()


class _Options(NamedTuple):
    """What `attach` was given besides."""

    buffers: BufferRule
    find_unused: bool
    bucket_bytes: int
    seed: int | None
    scaler: GradScaler | None
    on_drift: OnDrift
    allow_nan: bool


def _handle(
    world: ProcessWorld, model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: _Options
) -> Handle:
    asked = options._asdict() | {"scaler": scaler_facts(options.scaler)}
    ports = ports_of(world.port)
    world.drive(agree_to_train(ports, model, optimizer, strategy, asked))
    group = host_group(world, ports.data, strategy)
    if ports.data.size > 1:
        world.drive(_begin(ports.data, model, optimizer, shares=group is not None))
    return _hooked(world, model, optimizer, strategy, options, group)


def _hooked(
    world: ProcessWorld,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    options: _Options,
    group: Group | None = None,
) -> Handle:
    """The hooks, once all ranks hold the same. `group`: where they share one copy of the parameters."""
    ports = ports_of(world.port)
    own = strategy if group is None else replace(strategy, gradients=identity())  # the step exchanges them
    replica = Replica(
        model,
        optimizer,
        own,
        ports.data.size,
        bucket_bytes=options.bucket_bytes,
        buffer_rule=options.buffers,
        empty=shared_empty if world.reads_arenas else None,  # what lies there is not copied to be exchanged
        allow_nan=options.allow_nan or (options.scaler is not None and options.scaler.is_enabled()),
    )
    copy = one_copy_of(group, strategy, optimizer, replica.trainable, sparse_tables(model))
    turns = None if group is None or copy is not None else in_turns(world, replica.trainable, optimizer, strategy)
    replica.drift = watch(world, ports.data, replica, options.on_drift)
    return Handle(world, ports, replica, find_unused=options.find_unused, copy=copy, turns=turns, scaler=options.scaler)


def _check(model: nn.Module, strategy: Strategy) -> None:
    if not isinstance(strategy, Strategy):
        name = getattr(strategy, "__name__", "sync_sgd")
        raise TypeError(f"a strategy is the answer of one of pt.strategies, got {strategy!r}; write {name}()")
    if strategy.slices is not None:
        raise ValueError(
            f"{strategy} has its batches computed in {strategy.slices} slices, which a loop of your own does not do; "
            "make a job of it and use pt.run or pt.Trainer, or give another route"
        )
    if _attached(model) is not None:
        raise ValueError("this model is attached already; call detach() on its handle first")


def _attached(model: nn.Module) -> Handle | None:
    handle = _handles.get(model)
    found = None if handle is None else handle()
    return found if found is not None and found.attached else None


async def _begin(port: Port, model: nn.Module, optimizer: Optimizer, *, shares: bool) -> None:
    await broadcast_model(port, model, frozenset(trainable(model, optimizer)) if shares else frozenset())
    await broadcast_optimizer(port, optimizer)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """`handle.no_sync()` of the handle that `attach(model, …)` returned: accumulate gradients without exchanging."""
    handle = _attached(model)
    if handle is None:
        raise ValueError("this model is not attached; call pt.attach(model, optimizer, strategy) first")
    with handle.no_sync():
        yield
