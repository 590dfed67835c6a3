"""`Rendezvous`: a store in one process, at which processes without a common folder find each other."""

from __future__ import annotations

import secrets

from polytempo.engines.join.environment import parsed_url, token_in
from polytempo.engines.join.keyed_store import KeyedStore, StoreHolder
from polytempo.wire.keys import keys_of

_TOKEN_BYTES = 32


class Rendezvous:
    """Texts by key, for processes that have its `url`, `tcp://host:port#token`. The token is a secret: it makes the
    keys.

    Close it: the process that holds the store has threads for it while it is open, and a process with threads should
    not fork.
    """

    def __init__(self, store: KeyedStore | StoreHolder, url: str) -> None:
        self._store: KeyedStore | StoreHolder | None = store
        self.url = url

    @classmethod
    def held(cls, host: str) -> Rendezvous:
        """A new one in this process, which listens at `host` alone, on any free port."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        holder = StoreHolder(host, keys_of(token))
        return cls(holder, f"{holder.address}#{token.hex()}")

    @classmethod
    def joined(cls, url: str, timeout_s: float = 300.0) -> Rendezvous:
        """The store of another process. `DistNetworkError` where it is not there within `timeout_s`."""
        host, port = parsed_url(url)
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        return cls(KeyedStore(address, keys_of(token_in(url)), timeout_s), url)

    def set(self, key: str, text: str) -> None:
        """Let others find `text`, in place of any before it."""
        assert self._store is not None, "it is closed"
        if isinstance(self._store, StoreHolder):
            self._store.table.perform("set", [key], text.encode())
        else:
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """The text; None as long as there is none."""
        assert self._store is not None, "it is closed"
        if isinstance(self._store, StoreHolder):
            value = self._store.table.perform("get", [key])
        else:
            value = self._store.found(key)
        return value.decode() if isinstance(value, bytes) else None

    def take(self, key: str) -> str | None:
        """The same, for its one reader: the text is not kept."""
        text = self.get(key)
        if text is not None and isinstance(self._store, StoreHolder):
            self._store.table.perform("delete_key", [key])
        elif text is not None:
            self.store.delete_key(key)
        return text

    def clear(self, prefix: str) -> None:
        """Remove all keys that begin with `prefix` from the store, which this process holds."""
        assert isinstance(self._store, StoreHolder), "it is closed, or held elsewhere"
        self._store.table.clear(prefix)

    @property
    def store(self) -> KeyedStore:
        """The store of another process, where groups of ranks meet."""
        assert isinstance(self._store, KeyedStore), "it is closed, or held here"
        return self._store

    def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()
        self._store = None
