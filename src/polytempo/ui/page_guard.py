"""`PageGuard`: who may see the page. A token in the link, a cookie after it, the right host, and no script but ours."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A report has its scripts in it, so it is a page of an origin of its own, which reads nothing here."""
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"x-frame-options": b"DENY",
    b"cache-control": b"no-store",
}
_REFUSED = {
    403: "This page needs the link that `polytempo ui` has printed: it ends in a token.",
    421: "This server answers to the address that `polytempo ui` has printed, and to no other name.",
}


class PageGuard:
    """An application that answers only requests with the token, or with the cookie that the first one received.

    host, port: the server's address. A request under another name is refused (421): another site may make its own name
    point here. A request that changes something must come from this page. Tokens are compared in constant time.
    """

    def __init__(self, app: App, host: str, port: int, token: str) -> None:
        self._app, self._port = app, port
        self._token = token
        self._session = secrets.token_urlsafe(32)
        self._cookie = f"polytempo_{port}"
        self._loopback = _is_loopback(host)
        self._names = {"localhost", host.strip("[]").lower()}
        if not self._loopback:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        if not self._is_own_name(headers.get(b"host", b"")):
            await _refuse(send, 421)
            return
        by_link = self._has_token(scope)
        if not by_link and not self._has_cookie(headers):
            await _refuse(send, 403)
            return
        if scope["method"] not in ("GET", "HEAD") and not self._is_own_page(headers):
            await _refuse(send, 403)
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = self._with_headers(message.get("headers", []), by_link)
            await send(message)

        await self._app(scope, receive, guarded)

    def _is_own_name(self, host: bytes) -> bool:
        """True if the name in the request's Host header is a name of this server."""
        try:
            found = urlsplit(f"//{host.decode('ascii')}")
            name, port = (found.hostname or "").lower(), found.port
        except ValueError:
            return False
        if port != self._port and not (port is None and self._port == 80):
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._loopback

    def _has_token(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return scope["method"] == "GET" and hmac.compare_digest(given.encode(), self._token.encode())

    def _has_cookie(self, headers: dict[bytes, bytes]) -> bool:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        given = cookies[self._cookie].value if self._cookie in cookies else ""
        return hmac.compare_digest(given.encode(), self._session.encode())

    def _is_own_page(self, headers: dict[bytes, bytes]) -> bool:
        """True for a request of this page's own script."""
        try:
            origin = urlsplit(headers.get(b"origin", b"").decode("ascii")).netloc.encode()
        except ValueError:
            return False
        is_json = headers.get(b"content-type", b"").startswith(b"application/json")
        return is_json and origin == headers.get(b"host")

    def _with_headers(self, headers: Iterable[tuple[bytes, bytes]], by_link: bool) -> list[tuple[bytes, bytes]]:
        given = {key.lower(): value for key, value in headers}
        found = [*_HEADERS.items()]
        if b"content-security-policy" not in given:
            found.append((b"content-security-policy", POLICY.encode()))
        if by_link:
            cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
            found.append((b"set-cookie", cookie.encode()))
        return [(key, value) for key, value in given.items() if key not in _HEADERS] + found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def _refuse(send: Send, status: int) -> None:
    headers = [*_HEADERS.items(), (b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSED[status].encode()})
