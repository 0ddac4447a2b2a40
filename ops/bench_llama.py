"""llama.cpp in this process, through the `llama_cpp` package: one request at a time, on a GGUF file.

It gets the very prompt tokens that our engine gets, and generates tokens without making text of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench_line_up import Contender
from ops.bench_measure import Clock, Decode, Measure, Messages, times_of
from shared.config import Config

PACKAGE = "llama_cpp"
_PROMPT_ROOM = 2048  # tokens of context beside the answer


def importable() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


class LlamaCpp:
    """One GGUF file."""

    def __init__(self, contender: Contender, config: Config, job: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        from shared.models.target import resolve_model

        library: Any = importlib.import_module(PACKAGE)
        threads = int(job["threads"])
        self._tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model(config.target.model, config.home_path))
        self._llama = library.Llama(
            model_path=contender.gguf,
            n_ctx=_PROMPT_ROOM + int(job["max_tokens"]),
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self._ends = set() if job["ignore_eos"] else {self._llama.token_eos()}
        # Filters off, as with every contender; at temperature 0 it takes the likeliest token.
        self._sampling = {"temp": float(job["temperature"]), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self.facts = {
            "drafter": "none",
            "weights": contender.dtype,
            "weight_bytes": Path(contender.gguf).stat().st_size,  # nearly all of it is weights
            "threads": threads,
            "version": str(getattr(library, "__version__", "")),
        }

    def run(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> Measure:
        """One conversation. What the context still holds of earlier calls is dropped first."""
        (messages,) = conversations
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        self._llama.reset()
        clock, began = Clock(), time.perf_counter()
        for token in self._llama.generate(prompt, **self._sampling):
            clock.deliver(time.perf_counter() - began)
            if token in self._ends or clock.tokens == max_tokens:
                break
        seconds = time.perf_counter() - began
        times = times_of([clock])
        after = clock.tokens - 1  # tokens after the first, each a forward
        decode = Decode(forwards=after, steps=after, tokens=after, seconds=seconds - times.ttft_s[0])
        return Measure(seconds, clock.tokens, times, forwards=clock.tokens, steps=clock.tokens, decode=decode)

    def stop(self) -> None:
        """Nothing outlives the process."""
