"""A run stopped and resumed in new processes equals an undisturbed one, to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, StepLR
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.worlds import ProcessWorld
from process.crew import squared, together

pytestmark = pytest.mark.process

s = pt.strategies

STRATEGIES: dict[str, list[Strategy]] = {
    "acco": [s.acco()],
    "adasum": [s.adasum()],
    "delayed_sgd": [s.delayed_sgd(), s.delayed_sgd(delay=3)],
    "co2": [s.co2(period=4)],
    "des_loc": [s.des_loc(3, 4, 7)],
    "diloco": [s.diloco(period=4), s.diloco(period=1)],
    "islands": [s.islands(outer=s.diloco(period=4)), s.islands(outer=s.gossip(period=3), number=1)],
    "noloco": [s.noloco(period=4)],
    "quasi_global_momentum": [s.quasi_global_momentum()],
    "sparta": [s.sparta(0.3), s.sparta(0.3, outer=s.diloco(period=4))],
    "streaming_diloco": [s.streaming_diloco(period=6, fragments=2, delay=2), s.streaming_diloco(4, delay=0)],
    "gossip": [s.gossip(), s.gossip(pt.aggregation.random_pairs(), period=3), s.gossip(period=3, overlap=True)],
    "local_sgd": [s.local_sgd(period=4), s.local_sgd(period=1)],
    "parameter_averaging": [s.parameter_averaging(period=4), s.parameter_averaging(period=1, optimizer_state=False)],
    "post_local_sgd": [s.post_local_sgd(switch_step=7, period=2), s.post_local_sgd(switch_step=15, period=2)],
    "robust_sgd": [s.robust_sgd()],
    "shared_memory": [s.shared_memory()],
    "slowmo": [s.slowmo(period=4)],
    "stochastic_gradient_push": [s.stochastic_gradient_push()],
    "sync_sgd": [s.sync_sgd(), s.sync_sgd(pt.collectives.ring)],
}
"""Every strategy, with periods that the cut at step 10 falls into."""

COMPRESSED = [
    s.bf16_sgd(),
    s.int8_sgd(exact_below=4),
    s.one_bit_sgd(exact_below=4),
    s.top_k_sgd(0.1, exact_below=4),
    s.ef21(pt.compression.top_k(0.1), exact_below=4),
    s.threshold_sgd(0.05, density=0.1, exact_below=4),
    s.dgc(0.1, warmup_steps=5),
    s.power_sgd(1, exact_below=4),
    s.qsgd(exact_below=4),
    s.terngrad(),
    s.sign_sgd(feedback=True, exact_below=4),
    s.local_sgd(period=4, codec=pt.compression.feedback(pt.compression.one_bit())),
    s.sparse_loco(period=4, exact_below=4),
    *(s.demo(), s.dion(rank=2), s.distributed_lion(), s.distributed_muon(), s.one_bit_adam(warmup_steps=5)),
    s.zero_one_adam(freeze_step=5, repeats=2, longest=4),
]
"""Strategies that keep residuals, or are the update itself. Each is quick, so two sets of processes serve them all."""
UPDATES = ("demo", "dion", "distributed_lion", "distributed_muon", "one_bit_adam", "zero_one_adam")
"""Their update is the step, so they go with SGD."""

WORKERS = 2


def data(num_samples: int) -> TensorDataset:
    """Inputs (num_samples, 4) and targets (num_samples, 4): the sample's number and three values."""
    random = torch.Generator().manual_seed(0)
    number = torch.arange(num_samples, dtype=torch.float32).unsqueeze(1)
    values = torch.randn(num_samples, 7, generator=random)
    return TensorDataset(values[:, :4], torch.cat([number, values[:, 4:]], dim=1))


def halved(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    return StepLR(optimizer, step_size=3, gamma=0.5)


def job(seen: list[int] | None = None, *, num_samples: int = 100) -> pt.Job:
    """Batch norm (where no batch has one sample), dropout and a schedule: every state that could be forgotten.

    `seen` collects the numbers of the samples.
    """

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if seen is not None:
            seen.extend(int(number) for number in target[:, 0])
        return squared(output, target[:, 1:])

    def norm() -> nn.Module:
        return nn.BatchNorm1d(6) if seen is None else nn.LayerNorm(6)

    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), norm(), nn.Dropout(0.2), nn.Linear(6, 3)),
        data=lambda folder: pt.Data(data(num_samples)),
        loss=loss,
        optimizer=lambda parameters, lr: Adam(parameters, lr=lr),
        schedule=halved,
        lr=0.05,
        batch_size=4,
    )


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return SGD(parameters, lr=lr)


