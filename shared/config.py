"""The one configuration: frozen sections, read strictly from YAML, REDRAFT_* variables and overrides.

A key is `section.name`; its variable is `REDRAFT_SECTION_NAME` (`home` is `REDRAFT_HOME`). Later sources win:
defaults, file, environment, command line. An unknown key or an unreadable value is an error that names it.
What is found out at run time (ports, block counts, step costs) never comes back in here.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml

from shared.config_bounds import validate
from shared.errors import ConfigError

Gamma = Literal["auto"] | int
DEFAULT_TARGET = "smollm2-135m-instruct"


@dataclass(frozen=True)
class TargetConfig:
    model: str = DEFAULT_TARGET  # built-in alias, a folder, or a hub name
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: Literal["auto", "fp16", "int8", "fp32", "bf16"] = "auto"  # weight format
    served_name: str = ""  # name in the API; empty: the target's own


@dataclass(frozen=True)
class DrafterConfig:
    kind: Literal["auto", "eagle3", "model", "none"] = "auto"
    model: str = "default"  # default: the shipped head of the built-in target; else a folder or a hub name
    gamma: Gamma = "auto"
    gamma_max: int = 4
    exploration: float = 0.005  # least share of rounds that speculate under gamma auto
    confidence_cut: bool = True  # under gamma auto, a draft ends early where the drafter itself doubts it
    swap_poll_s: float = 1.0  # seconds between looks at the champion pointer


@dataclass(frozen=True)
class EngineConfig:
    block_size: int = 16  # token positions in a KV block
    kv_tokens: int = 32768  # positions that the KV cache of one replica holds
    max_batch: int = 16  # requests decoded together
    prefill_tokens: int = 256  # prompt tokens per step next to decoding
    prefix_cache: bool = True  # requests that begin alike share the KV of their beginning
    max_queue: int = 64  # waiting requests before 429
    max_context: int = 0  # prompt + output; 0: the model's own
    threads: int = 0  # torch threads of a replica; 0: all cores of the machine


@dataclass(frozen=True)
class ServeConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    replica_cpus: float = 0.5  # Ray's reservation, not a limit
    replica_gpus: float = 0.0
    replica_resource: str = ""  # custom Ray resource of the nodes that replicas are for; empty: any node
    drain_s: float = 20.0
    auth: Literal["auto", "keys", "off"] = "auto"  # auto: keys where there is a keys file, else open on loopback only
    keys_file: str = ""  # hashed API keys (`redraft keys`); empty: keys.json in `home`
    max_domains: int = 32  # domain tags of clients that a replica tells apart; the others are counted as "other"


@dataclass(frozen=True)
class TraceConfig:
    enabled: bool = True
    topk: int = 64
    position_share: float = 1.0  # committed positions whose top-k is kept, beside every rejection
    feature_share: float = 1.0  # requests whose features go to the learner
    feature_tokens: int = 65536  # tokens of features in flight before they are dropped
    queue: int = 256  # records waiting in the replica before they are dropped
    stream_bytes: int = 64 * 2**20  # cap of the trace stream


@dataclass(frozen=True)
class PrivacyConfig:
    """The first three are for tenants without a policy of their own (`redraft keys policy`)."""

    traces: bool = True  # false: nothing of their requests leaves the replica
    share: float = 1.0  # of their requests that are traced
    keep_s: float = 0.0  # seconds that a trace is kept for; 0: no limit of its own
    redactor: str = ""  # module:function that finds private text in every trace; empty: none


@dataclass(frozen=True)
class RedisConfig:
    url: str = ""  # empty: a server on PATH, else the embedded one
    prefix: str = "redraft"
    maxmemory: int = 256 * 2**20


@dataclass(frozen=True)
class LearnerConfig:
    enabled: bool = True
    device: str = "cpu"  # cpu | cuda | cuda:N
    threads: int = 1
    cpus: float = 0.5  # Ray's reservation, not a limit
    gpus: float = 0.0
    resource: str = ""  # custom Ray resource of the node that the learner is for; empty: any node
    lora_rank: int = 32
    lora_alpha: int = 64
    lora_targets: tuple[str, ...] = ()  # empty: every linear of the drafter
    learning_rate: float = 2e-3
    batch_tokens: int = 128  # learnt from in one optimiser step
    attempt_tokens: int = 12288  # tokens trained on in one attempt
    min_fresh_tokens: int = 2048  # new tokens before the next attempt
    budget_share: float = 1.0  # most seconds of training and judging by second of the clock; 1: no limit
    replay_share: float = 0.4  # of each attempt, from other domains than the newest
    loss: Literal["forward_kl", "reverse_kl", "jsd", "tv"] = "forward_kl"
    rejected_weight: float = 1.0
    ttt_steps: int = 3  # draft steps unrolled in training
    buffer_recent: int = 400  # requests a domain, newest
    buffer_reservoir: int = 200  # requests a domain, uniform over the past


@dataclass(frozen=True)
class GateConfig:
    confidence: float = 0.95  # one-sided
    min_requests: int = 16
    min_gain: float = 0.0  # least lower bound of the gain in tokens a second, as a share
    probe_loss: float = 0.05  # most that a frozen probe of another domain may lose
    resamples: int = 2000
    wait_s: float = 600.0  # seconds that a trained candidate waits for fresh requests to be judged on


@dataclass(frozen=True)
class RolloutConfig:
    watch_tokens: int = 500  # tested tokens of a new version before it has held; 0: no canary and no watch
    confidence: float = 0.99  # one-sided, that a fall is none by chance, over all looks of one watch
    fall: float = 0.01  # of live alpha, that is borne
    slowdown: float = 0.1  # of a round, as a share, that is borne
    cooldown_tokens: int = 8000  # served after a rollback by itself, before anything is promoted again


@dataclass(frozen=True)
class MlflowConfig:
    tracking_uri: str = ""  # empty: the local stack's own server
    experiment: str = "redraft"
    window_s: float = 5.0


@dataclass(frozen=True)
class Config:
    home: str = "~/.cache/redraft"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)

    @property
    def home_path(self) -> Path:
        return Path(self.home).expanduser()

    @property
    def keys_path(self) -> Path:
        return Path(self.serve.keys_file).expanduser() if self.serve.keys_file else self.home_path / "keys.json"

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, fit for YAML and for `load_config`."""
        plain = asdict(self)
        plain["learner"]["lora_targets"] = list(self.learner.lora_targets)
        return plain


