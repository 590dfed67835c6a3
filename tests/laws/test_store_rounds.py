"""Laws of workers that meet in an object store: they are the strategy, and with faults each sample counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import PolytempoError
from polytempo.worlds.object_store.object_store import ObjectStore
from polytempo.worlds.object_store.rounds import StoreRounds, history
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Crew, Faults, Killed, MemoryObjects, Work

SAMPLES, WORKERS, PERIOD, EPOCHS = 96, 3, 4, 2
RANDOM = torch.Generator().manual_seed(1)
DATA = TensorDataset(
    torch.randn(SAMPLES, 4, generator=RANDOM, dtype=torch.float64), torch.arange(SAMPLES, dtype=torch.float64)[:, None]
)


def net_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def loop(
    strategy: str, *, kill_at: int | None = None, epochs: int = EPOCHS, make: Callable[[int], nn.Module] = net_of
) -> Work:
    """A worker's loop; its answer is the model and the number of steps. Models begin differently: all take one."""

    def work(world: StoreWorld) -> tuple[Tensor, int]:
        net = make(world.rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        handle = pt.attach(net, optimizer, strategy, world=world)
        batches = pt.shard(DATA, batch_size=4, world=world)
        while batches.epoch < epochs:
            for x, y in batches:
                if handle.step == kill_at:
                    raise Killed
                optimizer.zero_grad()
                ((net(x) - y) ** 2).mean().backward()
                optimizer.step()
        world.leave()
        return flat(net), handle.step

    return work


def crew_of(*works: Work, wait_s: float = 10.0) -> Crew:
    crew = Crew(len(works), wait_s=wait_s)
    for worker, work in enumerate(works):
        crew.add(worker, work)
    return crew


def rows(objects: MemoryObjects) -> list[dict[str, Any]]:
    return list(history(ObjectStore(objects, "memory")))


def counted(objects: MemoryObjects) -> Counter[tuple[int, int]]:
    """Count the times that each place of each epoch was trained on, by the ledger."""
    found: Counter[tuple[int, int]] = Counter()
    for row in rows(objects):
        for member in row["members"]:
            for epoch, start, stop in row["ledger"][str(member)]["spans"]:
                found.update((epoch, place) for place in range(start, stop))
    return found


ONCE = Counter({(epoch, place): 1 for epoch in range(EPOCHS) for place in range(SAMPLES)})


# ------------------------------------------------------------------ without faults


def by_hand(outer_lr: float, momentum: float) -> Tensor:
    """Workers' movements and an outer Nesterov step, in plain torch."""
    nets = [net_of(0) for _ in range(WORKERS)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9) for net in nets]
    shards = [pt.data.DataShard(DATA, rank=rank, size=WORKERS, batch_size=4) for rank in range(WORKERS)]
    anchor, velocity, step = flat(nets[0]), torch.zeros_like(flat(nets[0])), 0
    for _ in range(EPOCHS):
        for batches in zip(*shards, strict=True):
            for net, optimizer, (x, y) in zip(nets, optimizers, batches, strict=True):
                optimizer.zero_grad()
                ((net(x) - y) ** 2).mean().backward()
                optimizer.step()
            step += 1
            if step % PERIOD == 0:
                moved = anchor - torch.stack([flat(net) for net in nets]).mean(0)
                velocity = momentum * velocity + moved
                anchor = anchor - outer_lr * (moved + momentum * velocity)
                for net in nets:
                    nn.utils.vector_to_parameters(anchor.clone(), net.parameters())
    return anchor


@pytest.mark.parametrize(
    ("strategy", "outer_lr", "momentum"), [("local_sgd(period=4)", 1.0, 0.0), ("diloco(period=4)", 0.7, 0.5)]
)
def test_rounds_are_the_strategy(strategy: str, outer_lr: float, momentum: float) -> None:
    crew = crew_of(*[loop(strategy)] * WORKERS)
    answers = crew.run()
    for found, steps in answers:
        assert steps == EPOCHS * SAMPLES // WORKERS // 4
        assert torch.equal(found, answers[0][0])
        torch.testing.assert_close(found, by_hand(outer_lr, momentum), rtol=0, atol=1e-12)
    assert counted(crew.objects) == ONCE


