"""`Feed`: one look for all pages of a view, early where a run has told of an event."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from polytempo.ui import feed as module
from polytempo.ui.feed import Feed, event_of
from polytempo.ui.hub import Hub
from polytempo.ui.page_view import PageView

VIEW = PageView(kind="run", runs=("one",))
DEADLINE_S = 60.0


class Looked:
    """A hub of one run: each look answers its number."""

    def __init__(self) -> None:
        self.pace = self
        self.interval_s = 1e9
        self.event = 0
        self.looks: list[bool] = []
        self.there = True

    def said(self, view: PageView) -> object:
        return self.event

    def parts(self, view: PageView, *, fresh: bool = False) -> Iterator[tuple[str, bytes]]:
        if not self.there:
            raise KeyError("one")
        self.looks.append(fresh)
        yield "facts", b"the same"
        yield "curves", b"%d" % len(self.looks)


async def next_of(messages: Any) -> bytes:
    return cast(bytes, await asyncio.wait_for(anext(messages), DEADLINE_S))


async def all_of_first(messages: Any) -> bytes:
    """The parts of the first look, which may come in one message or two."""
    found = await next_of(messages)
    return found if b"curves" in found else found + await next_of(messages)


def test_pages_share_looks_and_an_event_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)

    async def watched() -> None:
        hub = Looked()
        feed = Feed(cast(Hub, hub), VIEW)
        pages = [feed.messages() for _ in range(3)]
        first = await asyncio.gather(*map(all_of_first, pages))
        assert set(first) == {event_of("facts", b"the same") + event_of("curves", b"1")}
        assert (hub.looks, feed.pages) == ([False], 3)
        hub.event += 1
        assert set(await asyncio.gather(*map(next_of, pages))) == {event_of("curves", b"2")}
        assert hub.looks == [False, True]
        late = feed.messages()
        assert await next_of(late) == event_of("facts", b"the same") + event_of("curves", b"2")
        hub.there = False
        hub.event += 1
        assert b"has not begun" in await next_of(late)
        for page in [*pages, late]:
            await page.aclose()
        assert (feed.pages, feed._task) == (0, None)

    asyncio.run(watched())


def test_a_run_that_comes_again_is_no_problem_to_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)

    async def watched() -> None:
        hub = Looked()
        hub.there = False
        feed = Feed(cast(Hub, hub), VIEW)
        page = feed.messages()
        assert (await next_of(page)).startswith(b"event: problem")
        hub.there = True
        hub.event += 1
        assert event_of("curves", b"1") in await next_of(page)
        late = feed.messages()
        assert b"problem" not in await next_of(late)
        await page.aclose()
        await late.aclose()

    asyncio.run(watched())


def test_an_error_of_a_look_ends_the_streams_of_its_pages() -> None:
    class Broken(Looked):
        def parts(self, view: PageView, *, fresh: bool = False) -> Iterator[tuple[str, bytes]]:
            raise RuntimeError("not foreseen")

    async def watched() -> None:
        feed = Feed(cast(Hub, Broken()), VIEW)
        pages = [feed.messages() for _ in range(2)]
        errors = await asyncio.gather(*map(next_of, pages), return_exceptions=True)
        assert [str(error) for error in errors] == ["not foreseen"] * 2
        assert (feed.pages, feed._task) == (0, None)

    asyncio.run(watched())
