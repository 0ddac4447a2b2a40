"""The inbox is bounded and keeps its own copies; the frozen target computes what the replica had."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from learner.features import FeatureInbox, FrozenTarget, rows_of
from tests.learner.traffic import LAYERS, TinyServing


def features(rows: int, fill: float = 0.0) -> np.ndarray:  # type: ignore[type-arg]
    return np.full((rows, 4), fill, dtype=np.float16)


def test_what_is_put_is_taken_once_and_is_a_copy() -> None:
    inbox, mine = FeatureInbox(100), features(5, 1.0)
    inbox.put("a", mine)
    mine[:] = 2.0
    found = inbox.take("a")
    assert found is not None
    assert (found == 1.0).all()
    assert inbox.take("a") is None
    assert inbox.take("never came") is None
    assert inbox.rows == 0


def test_the_oldest_make_room_and_are_counted() -> None:
    inbox = FeatureInbox(10)
    for name in ("a", "b", "c"):
        inbox.put(name, features(4))
    assert inbox.take("a") is None
    assert inbox.crowded_out == 1
    assert (inbox.rows, inbox.take("b") is not None, inbox.take("c") is not None) == (8, True, True)
    inbox.put("too large", features(11))
    assert inbox.take("too large") is None
    assert inbox.rows == 0


def test_the_same_id_again_replaces_and_nonsense_is_not_kept() -> None:
    inbox = FeatureInbox(10)
    inbox.put("a", features(4, 1.0))
    inbox.put("a", features(6, 2.0))
    assert inbox.rows == 6
    inbox.put("b", np.zeros(3, dtype=np.float16))
    assert inbox.take("b") is None


def test_the_frozen_target_grows_with_what_it_is_given(tmp_path: Path) -> None:
    serving = TinyServing(tmp_path)
    frozen = FrozenTarget(serving.config, LAYERS)
    for item in serving.serve(3):
        found = frozen.features(item.record)
        assert found.shape == item.features.shape == (rows_of(item.record), len(LAYERS) * 32)
        np.testing.assert_allclose(found, item.features, atol=2e-2)
