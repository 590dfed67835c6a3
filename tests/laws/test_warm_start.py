"""Laws of starts from another run: every strategy begins with the model of any other, as if the job had made it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import GROUPED, PARTED, ROWS, SERVED, STAGED, Row
from polytempo.core import Strategy
from polytempo.core.calls.refusals import Incompatible
from polytempo.runs.run import join
from polytempo.spec.result import Result
from polytempo.training.job.start import tensors_sha256

s = pt.strategies
STEPS = 3
FIRST = {row.name: row for row in reversed([*ROWS, *SERVED, *STAGED, *PARTED, *GROUPED])}
"""One row of each strategy."""


def data(path: Path | None) -> pt.Data:
    random = torch.Generator().manual_seed(4)
    x = torch.randn(96, 6, dtype=torch.float64, generator=random)
    set_ = TensorDataset(x, (x.sum(1) > 0).long())
    return pt.Data(set_, set_)


def network(outputs: int = 4) -> nn.Module:
    """A frozen layer, running statistics and a buffer stand beside trained parameters."""
    net = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs)
    )
    net[0].weight.requires_grad_(False)
    return net.double()


def plain() -> nn.Module:
    """For strategies that do not take running statistics."""
    middle = [each for _ in range(2) for each in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *middle, nn.Linear(8, 4)).double()


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=lr)


def loaded(make: Any, tensors: dict[str, Tensor]) -> nn.Module:
    model: nn.Module = make()
    model.load_state_dict(tensors)
    return model


def loss_of(model: nn.Module) -> float:
    x, y = data(None).train.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(x), y))


JOB = pt.Job(network, data, nn.functional.cross_entropy, sgd, lr=0.05, batch_size=4, name="warm")
PLAIN = replace(JOB, model=plain)


def job_of(strategy: Strategy) -> pt.Job:
    normless = strategy.server is None and strategy.schedule is None and strategy.parted is None
    return JOB if normless and strategy.one_copy is None and strategy.groups == 1 else PLAIN


def seen(result: Result) -> tuple[Any, ...]:
    return result.parameters_sha256, result.trace_hash, result.loss, result.train_loss, result.seconds


def simulated(job: pt.Job, strategy: Strategy, **options: Any) -> Result:
    workers = 6 if strategy.stages == 3 else 4 if strategy.parted is None else 2
    return pt.simulate(job, strategy, workers, **{"steps": STEPS, **options})


@pytest.mark.parametrize("row", FIRST.values(), ids=list(FIRST))
def test_every_strategy_is_a_start_and_takes_one(row: Row, tmp_path: Path) -> None:
    """The bits are those of a job with a model() that has loaded the first run's model."""
    strategy = s.hybrid("0") if row.name == "hybrid" else row.make()  # one that divides a layer
    job = job_of(strategy)
    simulated(job, s.sync_sgd(), out=tmp_path / "first", checkpoint_every=STEPS)
    given = partial(loaded, job.model, pt.training.checkpoint_model(tmp_path / "first"))
    options = {"out": tmp_path / "second", "checkpoint_every": STEPS}
    found = simulated(job, strategy, start_from=tmp_path / "first", **options)
    assert seen(found) == seen(simulated(replace(job, model=given), strategy))
    assert found.started_from == {
        "run": "first",
        "step": STEPS,
        "strategy": str(s.sync_sgd()),
        "sha256": tensors_sha256(pt.training.checkpoint_model(tmp_path / "first")),
    }
    third = partial(loaded, job.model, pt.training.checkpoint_model(tmp_path / "second"))
    last = simulated(job, s.sync_sgd(), start_from=tmp_path / "second")
    assert seen(last) == seen(simulated(replace(job, model=third), s.sync_sgd()))


@pytest.mark.parametrize("shards", [1, 3])
def test_the_model_of_shards_is_the_scored_one(shards: int, tmp_path: Path) -> None:
    """Frozen parameters, statistics of norms, buffers and weights that two names share are there, too."""

    def tied() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)).double()
        net[3].weight = net[2].weight
        net[0].weight.requires_grad_(False)
        net.register_buffer("scale", torch.full((3,), 2.5))
        return net

    job = replace(JOB, model=tied)
    found = simulated(job, s.async_sgd(shards=shards), steps=8, out=tmp_path, checkpoint_every=8)
    model = loaded(tied, pt.training.checkpoint_model(tmp_path))
    assert loss_of(model) == pytest.approx(found.loss, abs=1e-12)
    assert pt.training.checkpoint_model(f"{tmp_path}@8").keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="no snapshot of step 7; it has steps 8"):
        pt.training.checkpoint_model(f"{tmp_path}@7")


