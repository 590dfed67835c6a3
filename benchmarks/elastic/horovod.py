"""Processes of a script for Horovod's elastic API are killed, sent away and taken in at random moments.

    python benchmarks/elastic/horovod.py --kills 20 --rooms 6
    python benchmarks/elastic/horovod.py --kills 0 --rooms 0 --storm 40

Three processes train digits. A kill or stop hits the script or its wrapper. Recovery is the time from the signal, or
from the change of the host's slots, until the others have made a step without that process, or the new number of them
has. `--storm` is so many seconds with one or two processes killed every 0 to 1 s, at any point: while they start, meet,
synchronize, commit or negotiate. One process with the training's state is always spared. Afterwards as many epochs are
trained without events. The exit status is 1 where a sample was not used once an epoch, the accuracy is more than half a
point from the calm run's, or 95 % of the recoveries from a kill took longer than 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from polytempo.horovod.launcher.elastic_ranks import ElasticRanks, run_elastic_ranks
from polytempo.horovod.launcher.settings import ElasticSettings, LaunchSettings

PROCESSES, MOST = 3, 4
FAULTS = {
    f"{number.name} of a {who}": (number, who)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for who in ("script", "wrapper")
}
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import polytempo as pt
import polytempo.horovod.torch as hvd

EPOCHS, BATCH, ENOUGH = int(sys.argv[1]), 24, Path("enough")
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
digits = pt.data.digits()
samples = len(digits.train) // 24 * 24
inputs, labels = (part[:samples] for part in digits.train.tensors)
data = TensorDataset(inputs, labels, torch.arange(samples))
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS and not state.over:
        for number, (x, y, which) in enumerate(loader):
            begin_s = time.monotonic()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            mine = torch.zeros(samples, dtype=torch.int64)
            mine[which] = 1
            state.used = state.used + hvd.allreduce(mine, op=hvd.Sum, name="used")
            sampler.record_batch(number, BATCH)
            state.commit()
            Path(f"step-{os.getpid()}").write_text("x")
            time.sleep(max(0.0, 0.01 - (time.monotonic() - begin_s)))
        state.epoch += 1
        state.over = hvd.broadcast_object(ENOUGH.exists())
        sampler.set_epoch(state.epoch)

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, over=False, used=torch.zeros(samples).long())
train(state)
x, y = digits.test.tensors
accuracy = (model(x).argmax(1) == y).float().mean().item()
told = {"epochs": state.epoch, "least": state.used.min().item(), "most": state.used.max().item(), "accuracy": accuracy}
Path(os.environ["POLYTEMPO_ANSWER_FILE"]).write_text(json.dumps(told))
"""


