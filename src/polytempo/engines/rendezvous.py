"""`Rendezvous`: a store that one process holds, at which processes that share no folder find each other."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore

from polytempo.engines.environment import parsed_url


class Rendezvous:
    """Texts by key. A process that reaches `url` can read and write them: they are addresses, and no secrets.

    Close it: the process that holds the store has threads for it as long as it is open, and a process with threads
    is no good parent of forked ones.
    """

    def __init__(self, store: TCPStore, url: str) -> None:
        self._store: TCPStore | None = store
        self.url = url

    @classmethod
    def held(cls, host: str) -> Rendezvous:
        """A new one in this process, which listens at `host` alone, on any free port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        port = listener.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return cls(store, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")

    @classmethod
    def joined(cls, url: str) -> Rendezvous:
        """The one that another process holds."""
        host, port = parsed_url(url)
        return cls(TCPStore(host, port, is_master=False, wait_for_workers=False), url)

    def set(self, key: str, text: str) -> None:
        """Let others find `text`, in place of any before it."""
        assert self._store is not None, "it is closed"
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """The text; None as long as there is none."""
        assert self._store is not None, "it is closed"
        return self._store.get(key).decode() if self._store.check([key]) else None

    @property
    def store(self) -> TCPStore:
        """The store itself, where groups of ranks meet."""
        assert self._store is not None, "it is closed"
        return self._store

    def close(self) -> None:
        """Let go of the store."""
        self._store = None
