"""The routes: /livez, /readyz, /metrics, /stats. All of them only read.

Every handler runs on the store's control thread, between its calls, and so reads a consistent
state without a lock; none waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ebbtide.connectors.http.metrics import StoreCollector
from ebbtide.connectors.http.token import grants

if TYPE_CHECKING:
    from starlette.requests import Request

    from ebbtide.connectors.server import StoreServer

CLOSED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def build_app(server: StoreServer, token: str | None) -> Starlette:
    """The application for one store. /metrics and /stats want the token, if there is one."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(server))

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n", headers=CLOSED)

    async def readyz(request: Request) -> Response:
        report = readiness(server)
        return JSONResponse(report, 200 if report["ready"] else 503, headers=CLOSED)

    async def metrics(request: Request) -> Response:
        if not grants(token, request.headers.get("authorization")):
            return _unauthorized()
        text = generate_latest(registry)
        headers = {**CLOSED, "Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        return Response(text, headers=headers)

    async def stats(request: Request) -> Response:
        if not grants(token, request.headers.get("authorization")):
            return _unauthorized()
        return JSONResponse(server.stats(), headers=CLOSED)

    routes = [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/stats", stats),
    ]
    return Starlette(routes=routes)


def readiness(server: StoreServer) -> dict[str, Any]:
    """Whether engines can use the store: also without its disk tier, but not while it stops."""
    disk = server.store.disk
    tiers = {"memory": "up"}
    if disk is not None:
        tiers["disk"] = "up" if disk.down is None else "down"
    return {"ready": not server.is_stopping, "stopping": server.is_stopping, "tiers": tiers}


def _unauthorized() -> Response:
    headers = {**CLOSED, "WWW-Authenticate": "Bearer"}
    return PlainTextResponse("a token is needed\n", 401, headers=headers)
