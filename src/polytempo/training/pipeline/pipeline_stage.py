"""`PipelineStage`: one rank's parts of a model, their optimizer, and the way of their gradients, in any world.

batch ──▶ micro-batches ──▶ StageProgram ──▶ gradients ──▶ replicas of this stage ──▶ clipping ──▶ optimizer.step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from polytempo.core import Bundle, Port, Strategy, is_idle
from polytempo.core.bundle import by_kind
from polytempo.core.errors import JobFailed
from polytempo.core.state import Saved
from polytempo.partition.cut import Cut, Stage
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import StageFacts, facts, steps_late
from polytempo.partition.tensor.division import Cuts
from polytempo.partition.tensor.parted_model import joined, refuse_norms
from polytempo.partition.tensor.way import SplitLayers
from polytempo.spec.loss_divisor import DividedLoss, divisor_of
from polytempo.spec.precision import Precision
from polytempo.training.model.parted_parameters import align, counted_elsewhere
from polytempo.training.model.ports import DATA, MODEL, STAGE, Ports, check_mesh, ports_of
from polytempo.training.model.run_device import device_of
from polytempo.training.model.trainable_parameters import is_frozen
from polytempo.training.pipeline.late.estimators import estimators_of
from polytempo.training.pipeline.late.late_stage import late_stage
from polytempo.training.pipeline.mail.stage_mail import own_messages
from polytempo.training.pipeline.mail.step_reports import DelayMail, LossMail
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.program_state import restored_state, saved_state
from polytempo.training.pipeline.shared_gradients import SharedGradients
from polytempo.training.pipeline.split_stage import cut_parameters, split_stage
from polytempo.training.pipeline.stage_model import StageModel
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.training.precision.masters import masters_of
from polytempo.training.step.replica import Replica

UPDATE_FLOPS = 4.0
"""Charged for each parameter in an optimizer step, as in a step without stages."""

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]


class WholeModel(NamedTuple):
    """All stages' tensors by the names and in the order of the model that was cut, in memory of their own."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


_LOSS = "loss/"


