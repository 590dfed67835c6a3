"""`hvd.elastic` on real processes: one is killed, one joins, one is sent away, and each sample counts once an epoch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polytempo.horovod.launcher.elastic_ranks import ElasticRanks, run_elastic_ranks
from polytempo.horovod.launcher.run_ranks import RanksFailed
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings
from process.test_remote_engine import children_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("none_left")]

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import polytempo.horovod.torch as hvd

SAMPLES, BATCH, EPOCHS, HURRY = 60, 6, 40, Path("hurry")
hvd.init()
numbers = torch.arange(SAMPLES)
data = TensorDataset(numbers, numbers.float()[:, None] / SAMPLES)
model = nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
slow_s = 0.02

@hvd.elastic.run
def train(state):
    global slow_s
    for state.epoch in range(state.epoch, EPOCHS):
        for number, (which, x) in enumerate(loader):
            if not HURRY.exists():
                time.sleep(slow_s)
                slow_s = min(1.0, slow_s * 1.03)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), 2 * x).backward()
            optimizer.step()
            mine = torch.zeros(SAMPLES, dtype=torch.int64)
            mine[which] = 1
            state.used = (torch.tensor(state.used) + hvd.allreduce(mine, op=hvd.Sum, name="used")).tolist()
            state.sampler.record_batch(number, BATCH)
            state.steps += 1
            state.commit()
            Path(f"step-{os.getpid()}").write_text(str(state.steps))
        state.sampler.set_epoch(state.epoch + 1)

resets = []
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0, used=[0] * SAMPLES)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
weights = hvd.allgather_object([p.detach() for p in model.parameters()])
assert all(torch.equal(mine, other) for each in weights for mine, other in zip(each, weights[0]))
with open(os.environ["POLYTEMPO_ANSWER_FILE"], "w") as file:
    file.write(repr([state.used, resets, os.getpid()]))
"""


def script_of(ranks: ElasticRanks, life: int) -> int:
    """The process of the script itself."""
    process: Any = ranks.processes[life]
    return children_of(process.pid)[0]


def test_each_sample_counts_once_over_a_kill_a_join_and_a_host_that_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    hosts = {"localhost": 3}

    def trains(ranks: ElasticRanks, members: int, generation: int) -> bool:
        """True if a later group of so many has made a step: all its processes have said so."""
        view = ranks.view
        if view is None or len(view.members) != members or view.generation <= generation:
            return False
        return all((tmp_path / f"step-{script_of(ranks, life)}").exists() for life in view.members)

    def story(ranks: ElasticRanks) -> Iterator[None]:
        while not trains(ranks, 3, 0):
            yield
        first = ranks.view
        assert first is not None
        os.kill(script_of(ranks, first.members[0]), signal.SIGKILL)
        while not trains(ranks, 3, first.generation):
            yield
        second = ranks.view
        assert second is not None
        assert second.members[:2] == first.members[1:], "the earlier ones are still there"
        hosts["localhost"] = 2
        while not trains(ranks, 2, second.generation):
            yield
        (tmp_path / "hurry").touch()
        kept.extend(script_of(ranks, life) for life in first.members[1:])
        while True:
            yield

    kept: list[int] = []
    plot: list[Iterator[None]] = []

    def watch(ranks: ElasticRanks) -> None:
        if not plot:
            plot.append(story(ranks))
        next(plot[0])

    answers = run_elastic_ranks(
        [sys.executable, "train.py"],
        lambda: hosts,
        LaunchSettings(),
        ElasticSettings.of(3, 2, 3, timeout_s=60, cooldown_s=(0.1, 1)),
        watch=watch,
    )
    told = [json.loads(answer or "null") for answer in answers]
    assert [each[0] for each in told] == [[40] * 60] * 2
    assert [each[1] for each in told] == [[2, 3, 2]] * 2
    assert [each[2] for each in told] == kept, "processes go on without a new start"


HARMED = """
import os, signal, sys, time
from pathlib import Path

try:
    os.close(os.open("first", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    until_s = time.monotonic() + 120
    while not Path("lost").exists() and time.monotonic() < until_s:
        time.sleep(0.02)
else:
    exec(sys.argv[1])
    signal.pause()
"""


@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "harmed.py", "os.kill(os.getpid(), signal.SIGSTOP)"],
        ["sh", "-c", f"{sys.executable} harmed.py 'os.kill(os.getpid(), signal.SIGSTOP)'; exit $?"],
        [sys.executable, "harmed.py", "os.kill(os.getppid(), signal.SIGSTOP)"],
        [sys.executable, "harmed.py", "os.kill(os.getppid(), signal.SIGKILL)"],
    ],
    ids=["the script is stopped", "a shell's script is stopped", "its wrapper is stopped", "its wrapper is killed"],
)
def test_a_process_that_is_held_is_lost_and_nothing_of_it_is_left(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harmed.py").write_text(HARMED)
    monkeypatch.chdir(tmp_path)
    before = set(children_of(os.getpid()))  # of tests in this process: torch and multiprocessing keep helpers

    def watch(ranks: ElasticRanks) -> None:
        if any(process.exit_code is not None for process in ranks.processes.values()):
            (tmp_path / "lost").touch()

    slots = {"localhost": 2}
    run_elastic_ranks(
        words, lambda: slots, LaunchSettings(), ElasticSettings.of(2, 1, 2, cooldown_s=(0.1, 1)), watch=watch
    )
    assert set(children_of(os.getpid())) <= before


def test_a_script_that_fails_everywhere_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(5)")
    with pytest.raises(RanksFailed, match="processes have failed on all hosts") as raised:
        run_elastic_ranks(
            [sys.executable, str(script)], lambda: {"localhost": 2}, LaunchSettings(), ElasticSettings.of(2, 2, 2)
        )
    assert raised.value.exit_code == 5
    assert "ended with exit code 5" in capfd.readouterr().err
