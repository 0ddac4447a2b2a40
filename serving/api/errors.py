"""The one place where an error becomes an HTTP answer, always in OpenAI's envelope.

Invariant: every answer with a status of 400 or more that leaves this package is
`{"error": {"message", "type", "param", "code"}}`, whatever raised it: our own tree, an ending of the engine, the body's
validation, an unknown route, or a defect. It decides codes and wording only; what is refused is decided where it is
raised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from serving.api.fields import UNKNOWN_KIND, UNREADABLE, UNSUPPORTED, printable
from serving.engine.events import Ending
from shared.errors import NotReady, Overloaded, RedraftError, RequestError

RETRY_NOT_READY_S = 1

# RequestError.code -> status, where it is not 400.
_STATUS_BY_CODE = {
    "invalid_api_key": 401,
    "insufficient_permissions": 403,
    "model_not_found": 404,
    "deadline_exceeded": 408,
    "request_too_large": 413,
    "unsupported_content_type": 415,
}

log = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """The body of every refusal and failure."""

    error: ErrorDetail


def status_of(error: RedraftError) -> int:
    if isinstance(error, Overloaded):
        return 429
    if isinstance(error, NotReady):
        return 503
    if isinstance(error, RequestError):
        return _STATUS_BY_CODE.get(error.code, 400)
    return 500


def envelope(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`type` follows from the status, as OpenAI's clients expect it."""
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": printable(message), "type": kind, "param": param and printable(param), "code": code}}


def envelope_of(error: RedraftError) -> dict[str, Any]:
    status = status_of(error)
    if isinstance(error, RequestError):
        return envelope(status, str(error), param=error.param, code=error.code)
    return envelope(status, str(error), code="internal_error")


def response_to(error: RedraftError) -> JSONResponse:
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    elif isinstance(error, NotReady):
        headers["Retry-After"] = str(RETRY_NOT_READY_S)
    elif isinstance(error, RequestError) and error.code == "invalid_api_key":
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, RequestError) and error.code == "deadline_exceeded":
        headers["X-Should-Retry"] = "false"  # OpenAI's clients would: the deadline is theirs, and the load as it was
    return JSONResponse(envelope_of(error), status_of(error), headers)


def error_of(ending: Ending, *, silent: bool, grammar_field: str) -> RedraftError | None:
    """What an irregular ending is to the client, or None. `silent`: nothing has been said before it."""
    match ending.reason:
        case "failed" if ending.code == "invalid_grammar":
            return RequestError(ending.message, param=grammar_field, code=ending.code)
        case "failed":
            return RedraftError(ending.message)
        case "cancelled":  # not by this client: it would not read this
            return NotReady(ending.message)
        case "deadline" if silent:  # later, what has been said is the answer
            message = (
                "The request's own timeout passed before its first token. Allow more time, or send it again later."
            )
            return RequestError(message, param="timeout", code="deadline_exceeded")
    return None


def install_error_handlers(app: FastAPI) -> None:
    async def on_redraft_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RedraftError)
        if status_of(error) == 500:
            log.error("request failed: %s", error)
        return response_to(error)

    async def on_invalid_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response_to(_refusal_of_body(request, error.errors()))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body = _envelope_of_http_error(request, error)
        return JSONResponse(body, error.status_code, error.headers)

    async def on_defect(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises it again after this answer, so whoever runs the app logs the traceback.
        return JSONResponse(envelope(500, "The server failed on this request.", code="internal_error"), 500)

    app.add_exception_handler(RedraftError, on_redraft_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_defect)


def _envelope_of_http_error(request: Request, error: HTTPException) -> dict[str, Any]:
    if error.status_code == 404:
        message = f"Unknown request URL: {request.method} {request.url.path}. The routes are listed at /openapi.json."
        return envelope(404, message, code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed on {request.url.path}. Use {allowed}."
        return envelope(405, message, code="method_not_supported")
    if error.status_code == 413:
        return envelope(413, "The request body is too large.", code="request_too_large")
    if error.status_code == 400:  # the framework could not read the body (encoding, nesting)
        return envelope(400, "The request body is not readable JSON.", code="invalid_json")
    return envelope(error.status_code, HTTPStatus(error.status_code).phrase)


def _refusal_of_body(request: Request, errors: Sequence[Mapping[str, Any]]) -> RequestError:
    first = errors[0]
    content_type = request.headers.get("content-type", "")
    if not _is_json(content_type) and first["loc"] == ("body",) and first["type"] != "missing":
        said = f"'{content_type}'" if content_type else "none"
        return RequestError(
            f"Unsupported content type: {said}. Send 'Content-Type: application/json'.",
            code="unsupported_content_type",
        )
    if first["type"] == "json_invalid":
        detail, position = first["ctx"]["error"], first["loc"][1]
        return RequestError(f"The request body is not JSON: {detail} at character {position}.", code="invalid_json")
    param = _path(first["loc"], first)
    if first["type"].startswith((UNSUPPORTED, UNREADABLE, UNKNOWN_KIND)):
        first = _of_field(first)
        param = f"{param}.{first['field']}" if param and first["field"] else param or first["field"]
    if not param and first["type"] != "extra_forbidden":  # a field may have no letters in its name
        return RequestError("The request body must be a JSON object.", code="invalid_type")
    if first["type"] == UNSUPPORTED:
        message = f"'{param}' is not supported by this service. Leave it out."
        return RequestError(message, param=param, code="unsupported_parameter")
    if first["type"] == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return RequestError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    said = str(first["msg"])
    said = said[0].lower() + said[1:]
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return RequestError(f"Invalid value for '{param}': {said}.", param=param, code=code)


def _of_field(error: Mapping[str, Any]) -> Mapping[str, Any]:
    """What our own error types say of one field of an object, in the words of pydantic's; `field` is its name."""
    if error["type"] == UNSUPPORTED:
        return {**error, "field": error["ctx"]["field"]}
    if error["type"] == UNREADABLE:
        return {"type": "extra_forbidden", "field": error["ctx"]["field"]}
    field, given = error["type"].removeprefix(UNKNOWN_KIND), error["input"]
    if not isinstance(given, dict):
        return {"type": "dict_type", "msg": "must be an object", "field": ""}
    if field not in given:
        return {"type": "missing", "field": field}
    return {"type": "enum" if isinstance(given[field], str) else "string_type", "msg": error["msg"], "field": field}


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _path(location: Sequence[str | int], error: Mapping[str, Any]) -> str:
    """`messages[0].content` of ("body", "messages", 0, "content", "(string)"); the last is a union's tag."""
    steps = list(location[1:])
    named = error["type"] in ("extra_forbidden", "missing")  # then the last is a name, whatever it looks like
    if steps[-1:] == ["[key]"]:  # a key of a dictionary is what is wrong; the path has it as far as it is text
        steps[-2:], named = [error["input"]], True
    path = ""
    for place, step in enumerate(steps, start=1):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not path:
            path = step
        elif not step.startswith("(") or (named and place == len(steps)):
            path += f".{step}"
    return path
