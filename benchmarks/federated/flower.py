"""Rounds per minute beside Flower's simulation engine: McMahan's task of 100 clients in both, one run, taking turns.

    python -m venv flower && flower/bin/pip install 'flwr[simulation]==1.42.0' torch==2.13.0 numpy
    export POLYTEMPO_DATA=…              # a folder with mnist/
    python benchmarks/federated/flower.py --flower flower/bin/python [--turns 3] [--rounds 30] [--logistic]

100 clients IID, ten a round, E = 1, B = 10, a rate of 0.1, 784-200-200-10 or logistic regression, scored after each
round by all test images.
Two processes with one thread each train the clients on both sides: our two workers, and two actors of Flower's Ray
backend with one processor each. Flower's client is a plain loop over tensors that its process has loaded once, without
a `DataLoader`. The seconds of rounds count, without scores; Flower's first round, which starts actors, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CLIENTS, A_ROUND, BATCH_SIZE, RATE = 100, 10, 10, 0.1
FOLDER = "POLYTEMPO_FLOWER_FOLDER"
"""Names the folder of the arrays to Flower's actors, which are other processes."""
LOGISTIC = "POLYTEMPO_FLOWER_LOGISTIC"


def network() -> nn.Module:
    """McMahan's 2NN, or logistic regression."""
    if os.environ.get(LOGISTIC):
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


@cache
def arrays(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of `train` or `test`."""
    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    images, labels = (torch.from_numpy(np.load(folder / f"{name}-{part}.npy")) for part in ("images", "labels"))
    return images, labels


def accuracy(model: nn.Module) -> float:
    """The share of test images that are right."""
    images, labels = arrays("test")
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def flower(rounds: int) -> tuple[float, float]:
    """Seconds a round and the last accuracy. Runs in an interpreter that has Flower."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
    from flwr.clientapp import ClientApp  # type: ignore[import-not-found]
    from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
    from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
    from flwr.simulation import run_simulation  # type: ignore[import-not-found]

    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        images, labels = arrays("train")
        share = len(images) // CLIENTS
        own = np.random.default_rng(0).permutation(len(images))[int(context.node_config["partition-id"]) * share :][
            :share
        ]
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in torch.from_numpy(own[torch.randperm(share).numpy()]).split(BATCH_SIZE):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": share})}
        return Message(content=RecordDict(content), reply_to=message)

    begins: list[float] = []
    ends: list[float] = []
    scores: list[float] = []

    def score(number: int, record: Any) -> Any:
        ends.append(time.perf_counter())
        model = network()
        model.load_state_dict(record.to_torch_state_dict())
        scores.append(accuracy(model))
        begins.append(time.perf_counter())
        return MetricRecord({"accuracy": scores[-1]})

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        strategy = FedAvg(fraction_train=A_ROUND / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        first = ArrayRecord(network().state_dict())
        strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds, evaluate_fn=score)

    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_name="ray", backend_config=resources)
    spans = [end - begin for begin, end in zip(begins[1:], ends[2:], strict=False)]
    return sum(spans) / len(spans), scores[-1]


def ours(rounds: int) -> tuple[float, float]:
    """Seconds a round and the last accuracy."""
    import polytempo as pt

    job = pt.Job(
        model=network,
        data=lambda path: pt.Data(*(torch.utils.data.TensorDataset(*arrays(name)) for name in ("train", "test"))),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target,
    )
    strategy = pt.federated.fed_avg(A_ROUND, epochs=1, batch_size=BATCH_SIZE)
    given = {"clients": f"iid({CLIENTS})", "lr": RATE, "steps": rounds, "eval_every": 1, "threads": 1}
    result = pt.run(job, strategy, 2, **given)
    return result.seconds / rounds, result.accuracy or 0.0


def write_arrays(folder: Path) -> None:
    """MNIST as arrays, which need no reader of ours."""
    import polytempo as pt

    for name, part in zip(("train", "test"), pt.data.mnist(Path(os.environ["POLYTEMPO_DATA"]) / "mnist"), strict=True):
        images, labels = part.tensors
        np.save(folder / f"{name}-images.npy", images.numpy())
        np.save(folder / f"{name}-labels.npy", labels.numpy())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", help="a Python that has Flower")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--logistic", action="store_true", help="logistic regression, not 784-200-200-10")
    parser.add_argument("--side", choices=["flower", "ours"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        seconds, score = {"flower": flower, "ours": ours}[asked.side](asked.rounds)
        print(json.dumps([seconds, score]), flush=True)
        return
    found: dict[str, list[list[float]]] = {"ours": [], "flower": []}
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(Path(folder))
        for turn in range(asked.turns):
            for side, python in (("ours", sys.executable), ("flower", asked.flower))[:: 1 if turn % 2 else -1]:
                command = [python, "-c", "import flower; flower.main()", "--side", side, "--rounds", str(asked.rounds)]
                given = os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
                given |= {LOGISTIC: "1"} if asked.logistic else {}
                answer = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True).stdout
                found[side].append(json.loads(answer.splitlines()[-1]))
                print(side, found[side][-1], flush=True)
    print("| | rounds per minute | accuracy after them |\n|---|---|---|")
    for side, rows in found.items():
        print(f"| {side} | {60 / median(row[0] for row in rows):.0f} | {median(row[1] for row in rows):.1%} |")
    ratio = median(theirs[0] / own[0] for own, theirs in zip(found["ours"], found["flower"], strict=True))
    print(f"ours / Flower: {ratio:.1f} (median of {asked.turns} pairs)")


if __name__ == "__main__":
    main()