def load_config(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Defaults, then `file` (YAML), then REDRAFT_* of `environ`, then dotted `overrides`.

    Raises ConfigError naming the key for anything unknown or unreadable.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(values_of_file(file))
    values.update(values_of_environ(os.environ if environ is None else environ))
    values.update(overrides or {})
    return config_from_flat(values)


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """The inverse of `Config.to_dict`."""
    return config_from_flat(_flatten(tree))


def config_from_flat(values: Mapping[str, Any]) -> Config:
    """A Config from dotted keys; strings are read as YAML scalars would be."""
    known = config_keys()
    config = Config()
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(key, "unknown key", _suggest(key, known))
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = _read(key, value, known[key])
    top = sections.pop("", {})
    parts = {name: replace(getattr(config, name), **changes) for name, changes in sections.items()}
    config = replace(config, **parts, **top)
    validate(config)
    return config


def config_keys() -> dict[str, Any]:
    """Every dotted key with its type."""
    keys: dict[str, Any] = {}
    for section, hint in typing.get_type_hints(Config).items():
        if is_dataclass(hint):
            keys.update({f"{section}.{name}": kind for name, kind in typing.get_type_hints(hint).items()})
        else:
            keys[section] = hint
    return keys


def variable_of(key: str) -> str:
    """`engine.max_batch` -> `REDRAFT_ENGINE_MAX_BATCH`."""
    return "REDRAFT_" + key.replace(".", "_").upper()


def values_of_file(file: Path) -> dict[str, Any]:
    """Dotted keys that a YAML file sets, unread."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", f"cannot read {file} ({error.strerror})", "Give a readable file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{file} is not YAML ({error})", "Mend the file.") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError("--config", f"{file} holds no mapping at the top", "Write sections such as `target:`.")
    return _flatten(tree)


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    sections = {f.name for f in fields(Config) if f.name != "home"}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if name in sections:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(str(name), f"is a section, not a value ({value!r})", "Indent its keys below it.")
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[str(name)] = value
    return flat


def values_of_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Dotted keys that REDRAFT_* variables set, unread."""
    by_variable = {variable_of(key): key for key in config_keys()}
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith("REDRAFT_") or variable in _OF_CLIENTS:
            continue
        if variable not in by_variable:
            raise ConfigError(variable, "no setting has this variable", _suggest(variable, by_variable))
        found[by_variable[variable]] = value
    return found


_OF_CLIENTS = frozenset({"REDRAFT_API_KEY"})  # what a client shows to a server is no setting of one


def _suggest(wrong: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(wrong, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else "`redraft config` lists every key."


def _read(key: str, value: Any, kind: Any) -> Any:
    if isinstance(value, str) and kind is not str:
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(key, f"unreadable value {value!r}", "Give a plain value.") from error
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) or _is_union(kind) else (kind,)
    for option in options:
        fitting, result = _fit(value, option)
        if fitting:
            return result
    raise ConfigError(key, f"{value!r} is not {_say(kind)}", f"The default is {_default(key)!r}.")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Union


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    if typing.get_origin(kind) is Literal:
        if value is False and "off" in typing.get_args(kind):  # YAML reads a bare `off` so
            value = "off"
        return value in typing.get_args(kind) and not isinstance(value, bool), value
    if typing.get_origin(kind) is tuple:
        fits = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return fits, tuple(value) if fits else value
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool), value
    if kind is float and isinstance(value, int | float):
        return True, float(value)
    return isinstance(value, kind), value


def _say(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list of names"
    if _is_union(kind) or isinstance(kind, types.UnionType):
        return " or ".join(_say(option) for option in typing.get_args(kind))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _default(key: str) -> Any:
    section, _, name = key.rpartition(".")
    config = Config()
    return getattr(getattr(config, section) if section else config, name)
