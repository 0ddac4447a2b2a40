"""What may leave a replica of a tenant's requests, and for how long: one policy a tenant, decided request by request.

A tenant without a policy of its own in the keys file has the configuration's. Whether a request is traced follows from
its id alone, so that every process says the same. It knows nothing of traces or of Redis.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from shared.errors import ConfigError

DEFAULT_TENANT = "default"  # of requests where no key says whose they are


@dataclass(frozen=True)
class Policy:
    traces: bool = True  # False: nothing of this tenant's requests leaves the replica
    share: float = 1.0  # of its requests that are traced
    keep_s: float = 0.0  # seconds after its end that a trace is kept for; 0: no limit of its own

    def takes(self, request_id: str) -> bool:
        """Whether this request is traced."""
        return self.traces and hash_share(request_id) < self.share

    def expires_at(self, finished_at: float) -> float:
        """Seconds since the epoch; 0 for never."""
        return finished_at + self.keep_s if self.keep_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_policy(tree: Any) -> Policy:
    """The inverse of `Policy.to_dict`. Raises ValueError or ConfigError for anything else."""
    if not isinstance(tree, dict) or set(tree) != {field.name for field in fields(Policy)}:
        raise ValueError(f"a policy has the fields {', '.join(field.name for field in fields(Policy))}")
    if not isinstance(tree["traces"], bool):
        raise ValueError("a policy's traces is true or false")
    policy = Policy(tree["traces"], float(tree["share"]), float(tree["keep_s"]))
    check_policy(policy)
    return policy


def check_policy(policy: Policy) -> None:
    """Raises ConfigError."""
    if not 0 <= policy.share <= 1:
        raise ConfigError("--share", f"{policy.share} is no share", "Give a number from 0 to 1.")
    if not 0 <= policy.keep_s < float("inf"):
        raise ConfigError("--keep-s", f"{policy.keep_s} is no time", "Give seconds; 0 sets no limit.")


def hash_share(name: str) -> float:
    """A number from 0 up to 1 that depends on the name alone, evenly spread whatever the names look like."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
