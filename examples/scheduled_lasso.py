"""Lasso by scheduled model parallelism: coordinates are updated together that do little to each other.

    python examples/scheduled_lasso.py

The columns come in blocks that are correlated 0.9. First on two real processes; then under the virtual clock, on two
workers, by priority and in turns; and at last without a bound on correlations, which diverges.
"""

from __future__ import annotations

import polytempo as pt

scheduled = pt.partition.scheduled
samples = pt.data.scheduled.correlated(rows=500, columns=300, block=10, correlation=0.9, nonzeros=5)

fit = pt.schedule(scheduled.lasso(l1=0.2), samples, workers=2)
found = fit.parameters["weights"].nonzero().flatten().tolist()
print(
    f"2 processes: objective {fit.last.objective:.6f}, columns {found}, at most {fit.last.error:.1e} from the optimum"
)

ethernet = pt.cluster.ethernet(gbit_per_s=1)
for order in ("priority", "round_robin"):
    fit = pt.schedule(scheduled.lasso(l1=0.2, order=order), samples, workers=2, cluster=ethernet, tolerance=1e-3)
    print(f"2 virtual workers, {order}: {fit.last.updates:,} updates in {fit.last.rounds} rounds to a gap of 1e-3")

try:
    pt.schedule(scheduled.lasso(l1=0.2, bound=None), samples, workers=2, cluster=ethernet)
except pt.errors.NotFinite as error:
    print(f"32 together, for any correlation: {error}")
