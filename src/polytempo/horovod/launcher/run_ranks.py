"""`run_ranks`: a command on a fixed number of ranks, as `horovodrun -np 4 python train.py` runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from polytempo.core.errors import PolytempoError
from polytempo.engines.engine import EngineProcess, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.processes.command_process import CommandRun
from polytempo.horovod.launcher.host_engines import HostEngines
from polytempo.horovod.launcher.hosts import places
from polytempo.horovod.launcher.settings import LaunchSettings

_LINE = re.compile(rb"\[([^\]]*)\]<(stdout|stderr)>:")
_READ_BYTES = 1 << 20


class OutputRelay:
    """Call `forward` now and then. `folder`: further copies go to its files `rank.N/stdout` and `rank.N/stderr`."""

    def __init__(self, folder: Path | None = None, *, timestamps: bool = False) -> None:
        self._folder, self._timestamps = folder, timestamps
        self._logs: dict[Path, tuple[int, bytes]] = {}
        """The number of bytes read of each log, and the line that is not complete yet."""

    def follow(self, process: EngineProcess) -> None:
        """Forward the output of this process, too."""
        self._logs[process.log] = (0, b"")

    def forward(self, *, last: bool = False) -> None:
        """Forward new, whole lines. `last`: also the rest of a line."""
        for log in self._logs:
            while self._advance(log):
                pass
            if last and self._logs[log][1]:
                self._write(self._logs[log][1] + b"\n")
                self._logs[log] = (self._logs[log][0], b"")
        sys.stdout.flush()
        sys.stderr.flush()

    def _advance(self, log: Path) -> bool:
        begin, rest = self._logs[log]
        try:
            with log.open("rb") as file:
                file.seek(begin)
                text = file.read(_READ_BYTES)
        except FileNotFoundError:
            return False
        *lines, rest = (rest + text).split(b"\n")
        self._logs[log] = (begin + len(text), rest)
        for line in lines:
            self._write(line + b"\n")
        return bool(text)

    def _write(self, line: bytes) -> None:
        match = _LINE.match(line)
        to: IO[str] = sys.stdout if match is not None and match[2] == b"stdout" else sys.stderr
        when = time.ctime() if self._timestamps else ""
        to.write(when + line.decode(errors="backslashreplace"))
        if match is not None and self._folder is not None:
            path = self._folder / f"rank.{match[1].decode()}" / match[2].decode()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line[match.end() :])


_LOOK_S = 0.05


class RanksFailed(PolytempoError):
    """A rank's command failed, and the others were ended. `exit_code`: the launcher's, 128 + n for signal n."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def run_ranks(
    words: Sequence[str],
    size: int,
    hosts: Mapping[str, int],
    settings: LaunchSettings,
    standard_input: str = "",
) -> list[str | None]:
    """Run the command `words` as ranks 0 to `size` - 1 in the slots of `hosts`; the answer that each left.

    Errors: `RanksFailed` for the first rank that fails, after the others were ended; PolytempoError where a host is not
    there in time; ValueError for too few slots.
    """
    slots = places(hosts, size)
    used = {place.host: place.local_size for place in slots}
    run = CommandRun(tuple(words), os.getcwd(), settings.environment(), standard_input)
    relay = OutputRelay(settings.output, timestamps=settings.timestamps)
    with ExitStack() as stack:
        engines = stack.enter_context(HostEngines(run, settings, used, size))
        said(settings, f"starting {size} ranks on {', '.join(f'{name}:{number}' for name, number in used.items())}")
        engines.open(used)
        meeting = {}
        if not all(engines.is_local(name) for name in used):
            rendezvous = Rendezvous.held(engines.address)
            stack.callback(rendezvous.close)
            meeting = {"POLYTEMPO_RENDEZVOUS": rendezvous.url}
        processes: list[EngineProcess] = []
        try:
            for place in slots:
                role = Role("rank", place.rank, place.rank)
                process = engines.start(place.host, role, str(place.rank), {**place.environment(), **meeting})
                processes.append(process)
                relay.follow(process)
            failed = None
            while failed is None and any(process.exit_code is None for process in processes):
                gone = engines.poll(_LOOK_S)
                failed = next((process for process in gone if code_of(process)), None)
                relay.forward()
        finally:
            engines.stop()
            engines.poll(0.0)
            relay.forward(last=True)
        if failed is not None:
            rank = failed.role.node
            raise RanksFailed(f"rank {rank} on {slots[rank].host} {ended(failed)}; the run has ended", status(failed))
        return [json.loads(process.result or b"{}").get("answer") for process in processes]


def said(settings: LaunchSettings, text: str) -> None:
    """Say it where the launcher is verbose."""
    if settings.verbose:
        print(f"horovodrun: {text}", file=sys.stderr)


def code_of(process: EngineProcess) -> int:
    """The exit code of the command, or of the process that ran it, where that was ended. Negative: a signal."""
    if process.exit_code == 0 and process.result:
        return int(json.loads(process.result)["code"])
    return process.exit_code or 1


def status(process: EngineProcess) -> int:
    """The launcher's exit code for it, as shells give it."""
    code = code_of(process)
    return code if code >= 0 else 128 - code


def ended(process: EngineProcess) -> str:
    """The end of the command in words."""
    code = code_of(process)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
