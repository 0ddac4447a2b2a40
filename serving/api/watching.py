"""The routes for those who watch: Prometheus' text, the dashboard page, and the numbers that it draws.

Invariant: the page holds no secret and no word of a client's, so anybody may load it; what it shows it asks for with a
key. Its policy lets it run its own script and nothing else, and talk to this service alone.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, JSONResponse, Response

from serving.api.access import documented
from serving.metrics import CONTENT_TYPE
from serving.overview import Overview

_NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def watching(overview: Overview, errors: dict[int | str, dict[str, Any]]) -> APIRouter:
    """`errors` are the documented refusals. The handlers ask Redis, so they run beside the event loop."""
    routes = APIRouter(tags=["watching"])
    page = (files("serving.api") / "dashboard.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": policy_of(page), "Referrer-Policy": "no-referrer", **_NOT_KEPT}

    @routes.get(
        "/metrics",
        summary="Counters of all replicas and the learner, for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors},
        dependencies=[documented],
    )
    def metrics() -> Response:
        return Response(overview.metrics(), media_type=CONTENT_TYPE, headers=_NOT_KEPT)

    @routes.get("/dashboard", summary="The page that shows what the service does", response_class=HTMLResponse)
    def dashboard() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @routes.get(
        "/dashboard/data",
        summary="What the page draws",
        responses={200: {"model": dict[str, Any]}, **errors},
        dependencies=[documented],
    )
    def data(
        after: Annotated[float, Query(ge=0, allow_inf_nan=False, description="Moments after this time (seconds)")] = 0,
    ) -> JSONResponse:
        return JSONResponse(overview.data(after), headers=_NOT_KEPT)

    return routes


def policy_of(page: str) -> str:
    """A Content-Security-Policy under which exactly the page's own script and style count."""
    script, style = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found)
