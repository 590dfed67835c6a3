"""Forks: a signal that another thread takes meanwhile is not lost."""

from __future__ import annotations

import subprocess
import sys

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
