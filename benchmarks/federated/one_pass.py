"""CPU seconds of a round: ours, a plain loop over its clients, and all of its clients in one pass by `torch.func.vmap`.

    POLYTEMPO_DATA=… python benchmarks/federated/one_pass.py [--turns 5] [--rounds 4]

The round of `flower.py`: MNIST, 100 clients IID, ten a round, E = 1, B = 10, one thread. Sides take turns. CPU seconds
of this process count, so other work of the machine has a small part in them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn import functional

import polytempo as pt

CLIENTS, A_ROUND, BATCH_SIZE, RATE = 100, 10, 10, 0.1
MODELS: dict[str, Callable[[], nn.Module]] = {
    "784-200-200-10": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    ),
    "logistic regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
}


def job(make: Callable[[], nn.Module], data: torch.utils.data.TensorDataset) -> pt.Job:
    return pt.Job(
        model=make,
        data=lambda path: pt.Data(data, None),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )


def ours(make: Callable[[], nn.Module], data: torch.utils.data.TensorDataset, rounds: int) -> None:
    """Train in this process."""
    strategy = pt.federated.fed_avg(A_ROUND, epochs=1, batch_size=BATCH_SIZE)
    pt.Trainer(job(make, data), strategy, clients=f"iid({CLIENTS})", lr=RATE, steps=rounds).fit()


def batches(data: torch.utils.data.TensorDataset) -> tuple[Tensor, Tensor]:
    """A round's batches, (clients, steps, samples, …)."""
    images, labels = data.tensors
    order = torch.randperm(len(images))[: len(images) // CLIENTS * A_ROUND]
    steps = len(order) // A_ROUND // BATCH_SIZE
    rows = order[: A_ROUND * steps * BATCH_SIZE].view(A_ROUND, steps, BATCH_SIZE)
    return images[rows], labels[rows]


def loop(make: Callable[[], nn.Module], data: torch.utils.data.TensorDataset, rounds: int) -> None:
    """One client after the other."""
    for _ in range(rounds):
        for images, labels in zip(*batches(data), strict=True):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for x, y in zip(images, labels, strict=True):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()


def one_pass(make: Callable[[], nn.Module], data: torch.utils.data.TensorDataset, rounds: int) -> None:
    """A step of all clients together."""
    base = make()

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = functional.cross_entropy(functional_call(base, parameters, (x,)), y)
        return found

    step = vmap(grad_and_value(loss))
    for _ in range(rounds):
        images, labels = batches(data)
        stacked, _ = stack_module_state([make() for _ in range(A_ROUND)])
        parameters = {name: each.detach() for name, each in stacked.items()}
        for number in range(images.shape[1]):
            gradients, _ = step(parameters, images[:, number], labels[:, number])
            torch._foreach_add_(list(parameters.values()), list(gradients.values()), alpha=-RATE)


def seconds(side: Callable[..., None], make: Callable[[], nn.Module], data: object, rounds: int) -> float:
    """CPU seconds of a round, without the start of a run."""
    begun = time.process_time()
    side(make, data, 1)
    once = time.process_time()
    side(make, data, 1 + rounds)
    return (time.process_time() - once - (once - begun)) / rounds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, _ = pt.data.mnist(Path(os.environ["POLYTEMPO_DATA"]) / "mnist")
    sides = (ours, loop, one_pass)
    print("| model | ours | plain loop | one pass | loop / ours | loop / one pass |\n|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        for side in sides:
            side(make, data, 1)
        rows = list[dict[str, float]]()
        for turn in range(asked.turns):
            order = sides[:: 1 if turn % 2 else -1]
            rows.append({side.__name__: seconds(side, make, data, asked.rounds) for side in order})
        told = [f"{median(row[side.__name__] for row in rows):.3f} s" for side in sides]
        told += [f"{median(row['loop'] / row[other] for row in rows):.2f}" for other in ("ours", "one_pass")]
        print(f"| {name} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
