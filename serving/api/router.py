"""The FastAPI application: routes of the OpenAI API and the two probes, over one `Service`.

`create_app` is the only way in. The application keeps no state of its own and starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serving.api.admission import admit_chat, admit_completion
from serving.api.answers import Form, Head
from serving.api.completions import CHAT, TEXT, complete, new_head, stream
from serving.api.enveloped import Enveloped
from serving.api.errors import ErrorEnvelope, install_error_handlers
from serving.api.schema import ChatCompletionRequest, CompletionRequest
from serving.api.service import Backend, Service
from serving.api.stream import ClientGone, EventStream, unless_gone
from serving.engine.request import GenerationRequest

MAX_BODY = 16 * 2**20  # bytes
CLIENT_GONE = 499  # nobody reads it; access logs do
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Redraft", version=_version(), docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.add_middleware(Enveloped)
    app.include_router(_probes(service))
    app.include_router(_models(service))
    app.include_router(_generation(service))
    return app


def _probes(service: Service) -> APIRouter:
    routes = APIRouter(tags=["probes"])

    @routes.get("/healthz", summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "replica": service.replica_id}

    @routes.get("/readyz", summary="Requests are served; 503 while loading, draining or failed")
    async def readyz() -> JSONResponse:
        body = service.readiness()
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    return routes


def _models(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/models", tags=["models"], responses=_ERRORS)

    @routes.get("", summary="The one model served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service.backend())]}

    @routes.get("/{model:path}", summary="The model by its name")
    async def model(model: str) -> dict[str, Any]:
        backend = service.backend()
        backend.require_model(model)
        return _model(backend)

    return routes


def _generation(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["generation"], responses=_ERRORS)

    @routes.post("/completions", summary="Continue a prompt", max_body_size=MAX_BODY)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        backend = service.backend()
        backend.require_model(body.model)
        head = new_head(backend, TEXT)
        requests = await admit_completion(backend, body, head.id)
        return await _answer(request, body, backend, requests, head, TEXT)

    @routes.post("/chat/completions", summary="Continue a conversation", max_body_size=MAX_BODY)
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        backend = service.backend()
        backend.require_model(body.model)
        head = new_head(backend, CHAT)
        requests = await admit_chat(backend, body, head.id)
        return await _answer(request, body, backend, requests, head, CHAT)

    return routes


async def _answer(
    request: Request,
    body: CompletionRequest | ChatCompletionRequest,
    backend: Backend,
    requests: Sequence[GenerationRequest],
    head: Head,
    form: Form,
) -> Response:
    if body.stream:
        return EventStream(stream(backend, requests, head, form, with_usage=body.include_usage))
    try:
        return JSONResponse(await unless_gone(complete(backend, requests, head, form), request.receive))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


def _model(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.name,
        "object": "model",
        "created": backend.created,
        "owned_by": "redraft",
        "max_model_len": backend.context,
    }


def _version() -> str:
    try:
        return version("redraft")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
