"""Ranks of an elastic torchrun's round agree on a name, with any entries of earlier rounds in the agents' store."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore

from polytempo.engines.join import elastic_round
from polytempo.engines.join.elastic_round import name_of_round

pytestmark = pytest.mark.process

Connect = Callable[[], TCPStore]
LONG_S = 60.0


@pytest.fixture
def connect() -> Connect:
    """Another client of the store that the agents of one torchrun hold."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore(
        "127.0.0.1", agent.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LONG_S)
    )


def round_of(connect: Connect, size: int) -> list[str]:
    """Each rank's name of a round of `size` ranks."""
    with ThreadPoolExecutor(size) as ranks:
        names = [ranks.submit(name_of_round, connect(), rank, size, LONG_S) for rank in reversed(range(size))]
        return [name.result() for name in names]


def test_each_round_has_a_name_of_its_own(connect: Connect) -> None:
    rounds = [round_of(connect, size) for size in (2, 1, 3, 3)]
    assert [len(set(names)) for names in rounds] == [1, 1, 1, 1]
    assert len({names[0] for names in rounds}) == 4


def test_what_a_round_that_never_met_has_left_does_no_harm(connect: Connect) -> None:
    """Two ranks of the last round knocked, one of them got its answer; then all of it was killed."""
    store = connect()
    store.queue_push("polytempo/round", json.dumps({"rank": 1, "size": 3, "nonce": "old"}))
    store.queue_push("polytempo/round", json.dumps({"rank": 2, "size": 4, "nonce": "older"}))
    store.queue_push("polytempo/round", json.dumps({"rank": 2, "name": "the last round's"}))
    assert len(set(round_of(connect, 3))) == 1
    assert store.queue_len("polytempo/round") == 0


def test_a_rank_whose_message_another_rank_0_has_read_knocks_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_round, "_AGAIN_S", 0.05)
    with ThreadPoolExecutor(1) as ranks:
        late = ranks.submit(name_of_round, connect(), 1, 2, LONG_S)
        taken = json.loads(connect().queue_pop("polytempo/round"))
        connect().set(f"polytempo/round/{taken['nonce']}", "a round that has ended")
        assert name_of_round(connect(), 0, 2, LONG_S) == late.result()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_away_is_waited_for_only_so_long(connect: Connect, rank: int) -> None:
    with pytest.raises(DistStoreError, match="timeout"):
        name_of_round(connect(), rank, 2, 0.2)
