"""The trace stream: appended under a byte cap, read by one consumer group, acknowledged, counted.

Invariant: appended = delivered + lag + trimmed before delivery. Each of these changes in the same Lua script as the
stream itself, so that a crash cannot bend the counts. Delivery is at least once: a record comes again until it is
acknowledged, and whoever reads keeps each stream id once. It does not know what a record holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import ServiceDown
from shared.redis_link import NoGroup, RedisLink, ServerFull

GROUP = "learner"
BLOCK_SLICE_MS = 500  # one blocking read; must stay below the socket timeout
DEAD_KEEP = 256  # dead letters kept
DEAD_BYTES = 65536  # of each

# KEYS stream, meta. ARGV data, byte cap, tenant, expiry. The mean follows the record sizes over the last few dozen
# records; it is kept on the server because all replicas trim the one stream.
_APPEND = """
local size = #ARGV[1] + 64
local mean = tonumber(redis.call('HGET', KEYS[2], 'mean_bytes') or size)
mean = mean + (size - mean) / 32
local keep = math.max(1, math.floor(tonumber(ARGV[2]) / math.max(mean, 1)))
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', keep, '*', 'd', ARGV[1], 't', ARGV[3], 'e', ARGV[4])
redis.call('HSET', KEYS[2], 'mean_bytes', tostring(mean))
redis.call('HINCRBY', KEYS[2], 'appended', 1)
if tonumber(ARGV[4]) > 0 then redis.call('HINCRBY', KEYS[2], 'expiring', 1) end
return id
"""

# A group that is made anew delivers what the stream still holds once more, so those records count as undelivered.
_CREATE = """
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err then
  if string.find(made.err, 'BUSYGROUP') then return 0 end
  return made
end
local delivered = tonumber(redis.call('HGET', KEYS[2], 'delivered') or 0)
local appended = tonumber(redis.call('HGET', KEYS[2], 'appended') or 0)
local gone = math.max(0, appended - redis.call('XLEN', KEYS[1]))
redis.call('HSET', KEYS[2], 'delivered', math.min(delivered, gone))
return 1
"""

# KEYS stream, meta. ARGV group, consumer, count, after. Own pending records whose data were trimmed come back
# without data: they are acknowledged here, and counted.
_OWN = """
local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], ARGV[4])
local found, last = {}, false
for _, entry in ipairs((reply and reply[1] and reply[1][2]) or {}) do
  last = entry[1]
  if entry[2] then
    found[#found + 1] = entry
  else
    redis.call('XACK', KEYS[1], ARGV[1], entry[1])
    redis.call('HINCRBY', KEYS[2], 'trimmed_pending', 1)
  end
end
return {last, found}
"""

# KEYS stream, meta. ARGV group, consumer, count, idle ms. Takes over what other consumers left unacknowledged.
_RECLAIM = """
local from, wanted, ids = '-', tonumber(ARGV[3]), {}
while #ids < wanted do
  local page = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[4], from, '+', 200)
  for _, entry in ipairs(page) do
    if entry[2] ~= ARGV[2] and #ids < wanted then ids[#ids + 1] = entry[1] end
  end
  if #page < 200 then break end
  from = '(' .. page[#page][1]
end
if #ids == 0 then return {} end
local found = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[4], unpack(ids))
if #found < #ids then redis.call('HINCRBY', KEYS[2], 'trimmed_pending', #ids - #found) end
return found
"""

# KEYS stream, meta. ARGV group, consumer, count. When there is nothing new: the id to wait behind.
_NEW = """
local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
local found = (reply and reply[1] and reply[1][2]) or {}
if #found > 0 then
  redis.call('HINCRBY', KEYS[2], 'delivered', #found)
  return {false, found}
end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then return {info[i + 1], {}} end
end
"""

# KEYS stream, meta, dead letters. ARGV id, reason, size, data. The letter belongs to whom the record belonged to.
_BURY = """
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
local tenant, expiry = '', '0'
for i = 1, #((entry and entry[2]) or {}), 2 do
  if entry[2][i] == 't' then tenant = entry[2][i + 1] end
  if entry[2][i] == 'e' then expiry = entry[2][i + 1] end
end
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[6], '*', 'id', ARGV[1], 'reason', ARGV[2], 'size', ARGV[3], 'data', ARGV[4],
  't', tenant, 'e', expiry)