def fitted(strategy: Strategy, **options: Any) -> list[Any]:
    """Final hash and steps of a run with these options, from every rank."""

    def work(world: ProcessWorld) -> Result:
        result = pt.Trainer(job(), strategy, world=world, **options).fit()
        return [result.parameters_sha256, result.steps, result.samples]

    return together(WORKERS, work)


def test_every_strategy_is_here() -> None:
    served = {name for name in s.__all__ if getattr(s, name)().server is not None}  # they have tests of their own
    staged = {name for name in s.__all__ if getattr(s, name)().schedule is not None}  # so have they
    parted = {name for name in s.__all__ if getattr(s, name)().parted is not None}  # and these: `test_parted_runs`
    grouped = {name for name in s.__all__ if getattr(s, name)().groups > 1}  # and they: `test_codistillation`
    compressed = {str(strategy).partition("(")[0] for strategy in COMPRESSED}
    hogwild = {"hogwild"}  # where no worker waits nothing repeats
    assert set(STRATEGIES) | compressed | served | staged | parted | grouped | hogwild == set(s.__all__)


@pytest.mark.parametrize("strategy", [one for several in STRATEGIES.values() for one in several], ids=str)
def test_stopping_and_resuming_equals_going_straight_on(strategy: Strategy, tmp_path: Path) -> None:
    def straight_and_stopped(world: ProcessWorld) -> Result:
        straight = pt.Trainer(job(), strategy, world=world, steps=20).fit()
        pt.Trainer(job(), strategy, world=world, steps=10, out=tmp_path).fit()
        return [straight.parameters_sha256, straight.steps, straight.samples]

    expected = together(WORKERS, straight_and_stopped)
    assert expected[0] == expected[1]
    assert expected[0][1:] == [20, 20 * 4 * WORKERS - 4]  # an epoch is 12 whole steps and a last one of 4 samples
    assert fitted(strategy, steps=20, out=tmp_path, resume=True) == expected


def test_what_compression_remembers_is_saved_by_every_rank_and_resumed(tmp_path: Path) -> None:
    def hashes(resume: bool) -> Any:
        def work(world: ProcessWorld) -> Result:
            found = []
            for i, strategy in enumerate(COMPRESSED):
                own = strategy.momentum or strategy.name.startswith(UPDATES)  # Adam has momentum of its own
                of = replace(job(), optimizer=sgd) if own else job()
                if resume:
                    out = tmp_path / str(i)
                    found.append(pt.Trainer(of, strategy, world=world, steps=16, out=out, resume=True).fit())
                else:
                    found.append(pt.Trainer(of, strategy, world=world, steps=16).fit())
                    pt.Trainer(of, strategy, world=world, steps=7, out=tmp_path / str(i)).fit()
            return [[str(result.strategy), result.parameters_sha256] for result in found]

        return work

    straight = together(WORKERS, hashes(False))
    assert straight[0] == straight[1]
    assert together(WORKERS, hashes(True)) == straight


def test_resuming_what_is_over_changes_nothing(tmp_path: Path) -> None:
    first = fitted(s.diloco(period=4), steps=10, out=tmp_path)
    assert fitted(s.diloco(period=4), steps=10, out=tmp_path, resume=True) == first


def test_checkpoints_on_the_way_change_nothing(tmp_path: Path) -> None:
    strategy = s.delayed_sgd(delay=2)
    assert fitted(strategy, steps=10, out=tmp_path, checkpoint_every=3) == fitted(strategy, steps=10)
    newest = latest(tmp_path / "checkpoint")
    assert newest is not None
    assert newest.name == "step-00000010"


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.diloco(period=2), s.gossip()], ids=str)
def test_another_number_of_workers_neither_repeats_nor_loses_a_sample(
    strategy: Strategy, before: int, after: int, tmp_path: Path
) -> None:
    def serve(resume: bool, **options: Any) -> Any:
        def work(world: ProcessWorld) -> Result:
            seen: list[int] = []
            trainer = pt.Trainer(
                job(seen, num_samples=96), strategy, world=world, out=tmp_path, resume=resume, **options
            )
            trainer.fit()
            return seen

        return work

    stopped = together(before, serve(False, steps=5))
    resumed = together(after, serve(True, epochs=1))
    assert sum(len(part) for part in stopped) == 5 * 4 * before
    assert sorted(number for part in [*stopped, *resumed] for number in part) == list(range(96))


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-1.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_damaged_checkpoint_is_refused_by_name(file: str, harm: str, tmp_path: Path) -> None:
    fitted(s.local_sgd(period=2), steps=2, out=tmp_path)
    newest = latest(tmp_path / "checkpoint")
    assert newest is not None
    content = bytearray((newest / file).read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    else:
        del content[-1:]
    (newest / file).write_bytes(content)
    with pytest.raises(
        pt.errors.WorkerDied, match=rf"DamagedCheckpoint(.|\n)*{newest.name}/{file} (is damaged|has \d+ bytes)"
    ):
        fitted(s.local_sgd(period=2), steps=4, out=tmp_path, resume=True)


def test_a_checkpoint_of_another_strategy_is_refused(tmp_path: Path) -> None:
    fitted(s.local_sgd(period=2), steps=2, out=tmp_path)
    with pytest.raises(
        pt.errors.WorkerDied,
        match=r"raised ValueError: .* was saved by local_sgd\(period=2.*this run uses local_sgd\(period=3",
    ):
        fitted(s.local_sgd(period=3), steps=4, out=tmp_path, resume=True)


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.errors.WorkerDied, match=r"there is no checkpoint in .*checkpoint to resume from"):
        fitted(s.sync_sgd(), steps=2, out=tmp_path, resume=True)


