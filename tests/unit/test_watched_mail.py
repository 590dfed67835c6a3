"""A rank that waits for its loop's server sees that the server has ended, however short its waits are."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from polytempo.core import PolytempoError
from polytempo.runs.own_loop.loop_link import WatchedMail


class Silent:
    """A mailbox that answers calls without a wait only. A wait advances its clock."""

    def __init__(self, *mail: tuple[int, str]) -> None:
        self.now_s, self.mail = 100.0, list(mail)

    def take(self, wait_s: float | None = None) -> tuple[int, str] | None:
        self.now_s += wait_s or 0.0
        return self.mail.pop(0) if self.mail and wait_s == 0 else None

    def post(self, to: int, message: Any) -> bool:
        return True

    def close(self, linger_s: float) -> None:
        pass


def for_long(mail: WatchedMail, wait_s: float) -> None:
    """A hundred waits."""
    for _ in range(100):
        assert mail.take(wait_s) is None


@pytest.mark.parametrize("wait_s", [0.01, 0.25, 2.0])
def test_the_end_of_the_server_is_seen_by_waits_of_any_length(wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that came before the end are taken first."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    mail = Silent((3, "weights"))
    monkeypatch.setattr(time, "monotonic", lambda: mail.now_s)
    watched = WatchedMail(mail, 3, process=ended.pid)  # type: ignore[arg-type]
    found = next(filter(None, (watched.take(wait_s) for _ in range(100))))
    assert found == (3, "weights")
    with pytest.raises(PolytempoError, match="has ended without a word"):
        for_long(watched, wait_s)
