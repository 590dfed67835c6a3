"""`LoopCallbacks`: callbacks of a loop of one's own. Rank 0 calls them; all ranks follow after the same step.

rank 0   step ─▶ on_step ─▶ requests ─┐ the look of `PreemptionWatch`, 40 bytes a rank each quarter of a second
others   step ────────────────────────┴─▶ `asked()`, `stopped`, and the end of a shard's batches
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from weakref import ref

import torch
from torch import nn

from polytempo.core.calls.refusals import refuse
from polytempo.core.system.notice import Notice
from polytempo.data.shard import DataShard
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.callbacks.reading import Callbacks
from polytempo.training.hooks.preemption import PreemptionWatch
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.worlds import ProcessWorld, beside


class LoopCallbacks:
    """One rank's part. All ranks make one and call `stepped` after the same steps; rank 0 alone calls the callbacks."""

    def __init__(self, world: ProcessWorld, model: nn.Module, host: CallbackHost) -> None:
        self._host, self._world, self._model = host, world, ref(model)
        before = world.loop_watch
        if isinstance(before, LoopCallbacks) and before.is_on:
            raise ValueError(
                "another model is attached with callbacks, and one loop has one list of them; leave out callbacks=, or "
                "call detach() on the other's handle first"
            )
        world.loop_watch = self
        self._beside = beside(world) if world.size > 1 else world
        self._watch = PreemptionWatch(world, Notice(0.0), wish=host.take)
        self._asked, self._began_s, self._step = Control(), time.monotonic(), 0
        self._shard: DataShard | None = None
        self.stopped = False
        """True once a callback has asked for the end, on all ranks after the same step."""
        self._over = False
        atexit.register(self._at_exit)
        if world.rank == 0:
            host.started()

    # ------------------------------------------------------------------ moments of the loop

    def stepped(self, step: int) -> None:
        """The optimizer's step is done, on all ranks."""
        self._step = step
        if self._world.rank == 0:
            epoch, samples = self._position()
            self._host.stepped(step, epoch, samples, time.monotonic() - self._began_s)
        self._watch.agreed(step)
        self._follow(self._watch.asked(step))

    def evaluated(self, values: Mapping[str, float]) -> None:
        """The ranks have scored their common model, and meet here anyway."""
        if self._world.rank == 0:
            epoch, samples = self._position()
            seconds = time.monotonic() - self._began_s
            self._host.evaluated(values, step=self._step, epoch=epoch, samples=samples, seconds=seconds)
        self._follow(self._beside.drive(self._host.agreed(self._beside.port)))

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
        self._over = True
        atexit.unregister(self._at_exit)
        self._watch.close()
        if self._world.rank == 0:
            self._host.finished()

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

    def _follow(self, asked: Control) -> None:
        self._asked = self._asked.joined(asked)
        self.stopped = self.stopped or asked.stop

    def _position(self) -> tuple[float, int]:
        """Epochs and samples so far, by the shard that training takes batches from."""
        shard = self._shard
        if shard is None or not shard.num_samples:
            return 0.0, 0
        samples = shard.epoch * shard.num_samples + shard.used
        return samples / shard.num_samples, samples


def check_loop_callbacks(callbacks: Callbacks, features: frozenset[str], strategy: object) -> None:
    """Refuse callbacks that a loop of one's own cannot follow."""
    if callbacks:
        needs = {need for each in callbacks for need in each.needs}
        refuse(features | {"own loop", "callbacks"} | needs, strategy=strategy)
