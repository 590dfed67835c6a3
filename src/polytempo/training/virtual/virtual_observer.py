"""Scores and checkpoints of a virtual world: they take none of its time and send nothing in it.

rank 0  ── step k ── k + 1 ──▶        a rank that has finished step k adds its tensors to a sum and goes on; the
rank 1  ───── step k ───── k + 1 ──▶  last one completes the mean, which is scored then
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port, Work
from polytempo.one_host.hogwild import is_hogwild
from polytempo.partition.tensor.division import Cuts
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.rates.plateau import Plateau
from polytempo.training.federated.client_states import own_tensors
from polytempo.training.job.context import Moment, TrainingContext
from polytempo.training.job.evaluate import Evaluation, Score, meets, tensors_of
from polytempo.training.model.ports import mesh_of, ports_of
from polytempo.training.model.randomness import kept_random_states
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.observe.checkpoint_writer import about, complete, saved_row, write_when_landed
from polytempo.training.observe.holding import Whole
from polytempo.training.parts.model_parts import ModelParts
from polytempo.training.pipeline.pipeline_stage import PipelineStage
from polytempo.training.step.replica import Replica


@dataclass
class _Mean:
    """The ranks' mean, as far as they have come, added up in float64. Tensors without a mean are rank 0's."""

    count: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, rank: int, averaged: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
        """One rank's tensors."""
        self.count += 1
        for name, tensor in averaged.items():
            wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
            self.tensors[name] = self.tensors[name].add_(wide) if name in self.tensors else wide
            self.dtypes[name] = tensor.dtype
        if rank == 0:
            self.tensors |= {name: tensor.clone() for name, tensor in others.items()}

    def taken(self) -> dict[str, Tensor]:
        """The mean, in the tensors' own dtypes."""
        dtypes = self.dtypes
        return {n: (t / self.count).to(dtypes[n]) if n in dtypes else t for n, t in self.tensors.items()}


