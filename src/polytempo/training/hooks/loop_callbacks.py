"""`LoopCallbacks`: callbacks of a loop of one's own. Rank 0 calls them; all ranks follow after the same step.

rank 0   step ─▶ on_step ─▶ requests ─┐ the look of `PreemptionWatch`, 40 bytes a rank each quarter of a second; in
others   step ────────────────────────┴─▶ `pt.elastic` the commit point ─▶ `asked()`, `stopped`, the end of batches
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import ref

import torch
from torch import nn

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.system.notice import Notice
from polytempo.data.shard import DataShard
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.callbacks.reading import Callbacks, callbacks_of
from polytempo.training.hooks.preemption import PreemptionWatch
from polytempo.training.model.agree import gather_json
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.worlds import ProcessWorld, beside


class LoopRequests(Protocol):
    """The way of requests from rank 0 to all ranks."""

    def after_step(self, step: int, /) -> Control:
        """The requests that this rank follows after `step` steps."""

    def after_evaluation(self) -> Control:
        """The requests that it follows after an evaluation."""

    def close(self) -> None:
        """The loop is over."""


class LoopCallbacks:
    """One rank's part. All ranks make one and call `stepped` after the same steps; rank 0 alone calls the callbacks.

    `requests`: by default looks, and commit points in `pt.elastic`. `position()`: epochs and samples so far; by default
    the position of the shard that training takes batches from.
    """

    def __init__(
        self,
        world: ProcessWorld,
        model: nn.Module,
        host: CallbackHost,
        requests: LoopRequests | None = None,
        position: Callable[[], tuple[float, int]] | None = None,
    ) -> None:
        self._host, self._world, self._model = host, world, ref(model)
        before = world.loop_watch
        if isinstance(before, LoopCallbacks) and before.is_on:
            raise ValueError(
                "another model is attached with callbacks, and one loop has one list of them; leave out callbacks=, or "
                "call detach() on the other's handle first"
            )
        world.loop_watch = self
        group = world.committed
        if requests is None:
            requests = Looks(world, host) if group is None else Commits(world, host)
        self._requests, self._position = requests, position or self._shard_position
        self._asked, self._began_s, self._step = Control(), time.monotonic(), 0
        self._shard: DataShard | None = None
        self.stopped = False
        """True once a callback has asked for the end, on all ranks after the same step."""
        self._over = False
        atexit.register(self._at_exit)
        if group is not None and group.goes_on:
            self._go_on(group.callbacks)
        elif world.rank == 0:
            host.started()

    # ------------------------------------------------------------------ moments of the loop

    def stepped(self, step: int) -> None:
        """The optimizer's step is done, on all ranks."""
        self._step = step
        if self._world.rank == 0:
            epoch, samples = self._position()
            self._host.stepped(step, epoch, samples, time.monotonic() - self._began_s)
        self._follow(self._requests.after_step(step))

    def evaluated(self, values: Mapping[str, float]) -> None:
        """The ranks have scored their common model, and meet here anyway."""
        if self._world.rank == 0:
            epoch, samples = self._position()
            seconds = time.monotonic() - self._began_s
            self._host.evaluated(values, step=self._step, epoch=epoch, samples=samples, seconds=seconds)
        self._follow(self._requests.after_evaluation())

    def ends(self, shard: DataShard) -> bool:
        """True if the batches of `shard` end here, because a callback has asked for the end of the training."""
        model = self._model()
        if model is None or not (model.training and torch.is_grad_enabled()):
            return False
        self._shard = shard
        return self.stopped and not self._over

    @property
    def is_on(self) -> bool:
        """True while the model is attached."""
        return not self._over and self._model() is not None

    def finish(self) -> None:
        """The loop is over, on all ranks; a second call does nothing."""
        if self._over:
            return
        self.leave()
        self._requests.close()
        if self._world.rank == 0:
            self._host.finished()

    def leave(self) -> None:
        """The group of workers is over, and the loop goes on in another one."""
        self._over = True
        atexit.unregister(self._at_exit)

    def fail(self, error: BaseException) -> None:
        """The loop has failed on this rank."""
        if self.is_on and self._world.rank == 0:
            self._host.finished(error)
        self.leave()

    def _at_exit(self) -> None:
        """The program ends without `detach`, perhaps by an exception. No rank waits for others here."""
        self._over = True
        if self._world.rank == 0:
            self._host.finished(getattr(sys, "last_value", None))

    # ------------------------------------------------------------------ requests and states

    def asked(self) -> Control:
        """The requests since the last call; see `Handle.asked`."""
        asked, self._asked = self._asked, Control(stop=self.stopped)
        return asked

    def state(self) -> str:
        """The callbacks' states."""
        return self._host.state()

    def restore(self, state: str, step: int) -> None:
        """Go on from `state`, after `step` steps."""
        self._step = step
        self._host.restore(state)

    def take(self) -> Control:
        """Rank 0's requests since the last call, for a commit point."""
        return self._host.take()

    def commit(self, asked: Control) -> str:
        """All ranks follow the requests `asked`, which came with a commit point; returns the states to be committed."""
        self._follow(asked)
        return json.dumps([self.state(), self.stopped])

    def _go_on(self, committed: str) -> None:
        """Another group of workers goes on from a commit. All its ranks get rank 0's states."""
        if committed:
            states, self.stopped = json.loads(committed)
            self._host.restore(states)
        port = self._world.port
        self.stopped = any(self._world.drive(gather_json(port, self.stopped)))
        if port.rank == 0:
            self._host.started()
            self._host.faulted(f"the group of workers has changed: {port.size} go on")
        self._follow(self._world.drive(self._host.agreed(port)))

    def _follow(self, asked: Control) -> None:
        self._asked = self._asked.joined(asked)
        self.stopped = self.stopped or asked.stop

    def _shard_position(self) -> tuple[float, int]:
        """Epochs and samples so far, by the shard that training takes batches from."""
        shard = self._shard
        if shard is None or not shard.num_samples:
            return 0.0, 0
        samples = shard.epoch * shard.num_samples + shard.used
        return samples / shard.num_samples, samples


