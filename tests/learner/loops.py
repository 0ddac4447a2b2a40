"""A learner's loop that runs in a thread of a test, over a tiny service's traffic and a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from learner.loop import LearnerLoop
from shared.config import Config, config_from_dict
from tests.learner.traffic import TinyServing


def configured(serving: TinyServing, home: Path, redis_url: str, **changes: Any) -> Config:
    tree = serving.config.to_dict()
    tree["home"] = str(home)
    tree["redis"] |= {"url": redis_url, "prefix": f"test-{uuid4().hex}"}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section][name] = value
    return config_from_dict(tree)


@contextmanager
def running(config: Config, loop: LearnerLoop | None = None, **settings: Any) -> Iterator[LearnerLoop]:
    loop = loop or LearnerLoop(config, **settings)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(60)
        assert not thread.is_alive()


def until(
    condition: Callable[[], object], seconds: float = 120.0, meanwhile: Callable[[], object] = lambda: None
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        meanwhile()
        time.sleep(0.05)
