"""`attach`: one line makes an ordinary training loop distributed."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.system.url_path import Place
from polytempo.large_batch.noise_scale import NoiseProbe
from polytempo.partition.branches import Threads
from polytempo.runs.own_loop.loop_link import LoopServerStart
from polytempo.runs.own_loop.watching import Watching, watching
from polytempo.spec.precision import Precision, precision_of
from polytempo.spec.run_spec import check_precision
from polytempo.spec.text.catalogue import strategy_from
from polytempo.spec.text.profiled_steps import ProfiledSteps
from polytempo.strategies import sync_sgd
from polytempo.training.hooks.attach import AttachOptions, attach_replica, begin_alike, check_attachable, check_kinds
from polytempo.training.hooks.attached_models import set_handle
from polytempo.training.hooks.drift_watch import OnDrift
from polytempo.training.hooks.handle import Handle
from polytempo.training.hooks.loop_callbacks import LoopCallbacks
from polytempo.training.model.agree import agree_to_train
from polytempo.training.model.ports import ports_of
from polytempo.training.model.requirements import check_served
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.own_loop.served_handle import ServedHandle
from polytempo.training.own_loop.store_loop import attach_in_store
from polytempo.training.precision.masters import check as check_masters
from polytempo.training.step.bucket_cuts import DEFAULT_BUCKET_BYTES
from polytempo.training.step.buffers import BufferRule
from polytempo.worlds import ProcessWorld, current
from polytempo.worlds.object_store.store_world import StoreWorld


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | str | None = None,
    *,
    world: ProcessWorld | None = None,
    buffers: BufferRule = "average",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    seed: int | None = None,
    scaler: GradScaler | None = None,
    on_drift: OnDrift = "stop",
    allow_nan: bool = True,
    threads: int | None = None,
    inter_threads: int = 1,
    noise_scale: int | None = None,
    batch_size: int | None = None,
    precision: Precision | str | None = None,
    out: Place | str | None = None,
    trackers: Sequence[object] | str = (),
    profile: ProfiledSteps | str | None = None,
    callbacks: Sequence[object] | str = (),
) -> Handle | ServedHandle:
    """Make the training loop around `model` and `optimizer` distributed; the loop itself does not change.

        handle = pt.attach(model, optimizer, pt.strategies.local_sgd(period=8))
        for x, y in pt.shard(loader):
            optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()

    After `backward()`, `.grad` holds the strategy's answer: clip it, scale it, read it, then step. All ranks start with
    rank 0's parameters, buffers and optimizer state, once all have the same strategy, model and versions (`Mismatch`
    names both values). In a mesh (`pt.init(mesh=…)`) "all ranks" are the ranks along "data", for each part.

    One model has one optimizer: put two models that train together into one nn.ModuleList, and different settings into
    parameter groups. Thawed layers or a new optimizer need detach() and a new attach. Of nested optimizers, such as
    SAM, attach the optimizer that your loop steps. The strategy's state is tentative until `step()`, closures included:
    a backward pass without a step (a GAN's other loss, SAM's first pass) leaves nothing behind. Accumulate inside
    `no_sync()`: only plain means take gradients that were added to an answer (else RuntimeError). Frozen layers stay
    unchanged. `step` exchanges gradients set by hand if no backward pass came since the last step; else they edit its
    answer: run that pass inside `no_sync()`. After `model.load_state_dict()` (by all ranks) the strategy begins again;
    other changes in place (clipped weights) belong to the step. A parameter unused on this rank counts as a zero
    gradient; unused on all ranks it keeps `.grad` None. Under `shared_memory()` `.grad` is this rank's own gradient,
    `step` does the rest and waits for all; clip by the handle's `clip_grad_norm_`.

    `buffers`: with "average", running statistics of torch's batch and instance norms meet when ranks meet, between the
    same ranks; other buffers and counts of batches do not change. "broadcast": all ranks get all of rank 0's buffers.
    "leave": nothing. `scaler`, the loop's GradScaler: gradients are exchanged without its scale, and all ranks skip the
    same steps. Cost: one small all-reduce a backward pass, unless the strategy is a plain mean; only a plain mean works
    without passing it. `on_drift`: where a strategy promises equal models, ranks compare hashes of them
    (`training.drift_watch`). Ranks that differ raise `Drifted` ("stop"), their minority takes over the others' state
    ("restore"), or nothing is compared ("ignore"). `allow_nan`: NaN and infinities travel as in DDP. With False the
    rank that brings one raises `NotFinite` before another rank gets it (on the CPU; a `scaler` skips steps that
    overflow). `seed`: equal on all ranks. `threads`, `inter_threads`: of this rank. `noise_scale`: steps between looks
    at it, with the rank's `batch_size`. `precision`: 16-bit parameters. `world`: by default from `pt.init()`.

    `out`: a folder for `handle.log`, `pt.log` and the run's stream, which rank 0 holds until `detach`. `trackers` show
    it meanwhile, as in `RunOptions`. `profile`: steps that torch.profiler records there, as text: "20:30". `callbacks`:
    rank 0 calls them, all ranks follow; `pt.shard` ends where one asks for it, `handle.asked` tells other requests.
    A parameter server (`downpour`, …) runs beside rank 0, or on processes of `pt.init(servers=…)`; `pt.shard` deals its
    batches. Memory: one flat copy of the gradients.
    """
    strategy, world, bits = _checked(model, optimizer, strategy), world or current(), precision_of(precision)
    shown = watching(strategy, out, trackers, callbacks, profile)
    noise, served = _probe(noise_scale, batch_size), strategy.server is not None and not isinstance(world, StoreWorld)
    options = AttachOptions(buffers, bucket_bytes, seed, scaler, on_drift, allow_nan, noise, bits, str(shown.callbacks))
    branched = _branched(model, Threads(threads, inter_threads), bits)
    begin = attach_served if served else _attach_between_equals
    handle = begin(model, optimizer, strategy, world=world, options=options)
    handle.threaded = branched.apply(model)
    _begin_watching(handle, model, strategy, shown)
    return handle


def _attach_between_equals(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, *, world: ProcessWorld, options: AttachOptions
) -> Handle:
    if isinstance(world, StoreWorld):
        return attach_in_store(model, optimizer, strategy, world=world, options=options)
    return attach_replica(model, optimizer, strategy, world=world, options=options)


def _begin_watching(handle: Handle | ServedHandle, model: nn.Module, strategy: Strategy, shown: Watching) -> None:
    """Open the loop's folder, begin the profile, and call the callbacks' `on_start`."""
    here, world = ref(handle), handle.world  # a handle's hooks keep it alive, and nothing else must
    shown.begin(handle, world, model, strategy, writes=world.rank == 0, step=lambda: getattr(here(), "step", 0))
    if shown.callbacks:
        host = CallbackHost(shown.callbacks, shown.folder)
        if isinstance(handle, ServedHandle):
            handle.begin_callbacks(host)
        else:
            handle.begin_callbacks(LoopCallbacks(world, model, host))


def _checked(model: object, optimizer: object, strategy: Strategy | str | None) -> Strategy:
    check_kinds(model, optimizer)
    return sync_sgd() if strategy is None else strategy_from(strategy)


def _probe(noise_scale: int | None, batch_size: int | None) -> NoiseProbe | None:
    if noise_scale is None and batch_size is None:
        return None
    if noise_scale is None or batch_size is None:
        raise ValueError(
            f"noise_scale={noise_scale} and batch_size={batch_size} go together: steps between two looks, and samples "
            "of this rank in a step; give both, or leave both out"
        )
    return NoiseProbe(batch_size, noise_scale)


def _branched(model: nn.Module, threads: Threads, precision: Precision | None) -> Threads:
    if precision is not None and threads.inter > 1:
        raise ValueError(
            f"precision={precision} and inter_threads={threads.inter} both replace the model's forward, and a loop of "
            "your own can have one of them; leave one out, or make a job of it"
        )
    return threads.checked(model)


def attach_served(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, *, world: ProcessWorld, options: AttachOptions
) -> ServedHandle:
    """`attach` for strategies with a parameter server. Its first process starts here, on rank 0."""
    check_attachable(model, optimizer, strategy)
    ports, features = ports_of(world.port), strategy.features | {"own loop"}
    asked = {"noise scale": options.noise_scale is not None, "mesh": ports.model.size > 1}
    refuse(features | {name for name, has in asked.items() if has}, strategy=strategy)
    if options.precision is not None:
        check_precision(options.precision, strategy)
        check_masters(model, optimizer, options.precision)
    if world.epoch_source is not None:
        raise ValueError(
            "another model is attached with a parameter server, which deals the batches; put both models into one "
            "nn.ModuleList, or call detach() on the other's handle first"
        )
    check_served(model, optimizer, strategy, strategy.features, options.buffers)
    _check_servers(world, strategy)
    if world.deaths is not None:
        world.deaths.tolerate()
    if world.life == 1:  # a rank that comes back gets all of it from the server
        world.drive(agree_to_train(ports, model, optimizer, strategy, options.facts))
    if world.life == 1 and world.size > 1:
        world.drive(begin_alike(ports.data, model, optimizer))
    bits, start = options.precision, LoopServerStart(world)
    handle = ServedHandle(world, model, optimizer, strategy, start, allow_nan=options.allow_nan, precision=bits)
    set_handle(model, handle)
    return handle


def _check_servers(world: ProcessWorld, strategy: Strategy) -> None:
    """Raise ValueError if two copies of a shard would be on one server, or a server would hold nothing."""
    service = strategy.server
    if world.servers is None or service is None:
        return
    servers, copies = len(world.servers.ranks), 1 + service.replicas
    if copies > servers:
        raise ValueError(
            f"{strategy} keeps {copies} copies of each shard, each on a server of its own, and servers={servers}; give "
            f"pt.init(servers={copies}) or more, or replicas={servers - 1}"
        )
    if service.shards * copies < servers:
        raise ValueError(
            f"{strategy} has {service.shards * copies} copies of shards in all, so some of the {servers} servers would "
            f"hold nothing; give shards={-(-servers // copies)} or more, or pt.init(servers={service.shards * copies})"
        )
