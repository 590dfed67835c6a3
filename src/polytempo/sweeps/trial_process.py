"""A trial in a process of its own, for sweeps with several at a time.

sweep ── JSON: job, strategy, workers, options ─▶ python -m polytempo.sweeps.trial_process ── result.json ─▶ sweep
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from polytempo import jobs
from polytempo.report.runs import load_result
from polytempo.runs.run import run
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Job
from polytempo.spec.run_options import RunOptions

_LEFT = (75, 130, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a run that was asked to leave, and can be resumed."""


def train_apart(
    job: Job, strategy: str, workers: int, options: RunOptions, engine: object, cluster: object
) -> Mapping[str, Any]:
    """Train in a new interpreter, and return its result. RuntimeError with the last line that it has said."""
    for name, given in (("engine", engine), ("cluster", cluster)):
        if not (given is None or isinstance(given, str)):
            raise ValueError(f"parallel trials get their {name} as text, such as 'local'; give its name")
    assert options.out is not None
    told = {"job": job.origin, "strategy": strategy, "workers": workers, "engine": engine, "cluster": cluster}
    program = [sys.executable, "-m", __name__]
    text = json.dumps(told | {"options": options.as_plain()})
    with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603  # this package's own module
        try:
            _, said = process.communicate(text)
        except BaseException:
            process.terminate()
            raise
    if process.returncode in _LEFT:
        raise KeyboardInterrupt
    if process.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"the trial's process ended with {process.returncode}")
    return load_result(options.out)


def main() -> None:
    """Train the run on standard input."""
    told = json.load(sys.stdin)
    options = RunOptions(**told["options"])
    job = jobs.find(told["job"])
    if told["cluster"] is not None:
        result = simulate(job, told["strategy"], told["workers"], told["cluster"], options)
        result.write(options.out or sys.exit("a trial needs a folder"))
    else:
        run(job, told["strategy"], told["workers"], options, engine=told["engine"])


if __name__ == "__main__":
    main()
