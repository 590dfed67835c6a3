"""Batches by speed: parts of any size train as the joined batch, follow the speeds, and come back to equal ones.

speeds of 4 workers    1   1   1   ½          a step of 112 samples takes 32 samples' time, not 56
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import ROWS, Row
from laws.test_batch_weights import BATCH, JOB, PAIRS, STEPS, check, plain, simulated
from polytempo import strategies as s
from polytempo.core.calls.refusals import Incompatible
from polytempo.data.plan import Shares
from polytempo.planner.by_speed import parts_by_speed, with_runs_by_speed
from polytempo.planner.run_price import Pricer
from polytempo.planner.search_space import SearchSpace
from polytempo.training.hooks import speed_balance
from polytempo.worlds import ProcessWorld
from process.crew import together


def any_shares(parts: Shares, seconds: object) -> Shares:
    """Parts of at least one sample, drawn from the parts before."""
    draw, total, size = Random(str(parts)), sum(parts), len(parts)
    cuts = sorted(draw.sample(range(1, total), size - 1))
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True))


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts in each step."""
    monkeypatch.setattr(speed_balance, "EVERY", 1)
    monkeypatch.setattr(speed_balance, "next_shares", any_shares)


BY_SAMPLES = replace(
    PAIRS, weight=None, loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
)