class PipelineStage:
    """The stage that rank `port.rank` has of `model`, which is cut as `parts` says. It begins nothing itself.

    `strategy` has the schedule; `port` is laid out (`laid_out`). `optimizer` makes the optimizer of the stage's model.
    `series`: its number among the models that a world trains (`next_series`).
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Cut,
        optimizer: MakeOptimizer,
        loss: Loss,
        strategy: Strategy,
        port: Port,
        *,
        seed: int,
        max_norm: float | None = None,
        allow_nan: bool = True,
        flops_per_sample: float = 0.0,
        precision: Precision | None = None,
        series: int = 0,
    ) -> None:
        self.schedule, self.cut, self.ports = schedule_of(strategy), parts, _stage_ports(replace(port, series=series))
        self.number = self.ports.model.rank
        self._stages = own_messages(self.ports.model)
        self.split = isinstance(strategy.parted, SplitLayers)
        held = self.split and port.mesh is not None and MODEL in port.mesh.lengths
        self.holders = port.along(MODEL) if held else port.among([port.rank])
        """The ranks that hold this stage together: this rank alone if its layers are whole."""
        if isinstance(strategy.parted, SplitLayers):
            parts = split_stage(model, parts, strategy.parted, self.number, self.schedule.stages, self.holders)
        self._whole, self._max_norm = model, max_norm
        self.model = StageModel(parts.stages[self.number :: self.schedule.stages])
        self.optimizer = _optimizer(optimizer, self.model, model)
        masters = masters_of(self.model, self.optimizer, precision, called=list(self.model.parts))
        self.replica = Replica(
            self.model, self.optimizer, strategy, self.ports.data.size, allow_nan=allow_nan, masters=masters
        )
        if masters is not None:
            masters.watch()
        _advise(self.replica, self.schedule)
        self._shared = SharedGradients(parts, self.schedule, self.number)
        own = list(self.model.parameters())
        device = next((parameter.device for parameter in own), None)
        self.estimators = estimators_of(self.schedule, self.number, seed, self.ports.data, device)
        self.late_stage = late_stage(self.schedule, self.number, own, self.optimizer)
        self.program = self._made_program(parts)
        both = {"estimators": self.estimators, "late": self.late_stage}
        self._remembering = {path: part for path, part in both.items() if part is not None}
        self._losses = LossMail(self.late)
        self._delays = DelayMail(self.late)
        self._shares: deque[float | None] = deque()
        """Shares of the batches that wait for an update."""
        flops = flops_per_sample / self.holders.size
        replica = self.ports.data.rank
        self._batches = MicroBatches(self.cut, self.schedule, self._checked(loss), seed, replica, flops)

    def _made_program(self, parts: Cut) -> StageProgram:
        return StageProgram(
            parts,
            self.schedule,
            self.number,
            self._update,
            shares_of(parts),
            estimators=self.estimators,
            late=self.late_stage,
            suspends=self.split,
        )

    async def step(self, inputs: Sequence[Any], target: Any, share: float | None = None) -> Tensor | None:
        """Take a batch. The last stage answers its mean loss. `share`: the batch's weight among replicas."""
        step = self.program.step_number
        split = self.micro_batches(inputs, target)
        self._shares.append(share)
        loss = await self.program.step(self._stages, split)
        self.replica.buffers.passed = self.program.passed
        self.replica.step = step + 1  # also where no gradient has come back yet, and so no update was made
        return loss

    def micro_batches(self, inputs: Sequence[Any], target: Any) -> list[MicroBatch]:
        """The next step's micro-batches of a batch."""
        return self._batches.of(inputs, target, self.program.step_number)

    async def reported(self, loss: Tensor | None) -> Tensor | None:
        """The loss of the batch that is back at the first stage, there; `loss` is the answer of `step`."""
        return await self._losses.step(self._stages, loss)

    async def delays(self) -> list[float | None]:
        """The mean delay of each stage's updates since the last call, as far as it is known; see `DelayMail.row`."""
        if self.ports.data.rank:
            return []
        return await self._delays.row(self._stages, self.program.step_number, self.program.delays)

    async def finish(self) -> list[Tensor]:
        """Take the gradients that are under way back, and update by them. Answers losses that were not reported."""
        step = self.replica.step
        for _ in range(self.late):
            await self.program.step(self._stages, [])
        self.replica.step = step
        await self.program.settle()
        await self._delays.settle()
        return await self._losses.rest()

    @property
    def late(self) -> int:
        """The number of later steps until a batch's last gradient is back at all stages."""
        return steps_late(self.schedule)

    @property
    def facts(self) -> StageFacts:
        """The schedule's bounds on this stage's memory and delays."""
        return facts(self.schedule, self.number)

    def state(self) -> Saved:
        """The state under way here after a step; see `ProgramState`."""
        buffers = self.replica.buffers
        about = {"shares": list(self._shares), "passed": buffers.passed}
        found = saved_state(self.program.state(), about)
        tensors = found.tensors | {f"{_LOSS}{i}": t for i, t in enumerate(self._losses.under_way)}
        tensors |= {f"buffer/{name}": t for name, t in buffers.tensors().items() if buffers.passed}
        scalars = dict(found.scalars)
        for path, part in self._remembering.items():
            own = part.state().at(path)
            tensors, scalars = tensors | own.tensors, scalars | own.scalars
        return Saved(tensors, scalars)

    def restore(self, source: Saved) -> None:
        """Go on from the result of `state`, in the same stage of the same schedule. Parameters are loaded before."""
        own, device = source.tensors, device_of(self.model)
        moved = {
            name: t if name.startswith(_LOSS) else t.to(device) for name, t in own.items()
        }  # losses travel by host
        source = Saved(moved, source.scalars)
        state, about = restored_state(source)
        micro_batches = self.schedule.micro_batches
        self.program.restore(state, lambda number: self._batches.seeded(*divmod(number, micro_batches)))
        self._shares = deque(about["shares"])
        self.replica.buffers.passed = self.program.passed = about.get("passed", False)
        for name, buffer in self.replica.buffers.tensors().items() if self.program.passed else ():
            buffer.copy_(source.tensors[f"buffer/{name}"])
        losses = [tensor for name, tensor in source.tensors.items() if name.startswith(_LOSS)]
        self._losses.restore(losses, state.step)
        for path, part in self._remembering.items():
            part.restore(source.under(path))

    def begin(self, step: int) -> None:
        """Go on after `step` steps with nothing under way."""
        self.program.begin(step)

    def report(self) -> dict[str, Any]:
        """Delays and memory of this stage, as plain values; see `Result.stages`."""
        return stage_report(self.program, self.cut, self.schedule, self.number, self.model)

    async def whole(self) -> WholeModel:
        """The model on every rank: the mean over replicas where these differ. Cost: each stage broadcasts once."""
        found = await gathered(
            self.ports, self.replica, self.cut, self.schedule.stages, self.holders if self.split else None
        )
        return self.named(found)

    def named(self, found: dict[str, Tensor]) -> WholeModel:
        """The stages' tensors in the model's order; a tensor that no stage uses is as it was made."""
        return WholeModel(
            {name: found.get(name, p.detach()) for name, p in self._whole.named_parameters()},
            {name: found.get(name, buffer) for name, buffer in self._whole.named_buffers()},
        )

    @property
    def holder(self) -> int:
        """This rank's number among the ranks that hold the stage together."""
        return self.holders.rank

    @property
    def place(self) -> int:
        """The number of this rank's share of the model: all holders of the first stage come first, then the next
        stage's."""
        return self.number * self.holders.size + self.holder

    @property
    def divisions(self) -> Cuts:
        """Cuts of the parameters of this stage, by the whole model's names."""
        return cut_parameters(self.model) if self.split else {}

    def of_all(self, found: Mapping[int, Mapping[str, Tensor]], cuts: Mapping[int, Cuts]) -> WholeModel:
        """The model of the tensors at each place, and of how they are cut there."""
        held = self.holders.size
        whole: dict[str, Tensor] = {}
        for place in range(0, len(found), held):
            several, cut = [found[place + holder] for holder in range(held)], cuts[place]
            for name, tensor in several[0].items():
                whole[name] = cut[name].join([each[name] for each in several]) if name in cut else tensor
        return self.named(whole)

    async def state_dict(self) -> dict[str, Tensor]:
        """`whole` as a state that the model loads; tied parameters by all of their names."""
        parameters, buffers = await self.whole()
        first = {id(p): name for name, p in self._whole.named_parameters()}
        every = {n: parameters[first[id(p)]] for n, p in self._whole.named_parameters(remove_duplicate=False)} | buffers
        return {name: every[name] for name in self._whole.state_dict() if name in every}

    async def _update(self) -> None:
        """The gradients of this stage are there: exchange them with the replicas', and step."""
        replica, ports, share = self.replica, self.ports, self._shares.popleft()
        if replica.guard is not None and not replica.exchanges_gradients:
            replica.guard.gradients(replica.step, ports.whole.world_rank)
        for bucket in replica.buckets:
            await replica.exchange(ports.data, bucket, share)
        await replica.leave_unused(ports.data)
        if replica.drift is not None and replica.exchanges_gradients:
            replica.drift.after_exchange()
        await self._shared.summed(ports.model)  # last, so that all stages have the same bits of it
        if self._max_norm is not None:
            own = list(self.model.parameters())
            others = [*self._shared.counted_elsewhere, *counted_elsewhere(replica.splits)]
            await replica.clip_grad_norm_(ports_of(ports.whole).model, own, self._max_norm, others)
        if not replica.trainable and not is_idle(replica.strategy.gradients, ports.data.size):
            replica.has_met()  # so that buffers do
        numel = sum(parameter.numel() for parameter in replica.trainable.values())
        await ports.whole.compute(self.optimizer.step, UPDATE_FLOPS * numel, "update")
        await replica.finish_step(ports.data)
        with replica.in_float32():
            await align(replica.splits)
        if replica.drift is not None:
            if not replica.exchanges_gradients:
                replica.drift.after_exchange()
            replica.drift.after_step()
        self.optimizer.zero_grad()

    def _checked(self, loss: Loss) -> Loss:
        """`loss`, and a look at its answer, where one is wanted."""
        guard = self.replica.guard
        if guard is None:
            return loss

        def looked_at(output: Any, target: Any) -> Tensor:
            answer = loss(output, target)
            guard.loss(answer, self.replica.step, self.ports.whole.world_rank)
            return answer

        return DividedLoss(looked_at, divisor_of(loss))


