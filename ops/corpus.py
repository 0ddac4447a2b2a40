"""A folder of finished traces with their features: what a base drafter is distilled from.

Append-only, so that hours of generation survive a kill: a record counts once its line stands in the index, and what
was written behind the last line is cut off when the folder is opened again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.trace import TraceRecord, decode, encode


class Corpus:
    """Traces and float16 features [tokens, width] on disk, in order of arrival."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._index, self._traces, self._features = (folder / name for name in ("index.jsonl", "traces", "features"))
        self._entries: list[tuple[str, str, int, int, int]] = []  # id, domain, end of trace, end of features, width
        if self._index.exists():
            *lines, torn = self._index.read_text(encoding="utf-8").split("\n")  # a whole last line ends with a newline
            self._entries = [tuple(json.loads(line)) for line in lines]
            if torn:  # else nothing is written: others may be reading
                self._index.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self.only: set[str] | None = None  # what iteration is narrowed to
        self._cut(self._traces, self._entries[-1][2] if self._entries else 0)
        self._cut(self._features, self._entries[-1][3] if self._entries else 0)

    @property
    def ids(self) -> set[str]:
        return {entry[0] for entry in self._entries}

    def append(self, record: TraceRecord, features: Tensor) -> None:  # [tokens, width]
        """Add one finished request."""
        ends = [
            self._write(self._traces, encode(record)),
            self._write(self._features, features.half().contiguous().numpy().tobytes()),
        ]
        entry = (record.id, record.domain, ends[0], ends[1], features.shape[1])
        with self._index.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._entries.append(entry)

    def __iter__(self) -> Iterator[tuple[TraceRecord, Tensor]]:
        """Every record of `only`, or all; features are views of the mapped file."""
        traces = self._traces.read_bytes() if self._entries else b""
        mapped = np.memmap(self._features, dtype=np.uint8, mode="c") if self._entries else np.zeros(0, np.uint8)
        trace_start = feature_start = 0
        for name, _, trace_end, feature_end, width in self._entries:
            if self.only is None or name in self.only:
                rows = torch.from_numpy(mapped[feature_start:feature_end].view(np.float16).reshape(-1, width))
                yield decode(traces[trace_start:trace_end]), rows
            trace_start, feature_start = trace_end, feature_end

    def digest(self) -> str:
        """sha256 over every prompt and every committed token, in order: names the data in a manifest."""
        digest = hashlib.sha256()
        for record, _ in self:
            digest.update(record.prompt_ids.tobytes() + record.output_ids.tobytes())
        return digest.hexdigest()

    @staticmethod
    def _write(file: Path, data: bytes) -> int:
        with file.open("ab") as handle:
            handle.write(data)
            return handle.tell()

    @staticmethod
    def _cut(file: Path, size: int) -> None:
        if file.exists() and file.stat().st_size > size:
            os.truncate(file, size)
