"""An OpenAI-shaped server on loopback that answers in pieces and remembers when it wrote them."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PIECES = 4  # chunks with text; the usage says two tokens more, as when a chunk holds several
PAUSE_S = 0.02
SPECULATIVE = {"num_accepted_draft_tokens": 3, "tested": 5, "num_draft_tokens": 6, "num_spec_steps": 2,
               "drafter_version": "v7"}  # fmt: skip


class SlowServer:
    """`fault` is refuse, break (no [DONE]), error (an error event) or mute (no text); `hold` waits for six requests."""

    def __init__(self, *, fault: str = "", usage: bool = True, hold: bool = False, key: str = "") -> None:
        self.fault, self.usage, self.key = fault, usage, key
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.written: list[float] = []  # perf_counter of each piece
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self._gate = threading.Barrier(6) if hold else None
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any], write: Any) -> None:
        with self._lock:
            self.requests.append((path, body))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self._gate is not None:
                self._gate.wait(10)
            self._say(path.endswith("/chat/completions"), write)
        finally:
            with self._lock:
                self._now -= 1

    def _say(self, chat: bool, write: Any) -> None:
        def chunk(text: str) -> dict[str, Any]:
            return {"choices": [{"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}]}

        write(chunk(""))
        for _ in range(0 if self.fault == "mute" else PIECES):
            time.sleep(PAUSE_S)
            self.written.append(time.perf_counter())
            write(chunk("word "))
        if self.fault == "error":
            write({"error": {"message": "it broke"}})
            return
        if self.usage:
            usage = {"completion_tokens": PIECES + 2, "prompt_tokens": 7}
            write({"choices": [], "usage": usage, "metrics": {"speculative_decoding": SPECULATIVE}})
        if self.fault != "break":
            write(None)


def _handler(server: SlowServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._json(200, {"data": [{"id": "listed-model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.fault == "refuse":
                self._json(429, {"error": {"message": "no room"}})
                return
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                self._json(401, {"error": {"message": "no key"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            server.answer(self.path, body, self._event)

        def _event(self, chunk: dict[str, Any] | None) -> None:
            self.wfile.write(f"data: {json.dumps(chunk) if chunk else '[DONE]'}\n\n".encode())
            self.wfile.flush()

        def _json(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