def test_a_parameter_server_s_snapshots_are_no_checkpoint_but_are_named(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    root.mkdir()
    (root / "snapshot-00000001-run.json").touch()
    with pytest.raises(
        pt.errors.WorkerDied, match=r"holds snapshots of a parameter server, and sync_sgd.*the --strategy"
    ):
        fitted(s.sync_sgd(), steps=2, out=tmp_path, resume=True)


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    fitted(s.sync_sgd(), steps=2, out=tmp_path)

    def work(world: ProcessWorld) -> Result:
        other = replace(job(), name="other")
        with pytest.raises(ValueError, match=r"was saved by job 'job', this run trains 'other'; use another --out"):
            pt.Trainer(other, s.sync_sgd(), world=world, steps=4, out=tmp_path, resume=True).fit()
        return None

    together(1, work)


def rates(trainer: pt.Trainer) -> list[float]:
    return [group["lr"] for group in trainer.context.replica.optimizer.param_groups]


def twofold(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """The last two parameters learn ten times as fast."""
    *slow, weight, bias = parameters
    groups: list[dict[str, Any]] = [{"params": slow}, {"params": [weight, bias], "lr": 10 * lr}]
    return Adam(groups, lr=lr)


@pytest.mark.parametrize(("lr", "expected"), [(None, [0.05, 0.5]), (0.01, [0.01, 0.1])])
def test_a_learning_rate_that_is_given_replaces_the_saved_one(
    lr: float | None, expected: list[float], tmp_path: Path
) -> None:
    plain = replace(job(), schedule=None, optimizer=twofold)

    def work(world: ProcessWorld) -> Result:
        pt.Trainer(plain, s.sync_sgd(), world=world, steps=2, out=tmp_path).fit()
        resumed = pt.Trainer(plain, s.sync_sgd(), world=world, steps=4, out=tmp_path, resume=True, lr=lr)
        resumed.fit()
        return rates(resumed)

    assert together(1, work) == [expected]


def test_a_learning_rate_that_contradicts_the_saved_schedule_is_refused(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> Result:
        pt.Trainer(job(), s.sync_sgd(), world=world, steps=4, out=tmp_path).fit()
        pt.Trainer(job(), s.sync_sgd(), world=world, steps=5, out=tmp_path, resume=True, lr=0.05).fit()
        with pytest.raises(
            ValueError, match=r"schedule, which began at learning rate \[0.05\], and lr=0.01 would begin"
        ):
            pt.Trainer(job(), s.sync_sgd(), world=world, steps=6, out=tmp_path, resume=True, lr=0.01).fit()
        return None

    together(1, work)


def test_a_schedule_with_milestones_goes_on(tmp_path: Path) -> None:
    falling = replace(job(), schedule=lambda optimizer, steps: MultiStepLR(optimizer, [2, 6], gamma=0.1))

    def work(world: ProcessWorld) -> Result:
        straight = pt.Trainer(falling, s.sync_sgd(), world=world, steps=8)
        expected = straight.fit().parameters_sha256
        pt.Trainer(falling, s.sync_sgd(), world=world, steps=4, out=tmp_path).fit()
        resumed = pt.Trainer(falling, s.sync_sgd(), world=world, steps=8, out=tmp_path, resume=True)
        assert resumed.fit().parameters_sha256 == expected
        return [rates(straight), rates(resumed)]

    ((straight, resumed),) = together(1, work)
    assert straight == resumed == [pytest.approx(0.0005)]
