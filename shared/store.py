"""What serving and learner share through Redis: traces, blobs, champion, canary, counters, heartbeats, history, orders.

Every method raises ServiceDown quickly when Redis is away and works again when it is back, empty or not: groups,
keys and indexes recreate themselves. Traces are the only thing given up when the server is full. Keys start with
the prefix, so that several installations can share a server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, TypeVar, cast

from shared.errors import Unreadable
from shared.orders import OrderBox
from shared.privacy import DEFAULT_TENANT
from shared.redis_link import RedisLink, ServerFull
from shared.stream import Record, StreamDepth, TraceStream

T = TypeVar("T")

BLOBS_KEPT = 4  # newest, besides those of the champion and of the one before it
RECLAIM_IDLE_MS = 60_000
_TRIMS = 6  # halvings of the trace stream before a full server is reported


@dataclass(frozen=True)
class Champion:
    """The version that replicas serve. `number` only ever grows; a rollback is a new, higher number."""

    version: str
    blob: str  # sha256 of the adapter blob; empty for the base itself
    base: str  # hash of the immutable base
    target: str  # fingerprint
    kind: str
    number: int
    previous: str  # version
    created_at: float  # seconds since the epoch


@dataclass(frozen=True)
class Canary:
    """A version that one replica serves ahead of the others. It has a key of its own, which older replicas do not read:
    they stay with the champion. It expires unless it is renewed, so that it never outlives who watches it."""

    replica: str
    pointer: Champion


@dataclass(frozen=True)
class ServerFacts:
    """What a server must be asked before it is trusted with the champion."""

    version: tuple[int, int]  # of Redis; Valkey says which one it is compatible with
    policy: str  # maxmemory-policy


# KEYS champion, previous champion. ARGV pointer, number, an unreadable pointer to replace or nothing. 1 when it is now
# the champion. What somebody wrote by hand may be of any type.
_PROMOTE = """
local current = redis.call('GET', KEYS[1])
if current and current ~= ARGV[3] then
  if current == ARGV[1] then return 1 end
  local readable, pointer = pcall(cjson.decode, current)
  if readable and type(pointer) == 'table' and type(pointer.number) == 'number' then
    if pointer.number >= tonumber(ARGV[2]) then return 0 end
    redis.call('SET', KEYS[2], current)
  end
end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""

# KEYS blob index, champion, previous champion, canary. ARGV number kept, blob key prefix.
_PRUNE_BLOBS = """
local named = {}
for i = 2, 4 do
  local text = redis.call('GET', KEYS[i])
  if text then
    local readable, pointer = pcall(cjson.decode, text)
    if readable and type(pointer) == 'table' and type(pointer.pointer) == 'table' then pointer = pointer.pointer end
    if readable and type(pointer) == 'table' then
      named[pointer.blob or ''] = true
      named[pointer.base or ''] = true
    end
  end
end
for _, old in ipairs(redis.call('ZREVRANGE', KEYS[1], ARGV[1], -1)) do
  if not named[old] then
    redis.call('DEL', ARGV[2] .. old)
    redis.call('ZREM', KEYS[1], old)
  end
end
return 1
"""