def test_rows_of_tables_are_in_the_model_of_shards(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(12, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x).mean(1))

    words = torch.randint(12, (64, 4), generator=torch.Generator().manual_seed(1))
    set_ = TensorDataset(words, words[:, 0] % 2)
    job = replace(JOB, model=lambda: Words().double(), data=lambda path: pt.Data(set_, set_))
    found = simulated(job, s.async_sgd(shards=2), steps=6, out=tmp_path, checkpoint_every=6)
    model = loaded(lambda: Words().double(), pt.training.checkpoint_model(tmp_path))
    loss = nn.functional.cross_entropy(model(words), words[:, 0] % 2)
    assert float(loss.detach()) == pytest.approx(found.loss, abs=1e-12)


def test_a_folder_has_the_model_of_its_last_run(tmp_path: Path) -> None:
    for strategy in (s.sync_sgd(), s.async_sgd(), s.local_sgd(period=2)):
        found = simulated(PLAIN, strategy, out=tmp_path, checkpoint_every=STEPS)
        assert loss_of(loaded(plain, pt.training.checkpoint_model(tmp_path))) == pytest.approx(found.loss, abs=1e-12)


def test_a_file_of_named_tensors_is_a_start(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(7)
    tensors = plain().state_dict()
    save_file(tensors, tmp_path / "weights.safetensors")
    found = simulated(PLAIN, s.sync_sgd(), start_from=tmp_path / "weights.safetensors")
    by_hand = simulated(replace(PLAIN, model=partial(loaded, plain, tensors)), s.sync_sgd())
    assert seen(found) == seen(by_hand)


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    simulated(PLAIN, s.sync_sgd(), out=tmp_path, checkpoint_every=STEPS)
    with pytest.raises(Incompatible, match=r"PT2001.*1\.bias.*"):
        simulated(JOB, s.sync_sgd(), start_from=tmp_path)
    wide = replace(PLAIN, model=lambda: nn.Sequential(*list(plain())[:-1], nn.Linear(8, 5)).double())
    with pytest.raises(Incompatible, match=r"PT2002.*6\.bias \(4,\) instead of \(5,\)"):
        simulated(wide, s.sync_sgd(), start_from=tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint of step 2 in .*; it has steps 3"):
        simulated(PLAIN, s.sync_sgd(), start_from=f"{tmp_path}@2")
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        simulated(PLAIN, s.sync_sgd(), start_from=tmp_path / "nowhere")


CHAINS = {
    "warm start by Downpour": (s.downpour(push_every=2, pull_every=2), s.sync_sgd()),
    "warm start of Downpour": (s.sync_sgd(), s.downpour(push_every=2, pull_every=2)),
    "local steps after gossip": (s.gossip(), s.local_sgd(period=2)),
    "a pipeline after a server": (s.async_sgd(shards=2), s.gpipe(stages=2)),
    "Hogwild! after a pipeline": (s.one_f_one_b(stages=2), s.hogwild()),
}


@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_is_two_runs_by_hand(case: str, tmp_path: Path) -> None:
    first, second = CHAINS[case]
    chain = pt.then(first, 4, second)
    assert str(pt.parse_strategy(str(chain))) == str(chain)
    simulated(PLAIN, first, steps=4, out=tmp_path, checkpoint_every=4)
    expected = simulated(PLAIN, second, start_from=tmp_path)
    found = simulated(PLAIN, chain)
    assert seen(found) == seen(expected)
    assert found.strategy == str(chain)
    assert found == simulated(PLAIN, chain)


def test_chains_follow_one_another_however_they_are_written() -> None:
    a, b, c = s.sync_sgd(), s.gossip(), s.local_sgd(period=2)
    left, right = pt.then(pt.then(a, 2, b), 3, c), pt.then(a, 2, pt.then(b, 3, c))
    assert seen(simulated(PLAIN, left)) == seen(simulated(PLAIN, right))
    assert left.before is not None
    assert right.before is not None
    assert left.before.steps == right.before.steps == 3
    assert str(left.before.strategy) == str(right.before.strategy) == str(pt.then(a, 2, b))


def test_chains_that_cannot_be_are_refused(tmp_path: Path) -> None:
    chain = pt.then(s.downpour(), 2, s.sync_sgd())
    for after in (0, True, 2.5):
        with pytest.raises(ValueError, match="whole number above 0"):
            pt.then(s.sync_sgd(), after, s.gossip())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is written then"):
        pt.parse_strategy("then(downpour(), 2)")
    model = plain()
    with pytest.raises(Incompatible, match="PT2004"):
        pt.attach(model, sgd(model.parameters(), 0.1), chain)
    with pytest.raises(Incompatible, match="PT2006"):
        s.gpipe(stages=2, inner=chain)
    with pytest.raises(Incompatible, match="PT2007"):
        s.split(inner=chain)
    with pytest.raises(Incompatible, match="PT1201"):  # the first run cannot be elastic
        pt.run(PLAIN, chain, 2, steps=2, min_workers=1)
    for begin in (partial(join, PLAIN), lambda strategy: pt.Trainer(PLAIN, strategy)):
        with pytest.raises(Incompatible, match="PT2005"):
            begin(chain)
