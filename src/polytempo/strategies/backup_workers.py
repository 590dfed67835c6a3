"""Synchronous SGD with backup workers: a step does not wait for the slowest."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from polytempo.core import Strategy, call_name
from polytempo.core.rule import Rate, Service
from polytempo.server.rules.synchronous_step import all_but
from polytempo.server.service import choice, served


def backup_workers(backups: int = 1, shards: int = 1, replicas: int = 0, scale: str = "none") -> Strategy:
    """Use the first N gradients of a step of λ = N + b workers (b = `backups`); later ones are dropped.

    θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ over the first N, the mean over their samples: mᵢ is how many gᵢ is of, as an epoch's last
    batch may be smaller. No gradient that counts is stale. A worker that came late pulls and is in the present step
    again; its samples of the late step are not used. To keep a batch of N parts, start N + b workers. With b = 0 it is
    `sync_sgd`. A run needs at least b + 1 workers; with b + 1
    a step takes the first gradient alone, and so it does where workers have died and fewer are left.

    `scale`: η is the job's learning rate as it is ("none"), or the rate of one worker's batch, times N ("linear", the
    paper's) or √N ("square_root"), by the workers that the run starts with.

    Under a schedule η is the rate at each batch; batches of two steps of the schedule may meet in one step where b > 0,
    and then count by it, Σ mᵢ ηᵢ gᵢ / Σ mᵢ.

    Cost: as `async_sgd`, and b workers' work in every step; a step takes as long as the Nth fastest worker.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio and R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016,
    section 3. There batches have one size, and N is fixed; here it is the number of workers at the time less b, at
    least 1.
    """
    scales: dict[str, Rate | None] = {
        "none": None,
        "linear": lambda workers: workers - backups,
        "square_root": lambda workers: sqrt(workers - backups),
    }
    served_by = Service(
        all_but(backups),
        shards=shards,
        replicas=replicas,
        deals="freely" if backups else "evenly",  # who comes late makes fewer steps than the others
        waits=True,
        rate=choice("scale", scale, scales),
    )
    return served(
        call_name(backup_workers, locals(), brief=("scale",)),
        replace(served_by, least_workers=backups + 1),
    )
