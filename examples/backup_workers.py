"""Backup workers: of three workers the first two of each step count, so that no worker waits for the slowest.

With no backups it is synchronous SGD through a server. A late worker's gradient is dropped.
"""

from __future__ import annotations

import polytempo as pt
from polytempo.jobs.digits import job

for backups in (0, 1):
    strategy = pt.strategies.backup_workers(backups)
    result = pt.run(job, strategy, workers=3, epochs=4)
    print(f"{backups} of 3 are backups: loss {result.loss:.4f}, accuracy {result.accuracy:.1%}, {result.seconds:.2f} s")