class Events:
    """The events of one run, one after the other, each once the group makes steps."""

    def __init__(self, folder: Path, kills: int, rooms: int, storm_s: float, seed: int) -> None:
        self._folder, self._random, self._storm_s = folder, random.Random(seed), storm_s
        self.storm_kills = 0
        self._kinds = self._random.choices(list(FAULTS), (6, 2, 1, 1), k=kills) + ["room"] * rooms
        self._random.shuffle(self._kinds)
        self.slots = {"localhost": PROCESSES}
        self.recovery_s: dict[str, list[float]] = {kind: [] for kind in (*FAULTS, "room")}
        self._story: Iterator[None] | None = None

    def watch(self, ranks: ElasticRanks) -> None:
        """Go on with the story."""
        self._story = self._story or self._told(ranks)
        next(self._story, None)

    def _told(self, ranks: ElasticRanks) -> Iterator[None]:
        yield from self._steps(ranks, lambda members: len(members) == PROCESSES)
        for kind in self._kinds:
            until_s = time.monotonic() + self._random.uniform(0.2, 1.5)
            while time.monotonic() < until_s:
                yield
            if kind in FAULTS:
                yield from self._steps(ranks, lambda members: len(members) > 1)
                assert ranks.view is not None
                life = self._random.choice(ranks.view.members)
                since_s = time.monotonic()
                number, who = FAULTS[kind]
                process: Any = ranks.processes[life]
                os.kill(process.pid if who == "wrapper" else self._script(ranks, life), number)
                yield from self._steps(ranks, lambda members, life=life: life not in members)
            else:
                others = [number for number in range(2, MOST + 1) if number != self.slots["localhost"]]
                number = self.slots["localhost"] = self._random.choice(others)
                since_s = time.monotonic()
                yield from self._steps(ranks, lambda members, number=number: len(members) == number)
            self.recovery_s[kind].append(time.monotonic() - since_s)
        yield from self._storm(ranks)
        yield from self._steps(ranks, lambda members: len(members) == self.slots["localhost"])
        (self._folder / "enough").touch()

    def _storm(self, ranks: ElasticRanks) -> Iterator[None]:
        end_s = time.monotonic() + self._storm_s
        while time.monotonic() < end_s:
            until_s = time.monotonic() + self._random.choice((0.02, 0.1, 0.3, 1.0)) * self._random.random()
            while time.monotonic() < until_s:
                yield
            running = {life: pid for life in ranks.processes if (pid := self._alive(ranks, life))}
            with_state = [life for life, pid in running.items() if (self._folder / f"step-{pid}").exists()]
            if not with_state:  # they are being counted
                yield
                continue
            spared = self._random.choice(with_state)
            others = [life for life in running if life != spared]
            for life in self._random.sample(others, min(len(others), self._random.choice((1, 1, 2)))):
                with suppress(ProcessLookupError):
                    os.kill(running[life], signal.SIGKILL)
                    self.storm_kills += 1

    def _alive(self, ranks: ElasticRanks, life: int) -> int:
        """The script's process, 0 where there is none."""
        try:
            return self._script(ranks, life) if ranks.processes[life].exit_code is None else 0
        except (OSError, IndexError):
            return 0

    def _steps(self, ranks: ElasticRanks, wanted: Any) -> Iterator[None]:
        """Until a group that is `wanted` has made another step, all of its processes."""
        while True:
            view = ranks.view
            if view is None or not wanted(view.members):
                yield
                continue
            files = [self._folder / f"step-{self._script(ranks, life)}" for life in view.members]
            for file in files:
                file.unlink(missing_ok=True)
            while ranks.view is view and not all(file.exists() for file in files):
                yield
            if ranks.view is view:
                return

    def _script(self, ranks: ElasticRanks, life: int) -> int:
        process: Any = ranks.processes[life]
        return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def trained(folder: Path, epochs: int, events: Events | None) -> dict[str, Any]:
    """Rank 0's last words."""
    slots = {"localhost": PROCESSES} if events is None else events.slots
    os.chdir(folder)
    answers = run_elastic_ranks(
        [sys.executable, "train.py", str(epochs)],
        lambda: slots,
        LaunchSettings(),
        ElasticSettings.of(PROCESSES, 1, MOST, timeout_s=120, cooldown_s=(0.05, 0.1)),
        watch=(lambda _: None) if events is None else events.watch,
    )
    return dict(json.loads(answers[0] or "null"))


LONGEST_S, POINTS = 3.0, 0.005


def percentile_95(seconds: list[float]) -> float:
    """The time within which 95 % of them are."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def missed(harmed: dict[str, Any], calm: dict[str, Any], kills_s: list[float]) -> list[str]:
    """The missed goals."""
    found = []
    if not harmed["least"] == harmed["most"] == harmed["epochs"]:
        found.append("samples were not used once an epoch")
    if abs(harmed["accuracy"] - calm["accuracy"]) > POINTS:
        found.append("the accuracy is not the calm run's")
    if kills_s and percentile_95(kills_s) > LONGEST_S:
        found.append(f"recovery took longer than {LONGEST_S:g} s")
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rooms", type=int, default=6)
    parser.add_argument("--storm", type=float, default=0.0, metavar="S", help="seconds of kills at any moment")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        events = Events(folder, given.kills, given.rooms, given.storm, given.seed)
        harmed = trained(folder, 1 << 20, events)
        (folder / "enough").unlink()
        calm = trained(folder, harmed["epochs"], None)
        os.chdir("/")
    for kind, found in events.recovery_s.items():
        if found:
            high = percentile_95(found)
            times = f"median {statistics.median(found):.2f} s, 95 % {high:.2f} s, longest {max(found):.2f} s"
            print(f"{kind}: {len(found)}, {times}")
    if given.storm:
        print(f"storm: {events.storm_kills} kills in {given.storm:g} s")
    print(f"epochs {harmed['epochs']}, each sample used {harmed['least']} to {harmed['most']} times")
    print(f"accuracy {harmed['accuracy']:.4f}, calm {calm['accuracy']:.4f}; load {os.getloadavg()[0]:.0f}")
    kills_s = [second for kind in FAULTS for second in events.recovery_s[kind]]
    sys.exit("; ".join(missed(harmed, calm, kills_s)) or None)


if __name__ == "__main__":
    main()
