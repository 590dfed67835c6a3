"""`attach`: one line makes an ordinary training loop distributed.

loss.backward()      each bucket's transform starts as soon as its last gradient is there;
                     when backward returns, every `.grad` is the strategy's answer
optimizer.step()     afterwards the parameters' transform runs, then buffers meet
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.collectives import tree
from polytempo.core import Port, Strategy, identity
from polytempo.core.state import Saved
from polytempo.native.arena import shared_empty
from polytempo.strategies import sync_sgd
from polytempo.torch.agree import agree, facts
from polytempo.torch.bucket import DEFAULT_BUCKET_BYTES, Bucket
from polytempo.torch.hogwild import TurnHooks, in_turns
from polytempo.torch.join import Membership
from polytempo.torch.one_copy import OneCopy, host_group, one_copy_of, own_parameters
from polytempo.torch.optimizer_state import broadcast_optimizer
from polytempo.torch.replica import BufferRule, Replica, sparse_tables, take_over, trainable
from polytempo.worlds import ProcessWorld, current

_handles: WeakKeyDictionary[nn.Module, ref[Handle]] = WeakKeyDictionary()
"""Weak on both sides, because a handle holds its model; what keeps a handle alive is its optimizer."""


class Handle:
    """What `attach` returns: the replica, the hooks, and the ways to pause, join, save and end."""

    def __init__(
        self,
        world: ProcessWorld,
        replica: Replica,
        *,
        find_unused: bool,
        copy: OneCopy | None = None,
        turns: TurnHooks | None = None,
    ) -> None:
        self.world, self.replica = world, replica
        self.one_copy, self._turns = copy, turns
        self._find_unused = find_unused
        self._silent = False
        self._members = Membership(world, replica)
        self._exchanged = False
        self._met_before = False
        """Whether there was an exchange since the last step already."""
        self._backward: ref[Callable[[], None]] | None = None
        """What torch calls when the backward pass is over, and holds no longer than that."""
        self._missing = [len(bucket.parameters) for bucket in replica.buckets]
        self._launched: list[Any] = []
        self._mark_s = world.now_s()
        optimizer = replica.optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._num_held, self._frozen = len(held), [p for p in held if not p.requires_grad]
        self._hooks: list[Any] = []
        self._idle = copy is None and not (replica.exchanges_gradients or replica.exchanges_parameters)
        if not self._idle:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        for bucket in replica.buckets:
            for parameter in bucket.parameters.values():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrival(bucket)))

    @property
    def step(self) -> int:
        """Optimizer steps since the start (of the first run, where one was resumed)."""
        return self.replica.step

    # ------------------------------------------------------------------ gradients

    def _arrival(self, bucket: Bucket) -> Callable[[Tensor], None]:
        index = bucket.index
        weakly = ref(self)  # torch keeps a parameter's hooks where the garbage collector does not look

        def arrived(_: Tensor) -> None:
            handle = weakly()
            if handle is not None:
                handle._arrived(index)

        return arrived

    def _arrived(self, index: int) -> None:
        if self._silent:
            self._exchanged = False
            return
        if self._backward is None or self._backward() is None:
            self._begin_exchange()
            self._follow_backward()
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise RuntimeError(
                "a gradient arrived twice in one backward pass, perhaps after its exchange had begun; use "
                "checkpointing with use_reentrant=False, or no_sync() around all backward passes but the last"
            )
        if self._missing[index] == 0 and not self._members.joining and index == len(self._launched):
            self._launch_ready()

    def _begin_exchange(self) -> None:
        """Forget a backward pass that failed, and refuse a second exchange where a step may have but one."""
        if self._launched:
            raise RuntimeError(
                f"a backward pass ended with an error when {len(self._launched)} of {len(self._missing)} exchanges had "
                "begun, which cannot be taken back; end this run and go on from its last checkpoint"
            )
        self._backward = None
        self._missing = [len(bucket.parameters) for bucket in self.replica.buckets]
        buckets = self.replica.buckets
        counted = self._members.joining or any(bucket.remembers for bucket in buckets)
        if self._met_before and counted and any(bucket.accumulating for bucket in buckets):
            raise RuntimeError(
                f"gradients would be exchanged a second time before optimizer.step(), but {self.replica.strategy} "
                "(or join) counts every exchange as a step; put no_sync() around all backward passes but the last, and "
                "use checkpointing with use_reentrant=False"
            )

    def _follow_backward(self) -> None:
        finish = self._finish_exchange
        self._backward = ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _launch_ready(self) -> None:
        """Start the buckets that are complete, in their order, which is the same on every rank."""
        self.replica.share = self.world.share
        while len(self._launched) < len(self._missing) and self._missing[len(self._launched)] <= 0:
            self._launch(self.replica.buckets[len(self._launched)])

    def _launch(self, bucket: Bucket) -> None:
        self._launched.append(self.world.launch(self.replica.exchange(self.world.port, bucket)))

    def _finish_exchange(self) -> None:
        """Start what has not been started, and wait for everything."""
        if self.world.size > 1:
            self.world.record("compute", self._mark_s)
        try:
            self._members.agree_on_share()
            used = self._used() if self._find_unused or self.world.size == 1 else None
            for bucket in self.replica.buckets[len(self._launched) :]:
                self._launch(bucket)
            if used is not None:
                self._keep_none(used)
            for strand in self._launched:
                strand.wait()
        finally:
            self._launched = []
            self._missing = [len(bucket.parameters) for bucket in self.replica.buckets]
            self._backward = None
        self._exchanged = self._met_before = True
        self._mark_s = self.world.now_s()

    def _used(self) -> list[Tensor]:
        return [
            torch.tensor([float(p.grad is not None) for p in bucket.parameters.values()])
            for bucket in self.replica.buckets
        ]

    def _keep_none(self, used: list[Tensor]) -> None:
        """Parameters that no rank used keep `.grad` None."""
        total = self.world.drive(tree(self.world.port, torch.cat(used)))
        for bucket, counts in zip(self.replica.buckets, total.split([len(u) for u in used]), strict=True):
            names = zip(bucket.parameters, counts.tolist(), strict=True)
            bucket.keep_none = frozenset(name for name, count in names if not count)

    # ------------------------------------------------------------------ the step

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        self._check_parameters()
        if self.one_copy is not None:
            return self._step_together(self.one_copy, args, kwargs)
        if not self.replica.exchanges_gradients:
            self._members.agree_on_share()
        elif not self._exchanged:
            self._begin_exchange()
            self._finish_exchange()
        return None

    def _step_together(self, copy: OneCopy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the step on the one copy. A closure is called first, for torch would call it after the step."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.world.size > 1:
            self.world.record("compute", self._mark_s)
        self._members.agree_on_share()
        start_s = self.world.now_s()
        copy.step(self.replica.share)
        self.world.record("step", start_s)
        self.replica.has_met()
        return None if closure is None else ((args[0], lambda: loss), {})

    def _check_parameters(self) -> None:
        """Parameters that began to train after `attach` would train on every rank apart."""
        num_held = sum([len(group["params"]) for group in self.replica.optimizer.param_groups])
        thawed = self._frozen and any(parameter.requires_grad for parameter in self._frozen)
        if thawed or num_held != self._num_held:
            what = "a frozen parameter needs gradients now" if thawed else "the optimizer was given other parameters"
            raise RuntimeError(f"{what}, which nobody exchanges; call detach() on the handle and attach again")

    def _after_step(self, *_: Any) -> None:
        if self._idle:
            self.replica.step += 1
            self.world.step = self.replica.step
            return
        if self.one_copy is not None:
            self.one_copy.end_step()
        if self.world.size > 1 and self.replica.exchanges_parameters:
            self.world.record("compute", self._mark_s)
        self.world.drive(self.replica.finish_step(self.world.port))
        self.world.step = self.replica.step
        self._exchanged = self._met_before = False
        self._mark_s = self.world.now_s()

    # ------------------------------------------------------------------ contexts

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the next one outside exchanges their sum.

        The sum has the weight of the last batch: its share where `pt.shard` deals batches unevenly.
        """
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Ranks may leave the loop inside after different numbers of steps; nobody hangs.

        A rank that leaves goes on taking part with weight zero until all have left; those that are still
        active count the same, whatever `pt.shard` says. All end with the same parameters and running
        statistics: where a strategy lets models differ, with the mean of those that trained to the last step.
        Each step costs one more all-reduce of one number for each rank, which tells who is active.

        Raises ValueError where the strategy would hear those that have left: gossip, adasum, robust merges.
        """
        with self._members.join(self._shadow_step):
            yield

    def _shadow_step(self) -> None:
        if self.replica.exchanges_gradients:
            self.replica.optimizer.zero_grad()
            self._finish_exchange()
            self.replica.optimizer.step()
        elif self.one_copy is not None or self.replica.strategy.carries_optimizer:
            self.replica.optimizer.zero_grad()
            self.replica.optimizer.step()  # its slice of the one copy; or so that there is state, for others to average
        else:
            self._after_step()

    # ------------------------------------------------------------------ saving and ending

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state of this rank, by parameter: save it beside the model's and the optimizer's.

        All ranks must call it, because exchanges that are under way are finished first.
        """
        self.world.drive(self.replica.settle())
        tensors, scalars = self.replica.state()
        return {
            "strategy": str(self.replica.strategy),
            "tensors": {k: t.clone() for k, t in tensors.items()},
            "scalars": scalars,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank."""
        if state["strategy"] != str(self.replica.strategy):
            raise ValueError(f"the state was saved by {state['strategy']}, but {self.replica.strategy} is attached")
        self.replica.restore(Saved(state["tensors"], state["scalars"]))
        self.world.step = self.replica.step

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let the coming step have a gradient of norm at most `max_norm`; returns the norm that it has now.

        The norm is that of the ranks' mean gradient. `.grad` holds it where the strategy exchanges gradients in
        `backward`, and is scaled as `torch.nn.utils.clip_grad_norm_` does. Under `shared_memory()` `.grad` is this
        rank's own: all ranks call this, and the step does the scaling.
        """
        if self.one_copy is None:
            return nn.utils.clip_grad_norm_(self.replica.trainable.values(), max_norm)
        if self._members.joining:
            raise ValueError(
                "inside join() those that have left could not take part in clip_grad_norm_(); leave it out"
            )
        self._members.agree_on_share()
        return self.one_copy.clip_grad_norm_(max_norm, self.replica.share)

    def detach(self) -> None:
        """Take the hooks off; the loop is an ordinary one again.

        Where ranks share one copy of the parameters all must call it, and each gets parameters of its own.
        """
        for hook in [*self._hooks, *self.replica.hooks]:
            hook.remove()
        self._hooks = []
        if self._turns is not None:
            self._turns.remove()
            own_parameters(self.world, self.replica.trainable, self._turns.common)
        if self.one_copy is not None:
            self.one_copy.detach()
        _handles.pop(self.replica.model, None)


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
) -> Handle:
    """Make the training loop around `model` and `optimizer` distributed; the loop itself stays as it is.

        handle = pt.attach(model, optimizer, pt.strategies.local_sgd(period=8))
        for x, y in pt.shard(loader):
            optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()

    One model has exactly one optimizer, and all that it trains are parameters of the model: put two models that
    train together into one nn.ModuleList, and settings that differ into parameter groups of one optimizer. What
    begins to train later (`add_param_group`, thawed layers) needs detach() and a new attach; `step` says so.

    Rank 0's parameters, buffers and optimizer state are given to all ranks first, after checking that all
    run the same strategy on the same model with the same versions (`Mismatch` names both values).

    When `backward()` returns, `.grad` holds the strategy's answer: clip it, scale it, look at it, then step.
    A parameter that this rank did not use counts as a zero gradient; with `find_unused` one that no rank
    used keeps `.grad` None, for one more small all-reduce a step. Under `shared_memory()` it is otherwise: `.grad` is
    this rank's own gradient, `step` does all the rest and waits for all (so all take or skip it alike), clipping is
    the handle's `clip_grad_norm_`, and who changes parameters in other ways does it on one rank: all see the same.

    `buffers`: what happens when ranks meet: running statistics of torch's norms meet on the strategy's own way, other
    buffers are left alone ("average"); all ranks take rank 0's buffers, all of them ("broadcast"); nothing ("leave").
    `strategy` defaults to `sync_sgd()`; `world` to the one that `pt.init()` joined, or a world of one. `seed`,
    where given, must be the same everywhere.

    Cost alone: nothing but a counter a step for strategies that are idle with one rank. Memory: one flat
    copy of the gradients, which `.grad` then points into.
    """
    world = world or current()
    strategy = sync_sgd() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        name = getattr(strategy, "__name__", "sync_sgd")
        raise TypeError(f"a strategy is the answer of one of pt.strategies, got {strategy!r}; write {name}()")
    if _attached(model) is not None:
        raise ValueError("this model is attached already; call detach() on its handle first")
    options = {"buffers": buffers, "find_unused": find_unused, "bucket_bytes": bucket_bytes, "seed": seed}
    world.drive(agree(world.port, facts(model, optimizer, strategy) | options))
    group = host_group(world, strategy)
    if world.size > 1:
        world.drive(_begin(world.port, model, optimizer, shares=group is not None))
    own = strategy if group is None else replace(strategy, gradients=identity())  # the step exchanges them
    empty = shared_empty if world.reads_arenas else None  # what lies there is not copied to be exchanged
    replica = Replica(model, optimizer, own, world.size, bucket_bytes=bucket_bytes, buffer_rule=buffers, empty=empty)
    copy = one_copy_of(group, strategy, optimizer, replica.trainable, sparse_tables(model))
    turns = (
        None if group is None or copy is not None else in_turns(world, replica.trainable, replica.optimizer, strategy)
    )
    handle = Handle(world, replica, find_unused=find_unused, copy=copy, turns=turns)
    _handles[model] = ref(handle)
    return handle


def _attached(model: nn.Module) -> Handle | None:
    handle = _handles.get(model)
    return None if handle is None else handle()


async def _begin(port: Port, model: nn.Module, optimizer: Optimizer, *, shares: bool) -> None:
    await take_over(port, model, frozenset(trainable(model, optimizer)) if shares else frozenset())
    await broadcast_optimizer(port, optimizer)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """`handle.no_sync()` of the handle that `attach(model, …)` returned: accumulate gradients without exchanging."""
    handle = _attached(model)
    if handle is None:
        raise ValueError("this model is not attached; call pt.attach(model, optimizer, strategy) first")
    with handle.no_sync():
        yield
