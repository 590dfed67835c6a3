"""Helpers for launches: the place of private folders, and a worker that never ends."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from polytempo.engines.processes.worker import RankInfo, Result


@pytest.fixture(autouse=True)
def private(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of private folders in this test; there may be none afterwards."""
    folder = tmp_path_factory.mktemp("p")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def rest(rank_info: RankInfo) -> Result:
    """Wait for a signal that never comes."""
    threading.Event().wait()
    return None
