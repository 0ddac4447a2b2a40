"""What the tests of the store put into it."""

from __future__ import annotations

from shared.store import Champion, Store

ROOMY = 10**9  # a byte cap that no test reaches


def champion(number: int, *, blob: str = "", base: str = "b" * 64) -> Champion:
    return Champion(f"v{number}", blob, base, "t:fp16", "eagle3", number, f"v{number - 1}", 1.5)


def fill(store: Store) -> None:
    """Until the server refuses."""
    for _ in range(1000):
        store.append_trace(bytes(100_000), max_bytes=ROOMY)


def ids_of(records: list[tuple[str, bytes]]) -> list[str]:
    return [id for id, _ in records]