class Looks:
    """Requests travel with the look for SIGTERM, and behind an evaluation's sums."""

    def __init__(self, world: ProcessWorld, host: CallbackHost) -> None:
        self._host, self._beside = host, beside(world) if world.size > 1 else world
        self._watch = PreemptionWatch(world, Notice(0.0), wish=host.take)

    def after_step(self, step: int) -> Control:
        """See `LoopRequests`."""
        self._watch.agreed(step)
        return self._watch.asked(step)

    def after_evaluation(self) -> Control:
        """See `LoopRequests`."""
        return self._beside.drive(self._host.agreed(self._beside.port))

    def close(self) -> None:
        """See `LoopRequests`."""
        self._watch.close()


class Commits:
    """Requests travel with the commit points of `pt.elastic`: `take` and `commit` of `LoopCallbacks`."""

    def __init__(self, world: ProcessWorld, host: CallbackHost) -> None:
        self._world, self._host = world, host

    def after_step(self, step: int) -> Control:
        """Nothing: the step's commit brings them."""
        return Control()

    def after_evaluation(self) -> Control:
        """See `LoopRequests`."""
        return self._world.drive(self._host.agreed(self._world.port))

    def close(self) -> None:
        """Nothing is under way."""


def loop_callbacks(given: object, strategy: Strategy) -> Callbacks:
    """The callbacks of a loop of one's own. ValueError for other values, and for callbacks that it cannot follow."""
    try:
        callbacks = callbacks_of(given)
    except ValueError as error:
        raise ValueError(f"callbacks: {error}") from None
    if callbacks:
        needs = {need for each in callbacks for need in each.needs}
        features = strategy.features - {"stages", "parts"}  # `attach` refuses them, `pipeline` has them
        refuse(features | {"own loop", "callbacks"} | needs, strategy=strategy)
    return callbacks
