"""What a person may order of a running learner, by name: looking at versions, promoting, going back, pinning.

Arguments and answers are JSON; adapters travel as blobs in Redis. It decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from learner.parts import Parts
from shared.errors import ArtifactError, ConfigError
from shared.orders import Order
from shared.store import Store


def follow(order: Order, parts: Parts, store: Store) -> Any:
    """The answer. Raises RedraftError with the reason why not, TypeError for arguments that the order does not take."""
    actions: dict[str, Callable[..., Any]] = {
        "versions": lambda: _versions(parts),
        "blob": lambda version: _blob(parts, store, version),
        "promote": lambda version, reason: asdict(parts.releases.return_to(version, reason)),
        "force": lambda blob, reason: asdict(parts.releases.force(_fetched(store, blob), reason)),
        "rollback": lambda reason: asdict(parts.releases.rollback(reason)),
        "pin": lambda reason: asdict(parts.releases.pin(reason)),
        "unpin": lambda reason: asdict(parts.releases.unpin(reason)),
    }
    if order.name not in actions:
        raise ConfigError("order", f"{order.name} is none that this learner knows", "Use the same release for both.")
    return actions[order.name](**order.arguments)


def _versions(parts: Parts) -> dict[str, Any]:
    """Everything on the shelf, and who serves."""
    releases = parts.releases
    return {
        "champion": asdict(parts.rollout.champion),
        "versions": parts.shelf.versions(),
        "pinned": releases.pinned,
        "watch": releases.status().get("watch"),
    }


def _blob(parts: Parts, store: Store, version: str) -> str:
    """Puts the adapter into Redis, where it stays for a while, and names its hash."""
    entry = parts.shelf.get(version)
    if entry is None:
        raise ConfigError("version", f"{version} is not on the shelf", "`redraft drafters list` shows what is.")
    return store.put_blob(entry.blob)


def _fetched(store: Store, hash: str) -> bytes:
    blob = store.get_blob(hash)
    if blob is None:
        raise ArtifactError("truncated", f"the blob {hash[:12]}… is not in Redis any more: give the order again")
    return blob
