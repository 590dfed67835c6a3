"""`StageProgram`: one stage's part in every step of a pipeline, a coroutine that performs the actions of a schedule.

    receives of the next actions are begun ──▶ action ──▶ its tensors are on their way, while the next action computes

Each tensor that crosses a cut is sent once to each part that uses it. Messages of one tensor keep the order of their
micro-batches, so they need no numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import dropwhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core import Port, Program
from polytempo.core.suspension import suspendable
from polytempo.partition.cut import Cut, Layout, Stage, described, located
from polytempo.partition.schedules.action import Schedule, Turn, part_of, turns
from polytempo.partition.schedules.facts import facts, version_of
from polytempo.training.pipeline.late.estimators import Estimators
from polytempo.training.pipeline.late.late_stage import LateStage
from polytempo.training.pipeline.late.parameter_versions import ParameterVersions
from polytempo.training.pipeline.mail.sent_ahead import SentAhead
from polytempo.training.pipeline.mail.stage_mail import StageMail
from polytempo.training.pipeline.program_state import ProgramState
from polytempo.training.pipeline.stage_work import Head, MakeWork, UnderWay, computed

_RECEIVES_AHEAD = 2


class MicroBatch(NamedTuple):
    """A stage's view of a micro-batch, without other stages' tensors."""

    inputs: tuple[Any, ...]
    layouts: Mapping[str, Layout]
    """Layout of every tensor that crosses a cut."""
    head: Head
    """The model's output to its part of the batch's loss."""
    seeded: Callable[[int], None]
    """Sets the random state that the forward pass of a part begins with."""
    flops: float = 0.0
    """Operations of its forward and backward passes through the whole model."""
    target: Any = None
    """The target of the loss; estimators take labels from it."""


class StageProgram:
    """One stage. `update` updates its parameters once their gradients are there.

    `shares`: each part's share of the model's operations, for a virtual world's charges; None: equal ones. `suspends`:
    layers wait for other ranks while they compute.
    """

    def __init__(
        self,
        cut: Cut,
        schedule: Schedule,
        stage: int,
        update: Callable[[], Program[None]],
        shares: Sequence[float] | None = None,
        *,
        estimators: Estimators | None = None,
        late: LateStage | None = None,
        work: MakeWork = computed,
        suspends: bool = False,
    ) -> None:
        self._cut, self._schedule, self._stage, self._update, self._shares = cut, schedule, stage, update, shares
        self.estimators = estimators
        """Estimators of the gradients of this stage's outputs, if the schedule has them."""
        self.late = late
        """The correction of late gradients, if the schedule has one."""
        self._suspends = suspends
        own: list[Stage] = [cut.stages[part] for part in range(stage, len(cut.stages), schedule.stages)]
        self._parts = {part.index: part for part in own}
        parameters = self._parameters = [p for part in own for p in part.module.parameters()]
        stashes, overtaken = schedule.weights != "current", facts(schedule, stage).delay > 0
        self.versions = ParameterVersions(parameters, stashes=stashes, overtaken=overtaken, late=late)
        self._work = {part.index: work(part, self.versions, schedule, self._layouts) for part in own}
        self._values = {value.name: value for value in cut.values}
        self._turns: Iterator[Turn] = turns(schedule, stage)
        self._next = next(self._turns)
        self._batches: dict[int, MicroBatch] = {}
        self._device = next((p.device for p in parameters), torch.device("cpu"))
        self._mail = StageMail(cut, schedule, stage)
        self._begun: set[Turn] = set()
        self.step_number = self._num_entered = 0
        self._entered: dict[int, int] = {}
        """Numbers of steps, without steps that had no batch."""
        self._has_gradient = False
        self.last_version = 0
        """The version of the parameters that the last gradient was computed with."""
        self.passed = False
        """True if there was a forward pass since the last update."""
        self.delays: Counter[int] = Counter()
        """Number of updates by their delay, counted in updates since their gradient's parameters."""
        self._sent = SentAhead(cut, schedule, stage)
        self.most_held = self.most_versions = 0
        """The most micro-batches' parts between their passes, and the most versions of the parameters, so far."""

    async def step(self, port: Port, batches: Sequence[MicroBatch]) -> Tensor | None:
        """Take the micro-batches of one batch. The stage of the last part answers with the batch's loss.

        `port` spans the stages. With fewer micro-batches than the schedule has, the others are left out.
        """
        await self._sent.again(port, self._mail)
        first = self.step_number * self._schedule.micro_batches
        self._batches |= {first + number: batch for number, batch in enumerate(batches)}
        if batches:
            self._entered[self.step_number] = self._num_entered
            self._num_entered += 1
        self._begin_with(self.step_number)
        todo = [turn for turn in self._turns_of_step() if turn.micro_batch < 0 or turn.micro_batch in self._batches]
        losses = []
        forwards = sum(turn.action.kind == "forward" for turn in todo)
        for place, turn in enumerate(todo):
            for ahead in todo[place : place + 1 + _RECEIVES_AHEAD]:
                await self._begin_receives(port, ahead)
            loss = await self._perform(port, turn)
            self.most_versions = max(self.most_versions, self.versions.num_versions)
            forwards -= turn.action.kind == "forward"
            if not forwards:
                self._begin_with(self.step_number + 1)
            if loss is not None:
                losses.append(loss)
        if self._schedule.lockstep:
            await port.barrier()
        self._sent.forget(self.step_number)
        self._entered.pop(self.step_number, None)
        self.step_number += 1
        self._begun.clear()
        return torch.stack(losses).sum() if losses else None

    def _turns_of_step(self) -> list[Turn]:
        found = []
        while self._next.step == self.step_number:
            found.append(self._next)
            self._next = next(self._turns)
        return found

    def _begin_with(self, step: int) -> None:
        """The next forward pass is of `step`: versions that only earlier ones begin with can go."""
        if self._schedule.weights in ("vertical", "previous"):
            entered = self._entered.get(step, self._num_entered)
            self.versions.oldest = version_of(self._schedule, entered, self.versions.current)
        self.versions.forget()

    async def _begin_receives(self, port: Port, turn: Turn) -> None:
        """Begin to receive the tensors that `turn` needs of other stages."""
        if turn in self._begun:
            return
        self._begun.add(turn)
        stage = self._parts[part_of(self._schedule, self._stage, turn.action)]
        if turn.action.kind == "forward":
            for name in stage.takes:
                value, like = self._values[name], self._like(turn, name)
                await self._mail.expect(port, value, stage.index, "forward", like, turn.micro_batch)
        elif turn.action.kind in (("backward", "input") if self.estimators is None else ("learn",)):
            for name in stage.gives:
                like = self._like(turn, name)
                for target in self._back(name):
                    await self._mail.expect(port, self._values[name], target, "backward", like, turn.micro_batch)

    def _layouts(self, micro_batch: int) -> Mapping[str, Layout]:
        return self._batches[micro_batch].layouts

    def _like(self, turn: Turn, name: str) -> Tensor:
        shape, dtype = self._batches[turn.micro_batch].layouts[name]
        return torch.empty((), dtype=dtype, device=self._device).expand(shape)  # takes no memory

    def begin(self, step: int) -> None:
        """Begin with `step`, and with nothing under way."""
        self.step_number = step
        self._turns = dropwhile(lambda turn: turn.step < step, turns(self._schedule, self._stage))
        self._next = next(self._turns)

    def state(self) -> ProgramState:
        """The passes and messages under way after a step; its tensors are the used ones."""
        under_way = [((part, n), kept) for part, work in self._work.items() for n, kept in work.under_way.items()]
        return ProgramState(
            step=self.step_number,
            updates=self.versions.current,
            num_entered=self._num_entered,
            entered=dict(self._entered),
            older=self.versions.older(),
            under_way=dict(under_way),
            layouts={number: dict(batch.layouts) for number, batch in self._batches.items()},
            sent=list(self._sent.held),
            gradients=[p.grad for p in self._parameters] if self._has_gradient else None,
        )

    def restore(self, state: ProgramState, seeded: Callable[[int], Callable[[int], None]]) -> None:
        """Go on from `state`; parameters and buffers are there. `seeded`: of each micro-batch of the run."""
        self.begin(state.step)
        self._num_entered, self._entered = state.num_entered, dict(state.entered)
        self.versions.restore(state.updates, state.older)
        for number, layouts in state.layouts.items():
            self._batches[number] = MicroBatch((), layouts, _no_head, seeded(number))
        for (part, number), kept in state.under_way.items():
            kept.seeded = partial(self._batches[number].seeded, part)
            self._work[part].resume(number, kept)
        self._sent.restore(state.sent)
        self._has_gradient = state.gradients is not None
        for parameter, gradient in zip(self._parameters, state.gradients or (), strict=False):
            parameter.grad = gradient

    async def settle(self) -> None:
        """Wait until all messages have been received."""
        await self._mail.settle()

    # ------------------------------------------------------------------ actions

    async def _perform(self, port: Port, turn: Turn) -> Tensor | None:
        part = part_of(self._schedule, self._stage, turn.action)
        match turn.action.kind:
            case "forward":
                self.passed = True
                return await self._forward(port, turn, part)
            case "backward" | "input":
                await self._backward(port, turn, part)
            case "learn":
                await self._learn(port, turn, part)
            case "weight":
                flops = self._flops(turn) / 3
                halves = partial(self._work[part].weight_gradients, turn.micro_batch)
                await self._compute(port, halves, flops, "weight gradients")
                self._has_gradient = True
                self._end(turn)
            case "update" if self._has_gradient:
                self._has_gradient = self.passed = False
                self.delays[self.versions.current - self.last_version] += 1
                self.versions.update_begins()
                with nullcontext() if self.late is None else self.late.updating():
                    await self._update()
        return None

    async def _forward(self, port: Port, turn: Turn, part: int) -> Tensor | None:
        stage, batch = self._parts[part], self._batches[turn.micro_batch]
        taken = [await self._mail.take(name, part, "forward") for name in stage.takes]
        version = version_of(self._schedule, self._entered[turn.step], self.versions.current)
        inputs, head = self._cut.inputs_of(part, batch.inputs), batch.head if stage.is_last else None
        kept = UnderWay(inputs, taken, version, partial(batch.seeded, part), head)
        work = partial(self._work[part].forward, turn.micro_batch, kept)
        try:
            answer: tuple[list[Tensor], Tensor | None] = await self._compute(
                port, work, self._flops(turn) / 3, "forward"
            )
        except Exception as error:
            what = ", ".join(described(value) for value in batch.inputs)
            error.add_note(f"in {located(part, error)}, micro-batch {turn.micro_batch} of the run; inputs {what}")
            raise
        given, loss = answer
        if self.estimators is not None:
            outputs = {name: h for name, h in zip(stage.gives, given, strict=True) if self._back(name)}
            self.estimators.see(turn.micro_batch, outputs, batch.target)
        self.most_held = max(self.most_held, sum(len(work.under_way) for work in self._work.values()))
        for name, tensor in zip(stage.gives, given, strict=True):
            for target in self._values[name].targets:
                self._sent.note(turn.micro_batch, self._values[name], target, "forward", tensor)
                await self._mail.put(port, self._values[name], target, "forward", tensor, turn.micro_batch)
        return loss

    async def _backward(self, port: Port, turn: Turn, part: int) -> None:
        stage, whole = self._parts[part], turn.action.kind == "backward"
        flops = self._flops(turn) * (2 if whole else 1) / 3 + self._flops(turn) / 3 * self._schedule.recomputes
        if self.estimators is None:
            gradients = [await self._gradient(name) for name in stage.gives]
        else:
            gradients = self.estimators.estimates(turn.micro_batch, stage.gives)
            flops += self.estimators.flops(turn.micro_batch)
        work = partial(self._work[part].backward, turn.micro_batch, gradients)
        for name, gradient in zip(stage.takes, await self._compute(port, work, flops, "backward"), strict=True):
            if self._values[name].requires_grad:
                like = self._like(turn, name)
                answer = like.new_zeros(like.shape) if gradient is None else gradient
                self._sent.note(turn.micro_batch, self._values[name], part, "backward", answer)
                await self._mail.put(port, self._values[name], part, "backward", answer, turn.micro_batch)
        if whole:
            self._has_gradient = True
            self._end(turn)

    async def _compute(self, port: Port, work: Callable[[], Any], flops: float, what: str) -> Any:
        """The result of `work`. Layers that exchange meanwhile are charged their operations before."""
        if not self._suspends:
            return await port.compute(work, flops, what)
        await port.compute(lambda: None, flops, what)
        return await suspendable(work)

    async def _learn(self, port: Port, turn: Turn, part: int) -> None:
        """Train the estimators by the gradients of the stages behind."""
        assert self.estimators is not None
        found = {name: await self._gradient(name) for name in self._parts[part].gives}
        known = {name: gradient for name, gradient in found.items() if gradient is not None}
        work = partial(self.estimators.descend, turn.micro_batch, known)
        await port.compute(work, 3 * self.estimators.flops(turn.micro_batch))
        await self.estimators.learn()
        self._end(turn)

    async def _gradient(self, name: str) -> Tensor | None:
        total: Tensor | None = None
        for target in self._back(name):
            gradient = await self._mail.take(name, target, "backward")
            total = gradient if total is None else total + gradient
        return total

    def _end(self, turn: Turn) -> None:
        self.last_version = self._work[part_of(self._schedule, self._stage, turn.action)].last_version
        if turn.action.kind == "backward" and self.estimators is not None:  # which have still to learn
            return
        if turn.action.part == 0:  # the last of this stage's parts on the way back
            del self._batches[turn.micro_batch]

    def _back(self, name: str) -> tuple[int, ...]:
        """The parts that send back the gradient of a tensor."""
        value = self._values[name]
        return value.targets if value.requires_grad else ()

    def _flops(self, turn: Turn) -> float:
        part = part_of(self._schedule, self._stage, turn.action)
        share = 1 / len(self._cut.stages) if self._shares is None else self._shares[part]
        return self._batches[turn.micro_batch].flops * share


def _no_head(output: Any) -> Tensor:
    raise AssertionError("the last part has no micro-batch under way when a step is over")
