"""The FastAPI application: routes of the OpenAI API, the probes and the watchers, over one `Service`, behind the gate.

`create_app` is the only way in. The application keeps no state of its own and starts nothing.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serving.api.access import Gate, Tenant, documented
from serving.api.admission import Admitted, admit_chat, admit_completion
from serving.api.answers import Form, Head
from serving.api.chat_form import ChatForm
from serving.api.completions import complete, new_head, stream
from serving.api.enveloped import Enveloped
from serving.api.errors import ErrorEnvelope, install_error_handlers
from serving.api.replies import ChatCompletion, Completion, Health, Model, ModelList, Readiness, Reply
from serving.api.schema import ChatCompletionRequest, CompletionRequest, Generation
from serving.api.service import Backend, Service
from serving.api.stream import ClientGone, EventStream, unless_gone
from serving.api.text_form import TextForm
from serving.api.watching import watching
from serving.overview import Overview
from shared.keys import WatchedKeys

MAX_BODY = 16 * 2**20  # bytes
CLIENT_GONE = 499  # nobody reads it; access logs do
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}}


def create_app(service: Service, keys: WatchedKeys | None = None, overview: Overview | None = None) -> FastAPI:
    """`keys` None: nobody is asked for one. `overview` None: there is nothing to be watched."""
    app = FastAPI(title="Redraft", version=_version(), docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.add_middleware(Gate, keys=keys)
    app.add_middleware(Enveloped)
    app.include_router(_probes(service))
    app.include_router(_models(service))
    app.include_router(_generation(service))
    app.include_router(watching(overview or Overview(service.replica_id), _ERRORS))
    return app


def _probes(service: Service) -> APIRouter:
    routes = APIRouter(tags=["probes"])

    @routes.get("/healthz", summary="The process answers")
    async def healthz() -> Health:
        return Health(status="ok", replica=service.replica_id)

    @routes.get(
        "/readyz",
        summary="Requests are served; 503 while loading, draining or failed",
        responses={200: {"model": Readiness}, 503: {"model": Readiness}},
    )
    async def readyz() -> JSONResponse:
        body = service.readiness()
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    return routes


def _models(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/models", tags=["models"], responses=_ERRORS, dependencies=[documented])

    @routes.get("", summary="The one model served")
    async def models() -> ModelList:
        return ModelList(object="list", data=[_model(service.backend())])

    @routes.get("/{model:path}", summary="The model by its name")
    async def model(model: str) -> Model:
        backend = service.backend()
        backend.require_model(model)
        return _model(backend)

    return routes


def _generation(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["generation"], responses=_ERRORS, dependencies=[documented])

    @routes.post(
        "/completions", summary="Continue a prompt", max_body_size=MAX_BODY, responses=_whole_or_stream(Completion)
    )
    async def completions(request: Request, body: CompletionRequest, tenant: Tenant) -> Response:
        backend = service.backend()
        backend.require_model(body.model)
        head = new_head(backend, "cmpl-")
        admitted = await admit_completion(backend, body, head.id, tenant)
        return await _answer(request, body, backend, admitted, head, TextForm(body, backend.token_texts))

    @routes.post(
        "/chat/completions",
        summary="Continue a conversation",
        max_body_size=MAX_BODY,
        responses=_whole_or_stream(ChatCompletion),
    )
    async def chat_completions(request: Request, body: ChatCompletionRequest, tenant: Tenant) -> Response:
        backend = service.backend()
        backend.require_model(body.model)
        head = new_head(backend, "chatcmpl-")
        admitted = await admit_chat(backend, body, head.id, tenant)
        return await _answer(request, body, backend, admitted, head, ChatForm(body, backend.token_texts))

    return routes


async def _answer(
    request: Request, body: Generation, backend: Backend, admitted: Admitted, head: Head, form: Form
) -> Response:
    if body.stream:
        return EventStream(stream(backend, admitted, head, form, body.stream_options))
    try:
        return JSONResponse(await unless_gone(complete(backend, admitted, head, form), request.receive))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


def _whole_or_stream(answer: type[Reply]) -> dict[int | str, dict[str, Any]]:
    """With `stream`, the same in chunks of OpenAI's form, the last of them `[DONE]`."""
    return {200: {"model": answer, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def _model(backend: Backend) -> Model:
    return Model(
        id=backend.name,
        object="model",
        created=backend.created,
        owned_by="redraft",
        max_model_len=backend.context,
    )


def _version() -> str:
    try:
        return version("redraft")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
