"""An OpenAI-compatible server of canned answers, and a load job: for tests of contenders and their workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ASK = [{"role": "user", "content": "hi"}]


def job(**changes: Any) -> dict[str, Any]:
    return {
        "temperature": 0.0,
        "ignore_eos": False,
        "threads": 1,
        "batch": 2,
        "max_tokens": 8,
        "conversations": [ASK],
        **changes,
    }


class CannedServer(ThreadingHTTPServer):
    """Answers every chat with three pieces of text that were `tokens` tokens; remembers what it was asked."""

    daemon_threads = True

    def __init__(self, tokens: int = 4, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens, self.status = tokens, status
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: CannedServer

    def do_GET(self) -> None:
        known = {"/v1/models": {"data": [{"id": "canned"}]}, "/version": {"version": "1.2"}}
        self._answer(json.dumps(known.get(self.path, {})), 200 if self.path in known else 404)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.status != 200:
            self._answer('{"error": {"message": "no"}}', self.server.status)
            return
        pieces: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        pieces += [{"choices": [{"delta": {"content": text}}]} for text in "abc"]
        pieces.append({"choices": [], "usage": {"completion_tokens": self.server.tokens}})
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
        self._answer("".join([*lines, "data: [DONE]\n\n"]), 200)

    def _answer(self, text: str, status: int) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""


@contextmanager
def canned_server(**facts: Any) -> Iterator[CannedServer]:
    server = CannedServer(**facts)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
