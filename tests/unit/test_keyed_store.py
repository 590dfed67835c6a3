"""A store for owners of its keys: it behaves as torch's stores, and is closed to strangers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistNetworkError, DistStoreError

from polytempo.engines.join import keyed_store
from polytempo.engines.join.keyed_store import KeyedStore, StoreHolder, StoreRequest
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.wire.keys import keys_of, make_keys

KEYS = make_keys()


@pytest.fixture
def holder() -> Iterator[StoreHolder]:
    made = StoreHolder("127.0.0.1", KEYS)
    yield made
    made.close()


@pytest.fixture
def store(holder: StoreHolder) -> Iterator[KeyedStore]:
    made = KeyedStore(holder.address, KEYS, 20.0)
    yield made
    made.close()


USES: dict[str, Callable[[Store], Any]] = {
    "set and get": lambda s: [s.set("a", "x"), s.set("a", "y"), s.get("a")],
    "add": lambda s: [s.add("n", 2), s.add("n", 3), s.get("n")],
    "check": lambda s: [s.set("a", ""), s.check(["a"]), s.check(["a", "b"])],
    "compare_set": lambda s: [
        s.compare_set("a", "", "x"),
        s.compare_set("a", "y", "z"),
        s.compare_set("a", "x", "w"),
        s.get("a"),
    ],
    "delete_key": lambda s: [s.set("a", "x"), s.delete_key("a"), s.delete_key("a"), s.check(["a"])],
    "wait": lambda s: [s.set("a", "x"), s.wait(["a"]), s.wait(["a"], timedelta(seconds=1))],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("prefixed", [False, True])
def test_it_does_what_torchs_store_does(store: KeyedStore, use: str, prefixed: bool) -> None:
    ours: Store = PrefixStore("run", store) if prefixed else store
    assert USES[use](ours) == USES[use](HashStore())


def test_two_clients_and_threads_share_it(holder: StoreHolder, store: KeyedStore) -> None:
    other = KeyedStore(holder.address, KEYS)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(other.get("late")))
    reader.start()
    assert other.add("n", 1) == 1  # while the other thread waits
    store.set("late", b"\x00\xff")
    reader.join()
    assert got == [b"\x00\xff"]
    other.close()


def test_a_wait_has_an_end(store: KeyedStore) -> None:
    with pytest.raises(DistStoreError, match="timed out waiting for never"):
        store.wait(["never"], timedelta(seconds=0.01))


def test_a_request_that_is_sent_again_is_performed_once(holder: StoreHolder) -> None:
    first = StoreRequest(1, "add", ("n",), b"2")
    assert [holder._answer(b"a", each).value for each in (first, first, StoreRequest(2, "add", ("n",), b"2"))] == [
        2,
        2,
        4,
    ]
    assert holder._answer(b"b", first).value == 6
    assert holder._answer(b"a", StoreRequest(3, "no such thing", ("n",))).value is None


def test_who_has_no_keys_gets_nothing_and_leaves_nothing(holder: StoreHolder, store: KeyedStore) -> None:
    with pytest.raises(DistNetworkError, match="timed out"):
        KeyedStore(holder.address, make_keys(), 0.3)
    with socket.create_connection(("127.0.0.1", int(holder.address.rpartition(":")[2]))) as stranger:
        stranger.sendall(bytes(4096))  # no greeting of ZeroMQ's
        stranger.settimeout(20.0)
        with suppress(ConnectionResetError):
            while stranger.recv(64):  # until it is hung up
                pass
    assert store.num_keys() == 0


def test_without_its_holder_it_says_so(monkeypatch: pytest.MonkeyPatch, holder: StoreHolder, store: KeyedStore) -> None:
    monkeypatch.setattr(keyed_store, "_PATIENCE_S", 0.0)
    holder.close()
    with pytest.raises(DistNetworkError, match="out of reach"):
        store.get("a")


def test_a_rendezvous_is_for_those_who_have_its_url() -> None:
    held = Rendezvous.held("127.0.0.1")
    joined = Rendezvous.joined(held.url)
    held.set("a", "x")
    joined.set("b", "y")
    assert (held.get("a"), held.get("b"), held.get("c")) == ("x", "y", None)
    assert (joined.get("a"), joined.get("c")) == ("x", None)
    address, _, token = held.url.partition("#")
    with pytest.raises(ValueError, match="has no token") as caught:
        Rendezvous.joined(address)
    assert token not in str(caught.value)
    with pytest.raises(DistNetworkError):
        Rendezvous.joined(f"{address}#{'0' * 64}", 0.3)
    joined.close()
    held.close()


def test_a_secret_makes_the_same_keys_everywhere_and_none_can_be_guessed() -> None:
    assert keys_of(bytes(32)) == keys_of(bytes(32)) != keys_of(bytes(31) + b"\x01")
    with pytest.raises(ValueError, match="could be guessed"):
        keys_of(b"secret")
