"""The subprocess engine: new interpreters on this host, which receive nothing but JSON on their standard input.

It is slower to start than `local` (each process imports torch), and has no shared memory to offer. It resembles an
engine for other hosts: a process knows the run by its `RunSpec`, finds the job by name, and leaves its result as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polytempo.engines.engine import EngineAddress, EngineProcess, Failure, Launch, Role
from polytempo.engines.processes import janitor
from polytempo.engines.processes.capacity import limits
from polytempo.engines.processes.fork import held_signals
from polytempo.engines.processes.worker_processes import Child, ChildEngine

_HOST = "127.0.0.1"
_MODULE = "polytempo.worker"


@dataclass(frozen=True)
class Subprocess:
    """Processes of this host, each a new interpreter that gets the run as JSON."""

    python: str = sys.executable

    @contextmanager
    def open(self, launch: Launch) -> Iterator[SubprocessEngine]:
        """See `EngineSetup`. Errors: ValueError for a function, or a job, that has no name."""
        if launch.spec is None:
            raise ValueError("a function cannot travel to a new interpreter; give engine=pt.engines.local()")
        spec = launch.spec.to_json()
        with janitor.engine_home(launch.logs) as (home, notes, logs):
            threads = launch.threads or max(1, limits().cores // launch.workers)
            engine = SubprocessEngine(self.python, spec, launch, EngineAddress(_HOST, threads), home, notes, logs)
            try:
                yield engine
            finally:
                engine.stop()
                engine.poll()  # which closes the files of answers


class SubprocessEngine(ChildEngine):
    """See `Engine`."""

    def __init__(
        self, python: str, spec: str, launch: Launch, address: EngineAddress, home: Path, notes: int, logs: Path
    ) -> None:
        super().__init__(home)
        self._python, self._spec, self._launch, self.address = python, spec, launch, address
        self._notes, self._logs = notes, logs
        self._answers: dict[Child, IO[bytes]] = {}

    def start(self, role: Role, host: int = 0) -> EngineProcess:
        """See `Engine`. The output goes to `logs/ROLE.log`."""
        path = self._logs / f"{role}.log"
        path.unlink(missing_ok=True)  # it may be a link
        order = json.dumps(self._order(role)).encode()
        environment = dict(os.environ) | {"TMPDIR": str(self._home), "OMP_NUM_THREADS": str(self.address.threads)}
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644), "wb") as log:
            answer: IO[bytes] = tempfile.TemporaryFile(dir=self._home)  # noqa: SIM115 - `_read` closes it
            with held_signals():  # a process that has been started is known here, too
                started = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of ours
                    [self._python, "-P", "-m", _MODULE],
                    stdin=subprocess.PIPE,
                    stdout=answer,
                    stderr=log,
                    env=environment,
                    pass_fds=(self._notes,),
                    start_new_session=True,
                )
                started.returncode = 0  # from here on it is ours to wait for
                child = self._add(Child(role, path, pid=started.pid, notes=self._notes))
        self._answers[child] = answer
        assert started.stdin is not None
        try:
            with started.stdin as stdin:
                stdin.write(order)
        except BrokenPipeError:
            pass  # it has ended already: `poll` will find it
        return child

    def _order(self, role: Role) -> Mapping[str, Any]:
        """All that the process reads."""
        return {
            "spec": self._spec,
            "role": role._asdict(),
            "setting": dict(self._launch.setting()),
            "host": self.address.host,
            "size": self._launch.most,
            "threads": self.address.threads,
            "launcher": os.getpid(),
            "notes": self._notes,
        }

    def _read(self, child: Child) -> None:
        with self._answers.pop(child) as answer:
            answer.seek(0)
            text = answer.read()
        told = json.loads(text) if child.exit_code is not None and child.exit_code >= 0 and text else {}
        child.result = json.dumps(told["result"]).encode() if "result" in told else None
        child.failure = Failure(*told["failure"]) if "failure" in told else None
