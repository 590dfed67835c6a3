"""Laws of workers that push movements into an object store: one order of all, and each sample counts once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_store_rounds import DATA, EPOCHS, ONCE, SAMPLES, WORKERS, flat, loop, net_of
from polytempo.cli.look.bucket_round import bucket_round
from polytempo.training.own_loop import store_log_loop
from polytempo.worlds.object_store.object_store import ObjectStore, packed
from polytempo.worlds.object_store.store_log import StoreLog, logged
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Crew, Faults, Killed, MemoryObjects, Work

ASYNC = "async_diloco(period=4, outer_lr=0.6, outer_momentum=0.3)"


def steady(work: Work, pause_s: float) -> Work:
    """`work` with so many seconds before each look at the log's end."""

    def slow(world: StoreWorld) -> Any:
        store = world.rounds.store
        put = store.put

        def later(name: str, content: bytes) -> None:
            store.clock.sleep(pause_s)
            put(name, content)

        store.put = later  # type: ignore[method-assign]
        return work(world)

    return slow


def entries(objects: MemoryObjects) -> list[dict[str, Any]]:
    return list(logged(ObjectStore(objects, "memory")))


def counted(objects: MemoryObjects) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for entry in entries(objects):
        for epoch, start, stop in entry.get("mine", {}).get("spans", ()):
            found.update((epoch, place) for place in range(start, stop))
    return found


def movement(objects: MemoryObjects, name: str) -> Tensor:
    found = ObjectStore(objects, "memory").get(name)
    assert found is not None
    return found.tensors["movement"]


def orphans(objects: MemoryObjects) -> set[str]:
    """Movements that no entry names."""
    named = {entry.get("movement") for entry in entries(objects)}
    return {name for name in objects.content if name.startswith("moved/")} - named


def by_hand(objects: MemoryObjects, lr: float, momentum: float) -> Tensor:
    """The log's movements, each a step of Nesterov's with its share of the rate, in plain torch."""
    position, velocity, members = flat(net_of(0)), torch.zeros_like(flat(net_of(0))), set(range(WORKERS))
    for entry in entries(objects):
        if entry["kind"] != "push":
            members = members - set(entry["workers"]) if entry["kind"] == "left" else members | set(entry["workers"])
            continue
        moved = movement(objects, entry["movement"])
        velocity = momentum * velocity + moved
        position = position - lr / len(members) * (moved + momentum * velocity)
    return position


def test_the_log_is_the_server() -> None:
    """Workers of three speeds: the last push's answer is the sum of all movements' steps in their order."""
    crew, ends = Crew(WORKERS), dict[int, tuple[Tensor, int]]()

    def work(world: StoreWorld) -> None:
        net, steps = loop(ASYNC)(world)
        ends[world.rank] = net, steps

    for worker in range(WORKERS):
        crew.add(worker, steady(work, 1.0 + worker))
    assert crew.run() == [None] * WORKERS
    last = [entry["worker"] for entry in entries(crew.objects) if entry["kind"] == "push"][-1]
    torch.testing.assert_close(ends[last][0], by_hand(crew.objects, 0.6, 0.3), rtol=0, atol=1e-12)
    assert counted(crew.objects) == ONCE
    order = [entry["worker"] for entry in entries(crew.objects) if entry["kind"] == "push"]
    assert order != sorted(order)
    assert order.count(0) == order.count(2) == EPOCHS * SAMPLES // WORKERS // 4 // 4


def test_a_push_costs_what_explain_says() -> None:
    """Workers in turns: two puts each, the movements of the others, and a look at the log's end."""
    strategy = pt.parse_strategy("async_diloco(period=4)")
    found = bucket_round(strategy, net_of(0), WORKERS, "bucket(latency_ms=20)")["bucket"]
    crew, requests = Crew(WORKERS), list[tuple[int, int, int]]()
    tensor_bytes = 8 * flat(net_of(0)).numel()

    def work(world: StoreWorld) -> None:
        loop("async_diloco(period=4)", epochs=1)(world)
        counts = world.rounds.store.requests
        requests.append((counts.puts, counts.gets, counts.received_bytes))

    for worker in range(WORKERS):
        crew.add(worker, steady(work, 1.0 + 0.1 * worker))
    assert crew.run() == [None] * WORKERS
    pushes = SAMPLES // WORKERS // 4 // 4
    assert found["period"] == 4
    assert found["sent_bytes"] == tensor_bytes
    assert found["received_bytes"] == (WORKERS - 1) * tensor_bytes
    assert found["puts"] == 2 * WORKERS
    beginning_and_end = 3 * WORKERS + 1
    assert abs(sum(puts for puts, _, _ in requests) - pushes * found["puts"]) <= beginning_and_end
    assert sum(gets for _, gets, _ in requests) >= pushes * found["gets"]
    assert found["seconds"] == pytest.approx(tensor_bytes * WORKERS / 12.5e6 + 0.04 * (2 * WORKERS + 1))