def _advise(replica: Replica, schedule: Schedule) -> None:
    """Name a learning rate in the error for infinite values with estimates."""
    if schedule.estimation is not None and replica.guard is not None:
        lr = replica.optimizer.param_groups[0]["lr"]
        replica.guard.remedy = f"estimates need a smaller learning rate: a fifth of this one is {lr / 5:g}"


def _optimizer(make: MakeOptimizer, stage: nn.Module, whole: nn.Module) -> Optimizer:
    """The stage's optimizer; SGD with rate 0 if all its parameters are frozen and `make` takes no such model."""
    if is_frozen(whole):
        raise ValueError("no parameter of the model needs a gradient, so there is nothing to train; unfreeze some")
    if len(list(stage.parameters())) < len(list(whole.parameters())):
        refuse_norms(stage, "this rank has some stages of the model; clip by pt.pipeline(…, max_norm=…)")
    try:
        return make(stage)
    except (ValueError, JobFailed):
        if not is_frozen(stage):
            raise
        return SGD(stage.parameters(), lr=0.0)


def schedule_of(strategy: Strategy) -> Schedule:
    """The schedule of a strategy that has one."""
    assert isinstance(strategy.schedule, Schedule)
    return strategy.schedule


def shares_of(parts: Cut) -> list[float]:
    """Each part's share of the model's operations."""
    operations = [cost.operations for cost in parts.costs]
    return [each / sum(operations) for each in operations]


