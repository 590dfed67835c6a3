"""Hogwild!: workers update one copy of the weights without locks, which sparse updates forgive.

First its original use, on real cores: logistic regression with few features a sample, one update a sample; the data
set's three numbers say how seldom two workers meet. Then any model, under the virtual clock: eight workers with updates
that interleave by the seed, with the step size multiplied by 0.9 after every epoch, as in the paper.
"""

from __future__ import annotations

from dataclasses import replace

from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import polytempo as pt
from polytempo.data import sparsity
from polytempo.data.rows import random_rows
from polytempo.jobs.digits import job
from polytempo.runs.programs.hogwild_linear import fit_logistic

rows = random_rows(num_rows=4_000, num_columns=1_000, density=0.01)
omega, delta, rho = sparsity(rows.starts, rows.columns)
print(f"a sample has at most {omega} features; {delta:.1%} of the samples have the commonest one;")
print(f"at most {rho:.1%} share a feature with one sample")
for workers, update in ((1, "free"), (2, "free"), (2, "locked"), (2, "in_turn")):
    fit = fit_logistic(rows, workers=workers, update=update, epochs=10)
    print(f"{workers} worker(s), {update:8} loss {fit.losses[-1]:.4f}, {fit.samples_per_s:12,.0f} samples/s")

plain = replace(
    job,
    optimizer=lambda parameters, lr: SGD(parameters, lr=lr),
    schedule=lambda optimizer, steps: LambdaLR(optimizer, lambda step: 0.9 ** (step // steps)),
)
for strategy in (pt.strategies.hogwild("free"), pt.strategies.hogwild("locked"), pt.strategies.hogwild("in_turn")):
    result = pt.simulate(plain, strategy, workers=8, epochs=5)
    print(f"{strategy!s:26} loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, {result.seconds * 1e3:.1f} ms")
