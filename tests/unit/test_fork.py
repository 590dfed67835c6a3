"""Forks: a signal that another thread takes meanwhile is not lost, and the caller's filters of warnings stay."""

from __future__ import annotations

import subprocess
import sys
import warnings

from polytempo.engines.processes import fork

PROGRAM = """
import os, signal, threading
from polytempo.engines.processes.fork import fork
waits = threading.Event()
threading.Thread(target=waits.wait, daemon=True).start()
def hook():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000): pass
os.register_at_fork(after_in_parent=hook)
try:
    fork(lambda: os._exit(0))
    print("lost")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_during_hooks_of_a_fork_ends_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_two_threads_that_fork_leave_the_filters_of_warnings_as_they_were() -> None:
    filters, before = warnings.filters, list(warnings.filters)
    first, second = fork._without_warning(), fork._without_warning()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    warnings.warn("use of fork() may lead to deadlocks", DeprecationWarning, stacklevel=1)
    second.__exit__(None, None, None)
    assert warnings.filters is filters
    assert list(filters) == before
