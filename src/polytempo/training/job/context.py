"""The context of a rank in a run, the observer that scores and saves, and the summary of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Port, Program
from polytempo.core.strategy import InRounds
from polytempo.data.shard import DataShard
from polytempo.federated.client_tests import ClientTests
from polytempo.federated.clients import Cohorts
from polytempo.federated.privacy import epsilon
from polytempo.federated.sample_privacy import sample_epsilon
from polytempo.large_batch.weight_average import WeightAverage
from polytempo.report.status.client_rounds import round_text
from polytempo.report.status.records import Logged, row_of
from polytempo.report.status.row_exchanges import RankTotals, RowExchanges
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.job import Data, Job
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.hooks.speed_balance import SpeedBalance
from polytempo.training.job.evaluate import Score
from polytempo.training.job.growth import GeometricGrowth, NormGrowth
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.observe.holding import Holding
from polytempo.training.observe.user_log import UserLog
from polytempo.training.step.replica import Replica

TakeStep = Callable[[Port, Any, int, float | None], Program[Tensor | None]]
"""One optimizer step of the ranks of the data port on a batch, with its number of samples and its share of the global
batch (None: equal parts). Returns the batch's mean loss; a pipeline returns the loss of an earlier batch that has come
back to this rank, or None."""

_PART = 1e-9
"""A part of an epoch that is the rounding of a sum."""


class Moment(NamedTuple):
    """A moment of a run: steps, epochs and samples over all ranks and earlier runs, and the training time."""

    step: int
    epoch: float
    samples: int
    seconds: float

    def row(self, kind: str) -> dict[str, Any]:
        """The beginning of a row of metrics."""
        return {"kind": kind, **self._asdict()}


class Observer(Protocol):
    """Scores and saves a run without changing its results.

    `score` and `save` are called on every rank at the same steps, when the replica has finished that step.
    """

    @property
    def off_s(self) -> float:
        """Seconds without training, for scores and checkpoints."""

    @property
    def off_bytes(self) -> int:
        """Bytes that this rank has sent for scores and checkpoints."""

    def begins(self, rank: int, step: int) -> None:
        """`rank` begins `step` now."""

    def over(self, step: int) -> bool:
        """True if the run ends before `step`, because a score has reached `until`."""

    async def score(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Score the model as it is now; perhaps later. Called only where there is a test set."""

    async def agreed_score(self, port: Port, context: TrainingContext, step: int) -> Score:
        """The score of `step`, which has just been asked for: the same on all ranks, which wait for it."""

    async def save(self, port: Port, context: TrainingContext, moment: Moment) -> None:
        """Write a checkpoint of the training state as it is now; perhaps later."""

    async def leave(self, port: Port) -> None:
        """The run ends early: finish writing checkpoints."""

    async def finish(
        self, port: Port, context: TrainingContext, moment: Moment, final: Mapping[str, Tensor]
    ) -> tuple[Score | None, bool | None]:
        """Training is over: finish all work. Returns the score of the `final` model, and True if `until` was reached
        (None: without `until`)."""


