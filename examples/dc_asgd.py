"""DC-ASGD: the server corrects a late gradient for the way that the parameters have gone since it was begun.

With strength 0 it is plain asynchronous SGD. The correction costs one pass over the parameters for each gradient.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for strength in (0.0, 0.04, 1.0):
    result = pt.run(job, pt.strategies.dc_asgd(strength), workers=2, epochs=4)
    print(f"strength {strength:4}: loss {result.loss:.4f}, accuracy {result.accuracy:.1%}")