def test_a_round_costs_what_its_docstring_says() -> None:
    """3 k + 3 puts a round, and old objects are removed."""
    puts: list[int] = []

    def work(world: StoreWorld) -> None:
        loop("local_sgd(period=4)")(world)
        puts.append(world.rounds.store.requests.puts)

    crew = crew_of(*[work] * WORKERS)
    assert crew.run() == [None] * WORKERS
    rounds = len(rows(crew.objects))
    assert sum(puts) == rounds * (3 * WORKERS + 3) + 1 + WORKERS + 2, "the start, a word of leaving of each, the end"
    crew = crew_of(*[loop("local_sgd(period=2)")] * WORKERS)
    crew.run()
    old = [name for name in crew.objects.content if name.startswith(("00000000.", "00000001."))]
    assert old == ["00000000.0.0/decision", "00000001.0.0/decision"]


# ------------------------------------------------------------------ workers that are lost, late and come again


@pytest.mark.parametrize("kill_at", [0, 3, 5, 13])
def test_a_killed_worker_is_left_out_and_comes_again(kill_at: int) -> None:
    strategy = "diloco(period=4)"
    crew = crew_of(loop(strategy), loop(strategy), loop(strategy, kill_at=kill_at))
    crew.add(2, loop(strategy), at_s=5.0)
    first, second, killed, again = crew.run()
    assert isinstance(killed, Killed)
    assert torch.equal(first[0], second[0])
    assert not isinstance(again, BaseException), again
    assert counted(crew.objects) == ONCE
    found = rows(crew.objects)
    assert [0, 1, 2] in [row["members"] for row in found], "it has taken part"
    assert [2] in [row["lost"] for row in found] or kill_at < 4, "and was missing"


def paced(work: Work, pauses: Callable[[int], float]) -> Work:
    """`work` with a pause of `pauses(round)` seconds before each round."""

    def slow(world: StoreWorld) -> Any:
        rounds = world.rounds
        begin = rounds.begin

        def later(mine: dict[str, Any]) -> None:
            rounds.store.clock.sleep(pauses(rounds.round + 1))
            begin(mine)

        rounds.begin = later  # type: ignore[method-assign]
        return work(world)

    return slow


@pytest.mark.parametrize("moment", range(1, 96, 5))
def test_a_worker_may_be_killed_at_any_request(moment: int) -> None:
    """Also while it decides: the next one takes its place, and no sample is lost or counted twice."""

    def die(number: int, operation: str, name: str) -> None:
        if number == moment:
            raise Killed

    strategy = "local_sgd(period=4,codec=feedback(int8))"
    work = paced(loop(strategy, epochs=3), lambda number: 5.0)
    crew = Crew(WORKERS)
    for worker in (1, 2):
        crew.add(worker, work)
    crew.add(0, work, objects=Faults(crew.objects, die))
    crew.add(0, work, at_s=32.0)
    first, second, killed, again = crew.run()
    assert isinstance(killed, Killed)
    for found in (first, second, again):
        assert not isinstance(found, BaseException), found
    assert torch.equal(first[0], second[0])
    assert counted(crew.objects) == Counter({(e, p): 1 for e in range(3) for p in range(SAMPLES)})


def test_a_late_worker_takes_over_the_newest_state() -> None:
    """The worker goes back to the first sample that no round counts, and its steps since then are trained again."""
    work = loop("diloco(period=4)")
    steady = paced(work, lambda number: 9.0)
    crew = crew_of(steady, steady, paced(work, lambda number: 25.0 if number == 1 else 9.0))
    first, second, third = crew.run()
    assert torch.equal(first[0], second[0])
    assert third[1] > 0
    assert [row["lost"] for row in rows(crew.objects)].count([2]) == 1
    assert counted(crew.objects) == ONCE


@pytest.mark.parametrize("lates", [(2,), (1, 2)])
def test_workers_left_out_of_the_last_round_end_too(lates: tuple[int, ...]) -> None:
    work = loop("diloco(period=4)")
    late = paced(work, lambda number: 300.0 if number == 3 else 0.0)
    crew = crew_of(*[late if worker in lates else work for worker in range(WORKERS)])
    answers = crew.run()
    for answer in answers:
        assert not isinstance(answer, BaseException), answer
    assert [row["members"] for row in rows(crew.objects)][3] == [w for w in range(WORKERS) if w not in lates]
    assert counted(crew.objects) == ONCE
    assert crew.clock.now() < 500.0, "none has waited for timeout_s"


