"""`ServerProcess`: rank 0's handle of the process of a loop's parameter server. See `polytempo.parameter_server`."""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from polytempo.engines.processes.fork import held_signals

_MODULE = "polytempo.parameter_server"
LENGTHS = struct.Struct(">QQQQ")
"""Lengths of the four parts of an order."""
_MOST_BYTES = 64 << 20
_END_S = 5.0
"""The time that it has to end its processes after the order to end."""


class ServerProcess:
    """A new interpreter, not a fork: by now this process has threads, of torch and of its process group."""

    def __init__(self) -> None:
        with held_signals():
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of ours
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._text = b""
        self._lasting = threading.current_thread() is threading.main_thread()
        """True if the thread that has started it lasts as long as this process."""

    @property
    def pid(self) -> int:
        """The process id on this host."""
        return self._process.pid

    def begin(
        self, order: Mapping[str, Any], blobs: Sequence[bytes], wait_s: float, hand_over: Callable[[str], None]
    ) -> dict[str, Any]:
        """Let it serve; returns its answer, {"ready": …} or {"failed": why}.

        `hand_over(text)` gets the ticket for ranks that serve, if there are any.
        """
        assert self._process.stdin is not None
        text = json.dumps({**order, "lasting": self._lasting}).encode()
        parts = [text, *blobs]
        try:
            for part in (LENGTHS.pack(*map(len, parts)), *parts):
                self._process.stdin.write(part)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `_line` says how
        said = self._line(wait_s)
        if "ticket" in said:
            hand_over(said["ticket"])
            said = self._line(wait_s)
        if "ready" not in said:
            self.end(0.0)
        return said

    def end(self, wait_s: float, reason: str = "") -> dict[str, Any] | None:
        """Wait for its end for `wait_s`, and return its account of the run; with a `reason`, or no time, end it now.

        Its processes and its folder end with it in any case.
        """
        process = self._process
        if process.poll() is None and reason:
            self._tell(reason)
        said = self._line(wait_s if not reason else _END_S) if wait_s else {}
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(_END_S if wait_s else 0.0)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)  # its janitor sees to the rest
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        ended = said.get("ended")
        return ended if isinstance(ended, dict) else None

    def _tell(self, reason: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps({"end": reason[:1000]}).encode() + b"\n")
            self._process.stdin.flush()

    def _how(self) -> str:
        """The end of a process with closed output, in words."""
        try:
            return f"it has ended with exit code {self._process.wait(_END_S)} and said nothing"
        except subprocess.TimeoutExpired:
            return "it has closed its output and said nothing"

    def _line(self, wait_s: float) -> dict[str, Any]:
        """The next line of its output; {"failed": why} without one."""
        assert self._process.stdout is not None
        until_s, source = time.monotonic() + wait_s, self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while b"\n" not in self._text:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    return {"failed": f"it has said nothing for {wait_s:g} s"}
                piece = os.read(source, 1 << 16)
                if not piece or len(self._text) > _MOST_BYTES:
                    return {"failed": self._how()}
                self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found
