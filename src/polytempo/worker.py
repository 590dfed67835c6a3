"""A process of a run that was started by name: `python -m polytempo.worker`, with its orders as JSON on standard input.

    spec        the run: `RunSpec.to_json()`
    role        `Role._asdict()`
    setting     `Launch.setting()`
    host        where the others reach this process
    size        `Launch.most`
    threads     how many it computes with
    launcher    the process that must be its parent: it dies with it
    notes       a file that it inherits, from `engines.processes.janitor.swept`; the process leads its own group

Its answer, {"result": …} or {"failure": …}, is the only thing that it writes to standard output; all else goes to
standard error. Engines start it; there is no other use for it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from polytempo import jobs
from polytempo.core.system.notice import ignore_hangup
from polytempo.engines.engine import Role
from polytempo.engines.processes import janitor
from polytempo.engines.processes.fork import default_signals, die_with, reserve_standard_files
from polytempo.engines.processes.worker import encoded, exit_code_of, failure_by, show_error
from polytempo.runs.process.program import perform
from polytempo.spec.run_spec import RunSpec


def main() -> int:
    """Obey standard input; the exit code."""
    reserve_standard_files()
    order = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    os.dup2(2, 1)  # the job's output belongs into the log
    _settle(order)
    try:
        spec = RunSpec.from_json(order["spec"], jobs.find)
        role = Role(**order["role"])
        answer = b'{"result": ' + encoded(perform(spec, role, order["setting"], order["host"])) + b"}"
        code = 0
    except BaseException as error:
        answer, code = json.dumps({"failure": list(failure_by(error))}).encode(), exit_code_of(error)
        show_error(error)
    with os.fdopen(answers, "wb") as stream:
        stream.write(answer)
    return code


def _settle(order: Mapping[str, Any]) -> None:
    """End with the launcher, take signals as they come, and be found by `init` in the right world."""
    die_with(order["launcher"])
    janitor.begin(order["notes"])
    default_signals()
    ignore_hangup()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    tempfile.tempdir = os.environ.get("TMPDIR")
    torch.set_num_threads(order["threads"])
    os.environ.update(
        {
            "POLYTEMPO_RANK": str(order["role"]["life"]),
            "POLYTEMPO_SIZE": str(order["size"]),
            "POLYTEMPO_RENDEZVOUS": order["setting"].get("rendezvous", tempfile.gettempdir()),
        }
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
