"""The pages: one for people, three for programs, and the scripts they need."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from eyas.base.errors import EyasError
from eyas.dashboard.guard import Guard
from eyas.dashboard.view import LiveView
from eyas.report.charts import charts
from eyas.report.overview import Overview
from eyas.report.page import asset, body, chart_data, parts
from eyas.report.plotly_script import plotly_script
from eyas.report.sections import project_name

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<link rel="stylesheet" href="/assets/page.css">
</head>
<body>
<p id="contact" class="warning" hidden></p>
{body}
<script type="application/json" id="charts">{charts}</script>
<script src="/assets/plotly.js"></script>
<script src="/assets/page.js"></script>
<script src="/assets/live.js"></script>
</body>
</html>
"""
_KEPT = {"cache-control": "private, max-age=3600"}


def make_app(live: LiveView, *, token: str, hosts: Iterable[str], cookie: str = "eyas") -> ASGIApp:
    """The application, guarded.

    Args:
        live: what is shown.
        token: whoever asks has to know it.
        hosts: names under which it may be called.
        cookie: name of the cookie that keeps the token.
    """

    async def page(_: Request) -> Response:
        return await run_in_threadpool(_page, live)

    async def status(_: Request) -> Response:
        return await run_in_threadpool(_json, live, lambda view: view.status.as_dict())

    async def whole(_: Request) -> Response:
        return await run_in_threadpool(_json, live, lambda view: view.as_dict())

    async def live_parts(_: Request) -> Response:
        return await run_in_threadpool(
            _json, live, lambda view: {"parts": parts(view), "charts": json.loads(chart_data(charts(view)))}
        )

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/api/status", status),
            Route("/api/overview", whole),
            Route("/api/parts", live_parts),
            Route("/assets/{name}", _asset),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)],
    )
    return Guard(app, token=token, hosts=hosts, cookie=cookie)


def _page(live: LiveView) -> Response:
    try:
        view = live.get()
    except EyasError as error:
        text = escape(str(error)).replace("\n", "<br>")
        return HTMLResponse(
            _PAGE.format(title="eyas", body=f'<p class="warning">{text}</p>', charts="[]"), 503
        )
    return HTMLResponse(
        _PAGE.format(title=escape(project_name(view)), body=body(view), charts=chart_data(charts(view)))
    )


def _json(live: LiveView, make: Callable[[Overview], dict[str, Any]]) -> Response:
    try:
        value, code = make(live.get()), 200
    except EyasError as error:
        value, code = error.as_dict(), 503
    text = json.dumps(value, ensure_ascii=False, default=str)
    return Response(text, code, media_type="application/json")


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "plotly.js":
        if "gzip" in request.headers.get("accept-encoding", ""):
            packed = await run_in_threadpool(_packed_plotly)
            return Response(
                packed, headers={**_KEPT, "content-encoding": "gzip"}, media_type="text/javascript"
            )
        return Response(plotly_script(), headers=_KEPT, media_type="text/javascript")
    if name == "live.js":
        text = (files("eyas.dashboard") / "assets" / "live.js").read_text(encoding="utf-8")
        return Response(text, media_type="text/javascript")
    if name in ("page.css", "page.js"):
        return Response(asset(name), media_type="text/css" if name.endswith("css") else "text/javascript")
    return Response("not here\n", 404, media_type="text/plain")


@lru_cache(maxsize=1)
def _packed_plotly() -> bytes:
    return gzip.compress(plotly_script().encode(), 6)