redis.call('HINCRBY', KEYS[2], 'dead', 1)
redis.call('XACK', KEYS[1], ARGV[5], ARGV[1])
return 1
"""

# KEYS stream, meta. ARGV group, first id, page size, now, tenant. Removes the records of one page that have expired, or
# that are the tenant's (without a name: nobody's but those). What was not delivered yet counts as delivered, so that
# it is not taken for trimmed. Returns the id to go on behind, removed records, and how many of them nobody had read.
_SWEEP = """
local page = redis.call('XRANGE', KEYS[1], ARGV[2], '+', 'COUNT', ARGV[3])
local delivered = ''
for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[1])) do
  local facts = {}
  for i = 1, #group, 2 do facts[group[i]] = group[i + 1] end
  if facts['name'] == ARGV[1] then delivered = facts['last-delivered-id'] end
end
local function parts(id)
  local ms, n = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms or 0), tonumber(n or 0)
end
local dms, dn = parts(delivered)
local removed, unread = 0, 0
for _, entry in ipairs(page) do
  local tenant, expiry = '', '0'
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 't' then tenant = entry[2][i + 1] end
    if entry[2][i] == 'e' then expiry = entry[2][i + 1] end
  end
  local expired = tonumber(expiry) > 0 and tonumber(expiry) <= tonumber(ARGV[4])
  -- A record that says nothing of its owner could be anybody's.
  if expired or (ARGV[5] ~= '' and (tenant == ARGV[5] or tenant == '')) then
    local ms, n = parts(entry[1])
    removed = removed + 1
    if delivered == '' or ms > dms or (ms == dms and n > dn) then unread = unread + 1
    else redis.call('XACK', KEYS[1], ARGV[1], entry[1]) end
    redis.call('XDEL', KEYS[1], entry[1])
  end
