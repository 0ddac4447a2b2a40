"""The flags of `redraft bench`, read into one frozen object before anything is started."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ops.bench_line_up import USELESS
from ops.bench_llama import importable as llama_importable
from ops.bench_measure import Messages
from ops.bench_prompts import built_in, from_file
from ops.demo_files import require_writable
from ops.settings import FLAGS, help_of, read_settings
from shared.config import Config
from shared.errors import ConfigError

_OURS = ("plain", "speculative", USELESS, "traces")
KINDS = (*_OURS, "transformers", "lookup", "assisted", "llama")
_DEFAULT_KINDS = ("plain", "speculative", "transformers", "lookup")  # and llama, where it can be
_DTYPES = ("auto", "fp16", "int8", "fp32", "bf16")
_PEER_DTYPES = ("fp32", "bf16", "fp16")
_BATCHES = "1,2,4,8,16"
_DOMAINS = "chat,code,maths"


@dataclass(frozen=True)
class BenchSettings:
    config: Config
    contenders: tuple[str, ...]  # of KINDS
    dtypes: tuple[str, ...]  # weight formats of ours
    peer_dtypes: tuple[str, ...]  # of transformers
    gammas: tuple[str, ...]  # of ours that speculate
    assistant: str
    gguf: str
    against: tuple[tuple[str, str], ...]  # (name, URL)
    conversations: Mapping[str, Sequence[Messages]]  # by domain
    batches: tuple[int, ...]
    count: int  # prompts of a domain in a repeat
    max_tokens: int
    temperature: float
    ignore_eos: bool
    repeats: int
    warmup_tokens: int
    rate: float | None  # requests a second of an open loop; None: a closed one
    swap: bool
    threads: int
    seed: int
    json: Path | None
    png: Path | None

    @property
    def largest_batch(self) -> int:
        return max(self.batches)

    def to_dict(self) -> dict[str, Any]:
        """For the report: without the prompts' texts, but with how many there are."""
        shown = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("config", "conversations", "json", "png")
        }
        prompts = {domain: len(found) for domain, found in self.conversations.items()}
        return {**shown, "against": dict(self.against), "prompts": prompts, "config": self.config.to_dict()}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings; see `redraft config`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration; repeatable"
    )
    who = parser.add_argument_group("who takes part")
    who.add_argument("--target", metavar="X", help=help_of("target"))
    who.add_argument("--drafter", metavar="X", help=help_of("drafter"))
    who.add_argument("--device", metavar="X", help=help_of("device"))
    who.add_argument(
        "--contenders",
        metavar="A,B",
        help=f"of {', '.join(KINDS)} (default: {', '.join(_DEFAULT_KINDS)}, and llama where llama_cpp is installed)",
    )
    who.add_argument("--dtype", default="auto", metavar="A,B", help="weight formats of ours")
    who.add_argument("--gamma", default="auto", metavar="A,B", help="auto and numbers, each a contender")
    who.add_argument("--peer-dtype", default="fp32", metavar="A,B", help="of transformers")
    who.add_argument(
        "--assistant",
        default="",
        metavar="X",
        help="model that drafts for transformers' assisted; default: it takes no part",
    )
    who.add_argument("--gguf", default="", metavar="FILE", help="for llama.cpp (default: the built-in target's)")
    who.add_argument(
        "--against", action="append", default=[], metavar="NAME=URL", help="an OpenAI-compatible server; repeatable"
    )
    what = parser.add_argument_group("what they are asked")
    what.add_argument("--domains", default=_DOMAINS, metavar="A,B", help="built-in prompts")
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSONL of your own, such as Spec-Bench's; default: the built-in prompts",
    )
    what.add_argument("--count", type=int, default=4, metavar="N", help="prompts a domain")
    what.add_argument("--batch", default=_BATCHES, metavar="A,B", help="answered together")
    what.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens of an answer")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    what.add_argument("--ignore-eos", action="store_true", help="every answer is --max-tokens long")
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--repeats", type=int, default=5, metavar="N", help="of everything")
    how.add_argument("--warmup-tokens", type=int, default=32, metavar="N", help="tokens of an answer before it counts")
    how.add_argument("--arrival", choices=("closed", "poisson"), default="closed", help="poisson: open loop, ours only")
    how.add_argument("--rate", type=float, metavar="R", help="requests a second under --arrival poisson; no default")
    how.add_argument("--swap", action="store_true", help="also measure how long a swap holds decoding up")
    how.add_argument("--threads", type=int, default=0, metavar="N", help="of each contender (default: all cores)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, arrivals and resampling")
    how.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    how.add_argument("--png", type=Path, metavar="FILE", help="write a picture")


