"""Whatever fits the document, or nearly fits it, is answered as the document says: schemathesis tries."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks as conforms

from serving.api.router import create_app
from serving.api.service import Service
from tests.fakes import FakeLoop
from tests.serving.api.conftest import MODEL

# Not among them: `positive_data_acceptance`, since no schema can say which model is served or how long a prompt may be.
CHECKS = [
    schemathesis.checks.not_a_server_error,
    conforms.status_code_conformance,
    conforms.content_type_conformance,
    conforms.response_headers_conformance,
    conforms.response_schema_conformance,
    conforms.negative_data_rejection,
    conforms.unsupported_method,
]


@pytest.mark.parametrize("examples", [10, pytest.param(300, marks=pytest.mark.slow)])  # of each route
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_documented(service: Service, loop: FakeLoop, mode: GenerationMode, examples: int) -> None:
    loop.max_queue = 10**6
    patient = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(service))
    for operation in (result.ok() for result in schema.get_all_operations()):
        if not mode.is_positive and not operation.body:
            continue  # nothing can be wrong with it

        @patient
        @given(operation.as_strategy(generation_mode=mode))
        def holds(case: schemathesis.Case) -> None:
            if mode.is_positive and isinstance(case.body, dict):
                case.body["model"] = MODEL  # or no request would come further than this
            case.validate_response(case.call(), checks=CHECKS)

        holds()
    assert bool(loop.seen) == mode.is_positive  # some came through to the engine, and only of these
