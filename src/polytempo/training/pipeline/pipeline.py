"""`pipeline`: a model whose layers lie on several ranks, trained in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core import Port, Strategy, is_idle
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import By, cut
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import facts, steps_late
from polytempo.strategies import sync_sgd
from polytempo.training.agree import agree, gather_json
from polytempo.training.clipping import clip_grad_norm_
from polytempo.training.model_broadcast import broadcast_model
from polytempo.training.pipeline.estimators import estimators_of
from polytempo.training.pipeline.gathered import gathered
from polytempo.training.pipeline.late_stage import late_stage
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.shared_gradients import SharedGradients
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import StageProgram
from polytempo.training.ports import DATA, ports_of
from polytempo.training.replica import Replica
from polytempo.worlds import ProcessWorld, current

STAGE = "stage"
"""The axis of the mesh along which ranks hold the stages of one model."""

Loss = Callable[[Any, Any], Tensor]


def pipeline(
    model: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    loss: Loss,
    schedule: Schedule,
    *,
    sample: Any,
    by: By | Sequence[str] = "operations",
    inner: Strategy | None = None,
    max_norm: float | None = None,
    seed: int = 0,
    world: ProcessWorld | None = None,
) -> Pipeline:
    """Cut `model` into the stages of `schedule`, and give this rank its own.

        pt.init()
        pipe = pt.pipeline(
            model,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            nn.functional.cross_entropy,
            pt.partition.schedules.one_f_one_b(stages=2, micro_batches=8),
            sample=x,
        )
        for x, y in loader:
            loss = pipe.step(x, y)
        state = pipe.state_dict()

    Every rank makes the whole model, takes rank 0's parameters, and keeps its stage. Rank r is stage r mod K of replica
    r // K, unless `pt.init(mesh={"data": …, "stage": …})` says otherwise. All stages of a replica are given the same
    batches, replicas different ones; gradients between replicas go by `inner` (default `sync_sgd()`).

    `sample` is what the model is called with, a tensor or a tuple; `by` how it is cut (see `partition.cut`). `max_norm`
    clips by the norm of the whole model's gradient. Tied weights in several stages have their gradients summed.

    Errors: ValueError where the ranks are no multiple of the stages, or a late schedule shares weights between stages;
    `Mismatch` where ranks disagree.
    """
    return Pipeline(world or current(), model, optimizer, loss, schedule, sample, by, inner, max_norm, seed)


class Pipeline:
    """One rank's stage. `model` holds its parts, `optimizer` trains them."""

    def __init__(
        self,
        world: ProcessWorld,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        loss: Loss,
        schedule: Schedule,
        sample: Any,
        by: By | Sequence[str],
        inner: Strategy | None,
        max_norm: float | None,
        seed: int,
    ) -> None:
        self._world, self.schedule, self._max_norm = world, schedule, max_norm
        whole = laid_out(world.port, schedule.stages)
        self.ports = ports_of(whole)
        strategy = checked_inner(inner or sync_sgd())
        self.cut: Cut = cut(model, schedule.stages * schedule.parts, sample=sample, by=by)
        if by == "time" and whole.size > 1:  # each rank has measured for itself
            begins = world.drive(gather_json(whole, list(self.cut.begins)))[0]
            self.cut = cut(model, sample=sample, by=begins)
        told = {"schedule": str(schedule), "stages": schedule.stages, "micro_batches": schedule.micro_batches}
        told |= {"strategy": str(strategy), "begins": list(self.cut.begins), "seed": seed, "max_norm": max_norm}
        world.drive(agree(whole, told))
        if world.size > 1:
            world.drive(broadcast_model(whole, model, frozenset()))
        self.stage = self.ports.model.rank
        self.model = StageModel(self.cut.stages[self.stage :: schedule.stages])
        self.optimizer = optimizer(self.model.parameters())
        self._replica = Replica(self.model, self.optimizer, strategy, self.ports.data.size)
        self._shared = SharedGradients(self.cut, schedule, self.stage)
        self.estimators = estimators_of(schedule, self.stage, seed, self.ports.data)
        own = list(self.model.parameters())
        self.late = late_stage(schedule, self.stage, own, self.optimizer)
        self._program = StageProgram(self.cut, schedule, self.stage, self._update, self.estimators, self.late)
        self._batches = MicroBatches(self.cut, schedule, loss, seed, self.ports.data.rank)

    def step(self, *batch: Any) -> Tensor | None:
        """Train on one batch: the model's inputs, then the target. All stages of a replica are given the same.

        Returns the batch's mean loss on the last stage, None on the others. With a schedule that does not wait the
        update by this batch's gradient comes `delay` steps later.
        """
        split = self._batches.of(batch[:-1], batch[-1], self._program.step_number)
        loss: Tensor | None = self._world.drive(self._program.step(self.ports.model, split))
        return loss

    def finish(self) -> None:
        """Take the gradients that are under way back through all stages, and update by them. All ranks call it."""
        for _ in range(steps_late(self.schedule)):
            self._world.drive(self._program.step(self.ports.model, []))
        self._world.drive(self._program.settle())

    @property
    def delay(self) -> int:
        """Updates of this stage between a batch's forward pass and the update by its gradient."""
        return facts(self.schedule, self.stage).delay

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers, by its own names, on every rank. All ranks call it."""
        return self._world.drive(gathered(self.ports, self._replica, self.cut, self.schedule.stages))

    async def _update(self) -> None:
        """The gradients of this stage are there: exchange them with the replicas', and step."""
        ports = self.ports
        for bucket in self._replica.buckets:
            await self._replica.exchange(ports.data, bucket)
        await self._shared.summed(ports.model)  # last, so that all stages have the same bits of it
        if self._max_norm is not None:
            own = list(self.model.parameters())
            await clip_grad_norm_(ports.model, own, self._max_norm, self._shared.counted_elsewhere)
        self.optimizer.step()
        await self._replica.finish_step(ports.data)
        self.optimizer.zero_grad()


def checked_inner(strategy: Strategy) -> Strategy:
    """The strategy itself. ValueError for one that does more between replicas of a stage than exchange gradients."""
    exchanges_more = strategy.server is not None or strategy.one_copy is not None or strategy.slices is not None
    if exchanges_more or not is_idle(strategy.parameters, 2):
        raise ValueError(
            f"replicas of a stage exchange their gradients, and {strategy} exchanges more, or by another way; give a "
            "strategy of gradients alone as inner, such as sync_sgd(), int8_sgd() or top_k_sgd()"
        )
    return strategy


def laid_out(port: Port, stages: int) -> Port:
    """The ranks as replicas of so many stages. ValueError where they cannot be."""
    lengths = {} if port.mesh is None else port.mesh.lengths
    if STAGE in lengths:
        if lengths[STAGE] != stages:
            raise ValueError(f"the mesh {lengths} has {lengths[STAGE]} stages, and the schedule {stages}")
        return port
    if port.size % stages:
        raise ValueError(
            f"{port.size} ranks cannot be replicas of {stages} stages each; start {-(-port.size // stages) * stages}"
        )
    return port.meshed(**{DATA: port.size // stages, STAGE: stages})
