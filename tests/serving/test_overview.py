"""One replica tells of the whole service: in Prometheus' text, and in the numbers of the page."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serving.overview import Overview, Own
from shared.metrics import LEARNER_METRICS, REDIS, SERVING_METRICS
from shared.store import Champion, Store
from tests.fakes import COUNTERS
from tests.shared.test_metrics import LEARNER, STATUS

NOWHERE = "redis://127.0.0.1:1/0"  # nobody listens there
MINE = "redraft#Replica#mine"


def own(**changes: Any) -> Own:
    return Own(COUNTERS, {**STATUS, **changes})


def parsed(text: bytes) -> dict[tuple[str, str], float]:
    """(sample, replica) -> the sum over its other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = sample.name, sample.labels.get("replica", "")
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_prometheus_reads_every_metric_of_every_living_replica_and_of_the_learner(store: Store) -> None:
    for name, epoch in (("redraft#Replica#other", "1"), ("redraft#Replica#other", "2"), ("redraft#Replica#dead", "1")):
        store.put_counters(name, epoch, {"emitted|domain=sql": 10.0 * float(epoch)})
    store.put_status("replica:redraft#Replica#other", STATUS, ttl_s=60)
    store.put_status("learner", LEARNER, ttl_s=60)
    text = Overview(MINE, store, own).metrics()
    families = {family.name: family.type for family in text_string_to_metric_families(text.decode())}
    wanted = {metric.name.removesuffix("_total"): metric.kind for metric in (*SERVING_METRICS, *LEARNER_METRICS, REDIS)}
    assert families == wanted
    found = parsed(text)
    emitted = {replica: value for (name, replica), value in found.items() if name == "redraft_emitted_tokens_total"}
    assert emitted == {"mine": 25.0, "other": 20.0}  # its newest life; the dead one's series has ended
    assert found["redraft_gamma_sum", "mine"] == 28.0
    assert found["redraft_gamma_count", "mine"] == 10.0
    assert found["redraft_redis_up", ""] == 1.0


def test_without_redis_a_replica_tells_of_itself_and_says_so() -> None:
    overview = Overview(MINE, Store(NOWHERE, "x"), own)
    found = parsed(overview.metrics())
    assert (found["redraft_redis_up", ""], found["redraft_emitted_tokens_total", "mine"]) == (0.0, 25.0)
    data = overview.data(0)
    assert "127.0.0.1:1" in data["trouble"][0]
    assert (data["now"]["sums"], [replica["name"] for replica in data["replicas"]]) == ([15.0, 18.0, 25.0], ["mine"])
    assert parsed(Overview(MINE).metrics()) == {("redraft_redis_up", ""): 0.0}  # still loading


def test_the_page_gets_counts_by_domain_version_and_position(store: Store) -> None:
    store.put_counters("dead", "1", {"accepted|domain=sql|version=v1": 1.0, "tested|domain=sql|version=v1": 2.0})
    store.put_status("learner", {**LEARNER, "state": "reading traces", "decisions": [{"reason": "kept"}]}, ttl_s=60)
    champion = Champion("v7", "b", "base", "target", "eagle3", 7, "v6", 900.0)
    store.set_champion(champion)
    for at in (1000, 1010):
        store.keep_moment(at, {"at": at})
    data = Overview(MINE, store, own).data(1000)
    assert data["moments"] == [{"at": 1010}]
    rows = {(row["domain"], row["version"]): (row["accepted"], row["tested"]) for row in data["alpha"]}
    assert rows == {("sql", "base"): (6.0, 8.0), ("sql", "v1"): (10.0, 12.0)}  # 9 + 1 of 10 + 2: ended lives count
    assert data["positions"][0] == {"number": 1, "accepted_at": 7.0, "tested_at": 8.0}
    assert [row["number"] for row in data["gammas"]] == [0, 3, 4]
    assert (data["champion"]["version"], data["learner"]["state"]) == ("v7", "reading traces")
    assert data["learner"]["decisions"] == [{"reason": "kept"}]
    assert data["trouble"] == []


def test_a_champion_that_makes_no_sense_hides_nothing_else(store: Store) -> None:
    store._link.run(lambda client: client.set(store._champion, b"{"))
    data = Overview(MINE, store, own).data(0)
    assert (data["champion"], data["trouble"]) == (None, [])
