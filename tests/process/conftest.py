"""Fixtures for private folders."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of private folders in this test."""
    folder = tmp_path_factory.mktemp("p")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def none_left(private: Path) -> Iterator[Path]:
    """The place of private folders in this test; there may be none afterwards."""
    yield private
    assert list(private.glob("polytempo-*")) == []


@pytest.fixture
def none_left_by_agents(none_left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same place for agents."""
    monkeypatch.setenv("TMPDIR", str(none_left))
