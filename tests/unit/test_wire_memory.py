"""Memory of large messages is used again: a second one touches no new page."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, resource
from polytempo.wire.memory import keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
assert keep_memory()
faults = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_the_second_large_block_touches_no_new_page() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    first, second = map(int, done.stdout.split())
    assert first > 16
    assert second < 16
