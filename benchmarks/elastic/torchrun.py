"""torchrun's elastic restart under the same kills: all workers end, start anew, and load the last checkpoint.

    python benchmarks/elastic/torchrun.py --kills 20 --every 15       # a checkpoint each epoch
    python benchmarks/elastic/torchrun.py --kills 20 --every 1        # after each step

Four workers train digits by DistributedDataParallel over gloo, global batch 96, a step lasts 10 ms at least. They get
SIGKILL at random moments. *Goes on*: from the signal to the next step of any number; *caught up*: until a step is made
that had not been made before. The steps between are done again: lost work.
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

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polytempo.jobs.digits import job

WORKERS, GLOBAL_BATCH, STEP_S, LIMIT_S = 4, 96, 0.01, 120.0


def work(folder: Path, every: int) -> None:
    """One worker: the loop that torch's own tutorial on fault tolerance shows, with a checkpoint each `every` steps."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters(), job.lr)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data = job.data(None).training()
    xs = torch.stack([data[i][0] for i in range(len(data))])
    ys = torch.stack([torch.as_tensor(data[i][1]) for i in range(len(data))])
    per_epoch = len(data) // GLOBAL_BATCH
    while not (folder / "over").exists():
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        mine = order[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH][rank::size]
        optimizer.zero_grad()
        time.sleep(STEP_S)
        job.loss(model(xs[mine]), ys[mine]).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            if step % every == 0:
                whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(whole, folder / "checkpoint.tmp")
                (folder / "checkpoint.tmp").replace(saved)
            with (folder / "steps").open("a") as file:
                file.write(f"{step}\n")


class Steps:
    """The steps that rank 0 has written down, as they come."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self.last = 0

    def next(self, beyond: int = 0) -> int:
        """Wait for the next step with a greater number than `beyond`."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            line = self._file.readline()
            if line.endswith("\n"):
                self.last = int(line)
                if self.last > beyond:
                    return self.last
            else:
                time.sleep(0.002)
        raise RuntimeError(f"no step beyond {beyond} in {LIMIT_S:g} s")


def driven(folder: Path, kills: int, every: int, seed: int) -> list[tuple[float, float, int]]:
    """For each kill: seconds until it goes on, and until it has caught up; steps that were done again."""
    plan, found = random.Random(seed), []
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    words += ["--max-restarts", "100000", __file__]
    words += ["--worker", str(folder), "--every", str(every)]
    run = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    steps = Steps(folder / "steps")
    try:
        steps.next()
        for _ in range(kills):
            until_s = time.monotonic() + plan.uniform(0.2, 1.0)
            while time.monotonic() < until_s:
                steps.next()
            victim = plan.randrange(WORKERS)
            since_s = time.monotonic()
            os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
            time.sleep(0.1)  # what was under way is written
            while (line := steps._file.readline()).endswith("\n"):
                steps.last = int(line)
            before = steps.last
            first = steps.next()
            goes_on_s = time.monotonic() - since_s
            if first <= before:
                steps.next(before)
            found.append((goes_on_s, time.monotonic() - since_s, max(0, before - first + 1)))
            print(
                "goes on after {:.2f} s, caught up after {:.2f} s, {} steps done again".format(*found[-1]), flush=True
            )
        (folder / "over").touch()
        run.wait(LIMIT_S)
    finally:
        run.terminate()
        run.wait()
    return found


def main() -> None:
    """Run, and print what the page shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", type=Path)
    given = parser.parse_args()
    if given.worker is not None:
        work(given.worker, given.every)
        return
    with tempfile.TemporaryDirectory() as name:
        found = driven(Path(name), given.kills, given.every, given.seed)
    for what, values in (("goes on", [f[0] for f in found]), ("caught up", [f[1] for f in found])):
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        print(f"{what}: median {statistics.median(ordered):.2f} s, p95 {p95:.2f} s, longest {ordered[-1]:.2f} s")
    lost = [f[2] for f in found]
    print(f"{len(found)} kills, steps done again: mean {statistics.mean(lost):.1f}, most {max(lost)}")


if __name__ == "__main__":
    main()