def plain_by_samples() -> dict[str, torch.Tensor]:
    """All places of a text count alike, so each text does."""
    from laws import test_batch_weights as weights

    torch.manual_seed(0)
    net, data = JOB.model(), weights.texts()
    optimizer = JOB.optimizer(net.parameters(), JOB.lr)
    schedule = weights.halving(optimizer, 3)
    for step in range(STEPS):
        order = weights.permutation(len(data), 0, step // 3).tolist()[step % 3 * BATCH : (step % 3 + 1) * BATCH]
        inputs, target = weights.pairs([data[i] for i in order])
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs).flatten(0, 1), target.flatten()).backward()
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize(("workers", "accumulate"), [(1, 1), (2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("row", [row for row in ROWS if row.joined], ids=lambda row: str(row.make()))
def test_strategies_that_average(row: Row, workers: int, accumulate: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"accumulate": accumulate, "balance": "speed"}
    check(simulated(JOB, row.make(), workers, tmp_path / "tokens", **given), plain())
    check(simulated(BY_SAMPLES, row.make(), workers, tmp_path / "samples", **given), plain_by_samples())


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("shared_memory()", 3, {}),
        ("gpipe(2, 1)", 4, {}),
        ("one_f_one_b(2, 2)", 4, {}),
        ("zero_bubble(2, 2)", 4, {}),
        (s.split({"2": "row"}, parts=2), 4, {}),
        ('hybrid("2")', 3, {}),
        ("sync_sgd(route=invariant(slices=6))", 3, {}),
        ("sync_sgd()", 3, {"batch_growth": {1: 2}}),
        ("sync_sgd()", 2, {"noise_scale": 1}),
    ],
    ids=str,
)
def test_other_layouts(strategy: Any, workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Replicas of pipelines and of split layers, hybrids, one copy; batches that grow train as without balance."""
    found = simulated(BY_SAMPLES, strategy, workers, tmp_path / "speed", balance="speed", **options)
    check(found, simulated(BY_SAMPLES, strategy, workers, tmp_path / "equal", **options))
    if not options:
        check(found, plain_by_samples())
    if "invariant" in str(strategy):
        check(simulated(JOB, strategy, workers, tmp_path / "tokens", balance="speed"), plain())


REFUSED = {"server": "PT1539", "rounds": "PT1540", "racing": "PT1541"}
OWN_STEPS = (
    *("parameter_averaging", "local_sgd", "post_local_sgd", "diloco", "gossip", "stochastic_gradient_push"),
    *("islands", "slowmo", "adasum", "sparse_loco", "streaming_diloco", "noloco", "quasi_global_momentum"),
    *("sparta", "co2", "des_loc", "zero_one_adam"),
)


def refusal(row: Row) -> str | None:
    """The code, or the codes, of a strategy without an exact mean of uneven parts."""
    strategy = row.make()
    code = next((code for name, code in REFUSED.items() if name in strategy.features), None)
    if code is not None or row.name in OWN_STEPS:
        return code or ("PT154[23]" if row.name == "adasum" else "PT1542")
    return "PT1543" if row.name in ("robust_sgd", "distributed_lion") or "feedback=False" in str(strategy) else None


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.make()))
def test_every_strategy_deals_by_speed_or_says_why_not(row: Row) -> None:
    given: dict[str, Any] = {"global_batch_size": BATCH, "steps": 2, "threads": 1, "balance": "speed"}
    if (code := refusal(row)) is None:
        assert pt.simulate(BY_SAMPLES, row.make(), max(4, 2 * row.make().holders), **given).steps == 2
        return
    assert not row.joined
    given |= {"global_batch_size": None, "batch_size": 3} if code == "PT1539" else {}
    with pytest.raises(Incompatible, match=code):
        pt.simulate(BY_SAMPLES, row.make(), 4, **given)


# ------------------------------------------------------------------ speeds


def features(samples: int = 448, batch: int = 28) -> pt.Job:
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1)).double(),
        data=lambda folder: pt.Data(TensorDataset(x, x.sum(1, keepdim=True)), None),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        batch_size=batch,
        lr=0.01,
    )


class Slow:
    """Host 3 computes at half the speed, in its first `steps` steps."""

    def __init__(self, steps: float = float("inf")) -> None:
        self.left = steps

    def __call__(self, random: Random, host: int) -> float:
        if host != 3:
            return 1.0
        self.left -= 1
        return 2.0 if self.left >= 0 else 1.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Shares]:
    """The parts at each look of each rank."""
    found: list[Shares] = []

    def watched(parts: Shares, seconds: Any) -> Shares:
        found.append(speed_shares(parts, seconds))
        return found[-1]

    speed_shares = speed_balance.next_shares
    monkeypatch.setattr(speed_balance, "next_shares", watched)
    return found


def seconds(steps: int, slow: bool, **options: Any) -> float:
    stragglers = Slow() if slow else pt.cluster.constant()
    cluster = pt.cluster.ethernet(gbit_per_s=1e6, gflops=0.1, stragglers=stragglers)
    return pt.simulate(features(), s.sync_sgd(), 4, cluster=cluster, steps=steps, threads=1, **options).seconds


def test_a_step_takes_the_work_over_the_sum_of_speeds(told: list[Shares]) -> None:
    """112 samples, and speeds 1, 1, 1, ½: 32 samples' time a step from the third window on."""

    def a_step(**options: Any) -> float:
        return (seconds(40, **options) - seconds(24, **options)) / 16

    even, slow, balanced = a_step(slow=False), a_step(slow=True), a_step(slow=True, balance="speed")
    assert told[-1] == (32, 32, 32, 16)
    assert slow == pytest.approx(2 * even, rel=0.05)
    work_over_speeds = even * 4 / 3.5
    assert work_over_speeds * 0.95 < balanced <= 1.05 * work_over_speeds


def test_a_rank_that_is_fast_again_has_an_equal_part_again(told: list[Shares]) -> None:
    cluster = pt.cluster.ethernet(stragglers=Slow(steps=24))
    pt.simulate(features(), s.sync_sgd(), 4, cluster=cluster, steps=48, threads=1, balance="speed")
    assert told[::4] == [(31, 30, 30, 21), *[(32, 32, 32, 16)] * 2, (30, 30, 29, 23), *[(28, 28, 28, 28)] * 2]


def test_a_plan_prices_parts_by_speed_as_the_simulation_with_values() -> None:
    cluster = pt.cluster.ethernet(gbit_per_s=1e6, gflops=0.1, stragglers=pt.cluster.slow_host(3, 2.0))
    runs, _ = SearchSpace(("sync_sgd()", "local_sgd(period=4)"), (1, 4), (28,)).runs()
    found = with_runs_by_speed(runs, cluster)
    added = found[2]
    assert [run for run in found if run not in runs] == [added] == [found[1]._replace(balance="speed")]
    assert with_runs_by_speed(runs, pt.cluster.ethernet()) == runs
    assert parts_by_speed(added, cluster) == (32, 32, 32, 16)
    measured = (seconds(40, slow=True, balance="speed") - seconds(24, slow=True, balance="speed")) / 16
    price = Pricer(features(), None, cluster).price(added)
    assert price.step_s == pytest.approx(measured, rel=0.05), "looks at speeds are not priced"


def test_data_in_shards_are_dealt_by_speed_too(told: list[Shares], tmp_path: Path) -> None:
    """A loss that is linear in the weights: an epoch in any order and parts moves them by lr · Σ x / 112, once for each
    sample."""
    rows = torch.randn(112 * 32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = [(row, row.sum()) for row in rows]
    parts = [pairs[at : at + 300] for at in range(0, len(pairs), 300)]
    shards = pt.data.InMemoryShards(parts).shuffled(buffer=64, interleave=2)
    job = replace(
        features(),
        model=lambda: nn.Linear(4, 1, bias=False, dtype=torch.float64),
        data=lambda folder: pt.Data(shards, None),
        loss=lambda output, target: output.mean(),
    )
    cluster = pt.cluster.ethernet(stragglers=Slow())
    given: dict[str, Any] = {"global_batch_size": None, "cluster": cluster, "steps": 32, "checkpoint_every": 32}
    equal, by_speed = (
        simulated(job, s.sync_sgd(), 4, tmp_path / balance, balance=balance, **given) for balance in ("equal", "speed")
    )
    assert told[-1] == (32, 32, 32, 16)
    check(by_speed, equal)


@pytest.mark.parametrize("workers", [1, 4])
def test_equal_speeds_keep_all_bits(workers: int) -> None:
    options: dict[str, Any] = {"steps": 40, "threads": 1}
    equal, by_speed = (
        pt.simulate(features(), s.sync_sgd(), workers, balance=balance, **options) for balance in ("equal", "speed")
    )
    assert by_speed.parameters_sha256 == equal.parameters_sha256
    looks = 5 if workers > 1 else 0
    assert 0 <= by_speed.bytes_sent_per_rank - equal.bytes_sent_per_rank <= 24 * looks * (workers - 1)


@pytest.mark.usefixtures("uneven")
@pytest.mark.parametrize("slices", [5, 8])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_slices_in_any_parts_have_the_bits_of_one_worker(workers: int, slices: int) -> None:
    """Another order of additions has other bits in float32. One layer is used by some batches only."""
    job = replace(features(), model=Sometimes, loss=nn.functional.mse_loss)
    given: dict[str, Any] = {"global_batch_size": 16, "steps": 12, "threads": 1}
    strategy = f"sync_sgd(route=invariant(slices={slices}))"
    one = pt.simulate(job, strategy, 1, **given)
    found = pt.simulate(job, strategy, workers, balance="speed", **given)
    assert found.parameters_sha256 == one.parameters_sha256
    assert pt.simulate(job, "sync_sgd()", 1, **given).parameters_sha256 != one.parameters_sha256


class Sometimes(nn.Module):
    """A second layer, with weight decay, that a batch uses if its first sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        out: torch.Tensor = self.first(x)
        return (out + self.second(x) if x[0, 0] > 1 else out).double()


def test_slices_follow_the_speeds(told: list[Shares], tmp_path: Path) -> None:
    """16 slices on 3 workers, the last at half the speed: 7, 6 and 3 of them. The bits are one worker's."""
    job, strategy = features(batch=32), "sync_sgd(route=invariant(slices=16))"
    cluster = pt.cluster.ethernet(gbit_per_s=1e6, gflops=0.1, stragglers=pt.cluster.slow_host(2, 2.0))
    given: dict[str, Any] = {"global_batch_size": 96, "steps": 32, "threads": 1}
    found = pt.simulate(job, strategy, 3, cluster=cluster, balance="speed", out=tmp_path, **given)
    one, equal = (pt.simulate(job, strategy, n, cluster=cluster, **given) for n in (1, 3))
    assert found.parameters_sha256 == equal.parameters_sha256 == one.parameters_sha256
    assert told[0] != told[-1] == (7, 6, 3)
    assert found.seconds < 0.8 * equal.seconds, "the slow worker has 8 slices where each has its subtree"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["smallest_part"], row["largest_part"]) for row in rows if row["kind"] == "train"][-1] == (3, 7)


def test_refusals() -> None:
    asked: list[tuple[dict[str, Any], str]] = [({"batched": True}, "PT1544"), ({"meta": True}, "PT1545")]
    for options, code in asked:
        with pytest.raises(Incompatible, match=code):
            pt.simulate(features(), s.sync_sgd(), 4, steps=1, balance="speed", **options)
    with pytest.raises(ValueError, match="must be one of 'equal', 'speed'"):
        pt.simulate(features(), s.sync_sgd(), 4, steps=1, balance="size")  # type: ignore[arg-type]  # the test is about it


# ------------------------------------------------------------------ real processes, with injected paces


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes 2.5 times as long for a sample."""

    def so_far(balance: Any) -> tuple[float, int]:
        shard = balance._shard
        assert balance.replica.pace is not None, "this takes the place of its seconds"
        return (1.0, 2.5)[shard.rank % 2] * shard.taken, shard.taken

    monkeypatch.setattr(speed_balance.SpeedBalance, "_so_far", so_far)
    monkeypatch.setattr(speed_balance, "EVERY", 4)


@pytest.mark.process
@pytest.mark.usefixtures("paces")
@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("sync_sgd()", 2, {}),
        ("sync_sgd()", 2, {"min_workers": 1}),
        ("sync_sgd(route=invariant(slices=12))", 2, {}),
        ("sync_sgd(route=invariant(slices=12))", 2, {"min_workers": 1}),
        ("one_f_one_b(2, 2)", 4, {}),
        ("shared_memory()", 2, {"accumulate": 2}),
    ],
)
def test_a_job_broken_off_between_two_looks(
    strategy: str, workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """The same bits as undisturbed, and plain torch's model; of slices the bits of one worker."""
    sliced = "invariant" in strategy
    given: dict[str, Any] = {"global_batch_size": 24, "threads": 1, "balance": "speed", **options}
    whole = pt.run(features(), strategy, workers, steps=20, out=tmp_path / "whole", **given)
    out = tmp_path / "parts"
    pt.run(features(), strategy, workers, steps=10, out=out, **given)
    found = pt.run(features(), strategy, workers, steps=20, out=out, resume=True, **given)
    assert found.parameters_sha256 == whole.parameters_sha256
    one: dict[str, Any] = {"global_batch_size": 24, "threads": 1, "out": tmp_path / "one", "checkpoint_every": 20}
    equal = pt.simulate(features(), strategy if sliced else "sync_sgd()", 1, steps=20, **one)
    assert equal.samples == found.samples
    assert not sliced or equal.parameters_sha256 == found.parameters_sha256
    check(pt.training.checkpoint_model(out), pt.training.checkpoint_model(tmp_path / "one"))
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    parts = [(row["smallest_part"], row["largest_part"]) for row in rows if row["kind"] == "train"]
    assert parts[-1] == ((3, 9) if sliced else (7, 17))  # 12 slices, or 24 samples, in the proportion 1 : 2.5


@pytest.mark.process
@pytest.mark.usefixtures("paces")
def test_a_loop_of_a_user() -> None:
    """Two ranks see each sample once an epoch, in parts by their speed, and have the model of one rank."""
    data = TensorDataset(torch.arange(96).double().unsqueeze(1) / 96)

    def trained(world: ProcessWorld, balance: Any) -> tuple[list[list[float]], list[float]]:
        torch.manual_seed(0)
        net = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        handle = pt.attach(net, optimizer, s.sync_sgd())
        shard, seen = pt.shard(data, batch_size=24 // world.size, balance=balance), []
        for _ in range(3):
            for (x,) in shard:
                seen.append(x.flatten().tolist())
                optimizer.zero_grad()
                (net(x) - 3 * x).square().mean().backward()
                optimizer.step()
        handle.detach()
        return seen, [p.item() for p in net.parameters()]

    found = together(2, lambda world: trained(world, "speed"), timeout_s=100)
    one = together(1, lambda world: trained(world, "equal"), timeout_s=100)[0]
    sizes = [[len(batch) for batch in seen] for seen, _ in found]
    assert sizes == [[12] * 5 + [15] * 4 + [17] * 3, [12] * 5 + [9] * 4 + [7] * 3]  # the first step is not measured
    for step, batch in enumerate(one[0]):
        assert [*found[0][0][step], *found[1][0][step]] == batch
    assert found[0][1] == found[1][1] == pytest.approx(one[1], rel=1e-12)


@pytest.mark.process
@pytest.mark.usefixtures("paces")
def test_a_loop_of_a_user_on_data_in_shards() -> None:
    """Other parts of a global batch deal the rest of the stretches again: each sample once an epoch, and the model of
    plain torch on the joined batches."""
    numbers = [(torch.tensor([number / 96], dtype=torch.float64),) for number in range(96)]
    data = pt.data.InMemoryShards([numbers[:50], numbers[50:61], numbers[61:]]).shuffled(buffer=16, interleave=2)

    def net_of() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(1, 1).double()
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (net(x) - 3 * x).square().mean().backward()
        optimizer.step()

    def trained(world: ProcessWorld) -> tuple[list[list[float]], list[float]]:
        net, optimizer = net_of()
        handle = pt.attach(net, optimizer, s.sync_sgd())
        shard, seen = pt.shard(data, batch_size=12, balance="speed"), []
        for _ in range(3):
            for (x,) in shard:
                seen.append(x.flatten().tolist())
                step(net, optimizer, x)
        handle.detach()
        return seen, [p.item() for p in net.parameters()]

    (first, model), (second, other) = together(2, trained, timeout_s=100)
    assert [len(batch) for batch in first] == [12] * 5 + [15] * 4 + [17] * 3
    assert [len(batch) for batch in second] == [12] * 5 + [9] * 4 + [7] * 3
    joined = [[*one, *two] for one, two in zip(first, second, strict=True)]
    for epoch in range(0, 12, 4):
        assert sorted(x for batch in joined[epoch : epoch + 4] for x in batch) == [number / 96 for number in range(96)]
    net, optimizer = net_of()
    for batch in joined:
        step(net, optimizer, torch.tensor(batch, dtype=torch.float64).unsqueeze(1))
    assert model == other == pytest.approx([p.item() for p in net.parameters()], rel=1e-12)


@pytest.mark.process
def test_refusals_in_loops() -> None:
    def work(world: ProcessWorld) -> list[str]:
        said = []

        def refused(act: Any) -> None:
            with pytest.raises(Incompatible) as error:
                act()
            said.append(error.value.code)

        class Stream(torch.utils.data.IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(9))

        refused(lambda: pt.shard(Stream(), batch_size=2, balance="speed"))
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, s.local_sgd(period=2))
        for (x,) in pt.shard(TensorDataset(torch.ones(8, 1)), batch_size=2, balance="speed"):
            net(x).sum().backward()
            refused(optimizer.step)
            break
        refused(lambda: handle.join().__enter__())
        return said

    assert together(2, work, timeout_s=100) == [["PT1546", "PT1542", "PT1547"]] * 2
