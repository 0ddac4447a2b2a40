"""An interval of alpha from counters alone: the same as from the requests themselves."""

from __future__ import annotations

import numpy as np
import pytest

from shared.counters import Counters
from shared.live_alpha import Served, add_request, served_by_domain


def requests(count: int, alpha: float, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(accepted, tested) of requests of very different length and difficulty."""
    tested = rng.integers(5, 60, count)
    return [(int(rng.binomial(n, np.clip(alpha + rng.normal(0, 0.15), 0, 1))), int(n)) for n in tested]


def test_replicas_add_up_to_the_variance_over_all_requests() -> None:
    rng, replicas = np.random.default_rng(0), [Counters(), Counters()]
    made = requests(60, 0.4, rng)
    for place, (accepted, tested) in enumerate(made):
        add_request(replicas[place % 2], "sql", "v1", steps=2 * tested, accepted=accepted, tested=tested)
    found = served_by_domain(Counters.merge(replica.fields for replica in replicas).fields, "v1")["sql"]
    accepted, tested = np.array(made, dtype=float).T
    alpha = accepted.sum() / tested.sum()
    assert found.alpha == pytest.approx(alpha)
    assert found.variance == pytest.approx(((accepted - alpha * tested) ** 2).sum() / tested.sum() ** 2 * 60 / 59)
    assert found.accepted_per_step == pytest.approx(alpha / 2)


def test_the_variance_is_what_alpha_really_varies_by() -> None:
    rng = np.random.default_rng(1)
    seen = []
    for _ in range(400):
        counters = Counters()
        for accepted, tested in requests(40, 0.4, rng):
            add_request(counters, "", "v1", steps=tested, accepted=accepted, tested=tested)
        seen.append(served_by_domain(counters.fields, "v1")[""])
    true = np.var([served.alpha for served in seen])
    # A variance over 400 draws has a relative standard error of sqrt(2 / 400) = 7 %; three of them.
    assert np.mean([served.variance for served in seen]) == pytest.approx(true, rel=0.21)


def test_versions_and_domains_are_kept_apart_and_one_request_says_nothing_of_its_own_spread() -> None:
    counters = Counters({"accepted|domain=sql|version=v1": 9.0})
    add_request(counters, "sql", "v1", steps=3, accepted=1, tested=2)
    add_request(counters, "code", "v2", steps=3, accepted=0, tested=0)
    assert served_by_domain(counters.fields, "v1") == {"sql": Served(1, 3, 1, 2, 1, 2, 4)}
    assert served_by_domain(counters.fields, "v2")["code"].alpha == 0.0
    assert served_by_domain(counters.fields, "v1")["sql"].variance == float("inf")
    assert served_by_domain(counters.fields, "v3") == {}
