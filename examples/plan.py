"""A plan: the strategy, the number of workers and the batch. A plan for the digits on two networks, and its grounds.

Step times are simulated on the cluster without values; samples to the target come from short simulated runs that train,
on at most four workers. The last line of each plan names the conditions for another choice.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.planner.front import PlanLimits
from polytempo.planner.search import plan_run
from polytempo.planner.search_space import SearchSpace

job = pt.jobs.find("digits")
space = SearchSpace(("sync_sgd()", "local_sgd(period=8)"), workers=(1, 4, 16), batch_sizes=(16, 32))
for gbit_per_s in (0.1, 40):
    cluster = pt.cluster.ethernet(gbit_per_s=gbit_per_s, gflops=1)
    plan = plan_run(job, space, {"accuracy": 0.95}, cluster, PlanLimits(price_per_host_hour=1.2))
    print(f"\n{cluster.name}: {plan.num_runs} runs compared, {len(plan.trials)} trials")
    for found in plan.front:
        interval = f"{1000 * found.low_s:.0f} to {1000 * found.high_s:.0f} ms"
        print(f"  {found.run!s:50} {1000 * found.seconds:4.0f} ms ({interval}), {found.money(1.2):.1e} money")
    if plan.reversal is not None and plan.runner_up is not None:
        more = plan.reversal.more_samples
        print(f"  {plan.runner_up.run} is as fast if the first needs {more:.2g} times the expected samples")