class Store:
    """One installation's keys on one server. Threads may share it; each consumer name belongs to one reader."""

    def __init__(self, url: str, prefix: str, *, reclaim_idle_ms: int = RECLAIM_IDLE_MS) -> None:
        self._link = RedisLink(url)
        self._stream = TraceStream(self._link, prefix, reclaim_idle_ms=reclaim_idle_ms)
        self.orders = OrderBox(self._link, prefix)
        self._champion, self._previous = f"{prefix}:champion", f"{prefix}:champion:previous"
        self._canary = f"{prefix}:canary"
        self._blob, self._blobs = f"{prefix}:blob:", f"{prefix}:blobs"
        self._erasures = f"{prefix}:erasures"
        self._counters, self._statuses = f"{prefix}:counters", f"{prefix}:statuses"
        self._history = f"{prefix}:history"
        self._promote, self._prune_blobs = self._link.script(_PROMOTE), self._link.script(_PRUNE_BLOBS)

    def ping(self) -> bool:
        return bool(self._link.run(lambda client: client.ping()))

    def server_facts(self) -> ServerFacts:
        facts: dict[str, Any] = self._link.run(lambda client: client.info())
        major, minor = str(facts.get("redis_version", "0.0")).split(".")[:2]
        return ServerFacts((int(major), int(minor)), str(facts.get("maxmemory_policy", "noeviction")))

    def close(self) -> None:
        self._link.close()

    # Traces

    def append_trace(
        self, data: bytes, *, max_bytes: int, tenant: str = DEFAULT_TENANT, expires_at: float = 0.0
    ) -> str:
        """Appends a record and returns its id; the oldest make room within about `max_bytes`.

        On a full server the record is not taken and half of the traces are given up.
        """
        return self._stream.append(data, max_bytes=max_bytes, tenant=tenant, expires_at=expires_at)

    def sweep_traces(self, now: float, tenant: str = "") -> tuple[int, int]:
        """Removes expired records, and all of a tenant that is named; see `TraceStream.sweep`."""
        return self._stream.sweep(now, tenant)

    def read_traces(self, consumer: str, *, count: int, block_ms: int) -> list[Record]:
        """(id, data) of up to `count` records; see `TraceStream.read`."""
        return self._stream.read(consumer, count=count, block_ms=block_ms)

    def peek_traces(self, after: str, *, count: int) -> list[Record]:
        """Records for a reader that takes none; see `TraceStream.peek`."""
        return self._stream.peek(after, count)

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Says that these records are safe in the learner's durable buffer."""
        self._stream.acknowledge(ids)

    def dead_letter(self, id: str, data: bytes, reason: str) -> None:
        """Puts an unreadable record aside (a capped number, truncated to 64 KiB each) and acknowledges it."""
        self._making_room(lambda: self._stream.dead_letter(id, data, reason))

    def stream_depth(self) -> StreamDepth:
        return self._stream.depth()

    # Champion and blobs

    def put_blob(self, blob: bytes) -> str:
        """Stores a blob under its sha256, which it returns. Older ones go, but never those that a pointer names."""
        digest = sha256(blob).hexdigest()

        def write(client: Any) -> None:
            # Not in the script below: Lua would hold a second copy of the blob.
            with client.pipeline(transaction=True) as batch:
                batch.set(self._blob + digest, blob)
                batch.zadd(self._blobs, {digest: time.time()})
                batch.execute()

        self._making_room(lambda: self._link.run(write))
        keys = [self._blobs, self._champion, self._previous, self._canary]
        self._prune_blobs(keys, [BLOBS_KEPT, self._blob])
        return digest

    def get_blob(self, hash: str) -> bytes | None:
        """The bytes as they are stored; whoever loads them checks them against the hash."""
        return cast("bytes | None", self._link.run(lambda client: client.get(self._blob + hash)))

    def set_champion(self, champion: Champion, *, over: bytes = b"") -> bool:
        """Points replicas to `champion`, in one step. False, and no change, unless its number is the highest yet.

        `over` is the text of an unreadable pointer: that one is replaced whatever number it may carry.
        """
        text = json.dumps(asdict(champion), sort_keys=True)
        arguments: list[Any] = [text, champion.number, over]
        return bool(self._making_room(lambda: self._promote([self._champion, self._previous], arguments)))

    def champion(self) -> Champion | None:
        """Raises Unreadable for a pointer that no release of ours wrote."""
        return self._as_champion(cast("bytes | None", self._link.run(lambda client: client.get(self._champion))))

    def _as_champion(self, text: bytes | None) -> Champion | None:
        if text is None:
            return None
        try:
            return _read_champion(json.loads(text))
        except (ValueError, TypeError) as error:
            raise Unreadable(f"the champion pointer {self._champion} is unreadable: {error}", text) from error

    def set_canary(self, canary: Canary | None, *, ttl_s: float = 0) -> None:
        """Shows one replica another version for `ttl_s`; None takes it back at once."""
        if canary is None:
            self._link.run(lambda client: client.delete(self._canary))
            return
        text = json.dumps(asdict(canary), sort_keys=True)
        self._making_room(lambda: self._link.run(lambda client: client.set(self._canary, text, px=int(ttl_s * 1000))))

    def canary(self) -> Canary | None:
        """Raises Unreadable for one that no release of ours wrote."""
        text = cast("bytes | None", self._link.run(lambda client: client.get(self._canary)))
        if text is None:
            return None
        try:
            plain = json.loads(text)
            return Canary(str(plain["replica"]), _read_champion(plain["pointer"]))
        except (ValueError, TypeError, KeyError) as error:
            raise Unreadable(f"the canary {self._canary} is unreadable: {error!r}", text) from error

    def blobs(self) -> list[str]:
        """Hashes of the blobs that are held."""
        found: Any = self._link.run(lambda client: client.zrange(self._blobs, 0, -1))
        return [digest.decode() for digest in found]

    def erase_blobs(self, hashes: Sequence[str]) -> None:
        """Removes blobs, and the note of the champion before this one if it names one of them."""

        def erase(client: Any) -> None:
            before = self._as_champion(client.get(self._previous))
            with client.pipeline(transaction=True) as batch:
                for digest in hashes:
                    batch.delete(self._blob + digest)
                    batch.zrem(self._blobs, digest)
                if before is not None and before.blob in hashes:
                    batch.delete(self._previous)
                batch.execute()

        if hashes:
            self._link.run(erase)

    # Erasures

    def ask_erasure(self, tenant: str, at: float) -> None:
        """Asks the learner to erase a tenant; it waits here until there is one."""
        self._write_erasure(tenant, {"asked_at": at, "receipt": None})

    def erasures_asked(self) -> dict[str, float]:
        """Tenants that are still to be erased, and when that was asked for (seconds since the epoch)."""
        return {tenant: entry["asked_at"] for tenant, entry in self._read_erasures().items() if not entry["receipt"]}

    def answer_erasure(self, tenant: str, receipt: Mapping[str, Any]) -> None:
        self._write_erasure(tenant, {"asked_at": receipt["asked_at"], "receipt": dict(receipt)})

    def erasure_receipt(self, tenant: str) -> dict[str, Any] | None:
        """What the learner has done; None while it has not."""
        entry = self._read_erasures().get(tenant)
        return entry["receipt"] if entry else None

    def _read_erasures(self) -> dict[str, Any]:
        found: Any = self._link.run(lambda client: client.hgetall(self._erasures))
        return {tenant.decode(): json.loads(text) for tenant, text in found.items()}

    def _write_erasure(self, tenant: str, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry)
        self._making_room(lambda: self._link.run(lambda client: client.hset(self._erasures, tenant, text)))

    # Counters and heartbeats

    def put_counters(self, replica: str, epoch: str, counters: Mapping[str, float], *, ttl_s: int = 86400) -> None:
        """Replaces the cumulative counters of one run (`epoch`) of a replica."""
        self._put(self._counters, json.dumps([replica, epoch]), dict(counters), ttl_s)

    def counters(self) -> dict[tuple[str, str], dict[str, float]]:
        """(replica, epoch) -> counters, ended epochs included until they expire."""
        found: dict[tuple[str, str], dict[str, float]] = {}
        for member, values in self._all(self._counters).items():
            replica, epoch = json.loads(member)
            found[replica, epoch] = {name: float(value) for name, value in values.items()}
        return found

    def put_status(self, name: str, status: Mapping[str, Any], *, ttl_s: int) -> None:
        """Replaces a heartbeat (small, JSON); it vanishes after `ttl_s` unless renewed."""
        self._put(self._statuses, name, dict(status), ttl_s)

    def statuses(self) -> dict[str, dict[str, Any]]:
        return self._all(self._statuses)

    # History

    def moments(self) -> list[int]:
        """The times of all that `keep_moment` has kept, in no order."""
        return [int(at) for at in cast("list[bytes]", self._link.run(lambda client: client.hkeys(self._history)))]

    def read_moments(self, times: Sequence[int]) -> list[dict[str, Any]]:
        """What was kept at these times; a time at which nothing is kept any more is left out."""
        if not times:
            return []
        names = [str(at) for at in times]
        texts = cast("list[bytes | None]", self._link.run(lambda client: client.hmget(self._history, names)))
        return [json.loads(text) for text in texts if text is not None]

    def keep_moment(self, at: int, moment: Mapping[str, Any], *, drop: Sequence[int] = ()) -> None:
        """Keeps what was at a time (seconds since the epoch) unless something is kept there, and drops older times."""
        text = json.dumps(moment)

        def write(client: Any) -> None:
            with client.pipeline(transaction=True) as batch:
                batch.hsetnx(self._history, str(at), text)
                if drop:
                    batch.hdel(self._history, *map(str, drop))
                batch.execute()

        self._making_room(lambda: self._link.run(write))

    def _put(self, index: str, member: str, values: dict[str, Any], ttl_s: int) -> None:
        text, now = json.dumps(values), time.time()

        def write(client: Any) -> None:
            with client.pipeline(transaction=True) as batch:
                batch.set(f"{index}:{member}", text, ex=ttl_s)
                batch.zadd(index, {member: now + ttl_s})
                # An hour's grace: the clocks of the writers need not agree.
                batch.zremrangebyscore(index, "-inf", now - 3600)
                batch.execute()

        self._making_room(lambda: self._link.run(write))

    def _all(self, index: str) -> dict[str, dict[str, Any]]:
        def read(client: Any) -> dict[str, dict[str, Any]]:
            members = [member.decode() for member in client.zrange(index, 0, -1)]
            texts = client.mget([f"{index}:{member}" for member in members]) if members else []
            return {m: json.loads(text) for m, text in zip(members, texts, strict=True) if text is not None}

        return self._link.run(read)

    def _making_room(self, write: Callable[[], T]) -> T:
        for _ in range(_TRIMS):
            try:
                return write()
            except ServerFull:
                self._stream.trim_half()
        return write()


def _read_champion(plain: Any) -> Champion:
    """Raises ValueError or TypeError for fields that are missing, unknown or of another type."""
    if not isinstance(plain, dict):
        raise TypeError(f"{plain!r} is no object")
    champion = Champion(**plain)
    for field in fields(Champion):
        value = getattr(champion, field.name)
        kinds = {"number": (int,), "created_at": (int, float)}.get(field.name, (str,))
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{field.name} is {value!r}")
    if champion.number < 0:
        raise ValueError(f"number is {champion.number}")
    return champion
