"""Post-local SGD: synchronous while the model still moves fast, local steps once it has settled.

The run's own trace shows the switch: every mark is a step with a meeting of the workers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import polytempo as pt
from polytempo.jobs.digits import job

STEPS = 92

for strategy in (pt.strategies.local_sgd(period=8), pt.strategies.post_local_sgd(switch_step=46, period=8)):
    with tempfile.TemporaryDirectory() as folder:
        result = pt.run(job, strategy, workers=2, steps=STEPS, out=Path(folder))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    met = {event["args"]["step"] for event in events if event["name"] == "all_reduce"}
    print(strategy)
    print("    " + "".join("|" if step in met else "." for step in range(STEPS)))
    print(f"    accuracy {result.accuracy:.1%}, {result.bytes_sent_per_rank / 1e6:.2f} MB sent per worker")
