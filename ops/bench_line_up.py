"""Who takes part in a bench, and which of them are compared.

A contender is data: a kind, and what that kind needs to be loaded in a process of its own. Nothing is loaded here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.errors import ConfigError
from shared.models.smollm2 import ALIAS, find_gguf

if TYPE_CHECKING:
    from ops.bench_settings import BenchSettings

Kind = Literal["redraft", "transformers", "assisted", "lookup", "llama.cpp", "server"]
ALONE: frozenset[str] = frozenset({"assisted", "lookup", "llama.cpp"})  # answer one request at a time


@dataclass(frozen=True)
class Contender:
    """`name` is unique in a run."""

    name: str
    kind: Kind
    dtype: str = ""
    gamma: str = ""  # of ours: auto or a number; 0 is plain, without a drafter
    drafter: str = ""  # of ours: empty is the configured one; "useless"; of assisted: the assistant
    redis: str = ""  # of ours: where traces are published; empty: none are made
    url: str = ""  # of a server
    gguf: str = ""  # of llama.cpp

    @property
    def ours(self) -> bool:
        return self.kind == "redraft"

    @property
    def drafts(self) -> bool:
        """True for ours where a drafter is loaded."""
        return self.ours and self.gamma != "0"

    def takes(self, batch: int) -> bool:
        return batch == 1 or self.kind not in ALONE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Contender:
        return cls(**tree)


@dataclass(frozen=True)
class Comparison:
    """`numerator` over `denominator`, both by name: more than 1 says that the numerator makes more tokens a second."""

    numerator: str
    denominator: str


USELESS = "useless"


def line_up(settings: BenchSettings, redis: str = "") -> list[Contender]:
    """Everybody that the settings name; `redis` is where traces are published. Raises ConfigError."""
    found = own_contenders(settings.contenders, settings.dtypes, settings.gammas, redis)
    for dtype in settings.peer_dtypes:
        if "transformers" in settings.contenders:
            found.append(Contender(f"transformers {dtype}", "transformers", dtype))
        if "lookup" in settings.contenders:
            found.append(Contender(f"transformers lookup {dtype}", "lookup", dtype))
        if "assisted" in settings.contenders:
            found.append(Contender(f"transformers assisted {dtype}", "assisted", dtype, drafter=settings.assistant))
    if "llama" in settings.contenders:
        gguf = _gguf(settings)
        weights = gguf.stem.rpartition(".")[2]
        found.append(Contender(f"llama.cpp {weights}", "llama.cpp", weights, gguf=str(gguf)))
    found += [Contender(name, "server", url=url) for name, url in settings.against]
    names = [contender.name for contender in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("--against", f"{twice!r} is the name of two contenders", "Choose another.")
    return found


def _gguf(settings: BenchSettings) -> Path:
    if settings.gguf:
        if not Path(settings.gguf).is_file():
            raise ConfigError("--gguf", f"{settings.gguf} is no file", "Name a GGUF of the same model.")
        return Path(settings.gguf)
    if settings.config.target.model.lower() != ALIAS:
        raise ConfigError("--gguf", "llama.cpp needs the target as a GGUF file", "Name one.")
    return find_gguf()


def own_contenders(wanted: Sequence[str], dtypes: Sequence[str], gammas: Sequence[str], redis: str) -> list[Contender]:
    """Ours, by weight format: plain, each gamma, a useless drafter under gamma auto, gamma auto with traces."""
    found = []
    for dtype in dtypes:

        def add(label: str, gamma: str, drafter: str = "", traces: str = "", dtype: str = dtype) -> None:
            found.append(Contender(f"redraft {label} {dtype}", "redraft", dtype, gamma, drafter, traces))

        if "plain" in wanted:
            add("plain", "0")
        if "speculative" in wanted:
            for gamma in gammas:
                add("auto" if gamma == "auto" else f"gamma {gamma}", gamma)
        if USELESS in wanted:
            add(USELESS, "auto", USELESS)
        if "traces" in wanted:
            add("auto + traces", "auto", traces=redis)
    return found


def comparisons(contenders: Sequence[Contender]) -> list[Comparison]:
    """Ours that draft over ours plain, with traces over without, each peer's speculation over its plain form, and
    each of ours over each peer."""
    found = []
    for one in contenders:
        for other in contenders:
            if _drafting_over_plain(one, other) or _traces_over_none(one, other) or _over_peer(one, other):
                found.append(Comparison(one.name, other.name))
    return found


def plain_of(contender: Contender, contenders: Sequence[Contender]) -> Contender | None:
    """Our own plain decoding in the same weight format."""
    return next((other for other in contenders if _drafting_over_plain(contender, other)), None)


def _drafting_over_plain(one: Contender, other: Contender) -> bool:
    return one.drafts and other.ours and not other.drafts and one.dtype == other.dtype


def _traces_over_none(one: Contender, other: Contender) -> bool:
    same = one.ours and other.ours and (one.dtype, one.gamma, one.drafter) == (other.dtype, other.gamma, other.drafter)
    return same and bool(one.redis) and not other.redis


def _over_peer(one: Contender, other: Contender) -> bool:
    if one.kind in ("assisted", "lookup"):
        return other.kind == "transformers" and one.dtype == other.dtype
    return one.ours and not other.ours and one.drafter != USELESS