@pytest.mark.parametrize(
    ("ours", "diloco"),
    [
        (ASYNC, "diloco(period=4, outer_lr=0.6, outer_momentum=0.3)"),
        ("async_diloco(period=4, outer_lr=1.0, delay=2)", "diloco(period=4, outer_lr=1.0, outer_momentum=0.0)"),
    ],
)
def test_one_worker_is_diloco(ours: str, diloco: str) -> None:
    """A whole step by one worker's movement leaves the worker where it is, however late it hears of that."""
    alone, rounds = Crew(1), Crew(1)
    alone.add(0, loop(ours))
    rounds.add(0, loop(diloco))
    torch.testing.assert_close(alone.run()[0][0], rounds.run()[0][0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("moment", [3, 9, 14, 20, 25, 29, 33, 36])
@pytest.mark.parametrize(
    "strategy",
    [
        ASYNC,
        "decoupled_diloco(period=4, quorum=2, delay=1)",
        "decoupled_diloco(period=4, quorum=1, grace_s=7)",
    ],
)
def test_a_worker_may_be_killed_at_any_request(strategy: str, moment: int) -> None:
    """A new process of it comes, also before it is dead, and no sample is lost or counted twice."""

    def die(number: int, operation: str, name: str) -> None:
        if number == moment:
            raise Killed

    crew, work = Crew(WORKERS), steady(loop(strategy), 5.0)
    for worker in (1, 2):
        crew.add(worker, work)
    crew.add(0, work, objects=Faults(crew.objects, die))
    crew.add(0, work, at_s=22.0)
    *others, killed, again = crew.run()
    assert isinstance(killed, Killed)
    for found in (*others, again):
        assert not isinstance(found, BaseException), found
    assert counted(crew.objects) == ONCE
    assert orphans(crew.objects) == set()


def test_a_worker_leaves_once_its_last_push_is_in_the_parameters() -> None:
    """A push that waits for its quorum would be lost with its worker."""
    crew = Crew(2)
    for worker in (0, 1):
        crew.add(worker, steady(loop("decoupled_diloco(period=4, quorum=2, delay=3)"), 1.0 + 3.0 * worker))
    assert not any(isinstance(found, BaseException) for found in crew.run())
    seen = [(entry["kind"], *entry.get("workers", [entry.get("worker")])) for entry in entries(crew.objects)]
    last = max(place for place, entry in enumerate(seen) if entry == ("push", 0))
    assert ("push", 1) in seen[last : seen.index(("left", 0))]


def test_a_grace_window_may_be_longer_than_the_wait_for_an_entry() -> None:
    """Workers that a window waits for are not absent: all their pushes count."""
    crew = Crew(2, wait_s=10.0)
    for worker in (0, 1):
        crew.add(worker, steady(loop("decoupled_diloco(period=4, quorum=1, grace_s=60)"), 1.0 + 11.0 * worker))
    assert not any(isinstance(found, BaseException) for found in crew.run())
    seen = [entry for entry in entries(crew.objects) if entry["kind"] != "elapsed"]
    pushes = EPOCHS * SAMPLES // 2 // 4 // 4
    assert [entry["worker"] for entry in seen if entry["kind"] == "push"].count(1) == pushes
    assert "left" not in [entry["kind"] for entry in seen[:-2]]
    assert orphans(crew.objects) == set()


@pytest.mark.parametrize("step", [4, 5, 6])
def test_a_state_is_saved_while_a_pull_is_under_way(step: int) -> None:
    """The loop goes on as without it."""
    ends = []
    for saved_at in (None, step):
        crew = Crew(1)

        def work(world: StoreWorld, saved_at: int | None = saved_at) -> Tensor:
            net = net_of(0)
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
            handle = pt.attach(net, optimizer, "async_diloco(period=4, delay=2)", world=world)
            for x, y in pt.shard(DATA, batch_size=4, world=world):
                optimizer.zero_grad()
                ((net(x) - y) ** 2).mean().backward()
                optimizer.step()
                if handle.step == saved_at:
                    assert any(tensor.abs().sum() > 0 for tensor in handle.state_dict()["tensors"].values())
            world.leave()
            return flat(net)

        crew.add(0, work)
        ends += crew.run()
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)


def test_a_quorum_waits_for_no_dead_worker() -> None:
    """All are asked for, and worker 2 never comes: after `wait_s` it is left out, once."""
    crew = Crew(WORKERS)
    for worker in (0, 1):
        crew.add(worker, loop("decoupled_diloco(period=4, quorum=3)"))
    first, second = crew.run()
    assert first[1] == second[1] == EPOCHS * SAMPLES // WORKERS // 4
    left = [entry["workers"] for entry in entries(crew.objects) if entry["kind"] == "left"]
    assert left[0] == [2]
    assert len(left) == 3
    assert crew.clock.now() < 40.0


def test_a_window_after_the_quorum_lets_others_in_and_ends_by_an_entry() -> None:
    """Worker 2 is too slow for windows of 3 s; 0 and 1 push within one, and each window of theirs ends once."""
    crew = Crew(WORKERS)
    for worker, pause_s in enumerate((0.5, 1.0, 40.0)):
        crew.add(worker, steady(loop("decoupled_diloco(period=4, quorum=1, grace_s=3)"), pause_s))
    for found in crew.run():
        assert not isinstance(found, BaseException), found
    assert counted(crew.objects) == ONCE
    kinds = [entry["kind"] + str(entry.get("worker", "")) for entry in entries(crew.objects)]
    assert kinds[:4] == ["comes", "comes", "comes", "push0"]
    assert kinds[4:6] == ["push1", "elapsed"]
    versions = [entry["version"] for entry in entries(crew.objects) if entry["kind"] == "elapsed"]
    assert versions == sorted(set(versions))


def test_a_window_in_the_log_that_no_worker_needs_is_a_meeting_of_all() -> None:
    ends = list[Tensor]()
    for strategy in ("decoupled_diloco(period=4, quorum=1, grace_s=9)", "decoupled_diloco(period=4, quorum=3)"):
        crew = Crew(WORKERS)
        for worker in range(WORKERS):
            crew.add(worker, loop(strategy, epochs=1))
        ends.append(crew.run()[0][0])
        assert all(entry["kind"] != "elapsed" for entry in entries(crew.objects))
    assert torch.equal(*ends)


def test_the_movement_of_a_dead_worker_is_removed_when_it_is_left_out() -> None:
    """Worker 2 is killed between its second movement and the entry."""
    puts = [0]

    def die(number: int, operation: str, name: str) -> None:
        puts[0] += operation == "lost put" and name.startswith("moved/")
        if puts[0] == 2:
            raise Killed

    crew, seen = Crew(WORKERS), list[set[str]]()
    for worker in range(WORKERS):
        faults = Faults(crew.objects, die) if worker == 2 else None
        crew.add(worker, loop("decoupled_diloco(period=4, quorum=3)"), objects=faults)
    remove = crew.objects.remove
    crew.objects.remove = lambda name: (seen.append(orphans(crew.objects)), remove(name))[1]  # type: ignore[method-assign]
    *others, killed = crew.run()
    assert isinstance(killed, Killed)
    assert not any(isinstance(found, BaseException) for found in others)
    assert max(map(len, seen)) == 1
    assert orphans(crew.objects) == set()


def test_a_worker_that_was_left_out_comes_again() -> None:
    """The movement that it brings is dropped, and samples of it are trained on again."""
    strategy = "decoupled_diloco(period=4, quorum=3)"
    crew = Crew(WORKERS)
    for worker, pause_s in enumerate((1.0, 1.0, 25.0)):
        crew.add(worker, steady(loop(strategy), pause_s))
    answers = crew.run()
    for found in answers:
        assert not isinstance(found, BaseException), found
    assert [entry["workers"] for entry in entries(crew.objects) if entry["kind"] == "comes"].count([2]) > 1
    assert counted(crew.objects) == ONCE


def test_a_worker_far_behind_goes_on_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """States after each few entries, and movements before them are removed."""
    monkeypatch.setattr(store_log_loop, "_SAVED", 1)
    crew = Crew(WORKERS)
    for worker, pause_s in enumerate((0.1, 0.1, 500.0)):
        crew.add(worker, steady(loop("async_diloco(period=1, outer_lr=0.6)"), pause_s))
    for found in crew.run():
        assert not isinstance(found, BaseException), found
    assert counted(crew.objects) == ONCE
    left = [name for name in crew.objects.content if name.startswith("moved/")]
    assert len(left) < len(entries(crew.objects)) / 2


def test_a_worker_that_falls_behind_while_it_waits_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 2 is suspended after its third push. The others leave it out, and remove movements that it has to read."""
    monkeypatch.setattr(store_log_loop, "_SAVED", 1)
    crew, pushes, slept = Crew(WORKERS), [0], [False]

    def suspended(number: int, operation: str, name: str) -> None:
        pushes[0] += operation == "lost create" and name.startswith("log/")
        if pushes[0] == 3 and operation == "get" and name.startswith("log/") and not slept[0]:
            slept[0] = True
            crew.clock.sleep(300.0)

    work = loop("decoupled_diloco(period=1, quorum=2)", epochs=3)
    for worker in range(WORKERS):
        crew.add(worker, work, objects=Faults(crew.objects, suspended) if worker == 2 else None)
    for found in crew.run():
        assert not isinstance(found, BaseException), found
    assert slept == [True]
    assert counted(crew.objects) == Counter({(e, p): 1 for e in range(3) for p in range(SAMPLES)})


def test_old_movements_are_removed_by_workers_of_equal_speed() -> None:
    """The same worker puts each state, and all of them remove their own."""
    objects = MemoryObjects()
    logs = [
        StoreLog(ObjectStore(objects, "memory"), lambda entry: None, lambda: packed({}, {}), save_every=30)
        for _ in range(3)
    ]
    for push in range(600):
        assert logs[push % 3].append(lambda push=push: {"push": push}, torch.zeros(1))  # type: ignore[misc]
    assert sum(name.startswith("moved/") for name in objects.content) <= 6 * 30
    assert not logs[0].append(lambda: None, torch.ones(1))
    assert sum(name.startswith("moved/") for name in objects.content) <= 6 * 30
    assert len(list(logged(logs[0].store))) == 600


def test_faults_of_the_store_lose_no_sample() -> None:
    """503 in one of five requests, and lost answers in one of seven."""
    crew = Crew(WORKERS)
    for worker in range(WORKERS):
        random = torch.Generator().manual_seed(worker)

        def fault(number: int, operation: str, name: str, random: torch.Generator = random) -> None:
            if torch.rand((), generator=random) < (1 / 7 if operation.startswith("lost") else 1 / 5):
                raise OSError(503, "Slow Down")

        crew.add(worker, loop(ASYNC), objects=Faults(crew.objects, fault))
    for found in crew.run():
        assert not isinstance(found, BaseException), found
    assert counted(crew.objects) == ONCE


@pytest.mark.parametrize(
    ("strategy", "code"),
    [("async_diloco(period=4, pull_codec=int8)", "PT2914"), ("downpour", "PT2901"), ("async_sgd", "PT2901")],
)
def test_other_servers_are_refused(strategy: str, code: str) -> None:
    crew = Crew(1)
    crew.add(0, loop(strategy))
    (error,) = crew.run()
    assert isinstance(error, pt.errors.Incompatible), error
    assert error.code == code


def test_running_statistics_are_refused_unless_they_are_left() -> None:
    def work(world: StoreWorld, **options: Any) -> None:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), ASYNC, world=world, **options)

    crew = Crew(1)
    crew.add(0, work)
    crew.add(0, lambda world: work(world, buffers="leave"))
    error, left = crew.run()
    assert isinstance(error, pt.errors.Incompatible), error
    assert error.code == "PT2913"
    assert left is None


@pytest.mark.parametrize("steps", [0, 6], ids=["before the first step", "within a period"])
@pytest.mark.parametrize("keeps", [True, False], ids=["its own again", "others"])
def test_parameters_that_a_loop_loads_do_not_undo_other_workers_steps(steps: int, keeps: bool) -> None:
    """The worker's own parameters again change nothing; others are refused by the next step."""

    def work(world: StoreWorld) -> None:
        net = net_of(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, ASYNC, world=world)
        for step in range(steps + 1):
            if step == steps:
                own = {name: value.clone() for name, value in net.state_dict().items()}
                net.load_state_dict(net_of(1).state_dict())
                if keeps:
                    net.load_state_dict(own)
            net(DATA[:4][0]).sum().backward()
            optimizer.step()

    crew = Crew(1)
    crew.add(0, work)
    (error,) = crew.run()
    if keeps:
        assert error is None
    else:
        assert isinstance(error, pt.errors.Incompatible), error
        assert error.code == "PT2915"


def test_another_strategy_is_named() -> None:
    crew = Crew(2)
    crew.add(0, loop(ASYNC, epochs=1))
    crew.add(1, loop("async_diloco(period=2)", epochs=1))
    assert isinstance(crew.run()[1], pt.errors.Mismatch)
    assert len(DATA) == SAMPLES
