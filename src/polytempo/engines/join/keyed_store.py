"""A store for those alone who have its keys: torch's `Store` over an encrypted channel, in place of a `TCPStore`.

    process   KeyedStore ──┐ StoreRequest
    process   KeyedStore ──┴▶ ChannelServer ─▶ a thread of the holder ─▶ StoreTable

torch's own store takes what any process sends that reaches its port, and keeps it. Here a stranger is refused before
anything of it is kept (`wire.guard`). A request that is asked again because its connection broke is performed once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from msgspec import Struct
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from polytempo.wire.channel import ChannelClient, ChannelServer
from polytempo.wire.keys import Keys

_LOOK_S = 0.05
_AGAIN_S = 2.0
"""A request without an answer is sent again: a connection that breaks loses what it carries."""
_PATIENCE_S = 5.0
"""How long a holder that was there may be out of reach."""
_WAIT_S, _MOST_WAIT_S = 0.001, 0.02
_MOST_PEERS = 1 << 16


class StoreRequest(Struct, frozen=True):
    """A client's request, the `number`th."""

    number: int
    do: str
    keys: tuple[str, ...]
    value: bytes = b""
    expected: bytes = b""


class StoreAnswer(Struct, frozen=True):
    """What came of it; None: there is no such key."""

    number: int
    value: bytes | int | None = None


class StoreTable:
    """Values by key, as torch's stores change them. Any thread may."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def perform(self, do: str, keys: Sequence[str], value: bytes = b"", expected: bytes = b"") -> bytes | int | None:
        """The answer to one request; None to what is none."""
        with self._lock:
            values = self._values
            match do, keys:
                case "check", _:
                    return int(all(key in values for key in keys))
                case "get", [key]:
                    return values.get(key)
                case "set", [key]:
                    values[key] = value
                case "add", [key]:
                    values[key] = b"%d" % (int(values.get(key, b"0")) + int(value))
                    return int(values[key])
                case "compare_set", [key]:
                    if values.get(key, b"") == expected:
                        values[key] = value
                    return values.get(key, expected)
                case "delete_key", [key]:
                    return int(values.pop(key, None) is not None)
                case "num_keys", _:
                    return len(values)
        return None

    def clear(self, prefix: str) -> None:
        """Remove all keys that begin with `prefix`."""
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}


class StoreHolder:
    """Holds a store at `host`, on any free port or on `port`, until it is closed: a thread answers those with `keys`.

    Errors: ValueError where this host cannot listen there.
    """

    def __init__(self, host: str, keys: Keys, port: int | None = None) -> None:
        where = f"[{host}]" if ":" in host else host
        self.table = StoreTable()
        self._channel = ChannelServer[StoreRequest, StoreAnswer](f"tcp://{where}:{port or '*'}", keys, StoreRequest)
        self.address = self._channel.address
        self._answered: dict[bytes, StoreAnswer] = {}
        """Peer -> the last answer to it."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="polytempo-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._channel.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            if (asked := self._channel.take(_LOOK_S)) is not None:
                self._channel.send(asked[0], self._answer(*asked))

    def _answer(self, peer: bytes, request: StoreRequest) -> StoreAnswer:
        last = self._answered.pop(peer, None)
        if last is None or last.number != request.number:
            try:
                value = self.table.perform(request.do, request.keys, request.value, request.expected)
            except ValueError:  # what is added to is no number
                value = None
            last = StoreAnswer(request.number, value)
        self._answered[peer] = last
        if len(self._answered) > _MOST_PEERS:
            del self._answered[next(iter(self._answered))]
        return last


class KeyedStore(Store):
    """The store at `address`, which another process or a thread of this one holds.

    Keep a reference: torch holds none. Errors, here and in all calls: `DistNetworkError` where the holder is out of
    reach, `DistStoreError` where a wait lasts longer than its timeout.
    """

    def __init__(self, address: str, keys: Keys, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._process = os.getpid()
        self._channel = ChannelClient[StoreAnswer, StoreRequest](address, keys, StoreAnswer)
        self._lock, self._number, self._met = threading.Lock(), 0, False
        self._answer_s = self._timeout_s = timeout_s
        self._meanwhile: Callable[[], object] = lambda: None
        try:
            self.num_keys()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection."""
        if os.getpid() == self._process:
            self._channel.close()

    def __del__(self) -> None:
        """It may be forgotten; a process that was forked with it has no part in its connection."""
        with suppress(AttributeError):  # it was never connected
            self.close()

    def _ask(self, do: str, keys: Sequence[str], value: bytes | str = b"", expected: bytes | str = b"") -> Any:
        with self._lock:
            self._number += 1
            request = StoreRequest(self._number, do, tuple(keys), _encoded(value), _encoded(expected))
            until_s, again_s = time.monotonic() + self._answer_s, 0.0
            while True:
                if time.monotonic() >= again_s:
                    self._channel.send(request)
                    again_s = time.monotonic() + _AGAIN_S
                answer = self._channel.take(_LOOK_S)
                if answer is not None and answer.number == request.number:
                    self._met = True
                    return answer.value
                late = time.monotonic() > until_s
                if late and not self._met:
                    raise DistNetworkError(f"timed out: no store answers at {self._channel.address} to these keys")
                if self._met and self._channel.parted_s > _PATIENCE_S:
                    raise DistNetworkError(f"the store at {self._channel.address} is out of reach")
                if late:
                    raise DistStoreError(f"timed out asking the store at {self._channel.address} to {do} {list(keys)}")

    @contextmanager
    def watched(self, check: Callable[[], object], timeout_s: float) -> Iterator[None]:
        """Waits call `check` again and again, which may raise an error, and last `timeout_s`."""
        before = self._meanwhile, self._timeout_s
        self._meanwhile, self._timeout_s = check, timeout_s
        try:
            yield
        finally:
            self._meanwhile, self._timeout_s = before

    # ------------------------------------------------------------------ torch's Store

    def set(self, key: str, value: bytes | str) -> None:
        """Put `value` there."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """Wait for the key, and read it."""
        self.wait([key])
        return bytes(self._ask("get", [key]) or b"")

    def found(self, key: str) -> bytes | None:
        """The value; None where there is none yet."""
        value: bytes | None = self._ask("get", [key])
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number there, 0 at first; the sum."""
        if (total := self._ask("add", [key], str(amount))) is None:
            raise DistStoreError(f"the value of {key} is no number")
        return int(total)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Put `desired` there if there is `expected`, or if that is empty and there is nothing; the value after it."""
        return bytes(self._ask("compare_set", [key], desired, expected))

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return bool(self._ask("delete_key", [key]))

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._ask("num_keys", []))

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - by these names a `PrefixStore` calls them

    def set_timeout(self, timeout: timedelta) -> None:
        """How long waits last."""
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """Nothing beyond the above."""
        return False

    def clone(self) -> Store:
        """Threads share its connection."""
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        until_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        wait_s = _WAIT_S
        while not self.check(keys):
            self._meanwhile()
            if time.monotonic() > until_s:
                raise DistStoreError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)


def _encoded(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
