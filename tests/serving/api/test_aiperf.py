"""NVIDIA's aiperf against the server: its speculative-decoding table is filled from what our answers say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.api.service import Service
from tests.fakes import FakeLoop
from tests.serving.api.conftest import MODEL
from tests.serving.api.test_openai_client import EXPECTED_METRICS

AIPERF = shutil.which("aiperf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(AIPERF is None, reason="`pip install aiperf` in an environment on PATH would run this"),
]
REQUESTS = 4


@pytest.mark.parametrize("streaming", [True, False])
def test_the_speculative_decoding_table(
    serve: Callable[[], str], service: Service, loop: FakeLoop, tokenizer: Any, tmp_path: Path, streaming: bool
) -> None:
    loop.context = 4096
    service.open(replace(service.backend(), context=loop.context))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [
        *(str(AIPERF), "profile", "--model", MODEL, "--url", serve(), "--endpoint-type", "chat"),
        *(["--streaming"] if streaming else []),
        *("--tokenizer", str(tmp_path / "tokenizer"), "--use-server-token-count", "--ui", "none"),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--artifact-dir", str(tmp_path / "out")),
        *("--workers-max", "1", "--record-processors", "1"),
        *("--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "16"),
    ]
    environment = os.environ | {"COLUMNS": "160", "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "200"}  # its eight processes
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Spec Decode" in done.stdout
    exported = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    text = json.dumps(exported)
    assert str(EXPECTED_METRICS["mean_acceptance_length"]) in text
    assert exported["request_count"]["avg"] == REQUESTS
