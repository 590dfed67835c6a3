"""`Rendezvous`: a store that one process holds, at which processes that share no folder find each other."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore

from polytempo.engines.environment import parsed_url


class Rendezvous:
    """Listens at `host` alone, on any free port; `url` says where. It is gone with the last reference to it.

    Whoever reaches the port can read and write the store: it holds addresses, and no secret.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        port = listener.getsockname()[1]
        self.store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def joined_store(url: str) -> TCPStore:
    """The store of the rendezvous at `url`, in another process."""
    host, port = parsed_url(url)
    return TCPStore(host, port, is_master=False, wait_for_workers=False)