def test_a_worker_left_out_goes_on_where_a_member_of_the_last_round_is_killed() -> None:
    """No worker is the last one to leave, so after `timeout_s` a state serves that another one has left."""
    work = loop("diloco(period=4)")

    def dies(world: StoreWorld) -> object:
        def leave() -> None:
            raise Killed

        world.leave = leave  # type: ignore[method-assign]
        return work(world)

    crew = crew_of(dies, work, paced(work, lambda number: 300.0 if number == 3 else 0.0))
    killed, second, late = crew.run()
    assert isinstance(killed, Killed)
    assert not isinstance(second, BaseException), second
    assert not isinstance(late, BaseException), late
    assert counted(crew.objects) == ONCE


@pytest.mark.parametrize("validates", [False, True])
def test_a_worker_left_out_goes_back_to_where_its_run_began(validates: bool) -> None:
    """Other shards, such as one for validation, keep their position."""
    moved: list[int] = []

    def work(world: StoreWorld) -> None:
        net = net_of(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        pt.attach(net, optimizer, "local_sgd(period=4)", world=world)
        held_out = pt.shard(torch.utils.data.Subset(DATA, range(40)), batch_size=4, world=world)
        batches = pt.shard(DATA, batch_size=4, world=world)
        batches.load_state_dict({"seed": 0, "epoch": 5, "consumed": 0, "num_samples": SAMPLES})
        while batches.epoch < 7:
            for x, y in batches:
                optimizer.zero_grad()
                ((net(x) - y) ** 2).mean().backward()
                optimizer.step()
                if validates:
                    with torch.no_grad():
                        before = held_out.epoch
                        assert len(list(held_out)) == len(held_out)
                        moved.append(held_out.epoch - before)
        world.leave()

    steady = paced(work, lambda number: 9.0)
    crew = crew_of(steady, steady, paced(work, lambda number: 25.0 if number == 0 else 9.0))
    assert crew.run() == [None] * WORKERS
    assert [row["lost"] for row in rows(crew.objects)].count([2]) == 1
    assert counted(crew.objects) == Counter({(e, p): 1 for e in (5, 6) for p in range(SAMPLES)})
    assert set(moved) == ({1} if validates else set())


def test_batches_of_one_step_all_count() -> None:
    def work(world: StoreWorld) -> None:
        net = net_of(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        handle = pt.attach(net, optimizer, "local_sgd(period=4)", world=world)
        batches = pt.shard(DATA, batch_size=4, world=world)
        for number, (x, y) in enumerate(batches):
            with handle.no_sync() if number % 2 == 0 else nullcontext():
                ((net(x) - y) ** 2).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        world.leave()

    crew = crew_of(*[work] * WORKERS)
    assert crew.run() == [None] * WORKERS
    assert counted(crew.objects) == Counter({(0, place): 1 for place in range(SAMPLES)})
    assert [row["ledger"]["0"]["samples"] for row in rows(crew.objects)] == [32]


def test_running_statistics_meet_in_rounds() -> None:
    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    means: dict[int, Tensor] = {}

    def work(world: StoreWorld) -> None:
        net = normed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        pt.attach(net, optimizer, "local_sgd(period=4)", world=world)
        for i in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * i + world.rank)).double()
            net(x).sum().backward()
            optimizer.step()
            means[10 * world.rank + i] = net[0].running_mean.clone()  # type: ignore[index,union-attr]

    crew_of(work, work).run()
    assert torch.equal(means[3], means[13])
    assert not torch.equal(means[2], means[12])


# ------------------------------------------------------------------ a store with faults


def test_faults_of_the_store_change_no_bit() -> None:
    """503 in one of five requests, and lost answers in one of seven."""

    def faults() -> Callable[[int, str, str], None]:
        random = torch.Generator().manual_seed(3)

        def fault(number: int, operation: str, name: str) -> None:
            if torch.rand((), generator=random) < (1 / 7 if operation.startswith("lost") else 1 / 5):
                raise OSError(503, "Slow Down")

        return fault

    strategy = "diloco(period=4)"
    expected = crew_of(*[loop(strategy)] * WORKERS).run()[0][0]
    crew = Crew(WORKERS, wait_s=100.0)
    for worker in range(WORKERS):
        crew.add(worker, loop(strategy), objects=Faults(crew.objects, faults()))
    for found, _ in crew.run():
        assert torch.equal(found, expected)


