"""Batches that grow while a run goes on: after given epochs, at a geometric rate, and by a test of gradients' noise.

Two virtual workers train digits at one rate. Each sample counts once an epoch in every run; larger batches make fewer
steps of them.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

RULES: dict[str, pt.RunOptions] = {
    "as it was": pt.RunOptions(),
    "x 5 after 8 epochs": pt.RunOptions(batch_growth={8: 5}),
    "x 1.005 after each step": pt.RunOptions(batch_growth=pt.training.geometric(ratio=1.005)),
    "where the norm test fails": pt.RunOptions(batch_growth=pt.training.norm_test(theta=0.7)),
}

for name, options in RULES.items():
    result = pt.simulate(job, pt.strategies.sync_sgd(), 2, options=options, batch_size=16, epochs=12, seed=1)
    print(f"{name:26} {result.steps:4} steps   {result.samples:,} samples   accuracy {result.accuracy:.1%}")
