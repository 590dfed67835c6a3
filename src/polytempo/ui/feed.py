"""`Feed`: the news of one view for all pages that show it.

Hub ──▶ Feed, one a view ──▶ the parts that changed, as one message ──▶ every page
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator

from polytempo.ui.hub import LOOK_S, Hub
from polytempo.ui.page_view import PageView

_QUIET_S = 15.0
_NOT_THERE = "this run has not begun yet, or is not in this folder"


class Feed:
    """Looks at a view at the hub's pace while there are pages, and sends each part that has changed to all of them.

    Each second between two looks it sees whether the run has told of an event, such as a fault or its end, and then
    looks immediately. Cost: a look, and one message to each page where parts have changed.
    """

    def __init__(self, hub: Hub, view: PageView) -> None:
        self._hub, self._view = hub, view
        self._events: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.pages = 0
        """Pages that listen."""

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """The messages to one page: all parts, then each part that changes; a comment after 15 s without a change."""
        self.pages += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on())
            self._task.add_done_callback(lambda _: self._tell())
        sent: dict[str, bytes] = {}
        try:
            while True:
                news = self._news
                new = {name: event for name, event in self._events.items() if sent.get(name) is not event}
                sent |= new
                if new:
                    yield b"".join(new.values())
                    continue
                if self._task.done():
                    self._task.result()  # its error ends the page's stream, which begins again
                try:
                    await asyncio.wait_for(news.wait(), _QUIET_S)
                except TimeoutError:
                    yield b": \n\n"
        finally:
            self.pages -= 1
            if not self.pages:
                self._task.cancel()
                self._task = None

    async def _look_on(self) -> None:
        begun = hurried = False
        said: object = None
        while True:
            try:
                said = await asyncio.to_thread(self._hub.said, self._view)
                parts = self._hub.parts(self._view, fresh=hurried)
                while (part := await asyncio.to_thread(next, parts, None)) is not None:
                    self._put(*part)
                    if not begun:  # pages begin with the parts that are made fast
                        self._tell()
                self._events.pop("problem", None)
            except (KeyError, ValueError, OSError) as error:
                text = _NOT_THERE if isinstance(error, KeyError) else str(error)
                self._put("problem", json.dumps({"text": text}).encode())
            self._tell()
            begun, hurried, looked_s = True, False, time.monotonic()
            while not hurried and time.monotonic() - looked_s < self._hub.pace.interval_s:
                await asyncio.sleep(LOOK_S)
                hurried = await asyncio.to_thread(self._hub.said, self._view) != said

    def _put(self, name: str, content: bytes) -> None:
        event = event_of(name, content)
        if self._events.get(name) != event:
            self._events[name] = event

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def event_of(name: str, content: bytes) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + content + b"\n\n"
