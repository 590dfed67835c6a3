"""The two ways between the processes of a parameter server: shared memory, and TCP encrypted with the run's keys."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import polytempo as pt
from polytempo.jobs import find
from polytempo.runs.process.mailbox_directory import MailboxDirectory, NodeMail, addresses_in
from polytempo.server.message import Beat, Message
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox

pytestmark = pytest.mark.process


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An element for each time that this process would have been told to keep its memory."""
    calls: list[bool] = []
    monkeypatch.setattr("polytempo.wire.zeromq.keep_memory", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_run_learns_and_leaves_nothing(
    transport: str, tmp_path: Path, kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "p"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    result = pt.run(
        find("digits"),
        pt.strategies.async_sgd(shards=2, replicas=1),
        workers=2,
        epochs=3,
        lr=0.02,
        transport=transport,
        out=tmp_path / "run",
    )
    assert result.accuracy is not None
    assert result.accuracy > 0.8
    assert result.server is not None
    assert result.server["updates"] == 135
    assert list(private.glob("polytempo-*")) == []
    assert not kept  # the coordinator was in this process
    text = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"server_secret" not in text
    assert not list((tmp_path / "run").rglob("keys"))


def post_office(home: Path, transport: str) -> MailboxDirectory:
    home.mkdir(mode=0o700)
    office = MailboxDirectory(home, transport, Arenas(2, 1 << 20), 1 << 20)  # type: ignore[arg-type]
    office.open()
    return office


def test_keys_are_in_a_file_of_their_owner_and_nowhere_else(tmp_path: Path) -> None:
    post_office(tmp_path / "home", "tcp")
    assert [(path.name, path.stat().st_mode & 0o777) for path in (tmp_path / "home").iterdir() if path.is_file()] == [
        ("keys", 0o600)
    ]


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_node_that_is_started_anew_is_found_again(transport: str, tmp_path: Path) -> None:
    office = post_office(tmp_path / "h", transport)
    first, second = office.mailbox(0), office.mailbox(1)
    try:
        assert first.post(1, Beat(0, 1, 7))
        taken = second.take(10.0)
        assert taken is not None
        assert taken[0] == 0
        assert taken[1].epoch == 7
        second.close()
        second = office.mailbox(1)
        seen = None
        for _ in range(100):  # messages to the former life may be lost
            first.post(1, Beat(0, 1, 8))
            seen = second.take(0.1)
            if seen is not None:
                break
        assert seen is not None
        assert seen[1].epoch == 8
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(("own_process", "times"), [(False, 0), (True, 1)])
def test_memory_is_kept_only_by_a_process_that_is_a_node_alone(
    own_process: bool, times: int, tmp_path: Path, kept: list[bool]
) -> None:
    post_office(tmp_path / "h", "tcp").mailbox(0, own_process=own_process).close()
    assert len(kept) == times


class Connections(Mailbox):
    """Connects to no node, and remembers the addresses."""

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []

    def connect(self, node: int, address: str) -> None:
        self.made.append((node, address))

    def post(self, to: int, message: Message) -> bool:
        return True


def test_addresses_are_looked_at_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("polytempo.runs.process.mailbox_directory.time", SimpleNamespace(monotonic=lambda: now.s))
    file, line = tmp_path / "n1.address", Connections()
    mail = NodeMail(0, line, addresses_in(tmp_path))
    posted = []
    for life, (at_s, moves) in enumerate([(100.0, False), (100.001, True), (100.002, True), (100.03, True)]):
        now.s = at_s
        if moves:
            file.write_text(f"life {life}")
            os.utime(file, (life, life))
        posted.append(mail.post(1, Beat(0, 1, 1)))
    assert posted == [False, True, True, True]  # an absent node is found immediately
    assert line.made == [(1, "life 1")]
    now.s = 100.06
    assert mail.post(1, Beat(0, 1, 1))
    assert line.made == [(1, "life 1"), (1, "life 3")]


def test_a_node_that_is_not_there_yet_loses_its_mail(tmp_path: Path) -> None:
    office = post_office(tmp_path / "h", "tcp")
    mail = office.mailbox(0)
    try:
        assert not mail.post(5, Beat(0, 1, 1))
    finally:
        mail.close()


def test_an_unknown_transport_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transport must be one of shared, tcp, got 'udp'"):
        MailboxDirectory(tmp_path, "udp", Arenas(1, 1 << 20), 1)  # type: ignore[arg-type]
