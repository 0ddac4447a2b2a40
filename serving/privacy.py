"""The last word on what leaves this replica: asked before a request is recorded, and again before its trace is sent.

Invariant: a policy is looked up at the moment at which something would leave, so that an opt-out counts at once, for
requests that are running or waiting to be sent too. What is held back is counted and forgotten.
"""

from __future__ import annotations

from dataclasses import replace

from serving.engine.request import GenerationRequest
from shared.config import Config
from shared.keys import WatchedKeys, access_of, default_policy
from shared.privacy import Policy
from shared.trace import TraceRecord


class Privacy:
    """`withheld` counts requests that left no trace because of their tenant's policy. Any thread may ask."""

    def __init__(self, default: Policy, keys: WatchedKeys | None = None) -> None:
        self._default, self._keys = default, keys
        self.withheld = 0

    @classmethod
    def of(cls, config: Config) -> Privacy:
        """Raises ConfigError for a keys file that is asked for and cannot be read."""
        keys = WatchedKeys(config.keys_path) if access_of(config) == "keys" else None
        return cls(default_policy(config), keys)

    def wants_trace(self, request: GenerationRequest) -> bool:
        """Called once a request, when it comes."""
        wanted = self.policy(request.tenant).takes(request.id)
        self.withheld += not wanted
        return wanted

    def release(self, record: TraceRecord) -> TraceRecord | None:
        """The record with the time at which it expires; None for one that must not leave any more."""
        policy = self.policy(record.tenant)
        if not policy.traces:
            self.withheld += 1
            return None
        return replace(record, expires_at=policy.expires_at(record.finished_at))

    def policy(self, tenant: str) -> Policy:
        own = self._keys.policy(tenant) if self._keys is not None else None
        return own if own is not None else self._default
