"""A sweep: learning rates and strategies for the bundled digits, each trial a simulated run, and the best of them.

A trial ends early if it is worse than half of the trials before it. Its rate falls when its accuracy no longer rises
(`plateau`). The same seed gives the same trials.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import polytempo as pt

with TemporaryDirectory() as folder:
    found = pt.sweep(
        "digits",
        over={"lr": "1e-3..1:log", "strategy": ["sync_sgd()", "local_sgd(period=8)"]},
        trials=6,
        sampler="random",
        prune=True,
        seed=1,
        workers=4,
        cluster="ethernet(gbit_per_s=1)",
        epochs=3,
        schedule="plateau(metric=accuracy, patience=1)",
        out=Path(folder, "sweep"),
    )
for trial in found.trials:
    print(f"{trial.settings}: {trial.value}")
print(f"best: {found.best.settings}")
