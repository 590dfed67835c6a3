"""A plan for a job to reach a target: strategy, number of workers and batch with the least time or money.

    search space ──▶ memory, step times (priced without values) ──▶ time to target = samples / rate ──▶ front ──▶ plan
                     short trials with real gradients ──▶ samples to target ───▲

Import the modules one by one. The entry is `plan_run` in `planner.search`.
"""
