"""Delayed SGD: the exchange hides behind the next steps' computation, and the gradient is a little old.

On a slow network a synchronous step is computation plus exchange; with a delay it is the longer of the two.
The price is paid in the learning rate: the largest stable one shrinks with the delay.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

slow = pt.cluster.ethernet(gbit_per_s=1, latency_us=100, gflops=1)
print(" " * 33 + "ms a step   loss with lr 0.02   with lr 0.2")
for strategy in (pt.strategies.sync_sgd(), pt.strategies.delayed_sgd(delay=1), pt.strategies.delayed_sgd(delay=3)):
    careful, bold = (
        pt.simulate(job, strategy, workers=4, cluster=slow, batch_size=32, lr=lr, steps=88) for lr in (0.02, 0.2)
    )
    step_ms = 1000 * careful.seconds / careful.steps
    print(f"{strategy!s:35}{step_ms:7.2f}   {careful.loss:17.3f}   {bold.loss:11.3f}")
