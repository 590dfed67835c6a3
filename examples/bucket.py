"""Three workers that share nothing but a folder, which stands for a bucket: `s3://bucket/run` is used in the same way.

Each is a process of its own; no address is known to any of them. Worker 2 begins late, when the others have gone on
without it: it takes over their newest state. The ledger shows who took part in each round.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn import Linear, functional

import polytempo as pt
from polytempo.worlds.object_store.rounds import history

WORKERS = 3


def train(bucket: str, worker: int) -> None:
    """One site's program."""
    torch.set_num_threads(1)
    time.sleep(2.0 * (worker == WORKERS - 1))
    digits = pt.data.digits()
    world = pt.join_bucket(bucket, worker=worker, workers=WORKERS, wait_s=1.5)
    model = Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = pt.attach(model, optimizer, pt.strategies.diloco(period=10))
    batches = pt.shard(digits.train, batch_size=8)
    while batches.epoch < 6:
        for x, y in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(0.01)  # a model that takes longer
    world.leave()
    images, labels = digits.test.tensors
    accuracy = (model(images).argmax(dim=1) == labels).float().mean()
    print(f"worker {worker}: {handle.step} steps, {accuracy:.1%} of the test digits", flush=True)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        place = sys.argv[1] if len(sys.argv) > 1 else folder
        start = multiprocessing.get_context("fork").Process
        sites = [start(target=train, args=(place, worker)) for worker in range(WORKERS)]
        for site in sites:
            site.start()
        for site in sites:
            site.join()
        if Path(place).is_dir():
            reader = pt.join_bucket(place, worker=0, workers=WORKERS).rounds.store
            members = None
            for row in history(reader):
                if row["members"] != members:
                    samples = {worker: line["samples"] for worker, line in row["ledger"].items()}
                    print(f"from round {row['round']} on: workers {row['members']}, samples so far {samples}")
                members = row["members"]
