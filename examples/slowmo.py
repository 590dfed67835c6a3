"""SlowMo: a slow momentum from round to round carries local SGD further with the same few exchanges.

Without momentum it is local SGD, which the first line shows.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job
from polytempo.strategies import gossip, slowmo

for strategy in (slowmo(slow_momentum=0.0), slowmo(slow_momentum=0.7), slowmo(slow_momentum=0.7, inner=gossip())):
    result = pt.simulate(job, strategy, workers=8, batch_size=16, lr=0.02, steps=72)
    print(f"{strategy!s:90} loss {result.loss:.3f}, accuracy {result.accuracy:.1%}")
