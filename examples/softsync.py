"""n-softsync: a number between synchronous and asynchronous SGD.

With n = 1 the server waits for as many gradients as there are workers, whoever they are from; with n = workers each
gradient is an update. The mean staleness is about n.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for n in (1, 2, 4):
    result = pt.run(job, pt.strategies.softsync(n), workers=4, epochs=8)
    print(f"n = {n}: loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, {result.seconds:.2f} s")
