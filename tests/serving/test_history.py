"""The history of the dashboard page: one moment a step for all replicas, thinner as it grows old, and bounded."""

from __future__ import annotations

from serving.history import STEP_S, TIERS, Historian, moment_of, outlived
from shared.counters import Counters
from shared.store import Store
from tests.fakes import COUNTERS

DAY = 86400


def test_moments_thin_out_with_age_and_are_never_many() -> None:
    kept: list[int] = []
    for now in range(0, 3 * DAY, STEP_S):
        kept.append(now)
        gone = set(outlived(kept, now)) if now % 600 == 0 else set()
        kept = [at for at in kept if at not in gone]
    end = 3 * DAY - STEP_S
    kept = [at for at in kept if at not in outlived(kept, end)]
    tiers = [sum(low < end - at <= high for at in kept) for low, high in ((-1, 1800), (1800, 21600), (21600, 2 * DAY))]
    assert tiers[0] == 1800 // 10 + 1  # every one, both ends included
    assert tiers[1] in range(19800 // 60 - 1, 19800 // 60 + 2)  # one a minute
    assert tiers[2] in range(151200 // 600 - 1, 151200 // 600 + 2)  # one in ten minutes
    assert sum(tiers) == len(kept), "nothing is older than the last tier"


def test_what_is_kept_once_stays_until_its_age_asks_for_less() -> None:
    width = TIERS[1][1]
    times = list(range(0, 1200, STEP_S))
    once = [at for at in times if at not in outlived(times, 4000)]
    assert once == list(range(0, 1200, width))
    assert outlived(once, 4010) == []


def test_the_first_replica_keeps_the_moment_for_all(store: Store) -> None:
    store.put_counters("a", "1", COUNTERS)
    store.put_status("replica:a", {"drafter_version": "v7"}, ttl_s=60)
    first, second = Historian(store), Historian(store)
    first.keep(1004.0)
    second.keep(1009.0)
    assert store.moments() == [1000]
    second.keep(1010.5)
    assert sorted(store.moments()) == [1000, 1010]
    [moment, _] = store.read_moments([1000, 1010])
    assert (moment["at"], moment["sums"], moment["versions"]) == (1004.0, [15.0, 18.0, 25.0], ["v7"])


def test_a_moment_holds_sums_of_the_busiest_domains_only() -> None:
    counters = Counters()
    for number in range(40):
        counters.add("emitted", number, domain=f"d{number}")
    learner = {"drift": {"d1": 1.2, "d2": 0.9}}
    moment = moment_of(counters, {"learner": learner}, 5.0)
    assert set(moment["domains"]) == {f"d{number}" for number in range(24, 40)}  # 16 of them
    assert moment["sums"] == [0.0, 0.0, sum(range(40))]
    assert moment["drifted"] == ["d1"]
    assert moment_of(Counters(), {}, 0.0)["sums"] == [0.0, 0.0, 0.0]
