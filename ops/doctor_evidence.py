"""What the doctor looks at: settings, heartbeats, counters, the newest traces, and the models' files. Reads only.

A part that cannot be had is None or empty, and its reason is kept: a check that lacks its evidence stays silent.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.run_file import read_run_file, redis_to_ask
from ops.stack import ask_ready
from shared.artifact import MANIFEST_FILE, Manifest, read_manifest
from shared.config import Config
from shared.counters import Counters
from shared.drafters import resolve_base
from shared.errors import ConfigError, RedraftError, ServiceDown, TraceError
from shared.models.fingerprint import checkpoint_fingerprint
from shared.models.target import resolve_model
from shared.store import Champion, Store
from shared.stream import StreamDepth
from shared.trace import TraceRecord, decode

TRACES = 200  # newest that are looked at
_PAGE = 64


@dataclass(frozen=True)
class Model:
    """A checkpoint's files, without its weights."""

    name: str
    family: str  # model_type
    fingerprint: str
    tokens: dict[str, int] = field(default_factory=dict)  # token -> id
    template_ids: frozenset[int] = frozenset()  # special ids that the chat template writes into every prompt


@dataclass(frozen=True)
class Evidence:
    config: Config
    api: tuple[int, str] = (200, "")  # status and body of /readyz
    redis_error: str = ""
    replicas: dict[str, dict[str, Any]] = field(default_factory=dict)
    learner: dict[str, Any] | None = None
    champion: Champion | None = None
    counters: Counters = field(default_factory=Counters)
    depth: StreamDepth = field(default_factory=lambda: StreamDepth(0, 0, 0, 0, 0))
    traces: tuple[TraceRecord, ...] = ()
    target: Model | None = None
    drafter: Model | None = None  # of a language model that drafts
    head: Manifest | None = None  # of a head that drafts
    drafter_error: str = ""  # why there is no drafter although one was asked for
    now: float = 0.0  # seconds since the epoch


def gather(config: Config) -> Evidence:
    """Raises ServiceDown when no stack can be asked."""
    running = read_run_file(config.home_path)
    url = redis_to_ask(config, running)
    api = running.api if running else f"http://{config.serve.host}:{config.serve.port}"
    found: dict[str, Any] = {"config": config, "api": ask_ready(api), "now": time.time()}
    store = Store(url, config.redis.prefix)
    try:
        found |= _from_redis(store)
    except ServiceDown as error:
        found["redis_error"] = str(error)
    finally:
        store.close()
    return Evidence(**found, **_models(config))


def _from_redis(store: Store) -> dict[str, Any]:
    statuses = store.statuses()
    learner = statuses.pop("learner", None)
    return {
        "learner": learner,
        "replicas": statuses,
        "champion": store.champion(),
        "counters": Counters.merge(store.counters().values()),
        "depth": store.stream_depth(),
        "traces": _newest(store),
    }


def _newest(store: Store) -> tuple[TraceRecord, ...]:
    kept: deque[bytes] = deque(maxlen=TRACES)
    after = ""
    while page := store.peek_traces(after, count=_PAGE):
        kept.extend(data for _, data in page)
        after = page[-1][0]
    records = []
    for data in kept:
        try:
            records.append(decode(data))
        except TraceError:  # the stream's own count of dead letters tells of these
            continue
    return tuple(records)


def _models(config: Config) -> dict[str, Any]:
    try:
        folder = resolve_model(config.target.model, config.home_path, field="target.model")
        target = read_model(folder, config.home_path)
    except ConfigError:
        return {}
    found: dict[str, Any] = {"target": target}
    named = Path(config.drafter.model).expanduser()
    try:
        if (named / MANIFEST_FILE).is_file():  # read before it is resolved, which refuses one of another target
            found["head"] = read_manifest(json.loads((named / MANIFEST_FILE).read_text(encoding="utf-8")))
        base = resolve_base(config, target.name, f"{target.fingerprint}:")
        if base.folder is not None:
            found["head"] = read_manifest(json.loads((base.folder / MANIFEST_FILE).read_text(encoding="utf-8")))
        elif base.spec:
            place = resolve_model(base.spec, config.home_path, field="drafter.model")
            found["drafter"] = read_model(place, config.home_path)
    except (RedraftError, OSError, ValueError) as error:
        found["drafter_error"] = str(error)
    return found


def read_model(folder: Path, home: Path) -> Model:
    """Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError("target.model", f"{folder} cannot be read ({error})", "Fetch it again") from error
    template: set[int] = set()
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        template = set(tokenizer(text, add_special_tokens=False)["input_ids"]) & set(tokenizer.all_special_ids)
    fingerprint = checkpoint_fingerprint(folder, home, "target.model")
    return Model(folder.name, family, fingerprint, dict(tokenizer.get_vocab()), frozenset(template))
