"""Who is asking: an ASGI gate in front of the application that lets through only requests with a fitting API key.

Invariant: the tenant of a request is what its key says, never what its body says; where keys are off it is "default".
A path that no scope is written for needs some key, so that a new route is never open by mistake. It decides before
the body is read.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.errors import response_to
from shared.errors import RequestError
from shared.keys import Key, WatchedKeys
from shared.keys import Scope as KeyScope
from shared.privacy import DEFAULT_TENANT

OPEN = frozenset({"/healthz", "/readyz", "/openapi.json", "/dashboard"})
SCOPE_BY_PREFIX: tuple[tuple[str, KeyScope], ...] = (
    ("/v1", "inference"),
    ("/metrics", "metrics"),
    ("/dashboard/data", "metrics"),
    ("/admin", "admin"),
)

# Only says in /openapi.json what the gate asks for.
documented = Depends(HTTPBearer(auto_error=False, description="A key made by `redraft keys add`."))


def scope_of(path: str) -> KeyScope | None:
    """What a key must be good for; None: any key will do."""
    for prefix, scope in SCOPE_BY_PREFIX:
        if path == prefix or path.startswith(prefix + "/"):
            return scope
    return None


def tenant_of(request: Request) -> str:
    tenant: str = request.scope["state"]["tenant"]
    return tenant


Tenant = Annotated[str, Depends(tenant_of)]


class Gate:
    """`keys` None: everybody is let in."""

    def __init__(self, app: ASGIApp, keys: WatchedKeys | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            state["tenant"] = DEFAULT_TENANT
            if self._keys is not None and scope["path"] not in OPEN:
                try:
                    state["tenant"] = self._admit(self._keys, scope).tenant
                except RequestError as error:
                    await response_to(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    @staticmethod
    def _admit(keys: WatchedKeys, scope: Scope) -> Key:
        """Raises RequestError."""
        kind, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            message = "You did not give an API key. Send it as 'Authorization: Bearer KEY'."
            raise RequestError(message, code="invalid_api_key")
        key = keys.find(secret.strip())
        if key is None:
            message = "This API key is not known here: it is mistyped, revoked, or another service's."
            raise RequestError(message, code="invalid_api_key")
        wanted = scope_of(scope["path"])
        if wanted is not None and wanted not in key.scopes:
            message = f"The key '{key.name}' has no scope '{wanted}', which {scope['path']} needs."
            raise RequestError(message, code="insufficient_permissions")
        return key