def read_arguments(arguments: Namespace) -> BenchSettings:
    """Raises ConfigError naming the flag, and before anything is loaded."""
    for flag in ("--json", "--png"):
        require_writable(flag, getattr(arguments, flag[2:]))
    config = _config(arguments)
    batches = tuple(_number("--batch", text, 1) for text in _list("--batch", arguments.batch))
    count = _at_least("--count", arguments.count, 1)
    contenders = _contenders(arguments)
    return BenchSettings(
        config=config,
        contenders=contenders,
        dtypes=_of("--dtype", arguments.dtype, _DTYPES),
        peer_dtypes=_of("--peer-dtype", arguments.peer_dtype, _PEER_DTYPES),
        gammas=tuple(_gamma(text) for text in _list("--gamma", arguments.gamma)),
        assistant=arguments.assistant,
        gguf=arguments.gguf,
        against=tuple(_server(text) for text in arguments.against),
        conversations=_conversations(arguments, max(count, *batches)),
        batches=batches,
        count=count,
        max_tokens=_at_least("--max-tokens", arguments.max_tokens, 2),
        temperature=_temperature(arguments.temperature),
        ignore_eos=arguments.ignore_eos,
        repeats=_at_least("--repeats", arguments.repeats, 1),
        warmup_tokens=_at_least("--warmup-tokens", arguments.warmup_tokens, 1),
        rate=_rate(arguments, contenders),
        swap=arguments.swap,
        threads=_at_least("--threads", arguments.threads, 0) or os.cpu_count() or 1,
        seed=arguments.seed,
        json=arguments.json,
        png=arguments.png,
    )


def _config(arguments: Namespace) -> Config:
    absent = dict.fromkeys(FLAGS)
    given = {name: getattr(arguments, name) for name in ("config", "set", "target", "drafter", "device")}
    chosen = read_settings(Namespace(**{**absent, **given, "no_learn": False}))
    config = chosen.config
    if "engine.prefix_cache" not in chosen.named:  # repeats would be answered from it, and peers have none
        config = replace(config, engine=replace(config.engine, prefix_cache=False))
    return config


def _contenders(arguments: Namespace) -> tuple[str, ...]:
    if arguments.contenders is not None:
        found = _of("--contenders", arguments.contenders, KINDS)
    elif arguments.arrival == "poisson":
        found = _DEFAULT_KINDS[:2]
    else:
        found = (*_DEFAULT_KINDS, *(["llama"] if llama_importable() else []))
    if arguments.assistant and "assisted" not in found:
        found = (*found, "assisted")
    if "assisted" in found and not arguments.assistant:
        raise ConfigError("--assistant", "assisted needs a smaller model of the same tokenizer", "Name one.")
    if "llama" in found and not llama_importable():
        raise ConfigError("--contenders", "llama needs the llama_cpp package", "pip install llama-cpp-python")
    return found


def _conversations(arguments: Namespace, count: int) -> dict[str, list[Messages]]:
    if arguments.prompts:
        return from_file(arguments.prompts, count)
    return built_in(_list("--domains", arguments.domains), count, arguments.seed)


def _rate(arguments: Namespace, contenders: Sequence[str]) -> float | None:
    if arguments.arrival == "closed":
        if arguments.rate is not None:
            raise ConfigError("--rate", "has no meaning without --arrival poisson", "Give both or none.")
        return None
    if arguments.rate is None or not arguments.rate > 0:
        raise ConfigError("--rate", f"{arguments.rate} is no rate", "Give requests a second, more than 0.")
    peers = [name for name in contenders if name not in _OURS]
    if peers or arguments.against:
        named = ", ".join([*peers, *arguments.against])
        raise ConfigError("--arrival", f"poisson drives our own engine only, not {named}", "Leave them out.")
    return float(arguments.rate)


def _list(flag: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or len(set(found)) != len(found):
        raise ConfigError(flag, f"{text!r} is empty or says something twice", "Give different values, with commas.")
    return found


def _of(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    found = _list(flag, text)
    for word in found:
        if word not in known:
            raise ConfigError(flag, f"{word!r} is not known", f"Choose from {', '.join(known)}.")
    return tuple(found)


def _gamma(text: str) -> str:
    return text if text == "auto" else str(_number("--gamma", text, 1))


def _number(flag: str, text: str, least: int) -> int:
    try:
        return _at_least(flag, int(text), least)
    except ValueError:
        raise ConfigError(flag, f"{text!r} is no whole number", f"Give {least} or more.") from None


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(flag, f"{value} is too small", f"Give {least} or more.")
    return value


def _temperature(value: float) -> float:
    if not 0 <= value <= 2:
        raise ConfigError("--temperature", f"{value} is out of range", "Give 0 to 2.")
    return value


def _server(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not name.strip() or not url.startswith(("http://", "https://")):
        raise ConfigError("--against", f"{text!r} is not NAME=URL", "Write --against vllm=http://127.0.0.1:8001.")
    return name.strip(), url
