"""The pages and answers of `polytempo ui`: a page, its files, a stream of events for each view, and removals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from polytempo.core.system.url_path import Place
from polytempo.report.pages.document import report_asset
from polytempo.report.pages.page import page
from polytempo.report.pictures.marks import SIGNS
from polytempo.report.pictures.style import COLORS, DASHES, css_variables
from polytempo.report.runs import load_run
from polytempo.ui.feed import Feed, event_of
from polytempo.ui.hub import Hub, LookPace
from polytempo.ui.page_guard import REPORT_POLICY
from polytempo.ui.page_view import PageView, view_of
from polytempo.ui.removal import archive, remove, run_below
from polytempo.ui.tagging import change_tags

MOST_STREAMS = 256
"""Pages that are served at a time."""
_MOST_BODY, _MOST_CHANGED = 200_000, 500
_KINDS = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Tagging(msgspec.Struct, frozen=True):
    """A request to give tags to runs, and to take some from them."""

    runs: list[str]
    add: list[str] = []
    remove: list[str] = []


class Removal(msgspec.Struct, frozen=True):
    """A request to remove runs."""

    runs: list[str]
    archive: bool = False


A = TypeVar("A", Removal, Tagging)


def application(root: Place, share: float | None = None) -> Starlette:
    """The application for the runs below `root`; `share`: the part of a core that it may use while runs go on."""
    return _Pages(Hub(root, LookPace(share))).application


class _Pages:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._streams = 0
        self._feeds: dict[PageView, Feed] = {}
        routes = [
            Route("/", self.page),
            Route("/assets/{name}", self.asset),
            Route("/events", self.events),
            Route("/report", self.report),
            Route("/picture", self.picture),
            Route("/remove", self.remove, methods=["POST"]),
            Route("/tags", self.tag, methods=["POST"]),
        ]
        self.application = Starlette(routes=routes)

    async def page(self, request: Request) -> Response:
        """The page, which is the same for all runs."""
        return HTMLResponse(asset("page.html"))

    async def asset(self, request: Request) -> Response:
        """A file of the page."""
        name = request.path_params["name"]
        try:
            return Response(asset(name), media_type=_KINDS[name.rpartition(".")[2]])
        except (KeyError, OSError):
            return PlainTextResponse("There is no such file.", 404)

    async def events(self, request: Request) -> Response:
        """A stream of the parts of a view: all of them first, then each that changes."""
        try:
            view = view_of(request.query_params, request.query_params.getlist("run"))
        except ValueError as error:
            return PlainTextResponse(str(error), 400)
        if self._streams >= MOST_STREAMS:
            return PlainTextResponse(f"{MOST_STREAMS} pages are open already; close one", 503)
        return StreamingResponse(self._stream(view), media_type="text/event-stream")

    async def _stream(self, view: PageView) -> AsyncIterator[bytes]:
        feed = self._feeds.setdefault(view, Feed(self._hub, view))
        self._streams += 1
        try:
            yield event_of("hello", json.dumps({"root": str(self._hub.root)}).encode())
            async with aclosing(feed.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._streams -= 1
            if not feed.pages and self._feeds.get(view) is feed:
                del self._feeds[view]

    async def report(self, request: Request) -> Response:
        """The report of a run that has ended, made from its numbers: a file of the folder could be anything."""
        try:
            folder = self._hub.folder(request.query_params.get("run", ""))
            content = await asyncio.to_thread(_report, folder)
        except (KeyError, ValueError, OSError) as error:
            return PlainTextResponse(f"There is no report of this run: {error}", 404)
        return HTMLResponse(content, headers={"content-security-policy": REPORT_POLICY})

    async def picture(self, request: Request) -> Response:
        """A picture that the user's program has logged."""
        asked = request.query_params
        try:
            content = await asyncio.to_thread(self._hub.picture, asked.get("run", ""), asked.get("path", ""))
        except (KeyError, ValueError, OSError) as error:
            return PlainTextResponse(f"There is no such picture: {error}", 404)
        return Response(content, media_type="image/png")

    async def remove(self, request: Request) -> Response:
        """Delete or archive runs; the answer names each that stays, with the reason."""
        return await self._changed(request, Removal, self._remove)

    async def tag(self, request: Request) -> Response:
        """Change the tags of runs; the answer names each that stays, with the reason."""
        return await self._changed(request, Tagging, _tag)

    async def _changed(self, request: Request, kind: type[A], change: Callable[[Path, str, A], None]) -> Response:
        """Change each run that a request names."""
        body, root = await request.body(), self._hub.root
        try:
            asked = msgspec.json.decode(body[: _MOST_BODY + 1], type=kind)
        except ValueError as error:
            return PlainTextResponse(str(error), 400)
        if len(asked.runs) > _MOST_CHANGED or not isinstance(root, Path):
            return PlainTextResponse(f"at most {_MOST_CHANGED} runs, in a folder of this machine", 400)
        stayed: dict[str, str] = {}
        for name in asked.runs:
            try:
                await asyncio.to_thread(change, root, name, asked)
            except (ValueError, OSError) as error:
                stayed[name] = str(error)
        return JSONResponse({"stayed": stayed})

    def _remove(self, root: Path, name: str, asked: Removal) -> None:
        (archive if asked.archive else remove)(root, name)
        self._hub.forget(name)


def _tag(root: Path, name: str, asked: Tagging) -> None:
    change_tags(run_below(root, name), asked.add, asked.remove)


@cache
def asset(name: str) -> str:
    """A file of the page. OSError for another name."""
    made: dict[str, Any] = {
        "colors.css": css_variables,
        "theme.js": lambda: report_asset("theme.js") + "export { theme };\n",
        "palette.js": lambda: (
            f"export const COLORS = {json.dumps(COLORS)};\n"
            f"export const DASHES = {json.dumps([[int(n) for n in dash.svg.split()] for dash in DASHES])};\n"
            f"export const MARKS = {json.dumps({kind: [s.color, s.letter] for kind, s in SIGNS.items()})};\n"
        ),
    }
    if name in made:
        return str(made[name]())
    if name not in {each.name for each in files("polytempo.ui").joinpath("assets").iterdir()}:
        raise FileNotFoundError(name)
    return files("polytempo.ui").joinpath("assets", name).read_text(encoding="utf-8")


def _report(folder: Place) -> str:
    run = load_run(folder)
    return page([run], title=f"{run.result.get('job', '')}: {run.result['strategy']}")
