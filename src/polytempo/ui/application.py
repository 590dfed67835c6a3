"""The pages and answers of `polytempo ui`: a page, its files, a stream of events for each view, and removals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

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
from polytempo.ui.hub import Hub, LookPace
from polytempo.ui.page_guard import REPORT_POLICY
from polytempo.ui.page_view import PageView, view_of
from polytempo.ui.removal import archive, remove

MOST_STREAMS = 256
"""Pages that are served at a time."""
_QUIET_S = 15.0
_NOT_THERE = "this run has not begun yet, or is not in this folder"
_MOST_BODY, _MOST_REMOVED = 200_000, 500
_KINDS = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Removal(msgspec.Struct, frozen=True):
    """A request to remove runs."""

    runs: list[str]
    archive: bool = False


def application(root: Place, share: float | None = None) -> Starlette:
    """The application for the runs below `root`; `share`: the part of a core that it may use while runs go on."""
    return _Pages(Hub(root, LookPace(share))).application


class _Pages:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._streams = 0
        routes = [
            Route("/", self.page),
            Route("/assets/{name}", self.asset),
            Route("/events", self.events),
            Route("/report", self.report),
            Route("/picture", self.picture),
            Route("/remove", self.remove, methods=["POST"]),
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
        sent = dict[str, bytes]()
        quiet_s = 0.0
        self._streams += 1
        try:
            yield _event("hello", json.dumps({"root": str(self._hub.root)}).encode())
            while True:
                parts = self._hub.parts(view)
                try:
                    while (part := await asyncio.to_thread(next, parts, None)) is not None:
                        name, content = part
                        if sent.get(name) != content:
                            sent[name], quiet_s = content, 0.0
                            yield _event(name, content)
                except (KeyError, ValueError, OSError) as error:
                    said = _NOT_THERE if isinstance(error, KeyError) else str(error)
                    content = json.dumps({"text": said}).encode()
                    if sent.get("problem") != content:
                        sent["problem"] = content
                        yield _event("problem", content)
                pause_s = self._hub.pace.interval_s
                await asyncio.sleep(pause_s)
                quiet_s += pause_s
                if quiet_s >= _QUIET_S:
                    quiet_s = 0.0
                    yield b": \n\n"
        finally:
            self._streams -= 1

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
        body = await request.body()
        try:
            asked = msgspec.json.decode(body[: _MOST_BODY + 1], type=Removal)
        except ValueError as error:
            return PlainTextResponse(str(error), 400)
        if len(asked.runs) > _MOST_REMOVED or not isinstance(self._hub.root, Path):
            return PlainTextResponse(f"at most {_MOST_REMOVED} runs, in a folder of this machine", 400)
        return JSONResponse({"stayed": await asyncio.to_thread(self._removed, asked)})

    def _removed(self, asked: Removal) -> dict[str, str]:
        stayed: dict[str, str] = {}
        assert isinstance(self._hub.root, Path)
        for name in asked.runs:
            try:
                (archive if asked.archive else remove)(self._hub.root, name)
                self._hub.forget(name)
            except (ValueError, OSError) as error:
                stayed[name] = str(error)
        return stayed


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


def _event(name: str, content: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + content + b"\n\n"
