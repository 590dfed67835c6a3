"""Ranks that work in step score and save in step, too: all stop, each does its part, all go on.

rank 0   step │ its part of the test set │ step          the clock of training stands still meanwhile; random
rank 1   step │ its part of the test set │ step          numbers and messages for it count nowhere
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from polytempo.core import Port, Program
from polytempo.training.federated.client_states import own_tensors
from polytempo.training.job.context import Moment, TrainingContext
from polytempo.training.job.evaluate import Evaluation, Score, evaluate, meets, of_first_part
from polytempo.training.model.ports import ports_of
from polytempo.training.model.randomness import kept_random_states
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.observe.checkpoint_writer import save, saved_row
from polytempo.training.observe.holding import Whole
from polytempo.worlds import ProcessWorld

T = TypeVar("T")


class CollectiveObserver:
    """The observer of real ranks that wait for each other. See `training.Observer`.

    The ranks of a model's first part score a model in parts.

    Cost of a score: 1/N of the test set on each of N ranks; and the mean of the models where they differ.
    """

    def __init__(self, world: ProcessWorld, evaluation: Evaluation | None) -> None:
        self._world, self._evaluation = world, evaluation
        self.off_s = 0.0
        self.off_bytes = 0
        self._reached: bool | None = None
        self._newest: tuple[int, Score] | None = None

    def begins(self, rank: int, step: int) -> None:
        """All ranks go step by step, so there is nothing to remember."""

    def over(self, step: int) -> bool:
        """The last score's answer, which all ranks have."""
        return bool(self._reached)

    async def score(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Score the ranks' mean, now."""
        await self._outside(port, "score", self._score(port, context, moment, None))
        await self._agree(port, context)

    async def agreed_score(self, port: Port, context: TrainingContext, step: int) -> Score:
        """The newest one, which all ranks have made together."""
        assert self._newest is not None
        return self._newest[1]

    async def save(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Write a checkpoint, now. Exchanges under way land first, on the clock: training would have waited."""
        out = context.options.out
        assert out is not None
        await context.replica.settle()
        if context.replica.drift is not None:  # a drifted model never replaces a good checkpoint
            context.replica.drift.check(buffers=True)
        root = out / "checkpoint"
        if await self._outside(port, "save", save(port, context, root)):
            context.record(saved_row(root, moment.step, moment.seconds))
        await self._agree(port, context)

    async def _agree(self, port: Port, context: TrainingContext) -> None:
        """Let all ranks know rank 0's requests of callbacks, off the clock."""
        if context.host is not None:
            await self._outside(port, "agree", self._told(port, context, context.host))

    async def _told(self, port: Port, context: TrainingContext, host: CallbackHost) -> None:
        context.wish = context.wish.joined(await host.agreed(port))

    async def leave(self, port: Port) -> None:
        """All is written when `save` returns."""

    async def finish(
        self, port: Port, context: TrainingContext, moment: Moment, final: Mapping[str, Tensor]
    ) -> tuple[Score | None, bool | None]:
        """Score the final model, unless that has been done: late gradients have changed the model since."""
        if context.replica.drift is not None:
            context.replica.drift.check(buffers=False)
        if self._evaluation is None:
            return None, None
        if self._newest is None or self._newest[0] != moment.step or context.holding.late:
            await self._outside(port, "score", self._score(port, context, moment, final))
        assert self._newest is not None
        return self._newest[1], self._reached

    async def _score(
        self, port: Port, context: TrainingContext, moment: Moment, given: Mapping[str, Tensor] | None
    ) -> None:
        assert self._evaluation is not None
        replica, (_, data, model) = context.replica, ports_of(port)
        if not isinstance(context.holding, Whole):
            if given is None:
                parameters, buffers = await context.holding.whole(port)
                given = parameters | buffers
            score = await evaluate(port, self._evaluation, given)
            return self._scored(port, context, moment, score)
        own = context.scored()
        if given is None:
            given = {}
            if data.size > 1 and not replica.strategy.synchronized:
                instead = None if context.average is None else context.average.tensors
                given = await replica.consensus(data, instead) | await replica.consensus_buffers(data)
        score = await evaluate(data, self._evaluation, {**own, **given}, own_tensors([replica.clients]))
        self._scored(port, context, moment, await of_first_part(model, score))

    def _scored(self, port: Port, context: TrainingContext, moment: Moment, score: Score) -> None:
        self._newest, self._reached = (moment.step, score), meets(score, context.options)
        if port.rank == 0:
            for row in context.score_rows(moment, score):
                context.record(row)

    async def _outside(self, port: Port, kind: str, what: Program[T]) -> T:
        """Do `what` off the clock, with a line of that kind in the trace. It begins when all ranks are here: waiting
        for the slowest is training time."""
        world = self._world
        await port.barrier()
        before_s, before_bytes = await port.now(), world.trace.bytes_sent[world.rank]
        with kept_random_states():
            found = await what
        world.record(kind, before_s)
        self.off_s += await port.now() - before_s
        self.off_bytes += world.trace.bytes_sent[world.rank] - before_bytes
        return found
