"""`pt.Trainer`: a job without a loop of your own, in the world that this process was started in.

`pt.run` starts the workers itself; a `Trainer` is one of them, so it suits torchrun, Slurm and the like:

    python examples/trainer.py
    torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

from __future__ import annotations

from typing import Any

import polytempo as pt
from polytempo.jobs.digits import job


def show(row: dict[str, Any]) -> None:
    """Called on rank 0 with the rows that `metrics.jsonl` would hold."""
    if row["kind"] == "test":
        print(f"epoch {row['epoch']:.0f}: loss {row['loss']:.3f}, accuracy {row['accuracy']:.1%}")


world = pt.init()
trainer = pt.Trainer(job, pt.strategies.sync_sgd(), epochs=20, until={"accuracy": 0.97})
result = trainer.fit(on_row=show)
if world.rank == 0:
    weights = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{result.steps} steps with {world.size} worker(s); trainer.model holds the {weights:,} weights")