end
if unread > 0 and KEYS[2] ~= '' then redis.call('HINCRBY', KEYS[2], 'delivered', unread) end
return {#page > 0 and page[#page][1] or false, removed, unread}
"""

SWEEP_PAGE = 64  # records looked at in one script, which nobody else can interrupt

Record = tuple[str, bytes]


@dataclass(frozen=True)
class StreamDepth:
    """Records in the stream, delivered but unacknowledged, not yet delivered; and, since the server was empty,
    lost to trimming before they were acknowledged, and given up as unreadable."""

    length: int
    pending: int
    lag: int
    trimmed_unread: int
    dead: int


class TraceStream:
    """`<prefix>:traces` with its group, its counters (`:traces:meta`) and its dead letters (`<prefix>:dead`)."""

    def __init__(self, link: RedisLink, prefix: str, *, reclaim_idle_ms: int) -> None:
        self._link = link
        self._stream, self._meta, self._dead = f"{prefix}:traces", f"{prefix}:traces:meta", f"{prefix}:dead"
        self._keys = [self._stream, self._meta]
        self._idle_ms = reclaim_idle_ms
        self._own_after: dict[str, str | None] = {}  # consumer -> last own pending id seen; None: all seen
        self._reclaim_at = 0.0  # monotonic seconds
        self._append, self._create = link.script(_APPEND), link.script(_CREATE)
        self._own, self._reclaim, self._new = link.script(_OWN), link.script(_RECLAIM), link.script(_NEW)
        self._bury, self._sweep = link.script(_BURY), link.script(_SWEEP)

    def append(self, data: bytes, *, max_bytes: int, tenant: str, expires_at: float) -> str:
        try:
            return str(self._append(self._keys, [data, max_bytes, tenant, f"{expires_at:.3f}"]).decode())
        except ServerFull:
            self.trim_half()
            raise

    def peek(self, after: str, count: int) -> list[Record]:
        """Up to `count` records later than the id `after` ("": from the oldest), acknowledged or not; takes none."""
        start = f"({after}" if after else "-"
        found: Any = self._link.run(lambda client: client.xrange(self._stream, start, "+", count))
        return [(id.decode(), fields[b"d"]) for id, fields in found]

    def trim_half(self) -> None:
        """Gives half of the traces up, so that a full server can take what matters more."""
        length = self._link.run(lambda client: client.xlen(self._stream))
        self._link.run(lambda client: client.xtrim(self._stream, maxlen=length // 2, approximate=False))

    def read(self, consumer: str, *, count: int, block_ms: int) -> list[Record]:
        """Up to `count` records: own pending ones after a start or an outage, then those of dead consumers, then new.

        Waits at most about `block_ms` for new ones; an empty list when none came.
        """
        try:
            return self._read(consumer, count, block_ms)
        except NoGroup:
            self._create(self._keys, [GROUP])
            return self._read(consumer, count, block_ms)
        except ServiceDown:
            # The reply may have been lost after the server marked the records as delivered: look again.
            self._own_after.pop(consumer, None)
            raise

    def _read(self, consumer: str, count: int, block_ms: int) -> list[Record]:
        deadline = time.monotonic() + block_ms / 1000
        after = self._own_after.get(consumer, "0-0")
        while after is not None:
            last, found = self._own(self._keys, [GROUP, consumer, count, after])
            after = last.decode() if last else None
            self._own_after[consumer] = after
            if found:
                return _records(found)
        if time.monotonic() >= self._reclaim_at:
            if found := self._reclaim(self._keys, [GROUP, consumer, count, self._idle_ms]):
                return _records(found)
            self._reclaim_at = time.monotonic() + self._idle_ms / 12_000
        while True:
            newest, found = self._new(self._keys, [GROUP, consumer, count])
            left_ms = int((deadline - time.monotonic()) * 1000)
            if found or left_ms <= 0:
                return _records(found)
            self._wait(newest, min(left_ms, BLOCK_SLICE_MS))

    def _wait(self, newest: bytes, block_ms: int) -> None:
        # XREAD and not XREADGROUP: waiting must not deliver, for delivery is counted by the script alone.
        self._link.run(lambda client: client.xread({self._stream: newest}, count=1, block=max(1, block_ms)))

    def acknowledge(self, ids: Sequence[str]) -> None:
        if ids:
            self._link.run(lambda client: client.xack(self._stream, GROUP, *ids))

    def dead_letter(self, id: str, data: bytes, reason: str) -> None:
        letter = [id, reason, len(data), data[:DEAD_BYTES], GROUP, DEAD_KEEP]
        self._bury([*self._keys, self._dead], letter)

    def sweep(self, now: float, tenant: str = "") -> tuple[int, int]:
        """Removes what has expired by `now` and, if one is named, all of the tenant's, dead letters included.

        Returns (records removed, how many of them nobody had read).
        """
        removed = unread = 0
        if not tenant and not self._link.run(lambda client: client.hexists(self._meta, "expiring")):
            return 0, 0  # no record has ever had an end, and looking at them all costs the server time
        for stream, meta in ((self._stream, self._meta), (self._dead, "")):
            after: str | None = "-"
            while after is not None:
                found = self._sweep([stream, meta], [GROUP, after, SWEEP_PAGE, now, tenant])
                after = f"({found[0].decode()}" if found[0] else None
                removed += found[1]
                unread += found[2] if meta else 0
        return removed, unread

    def depth(self) -> StreamDepth:
        def look(client: Any) -> tuple[int, list[dict[str, Any]], dict[bytes, bytes]]:
            with client.pipeline(transaction=True) as batch:
                batch.xlen(self._stream)
                batch.xinfo_groups(self._stream)
                batch.hgetall(self._meta)
                length, groups, meta = batch.execute(raise_on_error=False)
            # XINFO of a stream that is not there yet is an error of its own kind: no groups.
            return length, groups if isinstance(groups, list) else [], meta

        length, groups, meta = self._link.run(look)
        count = {name.decode(): float(value) for name, value in meta.items()}
        appended, delivered = int(count.get("appended", 0)), int(count.get("delivered", 0))
        group = next((g for g in groups if g["name"] == GROUP.encode()), {"pending": 0, "lag": length})
        # The server may not know its lag, and goes on counting undelivered records that were trimmed.
        lag = min(length, group["lag"] if group.get("lag") is not None else max(0, appended - delivered))
        unread = max(0, appended - delivered - lag) + int(count.get("trimmed_pending", 0))
        return StreamDepth(length, group["pending"], lag, unread, int(count.get("dead", 0)))


def _records(entries: list[Any]) -> list[Record]:
    return [(id.decode(), fields[fields.index(b"d") + 1]) for id, fields in entries]