class VirtualObserver:
    """The one observer of all virtual ranks. See `training.Observer`.

    A score is of the mean of the ranks' models when each has finished the step; of ranks in step, of the first one's
    model; of one copy of the parameters, of the copy when rank 0 is there. So a score may come late: then `until` ends
    the run before the first step that no rank has begun. Of a model in parts, the ranks of its first part are scored.

    Memory: the sums of the scores under way, each in float64.
    """

    off_s, off_bytes = 0.0, 0

    def __init__(
        self,
        size: int,
        evaluation: Evaluation | None,
        record: Callable[[dict[str, Any]], None] = lambda row: None,
        parts: int | None = None,
    ) -> None:
        self.record = record
        self._test_parts = parts
        """Number of parts of the test set for a score. None: the number of real ranks, for the same bits."""
        self.size, self._evaluation = size, evaluation
        self._means: dict[int, _Mean] = {}
        self._parts: dict[int, dict[int, _Mean]] = {}
        """Models in stages or parts: means by step and by number of the part."""
        self._cuts: dict[int, Cuts] = {}
        """Cuts of the tensors of each number."""
        self._begun: dict[int, int] = {}
        self._stop: int | None = None
        self._newest: tuple[int, Score] | None = None
        self._agreed: dict[int, Score] = {}
        """Scores by step, for plateaus."""
        self._saves: list[Work[None]] = []
        self._hashes: dict[int, dict[int, str]] = {}
        self.host: CallbackHost | None = None
        """Calls the run's callbacks."""
        self.replicas: Sequence[Replica] = ()
        """All ranks' replicas."""
        self._asked: dict[int, int] = {}
        """Each rank's last step with a look at the requests of callbacks."""
        self._controls: dict[int, Control] = {}
        """Requests, by the number of steps before all ranks follow them."""

    def begins(self, rank: int, step: int) -> None:
        """Remember it: a run does not end before a step that a rank has begun."""
        self._begun[rank] = step

    def over(self, step: int) -> bool:
        """True once a score has reached the goal, and no rank has begun `step`."""
        return self._stop is not None and step >= self._stop

    def asks(self, rank: int, step: int) -> Control:
        """Requests that `rank` follows after `step` steps, once. A request holds for the first step that no rank has
        asked for."""
        if self.host is not None and any(wish := self.host.take()):
            at = max(self._asked.values(), default=-1) + 1
            self._controls[at] = self._controls.get(at, Control()).joined(wish)
        if self._asked.get(rank, -1) >= step:
            return Control()
        self._asked[rank] = step
        return self._controls.get(step, Control())

    async def score(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Take this rank's tensors, and score if no rank is missing. Awaits nothing."""
        replica, (_, data, model) = context.replica, ports_of(port)
        if not isinstance(context.holding, Whole):
            self._add_part(context, moment, context.holding.divided)
            return
        if model.rank:
            return
        if replica.strategy.synchronized or data.size == 1:
            if self._newest is None or self._newest[0] < moment.step:
                self._complete(context, moment, context.scored(), data.size)
        elif is_hogwild(replica.strategy):
            if data.rank == 0:
                self._complete(context, moment, tensors_of(replica.model), data.size)
        else:
            mean = self._means.setdefault(moment.step, _Mean())
            averaged, others = replica.averaged_tensors()
            if context.average is not None:
                averaged |= context.average.tensors
            mean.add(data.rank, averaged, others)
            if mean.count == data.size:
                self._complete(context, moment, self._means.pop(moment.step).taken(), data.size)

    async def agreed_score(self, port: Port, context: TrainingContext, step: int) -> Score:
        """The score of `step`; ranks wait for each other where that takes all their models."""
        if not (isinstance(context.holding, Whole) and context.replica.strategy.synchronized):
            await port.barrier()
        return self._agreed[step]

    async def save(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Write this rank's part, or let it be written when its exchanges have landed; the last one commits all."""
        if context.options.checkpoint_every is None and not self._controls.get(moment.step, Control()).save:
            return
        assert context.options.out is not None
        root, notes, mesh = context.options.out / "checkpoint", about(port, context), mesh_of(port)

        def written(sha256: str) -> None:
            hashes = self._hashes.setdefault(moment.step, {})
            hashes[port.rank] = sha256
            if len(hashes) == self.size:
                in_order = [sha for _, sha in sorted(self._hashes.pop(moment.step).items())]
                if complete(root, moment.step, in_order, notes, mesh):
                    self.record(saved_row(root, moment.step, moment.seconds))

        self._saves.append(await write_when_landed(port, context, root, written))

    async def leave(self, port: Port) -> None:
        """No rank of a simulation is asked to leave."""

    async def finish(
        self, port: Port, context: TrainingContext, moment: Moment, final: Mapping[str, Tensor]
    ) -> tuple[Score | None, bool | None]:
        """Score the final model, which all ranks have, on rank 0."""
        for work in self._saves:
            await work
        if port.rank or self._evaluation is None:
            return None, None
        if self._newest is None or self._newest[0] != moment.step or context.holding.late:
            own, size = {}, self.size
            if isinstance(context.holding, Whole):
                own, size = tensors_of(context.replica.model), ports_of(port).data.size
            self._complete(context, moment, own | dict(final), size)
        assert self._newest is not None
        reached = self._stop is not None if context.options.until else None
        return self._newest[1], reached

    def _add_part(self, context: TrainingContext, moment: Moment, own: PipelineStage | ModelParts) -> None:
        """Score the mean, or the first replica of equal ones, when all ranks have finished the step."""
        data, means = own.ports.data, self._parts.setdefault(moment.step, defaultdict(_Mean))
        averaged, others = own.replica.averaged_tensors()
        if data.size == 1:
            averaged, others = {}, averaged | others
        means[own.place].add(data.rank, averaged, others)
        self._cuts[own.place] = own.divisions
        if sum(mean.count for mean in means.values()) == self.size:
            found = {place: mean.taken() for place, mean in self._parts.pop(moment.step).items()}
            parameters, buffers = own.of_all(found, self._cuts)
            self._complete(context, moment, parameters | buffers, self.size)

    def _complete(self, context: TrainingContext, moment: Moment, tensors: Mapping[str, Tensor], parts: int) -> None:
        assert self._evaluation is not None
        with kept_random_states():
            own = own_tensors([each.clients for each in self.replicas])
            score = self._evaluation.score(tensors, self._test_parts or parts, own)
        self._newest = moment.step, score
        if isinstance(context.scheduler, Plateau):
            self._agreed[moment.step] = score
        for row in context.score_rows(moment, score):
            self.record(row)
        if meets(score, context.options) and self._stop is None:
            self._stop = max(self._begun.values(), default=moment.step - 1) + 1
