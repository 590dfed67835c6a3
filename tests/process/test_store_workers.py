"""Workers that share an object store alone, as processes: the bits of a process group, and a kill in the middle."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from polytempo.worlds.object_store.object_store import ObjectStore
from polytempo.worlds.object_store.objects import objects_at
from polytempo.worlds.object_store.rounds import history
from polytempo.worlds.object_store.store_log import logged
from process.crew import flat, together
from store_workers import Crew
from waiting import soon

pytestmark = pytest.mark.process

SAMPLES, EPOCHS, WORKERS = 96, 3, 3
RANDOM = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(SAMPLES, 64, generator=RANDOM), torch.randn(SAMPLES, 8, generator=RANDOM))
STRATEGIES = (
    "local_sgd(period=4)",
    "diloco(period=4)",
    "slowmo(period=4)",
    "sparse_loco(period=4)",
    "parameter_averaging(period=4, optimizer_state=False)",
    "local_sgd(period=4, codec=feedback(int8))",
    "diloco(period=4, codec=feedback(top_k(0.1)))",
    "local_sgd(period=4, codec=bf16)",
)


def trained(world: ProcessWorld, strategy: str, precision: str | None = None) -> list[float]:
    """The model after two epochs. Its tensors are large enough to be encoded."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    handle = pt.attach(net, optimizer, strategy, world=world, precision=precision)
    batches = pt.shard(DATA, batch_size=4, world=world)
    while batches.epoch < 2:
        for x, y in batches:
            optimizer.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            optimizer.step()
    handle.detach()
    return flat(net)


def test_rounds_have_the_bits_of_a_process_group() -> None:
    cases = [(strategy, None) for strategy in STRATEGIES] + [("diloco(period=4)", "bf16")]

    def work(world: ProcessWorld) -> Result:
        return [trained(world, *case) for case in cases]

    in_a_group = together(WORKERS, work)
    for position, case in enumerate(cases):
        crew = Crew(WORKERS)
        for worker in range(WORKERS):
            crew.add(worker, lambda world, case=case: trained(world, *case))  # type: ignore[misc]
        answers = crew.run()
        for worker in range(WORKERS):
            assert answers[worker] == in_a_group[worker][position], case


def site(bucket: Path, worker: int, kill_at: int | None) -> None:
    """A site's program. The others wait after round 3 until worker 2 has asked to join again."""
    torch.set_num_threads(1)
    world = pt.join_bucket(bucket, worker=worker, workers=WORKERS, wait_s=6.0, timeout_s=100.0)
    torch.manual_seed(worker)
    net = nn.Linear(64, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    handle = pt.attach(net, optimizer, "diloco(period=2)")
    batches = pt.shard(DATA, batch_size=4)
    while batches.epoch < EPOCHS:
        for x, y in batches:
            if handle.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if handle.step == 9 and worker != 2:
                assert soon(lambda: (bucket / "joins" / "2").exists() or (bucket / "admitted").exists())
            optimizer.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            optimizer.step()
    world.leave()
    (bucket / f"model-{worker}.json").write_text(json.dumps(flat(net)))


def killed_once(target: Callable[..., None], *arguments: object, at: int) -> None:
    """Run three sites `target(*arguments, worker, step of its death)`. The last one dies, and is started again."""
    fork = multiprocessing.get_context("fork").Process
    sites = [fork(target=target, args=(*arguments, worker, at if worker == 2 else None)) for worker in range(WORKERS)]
    for each in sites:
        each.start()
    sites[2].join(100)
    assert sites[2].exitcode == -signal.SIGKILL
    sites[2] = fork(target=target, args=(*arguments, 2, None))
    sites[2].start()
    for each in sites:
        each.join(100)
    assert [each.exitcode for each in sites] == [0, 0, 0]


def test_a_killed_process_comes_again_and_each_sample_counts_once(tmp_path: Path) -> None:
    killed_once(site, tmp_path, at=5)
    rows = list(history(ObjectStore(objects_at(tmp_path), str(tmp_path))))
    counted: Counter[tuple[int, int]] = Counter()
    for row in rows:
        for member in row["members"]:
            for epoch, start, stop in row["ledger"][str(member)]["spans"]:
                counted.update((epoch, place) for place in range(start, stop))
    assert counted == Counter({(epoch, place): 1 for epoch in range(EPOCHS) for place in range(SAMPLES)})
    assert 2 in [member for row in rows for member in row["lost"]]
    assert not list(tmp_path.rglob("*.aside"))
    models = [json.loads((tmp_path / f"model-{worker}.json").read_text()) for worker in (0, 1)]
    assert models[0] == models[1] or any(row["lost"] in ([0], [1]) for row in rows)


LOGGED = {
    "grace_s and delay": "decoupled_diloco(period=4, quorum=1, outer_momentum=0.3, grace_s=0.3, delay=2)",
    "encoded, delay": "async_diloco(period=4, delay=2, codec=feedback(top_k(0.1)))",
}


def pusher(bucket: Path, strategy: str, worker: int, kill_at: int | None) -> None:
    """A site that pushes movements. Its model is large enough to be encoded."""
    torch.set_num_threads(1)
    world = pt.join_bucket(bucket, worker=worker, workers=WORKERS, timeout_s=100.0)
    torch.manual_seed(worker)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    handle = pt.attach(net, optimizer, strategy)
    batches = pt.shard(DATA, batch_size=4)
    while batches.epoch < EPOCHS:
        for x, y in batches:
            if handle.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            optimizer.step()
    world.leave()


@pytest.mark.parametrize("strategy", LOGGED.values(), ids=LOGGED)
def test_a_process_that_is_killed_with_a_movement_under_way_comes_again(strategy: str, tmp_path: Path) -> None:
    """Worker 2 has pushed in step 8, and would take the parameters in after step 10."""
    killed_once(pusher, tmp_path, strategy, at=9)
    entries = list(logged(ObjectStore(objects_at(tmp_path), str(tmp_path))))
    counted: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        for epoch, start, stop in entry.get("mine", {}).get("spans", ()):
            counted.update((epoch, place) for place in range(start, stop))
    assert counted == Counter({(epoch, place): 1 for epoch in range(EPOCHS) for place in range(SAMPLES)})
    assert [entry["worker"] for entry in entries if entry["kind"] == "push"].count(2) == EPOCHS * SAMPLES // 48
    named = {entry.get("movement") for entry in entries}
    assert {f"moved/{path.name}" for path in (tmp_path / "moved").glob("*")} <= named
    assert not list(tmp_path.rglob("*.aside"))
