"""Who may ask: the right host name, the token, and only to read."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Wraps an application: nothing behind it is reached without the host name and the token.

    The host name is checked because a page of another site may point a name of its own at this address and
    then read what it gets (DNS rebinding). The token comes once as ``?token=`` and then as a cookie, or as
    ``Authorization: Bearer``.

    Args:
        hosts: names under which browsers may call, without ports.
        cookie: name of the cookie; cookies know no ports, so two dashboards need two names.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Iterable[str], cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if _host_name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("this name is not served here\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read-only\n", 405, {"allow": "GET, HEAD"})
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if given and self._right(given[0]):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
            return answer
        if self._right(self._bearer(headers)) or self._right(self._from_cookie(headers)):
            return None
        return PlainTextResponse("open the address that eyas dashboard printed, with its token\n", 401)

    def _right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    @staticmethod
    def _bearer(headers: Headers) -> str:
        kind, _, value = headers.get("authorization", "").partition(" ")
        return value.strip() if kind.lower() == "bearer" else ""

    def _from_cookie(self, headers: Headers) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""


def _host_name(host: str) -> str:
    """The name of a Host header without its port: ``[::1]`` of ``[::1]:80``."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
