"""`serve`: the live page on this host, until it is ended."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import uvicorn

from polytempo.core.system.url_path import Place
from polytempo.ui.application import MOST_STREAMS, application
from polytempo.ui.page_guard import PageGuard

PORT = 7440
_PORTS_TRIED, _UNTIL_S = 20, 0.1


def serve(
    root: Place,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Iterable[str] = (),
    ready: Callable[[str], object] = print,
    until: Callable[[], bool] | None = None,
) -> None:
    """Serve the runs below `root` until Ctrl-C, SIGTERM, or `until()` is true.

    port: None takes the first free port from 7440 on; 0 takes any. `ready` receives the link, with its token, when the
    server listens. Errors: OSError where the address cannot be listened at.
    """
    listening = _listen(host, port)
    own_port = listening.getsockname()[1]
    guard = PageGuard(application(root), host, own_port, names)
    config = uvicorn.Config(
        guard,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        server_header=False,
        limit_concurrency=2 * MOST_STREAMS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    if until is not None:
        threading.Thread(target=_end_with, args=(server, until), name="polytempo-ui", daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{own_port}/?token={guard.token}")
    with listening, suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def quietly() -> None:
    """Let this process use only time that no other process wants, as far as the system can."""
    with suppress(OSError, AttributeError):
        os.nice(19)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _end_with(server: uvicorn.Server, until: Callable[[], bool]) -> None:
    while not server.should_exit:
        server.should_exit = until()
        time.sleep(_UNTIL_S)


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket at the address. OSError that names it."""
    wanted = range(PORT, PORT + _PORTS_TRIED) if port is None else [port]
    family = socket.AF_INET6 if _is_v6(host) else socket.AF_INET
    for number in wanted:
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, number))
            found.listen(128)
        except OSError as error:
            found.close()
            if error.errno == errno.EADDRINUSE and number != wanted[-1]:
                continue
            raise OSError(
                error.errno, f"{error.strerror}; name another --port, or leave it out", f"{host}:{number}"
            ) from error
        return found
    raise AssertionError("a range of ports is not empty")


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
