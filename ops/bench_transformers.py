"""transformers' own `generate` as a contender: plain, with an assistant model, or with prompt lookup.

Its weights are the same checkpoint that our engine loads. Speculation there takes one request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.bench_line_up import Contender
from ops.bench_measure import Clock, Decode, Measure, Messages, times_of
from ops.bench_weights import linear_bytes
from shared.config import Config
from shared.models.quiet import quiet_transformers
from shared.models.target import resolve_device, resolve_model

LOOKUP_TOKENS = 10  # drafted by prompt lookup, as in transformers' documentation
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TransformersGenerate:
    """One loaded model and one way to call `generate`."""

    def __init__(self, contender: Contender, config: Config, job: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        folder = resolve_model(config.target.model, config.home_path)
        self._device = resolve_device(config.target.device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = self._load(str(folder), contender.dtype)
        self._options = self._sampling(job)
        if contender.kind == "lookup":
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif contender.kind == "assisted":
            assistant = resolve_model(contender.drafter, config.home_path, field="--assistant")
            self._options["assistant_model"] = self._load(str(assistant), contender.dtype)
        self._forwards = 0
        self._model.register_forward_hook(self._count)
        self.facts = {
            "drafter": {"lookup": "prompt lookup", "assisted": contender.drafter}.get(contender.kind, "none"),
            "weights": contender.dtype,
            "weight_bytes": linear_bytes(self._model.config, contender.dtype),
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def run(self, conversations: Sequence[Messages], domain: str, max_tokens: int) -> Measure:
        """One call of `generate` for all, padded on the left."""
        texts = [
            self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            for messages in conversations
        ]
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(self._device)
        least = {"min_new_tokens": max_tokens} if self._options["ignore_eos"] else {}
        options = {name: value for name, value in self._options.items() if name != "ignore_eos"}
        moments = _Moments()
        self._forwards = 0
        output: Tensor = self._model.generate(
            **inputs, **options, **least, max_new_tokens=max_tokens, streamer=moments, pad_token_id=self._pad
        )
        seconds = moments.now
        answers = output[:, inputs["input_ids"].shape[1] :]
        lengths = [self._length(row) for row in answers.tolist()]
        return _measure(moments, lengths, seconds, self._forwards)

    def stop(self) -> None:
        """Nothing outlives the process."""

    def _load(self, folder: str, dtype: str) -> Any:
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype], use_safetensors=True)
        return model.eval().to(self._device)

    def _sampling(self, job: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {"ignore_eos": bool(job["ignore_eos"])}
        if not job["temperature"]:
            return {**options, "do_sample": False}
        # Its default keeps the 50 likeliest tokens only; ours keeps all.
        return {**options, "do_sample": True, "temperature": float(job["temperature"]), "top_k": 0, "top_p": 1.0}

    @property
    def _pad(self) -> int:
        return int(self._tokenizer.pad_token_id)

    def _length(self, row: list[int]) -> int:
        """Tokens up to and with the first that ends an answer; what follows is padding."""
        if self._options["ignore_eos"]:
            return len(row)
        eos = self._model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        return next((index + 1 for index, token in enumerate(row) if token in ends), len(row))

    def _count(self, *_: Any) -> None:
        self._forwards += 1


class _Moments:
    """A streamer that only looks at the clock. `generate` hands it the prompt first."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._prompt_seen = False
        self.puts: list[tuple[float, int]] = []  # (seconds, tokens of all requests)

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def put(self, value: Tensor) -> None:  # one token of each request, or some tokens of the only one
        if self._prompt_seen:
            self.puts.append((self.now, value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """Part of the interface."""


def _measure(moments: _Moments, lengths: list[int], seconds: float, forwards: int) -> Measure:
    clocks = [Clock() for _ in lengths]
    for at, tokens in moments.puts:
        count = tokens if len(lengths) == 1 else 1
        for clock, length in zip(clocks, lengths, strict=True):
            clock.deliver(at, min(count, length - clock.tokens))
    times = times_of(clocks)
    tokens, first = sum(lengths), max(times.ttft_s, default=0.0)
    steps = forwards if len(lengths) == 1 else tokens  # together, each forward is one token of each
    return Measure(
        seconds=seconds,
        tokens=tokens,
        times=times,
        forwards=forwards,
        steps=steps,
        decode=Decode(
            forwards=max(forwards - 1, 0),
            steps=max(steps - len(lengths), 0),
            tokens=tokens - len(lengths),
            seconds=max(seconds - first, 0.0),
        ),
    )
