"""`serve`: the live page at an address of this host, until it is ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from polytempo.core.system.url_path import Place
from polytempo.ui.address import Address
from polytempo.ui.application import MOST_STREAMS, application
from polytempo.ui.page_guard import PageGuard

_UNTIL_S, _TICK_S = 0.1, 0.5
LAST_LOOK_S = 2.0
"""The time that open pages have to show the end of the run."""


def serve(
    root: Place, address: Address, until: Callable[[], object] | None = None, *, share: float | None = None
) -> None:
    """Serve the runs below `root` at `address` until Ctrl-C, SIGTERM, or `until()` returns and open pages have had 2 s.

    The address is closed."""
    config = uvicorn.Config(
        PageGuard(application(root, share), address.host, address.port, address.token),
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        server_header=False,
        limit_concurrency=2 * MOST_STREAMS,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    if until is not None:
        threading.Thread(target=_end_with, args=(server, until), name="polytempo-ui", daemon=True).start()
    with address.listening, suppress(KeyboardInterrupt):
        server.run(sockets=[address.listening])


class _Server(uvicorn.Server):
    """uvicorn looks ten times a second whether it is to end, which takes a quarter of this page's part of a core."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(_TICK_S)


def _end_with(server: uvicorn.Server, until: Callable[[], object]) -> None:
    until()
    end_s = time.monotonic() + LAST_LOOK_S
    while server.server_state.connections and time.monotonic() < end_s:
        time.sleep(_UNTIL_S)
    server.should_exit = True
