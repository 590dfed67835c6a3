"""Asynchronous SGD: each gradient is an update of the server's parameters, and no worker waits for another.

Two workers and two server processes, each with half of the parameters. At the same number of samples there are twice
as many updates as synchronous SGD makes, each of a gradient of one worker only.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for strategy in (pt.strategies.sync_sgd(), pt.strategies.async_sgd(shards=2)):
    result = pt.run(job, strategy, workers=2, epochs=4)
    print(f"{strategy!s:36} loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, {result.seconds:.2f} s")
