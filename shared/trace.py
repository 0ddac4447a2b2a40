"""One request's trace: what was committed, which version drafted it, and the target's own distributions.

Owns the wire format (msgpack, `SCHEMA_VERSION`). A record of another version, with missing or unknown keys, or with
values that do not fit each other is a TraceError, never a guess. It knows nothing of Redis or of training.

Positions count committed tokens from 0; a position's distribution is p(. | prompt + the committed tokens before it).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from operator import index
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from shared.errors import TraceError

SCHEMA_VERSION = 3


class Kind(IntEnum):
    """How a committed token came to be."""

    PLAIN = 0  # decoded with gamma 0
    ACCEPTED = 1
    RECOVERED = 2  # drawn from norm((p-q)+) after a rejection
    BONUS = 3  # the extra token when every draft was kept


@dataclass(frozen=True)
class Round:
    """One speculation round: `drafted` tokens proposed by `version`, the first `accepted` of them kept.

    `start` is the committed position of the round's first token. A plain step has no drafted tokens.
    `tested` counts drafted positions that verification reached and that the request still had room for.
    """

    start: int
    version: str
    drafted: tuple[int, ...]
    accepted: int
    tested: int


@dataclass(frozen=True)
class Sampling:
    """The request's sampling parameters, as applied to p and q alike; temperature 0 is greedy.

    What each means and in which order they apply is `shared.sampling`'s to say.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seeded: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    constrained: bool = False  # a grammar or min_tokens masked p: no reader can rebuild the mask from this record

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """True when earlier tokens change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def processes(self) -> bool:
        """True when the logits are changed before temperature and filters, masks aside."""
        return self.penalises or bool(self.logit_bias)


@dataclass(frozen=True)
class TraceRecord:
    """A finished request. n committed tokens, m of them with the target's raw top-k, r rejections."""

    id: str
    tenant: str
    domain: str
    target: str  # fingerprint
    replica: str
    finished_at: float  # seconds since the epoch
    sampling: Sampling
    prompt_ids: NDArray[np.int32]  # [prompt]
    output_ids: NDArray[np.int32]  # [n]
    kinds: NDArray[np.uint8]  # [n] Kind
    probs: NDArray[np.float32]  # [n] p of the committed token after the request's filters
    rounds: tuple[Round, ...]
    topk_positions: NDArray[np.int32]  # [m] committed positions, ascending
    topk_ids: NDArray[np.int32]  # [m, k]
    topk_logprobs: NDArray[np.float16]  # [m, k] raw: before temperature and filters
    topk_lse: NDArray[np.float32]  # [m] log-sum-exp of the raw logits
    rejected: NDArray[np.int32]  # [r, 2] (position, draft id)
    rejected_probs: NDArray[np.float32]  # [r] q of the rejected draft
    has_features: bool = False  # the replica hands the features over separately, under `id`
    expires_at: float = 0.0  # seconds since the epoch; its tenant lets nobody keep it for longer. 0: no limit

    @property
    def versions(self) -> tuple[str, ...]:
        """Drafter versions in order of first use."""
        return tuple(dict.fromkeys(round_.version for round_ in self.rounds))


_ARRAYS: dict[str, Any] = {
    "prompt_ids": np.int32,
    "output_ids": np.int32,
    "kinds": np.uint8,
    "probs": np.float32,
    "topk_positions": np.int32,
    "topk_ids": np.int32,
    "topk_logprobs": np.float16,
    "topk_lse": np.float32,
    "rejected": np.int32,
    "rejected_probs": np.float32,
}
_SCALARS: dict[str, type] = {
    "id": str,
    "tenant": str,
    "domain": str,
    "target": str,
    "replica": str,
    "finished_at": float,
    "has_features": bool,
    "expires_at": float,
}


