"""The head's choice of target layers."""

from __future__ import annotations

import pytest

from shared.models.eagle3 import default_feature_layers


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 12, 30, 80])
def test_three_layers_that_exist_in_ascending_order(layers: int) -> None:
    low, middle, high = default_feature_layers(layers)
    assert 0 <= low <= middle <= high < layers


def test_the_shipped_heads_layers() -> None:
    assert default_feature_layers(30) == (3, 15, 28)
