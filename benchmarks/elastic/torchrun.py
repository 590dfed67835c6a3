"""The same loop and the same kills under torchrun's restart and under `pt.elastic`: how soon does it go on?

    python benchmarks/elastic/torchrun.py [--kills 12] [--every 15 1] [--seed 1]

Four workers train digits with a global batch of 96; a step lasts 10 ms at least. A random worker gets SIGKILL at random
moments, drawn from a seed, the same for all contenders, which run one after the other:

    torchrun    DistributedDataParallel over gloo, one node, `--max-restarts`; all workers end, start, and load the
                checkpoint that rank 0 saves each `every` steps
    pt.elastic  `state.commit()` after each step; the others go on, and a new worker gets the state from one of them

*Next step*: from the signal until any step of the new group is finished. *New step*: until a step is finished for the
first time. *All workers*: until a step of four workers is. *Again*: samples with gradients computed once more, of all
kills together, for each kill.

torchrun keeps its rendezvous' store for the workers' groups, so that after a restart gloo may read the address of a
process that has ended (pytorch issue 135712); `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which is set here unless the
environment says 0, avoids that.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.jobs.digits import job

WORKERS, GLOBAL_BATCH, STEP_S, LIMIT_S = 4, 96, 0.01, 120.0
_PAUSE_S = 0.002
_AHEAD = 100
"""So many steps before the last one all workers hear which it is."""


# ------------------------------------------------------------------------------------------------- workers


class Worker:
    """A rank of one group: its own samples, and its notes for the driver."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._group = f"{os.getpid()}-{time.monotonic_ns()}"
        self._images, self._labels = pt.data.digits().train.tensors
        (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def goes_on(self, step: int) -> bool:
        """True if there is a step after `step`."""
        last = self._folder / "last"
        return not last.exists() or step < int(last.read_text())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the step's samples; their number does not depend on the group, but for each rank."""
        epoch, place = divmod(step, len(self._labels) // GLOBAL_BATCH)
        order = torch.randperm(len(self._labels), generator=torch.Generator().manual_seed(epoch))
        mine = order[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH][self._rank :: self._size]
        time.sleep(STEP_S)
        _append(self._folder / f"computed-{os.getpid()}", f"{len(mine)}\n")
        return self._images[mine], self._labels[mine]

    def made(self, step: int) -> None:
        """Write down that all have made it."""
        if self._rank == 0:
            _append(self._folder / "steps", f"{step} {self._size} {self._group} {time.monotonic()}\n")


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def by_torchrun(folder: Path, every: int) -> None:
    """One of torchrun's workers, as in torch's tutorial on fault tolerance: save, and begin from the saved state."""
    dist.init_process_group("gloo")
    worker = Worker(folder, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters(), job.lr)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while worker.goes_on(step):
        images, labels = worker.batch(step)
        optimizer.zero_grad()
        job.loss(model(images), labels).backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0 and step % every == 0:
            whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(whole, folder / "checkpoint.tmp")
            (folder / "checkpoint.tmp").replace(saved)
        worker.made(step)
    dist.destroy_process_group()


def by_elastic(folder: Path) -> None:
    """All workers, and their launcher."""

    def train(state: pt.training.ElasticState) -> int:
        pt.attach(state.model, state.optimizer)
        world = pt.init(quiet=True)
        worker = Worker(folder, world.rank, world.size)
        while worker.goes_on(state.step):
            images, labels = worker.batch(state.step)
            state.optimizer.zero_grad()
            job.loss(state.model(images), labels).backward()
            state.optimizer.step()
            state.step += 1
            state.commit()
            worker.made(state.step)
        return int(state.step)

    torch.manual_seed(0)
    model: nn.Module = job.model()
    state = pt.training.ElasticState(model, job.optimizer(model.parameters(), job.lr), step=0)
    pt.elastic(train, state, workers=WORKERS, restarts=1_000)


# ------------------------------------------------------------------------------------------------- the driver


class Step(NamedTuple):
    """A line of rank 0."""

    step: int
    size: int
    group: str
    at_s: float


class Recovery(NamedTuple):
    """The events after a kill, in seconds from it."""

    next_s: float
    new_s: float
    all_s: float


class Steps:
    """Reads them as they come."""

    def __init__(self, folder: Path, run: subprocess.Popen[bytes]) -> None:
        (folder / "steps").touch()
        self._file, self._run, self._begun = (folder / "steps").open(), run, ""

    def next(self) -> Step:
        """Wait for the next one. RuntimeError after two minutes without one, or where the run has ended."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and self._run.poll() is None:
            self._begun += self._file.readline()
            if self._begun.endswith("\n"):
                words, self._begun = self._begun.split(), ""
                return Step(int(words[0]), int(words[1]), words[2], float(words[3]))
            time.sleep(_PAUSE_S)
        raise RuntimeError(f"no step in {LIMIT_S:g} s; the run has ended with {self._run.poll()}")


def contender(name: str, folder: Path) -> list[str]:
    """The command of "torchrun N" or "pt.elastic"."""
    mine = [__file__, "--folder", str(folder), "--contender", name]
    if name == "pt.elastic":
        return [sys.executable, *mine]
    options = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *mine]


def driven(name: str, kills: int, seed: int) -> tuple[list[Recovery], float]:
    """The recoveries of a run, and the samples that were computed again for each kill."""
    plan, found, furthest = random.Random(seed), list[Recovery](), 0
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as text, (Path(text) / "said").open("wb") as said:
        folder = Path(text)
        run = subprocess.Popen(contender(name, folder), env=environment, stdout=said, stderr=said)
        try:
            steps = Steps(folder, run)
            for _ in range(kills):
                until_s = None
                while until_s is None or time.monotonic() < until_s:
                    before = steps.next()
                    furthest = max(furthest, before.step)
                    if until_s is None and before.size == WORKERS:
                        until_s = time.monotonic() + plan.uniform(0.2, 1.0)
                since_s = time.monotonic()
                os.kill(int((folder / f"pid-{plan.randrange(WORKERS)}").read_text()), signal.SIGKILL)
                found.append(recovered(steps, before.group, furthest, since_s))
            (folder / "last").write_text(str(furthest := steps.next().step + _AHEAD))
            assert run.wait(LIMIT_S) == 0
        except BaseException:
            print((folder / "said").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            run.terminate()
            run.wait()
        computed = sum(sum(map(int, path.read_text().split())) for path in folder.glob("computed-*"))
    return found, (computed - furthest * GLOBAL_BATCH) / kills


def recovered(steps: Steps, group: str, furthest: int, since_s: float) -> Recovery:
    """Wait for the three steps that a recovery is measured by. Steps that the old group had finished come first."""
    next_s = new_s = all_s = 0.0
    while not (next_s and new_s and all_s):
        found = steps.next()
        if found.group == group:
            furthest = max(furthest, found.step)
            continue
        after_s = found.at_s - since_s
        next_s = next_s or after_s
        new_s = new_s or (after_s if found.step > furthest else 0.0)
        all_s = all_s or (after_s if found.size == WORKERS else 0.0)
    return Recovery(next_s, new_s, all_s)


def main() -> None:
    """Run, and print the page's numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument(
        "--every", type=int, nargs="+", default=[15, 1], help="steps between two checkpoints of torchrun's"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender is not None:
        name, _, every = given.contender.partition(" ")
        by_torchrun(given.folder, int(every)) if name == "torchrun" else by_elastic(given.folder)
        return
    headers = ("", "kills", "next step, median", "95 %", "new step, median", "95 %", "all workers, median", "again")
    rows = []
    for name in ("pt.elastic", *(f"torchrun {every}" for every in given.every)):
        found, again = driven(name, given.kills, given.seed)
        columns = [sorted(each[i] for each in found) for i in range(3)]
        figures = [f"{statistics.median(each):.2f} s" for each in columns]
        late = [f"{each[min(len(each) - 1, int(0.95 * len(each)))]:.2f} s" for each in columns]
        rows.append(
            (name, str(len(found)), figures[0], late[0], figures[1], late[1], figures[2], f"{again:.0f} samples")
        )
        print(markdown((headers, rows)), flush=True)


if __name__ == "__main__":
    main()