def encode(record: TraceRecord) -> bytes:
    """The record as one msgpack map."""
    body: dict[str, Any] = {"schema": SCHEMA_VERSION}
    body.update({name: getattr(record, name) for name in _SCALARS})
    for name, dtype in _ARRAYS.items():
        array = np.ascontiguousarray(getattr(record, name), dtype=dtype)
        body[name] = [list(array.shape), array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()]
    sampling = record.sampling
    body["sampling"] = [getattr(sampling, f.name) for f in fields(Sampling)]  # tuples become lists
    body["rounds"] = [[r.start, r.version, list(r.drafted), r.accepted, r.tested] for r in record.rounds]
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def decode(data: bytes) -> TraceRecord:
    """The inverse of `encode`. Raises TraceError for anything that is not one whole record of this version."""
    try:
        body = msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise TraceError(f"not msgpack: {error}") from error
    if not isinstance(body, dict):
        raise TraceError(f"a record is a map, not {type(body).__name__}")
    version = body.pop("schema", None)
    if version != SCHEMA_VERSION:
        raise TraceError(f"schema {version!r}; this reader takes {SCHEMA_VERSION}")
    expected = {*_SCALARS, *_ARRAYS, "sampling", "rounds"}
    if set(body) != expected:
        missing, unknown = (sorted(map(str, keys)) for keys in (expected - set(body), set(body) - expected))
        raise TraceError(f"keys differ: missing {missing}, unknown {unknown}")
    try:
        values: dict[str, Any] = {name: _scalar(name, body[name], kind) for name, kind in _SCALARS.items()}
        values.update({name: _array(name, body[name], dtype) for name, dtype in _ARRAYS.items()})
        values["sampling"] = _sampling(body["sampling"])
        values["rounds"] = tuple(_round(*item) for item in body["rounds"])
        record = TraceRecord(**values)
        _check_shapes(record)
        _check_values(record)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"unreadable record: {error}") from error
    return record


def _scalar(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind):
        raise TraceError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _array(name: str, value: Any, dtype: Any) -> NDArray[Any]:
    """A copy, since a view of the wire could not be written to."""
    shape, data = value
    if not isinstance(data, bytes):
        raise TraceError(f"{name} carries no bytes")
    if any(index(size) < 0 for size in shape):
        raise TraceError(f"{name} has shape {shape}")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape).astype(dtype)


def _sampling(values: Any) -> Sampling:
    names = [field.name for field in fields(Sampling)]
    if len(values) != len(names):
        raise TraceError(f"sampling has {len(values)} values, not {len(names)}")
    given = dict(zip(names, values, strict=True))
    bias = given.pop("logit_bias")
    kinds = {field.name: type(field.default) for field in fields(Sampling)}
    read = Sampling(
        **{name: _scalar("sampling", value, kinds[name]) for name, value in given.items()},
        logit_bias=tuple((index(token), _scalar("logit_bias", value, float)) for token, value in bias),
    )
    amounts = (read.presence_penalty, read.frequency_penalty, *(value for _, value in read.logit_bias))
    if not (
        0 <= read.temperature < np.inf
        and 0 <= read.top_p <= 1
        and 0 <= read.min_p <= 1
        and read.top_k >= 0
        and 0 < read.repetition_penalty < np.inf
        and all(token >= 0 for token, _ in read.logit_bias)
        and np.isfinite(amounts).all()
    ):
        raise TraceError(f"sampling is out of range: {read}")
    return read


def _round(start: Any, version: Any, drafted: Any, accepted: Any, tested: Any) -> Round:
    by: str = _scalar("a round's version", version, str)
    return Round(index(start), by, tuple(index(token) for token in drafted), index(accepted), index(tested))


def _check_shapes(record: TraceRecord) -> None:
    for name in ("prompt_ids", "output_ids", "topk_positions"):
        if getattr(record, name).ndim != 1:
            raise TraceError(f"{name} is not one-dimensional")
    n, m, r = len(record.output_ids), len(record.topk_positions), record.rejected.shape[:1]
    k = record.topk_ids.shape[-1] if record.topk_ids.ndim == 2 else -1
    wanted = {
        "kinds": (n,),
        "probs": (n,),
        "topk_ids": (m, k),
        "topk_logprobs": (m, k),
        "topk_lse": (m,),
        "rejected": (*r, 2),
        "rejected_probs": r,
    }
    for name, shape in wanted.items():
        if getattr(record, name).shape != shape:
            raise TraceError(f"{name} has shape {getattr(record, name).shape}, not {shape}")


def _check_values(record: TraceRecord) -> None:
    """What a reader will index with, or compare with, must be in range."""
    if not 0 <= record.expires_at < np.inf:
        raise TraceError(f"expires_at is {record.expires_at}")
    n, positions = len(record.output_ids), record.topk_positions
    for name in ("prompt_ids", "output_ids", "topk_ids"):
        if (getattr(record, name) < 0).any():
            raise TraceError(f"{name} holds negative ids")
    if (record.kinds > max(Kind)).any():
        raise TraceError(f"kinds go up to {record.kinds.max()}")
    for name, found in (("topk_positions", positions), ("rejected", record.rejected[:, 0])):
        if ((found < 0) | (found >= n)).any():
            raise TraceError(f"{name} leave 0..{n - 1}")
    if (np.diff(positions) <= 0).any():
        raise TraceError("topk_positions do not ascend")
    for r in record.rounds:
        if not (0 <= r.accepted <= r.tested <= len(r.drafted) and 0 <= r.start <= n - r.accepted):
            raise TraceError(f"a round is impossible in {n} tokens: {r}")
