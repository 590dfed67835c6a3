"""FedAvg, SCAFFOLD, FedProx and FedNova on ten clients, the experiment of Q. Li et al., 2022 (NIID-Bench).

    export POLYTEMPO_DATA=…              # a folder with mnist/ and fashion-mnist/
    python benchmarks/federated/niid.py [--data mnist] [--deal dirichlet one-label] [--only scaffold] [--rounds 50]
    python benchmarks/federated/niid.py --resume …             # goes on where it was stopped, or with more rounds

All ten clients are in each round, E = 10, B = 64; convolutions of 6 and 16 channels of 5 x 5, linear layers of 120, 84
and 10. Samples are dealt by Dirichlet(0.5), or each client has the samples of one label. The clients' optimizer is SGD
at a rate of 0.01 with a momentum of 0.9 and a decay of 1e-5. `scaffold` refuses a momentum: its rate is 0.1, because
steps with that momentum lead ten times as far. One seed; runs repeat to the bit. A round takes about a minute of one
core, so all of it takes a night (`make bench-night`), or several shorter sessions: each run has a folder in `--folder`,
with a checkpoint and a score after each round.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import polytempo as pt

STRATEGIES = {
    "fed_avg": pt.federated.fed_avg,
    "scaffold": pt.federated.scaffold,
    "fed_prox": pt.federated.fed_prox,
    "fed_nova": pt.federated.fed_nova,
}
REPEATED = {  # per cent after 50 rounds, as Flower's baseline `niid_bench` has them; one seed
    ("mnist", "dirichlet"): (98.9, 99.0, 99.0, 98.8),
    ("mnist", "one-label"): (10.0, 10.0, 81.3, 55.1),
    ("fashion-mnist", "dirichlet"): (88.4, 88.4, 88.6, 88.1),
    ("fashion-mnist", "one-label"): (10.0, 10.0, 38.0, 11.1),
}


def network() -> nn.Module:
    """The convolutional network for grey pictures of 28 x 28."""
    features = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, *head)


def job(folder: Path, deal: str, momentum: float) -> pt.Job:
    """Pictures dealt to ten clients."""

    def data(path: str | None) -> pt.Data:
        train, test = pt.data.mnist(folder)
        labels = train.tensors[-1].tolist()
        partition = pt.federated.by(labels) if deal == "one-label" else pt.federated.dirichlet(10, alpha=0.5)
        return pt.Data(pt.federated.clients(train, partition), test)

    return pt.Job(
        model=network,
        data=data,
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=1e-5),
        correct=lambda output, target: output.argmax(1) == target,
    )


def curve(out: Path) -> list[float]:
    """The test accuracy after each round of a run."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["accuracy"] for row in rows if row["kind"] == "test"]


def show(data: str, deal: str, name: str, asked: argparse.Namespace) -> None:
    """Make a run, or go on with it, and print its row."""
    plain, out = name == "scaffold", asked.folder / f"{data}-{deal}-{name}"
    begin_s = time.perf_counter()
    pt.run(
        job(Path(os.environ["POLYTEMPO_DATA"]) / data, deal, 0.0 if plain else 0.9),
        STRATEGIES[name](10, epochs=asked.epochs, batch_size=64),
        asked.workers,
        lr=0.1 if plain else 0.01,
        steps=asked.rounds,
        threads=1,
        eval_every=1,
        checkpoint_every=1,
        out=out,
        resume=asked.resume and out.exists(),
    )
    seconds, found = time.perf_counter() - begin_s, curve(out)
    repeated = REPEATED[data, deal][list(STRATEGIES).index(name)]
    each = " ".join(f"{100 * accuracy:.1f}" for accuracy in found)
    print(f"| {data} | {deal} | `{name}` | {found[-1]:.1%} | {repeated} % | {seconds:.0f} | {each} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=["mnist", "fashion-mnist"], default=["mnist", "fashion-mnist"])
    parser.add_argument("--deal", nargs="+", choices=["dirichlet", "one-label"], default=["dirichlet", "one-label"])
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/night/niid"), help="runs, a folder each")
    parser.add_argument("--resume", action="store_true", help="go on with the runs that are in the folder")
    asked = parser.parse_args()
    columns = ("data", "dealt by", "strategy", "accuracy at the end", "Flower's, after 50", "seconds", "each round, %")
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for data in asked.data:
        for deal in asked.deal:
            for name in asked.only:
                show(data, deal, name, asked)


if __name__ == "__main__":
    main()
