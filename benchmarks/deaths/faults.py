"""Trainings with one fault: a job, and loops of one's own. The environment names the fault, its rank and a folder.

FAULT=kill CULPRIT=1 FOLDER=/tmp/x torchrun --standalone --nproc-per-node 3 benchmarks/deaths/faults.py replicas
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.jobs.digits import job as digits
from polytempo.runs.run import join

STEP = 6
"""The fault's step: all ranks have met by then."""
TIMEOUT_S = 6.0
"""The deadline of every wait."""
_PATIENT_S = 600.0


def own_rank() -> int:
    """This process's rank, by its launcher's variables; -1 in a launcher."""
    names = ("POLYTEMPO_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), -1)


class Fault:
    """The fault of a row: it strikes once, at a step of one rank."""

    def __init__(self) -> None:
        self.name, self.culprit = os.environ["FAULT"], int(os.environ["CULPRIT"])
        self.folder = Path(os.environ["FOLDER"])
        self.calls = 0

    def is_mine(self) -> bool:
        """True on the culprit's rank, in its step, the first time."""
        self.calls += 1
        return own_rank() == self.culprit and self.calls > STEP and not (self.folder / "struck").exists()

    def strike(self, images: Tensor, loss: Tensor | None = None) -> Tensor:
        """Strike on the culprit's rank; the batch again, or another one in its place."""
        if not self.is_mine():
            return images if loss is None else loss
        (self.folder / "struck").write_text(str(time.monotonic()))
        match self.name:
            case "raise":
                raise LookupError("no row 17")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(_PATIENT_S)
            case "memory":
                blocks: list[bytearray] = []
                while True:
                    blocks.append(bytearray(b"x" * (16 << 20)))
            case "host":
                for path in self.folder.glob("host-*"):  # the other ranks of this host
                    os.kill(int(path.read_text()), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "NaN":
                return images * float("nan") if loss is None else loss * float("nan")
            case "shape":
                return images.flatten()[:-1].reshape(1, -1) if loss is None else loss.expand(2)
        return images if loss is None else loss


_faults: list[Fault] = []


def fault() -> Fault:
    """The fault of this process."""
    if not _faults:
        _faults.append(Fault())
    return _faults[0]


def struck_loss(output: Tensor, target: Tensor) -> Tensor:
    """The job's loss, with the fault inside."""
    loss = nn.functional.cross_entropy(output, target)
    return fault().strike(output, loss) if torch.is_grad_enabled() else loss


job = replace(digits, name="faulty", loss=struck_loss, epochs=200)


def net() -> nn.Module:
    """A small net."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


def replicas(strategy: str = "sync_sgd()", *, allow_nan: bool = True) -> None:
    """A loop of one's own between replicas."""
    pt.init(timeout_s=TIMEOUT_S)
    model, images, labels = net(), *pt.data.digits().train.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pt.attach(model, optimizer, strategy, allow_nan=allow_nan)
    for _ in range(4000):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(fault().strike(images[:16])), labels[:16]).backward()
        optimizer.step()
        time.sleep(0.002)


def averaged() -> None:
    """Local SGD: ranks meet every fourth step."""
    replicas("local_sgd(period=4)")


def strict() -> None:
    """Replicas that refuse NaN."""
    replicas(allow_nan=False)


def layers() -> None:
    """A hybrid: wide layers are divided over the ranks."""
    world = pt.init(timeout_s=TIMEOUT_S)
    model, (images, labels) = net(), pt.data.digits().train.tensors
    plan = pt.training.plan_layers(model, images[:2], workers=world.size, link="1gbit", batch_size=64)
    model = pt.hybrid(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pt.attach(model, optimizer)
    for _ in range(4000):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(fault().strike(images[:16])), labels[:16]).backward()
        optimizer.step()
        time.sleep(0.002)


def stages() -> None:
    """A pipeline: each rank has a stage."""
    world = pt.init(timeout_s=TIMEOUT_S)
    images, labels = pt.data.digits().train.tensors
    schedule = pt.parse_strategy(f"one_f_one_b(stages={world.size}, micro_batches=2)")
    sgd = torch.optim.SGD
    pipe = pt.pipeline(net(), lambda p: sgd(p, lr=0.02), nn.functional.cross_entropy, schedule, sample=images[:16])
    for _ in range(4000):
        pipe.step(fault().strike(images[:16]), labels[:16])
        time.sleep(0.002)


def joined() -> None:
    """The job as one rank of a launcher's world, with a folder."""
    join(job, "sync_sgd()", timeout_s=TIMEOUT_S, out=os.environ["FOLDER"] + "/run")


LOOPS = {each.__name__: each for each in (replicas, averaged, strict, layers, stages, joined)}

if __name__ == "__main__":
    LOOPS[sys.argv[1]]()