def stage_report(
    program: StageProgram, parts: Cut, schedule: Schedule, number: int, model: StageModel
) -> dict[str, Any]:
    """Delays and memory of stage `number`, as plain values; see `Result.stages`."""
    delays = program.delays
    return {
        "stage": number,
        "layers": [name for cost in parts.costs[number :: schedule.stages] for name in cost.layers],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "updates": delays.total(),
        "delay": sum(delay * times for delay, times in delays.items()) / max(1, delays.total()),
        "most_delay": max(delays, default=0),
        "held": program.most_held,
        "versions": program.most_versions,
    }


def laid_out(port: Port, stages: int, ranks: int = 1) -> Port:
    """The ranks as replicas of so many stages, with so many ranks for each. ValueError for other numbers."""
    check_mesh(port)
    if port.mesh is not None:
        lengths = port.mesh.lengths
        if (lengths.get(STAGE, 1), lengths.get(MODEL, 1)) != (stages, ranks):
            held = "" if ranks == 1 else f" of {ranks} ranks each, along {MODEL!r}"
            raise ValueError(f"the mesh {lengths} has {lengths.get(STAGE, 1)} stages, and the schedule {stages}{held}")
        return port
    if stages * ranks == 1:
        return port
    if port.size % (stages * ranks):
        held = "" if ranks == 1 else f", of {ranks} ranks each"
        raise ValueError(
            f"{port.size} ranks cannot be replicas of {stages} stages each{held}; start "
            f"{-(-port.size // (stages * ranks)) * stages * ranks}"
        )
    split = {} if ranks == 1 else {MODEL: ranks}
    return port.meshed(**{DATA: port.size // (stages * ranks), STAGE: stages, **split})


def _stage_ports(port: Port) -> Ports:
    """Replicas of this stage, and stages of this replica; of `ports_of` also ranks that hold a stage together."""
    found = ports_of(port)
    return found if port.mesh is None else found._replace(model=port.along(*[STAGE] * (STAGE in port.mesh.lengths)))


def of_parameters(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> MakeOptimizer:
    """An optimizer's function of parameters as one of the stage's model."""
    return lambda model: optimizer(model.parameters())


async def gathered(
    ports: Ports, replica: Replica, cut: Cut, num_stages: int, holders: Port | None
) -> dict[str, Tensor]:
    """The mean over replicas where they differ; in the order of the parts. Cost: every stage broadcasts once.

    `holders`: the ranks that hold this stage's split layers together, where it has such.
    """
    await replica.settle()
    mine = await replica.consensus(ports.data) | dict(replica.model.named_buffers())
    mine |= await replica.consensus_buffers(ports.data)
    if holders is not None:
        mine = await joined(holders, mine, cut_parameters(replica.model))
    with replica.in_float32():  # other stages' 16-bit tensors are float32 here
        likes = [_tensors(cut.stages[stage::num_stages]) for stage in range(num_stages)]
    found: dict[str, Tensor] = {}
    for stage, tensors in enumerate(likes):
        for group in by_kind(tensors).values():
            bundle = Bundle({name: mine[name] if stage == ports.model.rank else t for name, t in group.items()}).copy()
            flat = await ports.model.broadcast(bundle.flat, stage)
            found |= {name: torch.clone(view) for name, view in bundle.with_flat(flat).views.items()}
    return found


def _tensors(parts: Iterable[Stage]) -> dict[str, Tensor]:
    modules = [part.module for part in parts]
    return {n: t.detach() for module in modules for n, t in [*module.named_parameters(), *module.named_buffers()]}