def test_a_slow_store_changes_no_bit() -> None:
    """Each request takes up to two seconds, on the way there or back."""
    strategy = "diloco(period=4)"
    expected = crew_of(*[loop(strategy)] * WORKERS).run()[0][0]
    crew = Crew(WORKERS, wait_s=300.0)
    for worker in range(WORKERS):
        random = torch.Generator().manual_seed(worker)

        def slow(number: int, operation: str, name: str, random: torch.Generator = random) -> None:
            crew.clock.sleep(float(torch.rand((), generator=random)))

        crew.add(worker, loop(strategy), objects=Faults(crew.objects, slow))
    for found, _ in crew.run():
        assert torch.equal(found, expected)
    assert crew.clock.now() > 50.0


def test_objects_that_are_seen_late_lose_no_sample() -> None:
    """A look finds no object for a second after its put. A worker may miss a round then; its samples are not lost."""
    crew = Crew(WORKERS, wait_s=20.0)
    seen_from: dict[str, float] = {}

    def late(number: int, operation: str, name: str) -> None:
        if operation == "lost create":
            seen_from[name] = crew.clock.now() + 1.0
        if operation == "get" and crew.clock.now() < seen_from.get(name, 0.0):
            raise FileNotFoundError(name)

    for worker in range(WORKERS):
        crew.add(worker, loop("diloco(period=4)"), objects=Faults(crew.objects, late))
    for answer in crew.run():
        assert not isinstance(answer, BaseException), answer
    assert counted(crew.objects) == ONCE


def test_a_store_that_is_gone_ends_a_worker_by_a_code() -> None:
    def fault(number: int, operation: str, name: str) -> None:
        if number > 20:
            raise ConnectionError("Connection refused")

    crew = Crew(1)
    crew.add(0, loop("local_sgd(period=4)"), objects=Faults(crew.objects, fault))
    (error,) = crew.run()
    assert isinstance(error, PolytempoError)
    assert getattr(error, "code", "") == "PT2906"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("strategy", "code"),
    [
        ("sync_sgd", "PT2901"),
        ("local_sgd(period=1)", "PT2901"),
        ("async_sgd", "PT2901"),
        ("post_local_sgd", "PT2901"),
        ("gossip(period=4)", "PT2903"),
        ("local_sgd(period=4, route=ring)", "PT2903"),
        ("co2(period=4)", "PT1206"),
        ("parameter_averaging(period=4)", "PT2905"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(strategy: str, code: str) -> None:
    (error,) = crew_of(loop(strategy)).run()
    assert isinstance(error, pt.errors.Incompatible), error
    assert error.code == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"callbacks": "early_stop(patience=2)"}, "PT2908"),
        ({"noise_scale": 5, "batch_size": 4}, "PT2909"),
        ({"buffers": "broadcast"}, "PT2910"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "PT2911"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], code: str) -> None:
    def work(world: StoreWorld) -> None:
        net = net_of(0)
        pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "diloco(period=4)", world=world, **options)

    (error,) = crew_of(work).run()
    assert isinstance(error, pt.errors.Incompatible), error
    assert error.code == code


def test_exchanges_outside_a_round_are_refused() -> None:
    def work(world: StoreWorld) -> None:
        net = net_of(0)
        handle = pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "local_sgd(period=4)", world=world)
        with handle.consensus():
            pass

    (error, *_) = crew_of(work, work).run()
    assert isinstance(error, pt.errors.Incompatible), error
    assert error.code == "PT2904"


def test_another_strategy_or_model_is_named() -> None:
    def wider(seed: int) -> nn.Module:
        return nn.Linear(4, 1).double()

    first = loop("diloco(period=4)", epochs=1)
    for other in (loop("diloco(period=2)"), loop("diloco(period=4)", make=wider)):
        *_, error = crew_of(first, other).run()
        assert isinstance(error, pt.errors.Mismatch), error


def test_another_number_of_workers_is_named() -> None:
    work = loop("diloco(period=4)", epochs=1)

    def of_three(world: StoreWorld) -> object:
        return work(StoreWorld(StoreRounds(world.rounds.store, 1, 3, wait_s=10.0, timeout_s=100.0)))

    *_, error = crew_of(work, of_three).run()
    assert isinstance(error, pt.errors.Mismatch), error


def test_a_second_model_is_refused_and_a_reader_says_nothing() -> None:
    def work(world: StoreWorld) -> list[str]:
        net, other = net_of(0), net_of(1)
        pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "diloco(period=4)", world=world)
        with pytest.raises(pt.errors.Incompatible, match="PT2912"):
            pt.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), "diloco(period=4)", world=world)
        return []

    crew = crew_of(work)
    assert crew.run() == [[]]
    before = sorted(crew.objects.content)
    crew.world(0).leave()
    assert sorted(crew.objects.content) == before
