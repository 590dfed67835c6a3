"""Codistillation: two groups with half of the data each learn from each other's models of some steps ago.

The first line is each group's result alone; scores are of the first group's model.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.strategies import codistillation

for weight in (0.0, 1.0):
    strategy = codistillation(groups=2, period=50, burn_in=100, weight=weight)
    result = pt.simulate(job, strategy, workers=4, batch_size=8, lr=0.02, steps=400)
    print(f"{strategy!s:75} loss {result.loss:.3f}, accuracy {result.accuracy:.1%}")
