"""Which strategy, how many workers, which batch: time and money until a job reaches a target, and the best of them.

    search space ──▶ memory, step times (priced without values) ──▶ time to target = samples / rate ──▶ front ──▶ plan
                     short trials with real gradients ──▶ samples to target ───▲

Import the modules one by one. `plan_run` in `planner.search` is the whole of it.
"""
