"""Another rank is lost while this one begins: begun work is left, and retries are bounded."""

from __future__ import annotations

from typing import Any

import pytest

import polytempo.horovod.torch as hvd
from polytempo.core import PeerLost, PolytempoError
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.horovod import elastic_place as places
from polytempo.horovod.elastic_place import ElasticPlace
from polytempo.horovod.runtime import session
from polytempo.horovod.runtime.link import RankLink
from polytempo.horovod.runtime.performer import Performer
from polytempo.horovod.runtime.settings import LOG
from polytempo.membership.message import GroupView
from polytempo.runs.elastic.member_board import LauncherBoard


def test_what_a_session_has_begun_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    closed: list[RankLink] = []
    close = RankLink.close
    monkeypatch.setattr(RankLink, "close", lambda link: (closed.append(link), close(link)))

    def lost(*_: Any) -> None:
        raise PeerLost(0, None, "connect", 1)

    monkeypatch.setattr(session, "SetTransport", lost)
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        hvd.init()
    assert (len(closed), LOG.handlers, hvd.is_initialized()) == (1, [], False)


def test_the_transports_of_other_sets_are_left() -> None:
    class Transport:
        closed = 0

        def close(self) -> None:
            Transport.closed += 1

    def make(number: int, _: Any) -> Any:
        if number == 2:
            raise PeerLost(0, None, "connect", 1)
        return Transport()

    with pytest.raises(PeerLost):
        Performer(0, {0: (0, 1), 1: (0,), 2: (0, 1)}, make)
    assert Transport.closed == 2


def test_groups_that_cannot_be_formed_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "_MOST_TRIES", 3)
    rendezvous = Rendezvous.held("127.0.0.1")
    try:
        board = LauncherBoard(rendezvous)
        for generation in (1, 2, 3, 4):
            board.tell(0, GroupView(generation, (0,), 0, 0))

        def fails(*_: Any) -> None:
            raise RuntimeError("no memory")

        with pytest.raises(PolytempoError, match="3 groups in a row could not be formed, the last: no memory"):
            ElasticPlace(rendezvous.url, 0).join(5.0, fails)
        assert capsys.readouterr().err.count("could not be formed: no memory") == 3
    finally:
        rendezvous.close()