@dataclass
class TrainingContext:
    """Everything that one rank needs for a run."""

    spec: RunSpec
    holding: Holding
    shard: DataShard
    data: Data
    take_step: TakeStep
    observer: Observer
    scheduler: LRScheduler | None = None
    seconds: float = 0.0
    """Training time so far, over all runs; a checkpoint carries it."""
    resumed_at: int | None = None
    average: WeightAverage | None = None
    """The average of this rank's weights over its steps, if scores are of the average."""
    unchecked: frozenset[str] = frozenset()
    """Tensors of the model that were not finite at the beginning, so may stay so."""
    leaves: Callable[[int], bool] = field(default=lambda step: False)
    """True if all ranks save and leave after so many steps, because one was asked to; asked after each step."""
    begins: Callable[[int], object] = field(default=lambda step: None)
    """Hears the number of each step of this rank before it."""
    first_steps: int = 0
    """Steps of an epoch before its batches have grown."""
    growth: NormGrowth | GeometricGrowth | None = None
    """Lets batches grow while an epoch goes on, where the options have a rule for it."""
    balance: SpeedBalance | None = None
    """Deals global batches by the ranks' speeds, where the options ask for it."""
    host: CallbackHost | None = None
    """Calls the run's callbacks, on rank 0."""
    asks: Callable[[int], Control] = field(default=lambda step: Control())
    """The requests of callbacks that all ranks follow after so many steps; asked after each step."""
    wish: Control = field(default_factory=Control)
    """Further ones, which ranks have agreed on at a score or a checkpoint."""
    stopped: bool = False
    """True if the run ends here, because a callback asked for it."""
    scored_step: int = -1
    """The last step with a score, made or under way."""
    saved_step: int = -1
    """The last step with a checkpoint, written or under way."""
    record: Callable[[dict[str, Any]], None] = field(default=lambda row: None)
    """Takes rows of metrics; only rank 0 calls it."""
    exchanged: Callable[[], RankTotals] = RankTotals
    """The exchanges of this rank so far."""
    exchanges: RowExchanges = field(default_factory=RowExchanges)
    """The exchanges since the last row of training."""

    def scored(self) -> dict[str, Tensor]:
        """This rank's model as it is scored: parameters, or their average, and buffers, by name."""
        return self.replica.tensors() | ({} if self.average is None else self.average.tensors)

    def score_rows(self, moment: Moment, score: Score) -> list[dict[str, Any]]:
        """The rows of a score: its own, and the spread of clients' accuracies as numbers that pages draw."""
        row = score.row() | self.facts_after(moment.step, moment.epoch)
        spread = {name: value for name, value in row.items() if name.startswith("clients/") and value is not None}
        rows = [moment.row("test") | {name: value for name, value in row.items() if name not in spread}]
        return rows + ([row_of(Logged(step=moment.step, values=spread))] if spread else [])

    def facts_after(self, steps: int, epochs: float) -> dict[str, float]:
        """Facts after so many steps and epochs, earlier runs' included: ε and δ of clients or samples with noise, and
        the number of clients that took part where their tests are scored."""
        return self._of_rounds(steps) | self._of_samples(steps, epochs)

    def note_clients(self, log: UserLog, round_number: int) -> None:
        """Log the clients of a simulated round; real ones are logged by their server."""
        cohorts = self.shard.dataset
        if log.writes and isinstance(cohorts, Cohorts):
            text = round_text(round_number, len(cohorts.clients.parts), cohorts.ages(round_number))
            log.note_round(text, round_number + 1)

    def _of_rounds(self, rounds: int) -> dict[str, float]:
        meeting = self.spec.strategy.rounds
        if meeting is None:
            return {}
        tested = isinstance(self.data.test, ClientTests)
        found = {"clients/took_part": float(self.shard.dataset.took_part(rounds))} if tested else {}
        return found | self._spent(meeting, rounds)

    def _of_samples(self, steps: int, epochs: float) -> dict[str, float]:
        privacy, meeting = self.spec.strategy.sample_privacy, self.spec.strategy.rounds
        if privacy is None or not privacy.noise:
            return {}
        passes = math.ceil(epochs - _PART)
        if meeting is not None:
            passes = self.shard.dataset.most_turns(steps) * (meeting.local.head_epochs + meeting.local.epochs)
        return {"epsilon": sample_epsilon(privacy, passes), "delta": privacy.delta}

    def _spent(self, meeting: InRounds, rounds: int) -> dict[str, float]:
        if meeting.privacy is None or not meeting.is_noisy:
            return {}
        found = epsilon(meeting.privacy, *self.shard.dataset.releases(rounds))
        return {"epsilon": found, "delta": meeting.privacy.delta}

    @property
    def job(self) -> Job:
        """The run's."""
        return self.spec.job

    @property
    def replica(self) -> Replica:
        """The replica of the model, or of this rank's part of it."""
        return self.holding.replica

    @property
    def options(self) -> RunOptions:
        """The run's, as they were given."""
        return self.spec.options


class TrainingSummary(NamedTuple):
    """The end of a run on this rank."""

    steps: int
    epochs: float
    samples: int
    """Samples behind us, over all ranks and, after a resume, earlier runs."""
    seconds: float
    """Training time until all ranks were done, earlier runs included."""
    score: Score | None
    """Score of the final model; in a virtual world rank 0 has it."""
    train_loss: float | None
    reached: bool | None
    parameters: dict[str, Tensor]
    """The final model: the ranks' mean where they differ."""
    buffers: dict[str, Tensor]
    """The ranks' mean of running statistics, where they differ."""


def check_length(shard: DataShard) -> int:
    """Samples of an epoch. Raises ValueError for a stream, where its length is needed."""
    if shard.num_samples is None:
        raise ValueError(
            "this needs data with a length: a job on a stream is trained by pt.run, pt.Trainer and pt.simulate, with "
            "a fixed number of workers; count the stream once with pt.data.counted(stream) for everything else"
        )
    return shard.num_samples
