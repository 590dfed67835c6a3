"""What all tests share: one thread for torch, Ctrl-C, one profile for hypothesis, and where the real data sets lie.

Garbage is collected from the first test on, without a look at what is there by then: modules and thousands of tests
are most of the memory's objects, and each full collection would look at them all.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("polytempo", deadline=None, print_blob=True)
settings.load_profile("polytempo")
torch.set_num_threads(1)
gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell begins a background command, and all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """All tests are known."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of data sets: $POLYTEMPO_DATA, or `shared/data` beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("POLYTEMPO_DATA", default))
    if not root.is_dir():
        pytest.fail(f"no data sets at {root}; set POLYTEMPO_DATA to the folder that holds mnist, a9a, …")
    return root
