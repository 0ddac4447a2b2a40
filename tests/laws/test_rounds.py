"""Laws 7 and 10: every round names the version that drafted it, and all counts of it agree wherever they are kept."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.engine.engine import Engine, Tracing
from serving.engine.request import GenerationRequest
from shared.trace import Kind, Sampling, TraceRecord, decode, encode
from tests.tiny_engine import DRAFTING, Bench, GammaByDomain, request, serve

SAMPLINGS = ((None, None), (Sampling(), None), (Sampling(top_k=8, seeded=True), 3), (Sampling(top_p=0.9), None))


def requests() -> list[GenerationRequest]:
    return [
        request(
            f"r{i}",
            range(3, 5 + i % 9),
            SAMPLINGS[i % 4][0],
            seed=SAMPLINGS[i % 4][1],
            domain=f"g{i % 5}",
            max_tokens=14,
            ignore_eos=i % 3 == 0,
            speculative=i % 7 != 6,
        )
        for i in range(36)
    ]


@pytest.fixture(params=DRAFTING, scope="module")
def served(
    request: pytest.FixtureRequest, small_bench: Bench
) -> tuple[list[TraceRecord], Engine, dict[str, list[str]]]:
    """Traces, the engine, and by request the version that was in place at each of its rounds."""
    records: list[TraceRecord] = []
    target = small_bench.target()
    drafter = small_bench.drafter(request.param, target)
    versions: dict[str, list[str]] = {}
    live: dict[str, object] = {}

    def between(engine: Engine) -> None:
        assert engine.drafter is not None
        for sequence in [*engine.scheduler.running, *live.values()]:
            live[sequence.id] = sequence
            seen = versions.setdefault(sequence.id, [])
            seen.extend([engine.drafter.version] * (len(sequence.recorder.rounds) - len(seen)))
        small_bench.swap(engine.drafter)

    tracing = Tracing(lambda record, _: records.append(record), "replica", 4, 0.3, lambda _: False)
    _, engine = serve(target, drafter, requests(), GammaByDomain(), max_batch=7, tracing=tracing, between=between)
    return records, engine, versions


def test_rounds_name_their_version_and_counts_agree(
    served: tuple[list[TraceRecord], Engine, dict[str, list[str]]],
) -> None:
    records, engine, versions = served
    by: dict[str, Counter[tuple[str, str]]] = {
        name: Counter() for name in ("spec_steps", "drafted", "accepted", "tested")
    }
    steps: Counter[str] = Counter()
    emitted: Counter[str] = Counter()
    at: Counter[str] = Counter()
    for record in records:
        assert decode(encode(record)).rounds == record.rounds
        emitted[record.domain] += len(record.output_ids)
        steps[record.domain] += len(record.rounds)
        seen = versions.get(record.id, [])
        for index, round_ in enumerate(record.rounds):
            assert bool(round_.version) == bool(round_.drafted)
            if not round_.drafted:
                continue
            assert round_.start >= 1, "the first token comes from the prompt"
            if index < len(seen):
                assert round_.version == seen[index]
            for name, value in (
                ("spec_steps", 1),
                ("drafted", len(round_.drafted)),
                ("accepted", round_.accepted),
                ("tested", round_.tested),
            ):
                by[name][record.domain, round_.version] += value
            at.update(f"tested_at.{depth + 1}" for depth in range(round_.tested))
            at.update(f"accepted_at.{depth + 1}" for depth in range(round_.accepted))
    counters = engine.counters
    for domain in emitted:
        assert counters.total("emitted", domain=domain) == emitted[domain]
        assert counters.total("steps", domain=domain) == steps[domain]
    for name, counts in by.items():
        for (domain, version), value in counts.items():
            assert counters.total(name, domain=domain, version=version) == value
        assert counters.total(name) == sum(counts.values())
    for name, value in at.items():
        assert counters.total(name) == value
    assert {version for _, version in by["drafted"]} == {"base", "v1"}
    assert counters.total("requests_finished") == len(records) == 36


def test_rounds_tell_the_story_of_the_tokens(served: tuple[list[TraceRecord], Engine, dict[str, list[str]]]) -> None:
    """Accepted tokens are the drafts, the rejected draft is none of the target's, and rounds join without a gap."""
    for record in served[0]:
        kinds, tokens, position = record.kinds.tolist(), record.output_ids.tolist(), 0
        rejected = dict(record.rejected.tolist())
        for round_ in record.rounds:
            assert round_.start == position
            assert tokens[position : position + round_.accepted] == list(round_.drafted[: round_.accepted])
            assert kinds[position : position + round_.accepted] == [Kind.ACCEPTED] * round_.accepted
            position += round_.accepted
            if round_.tested > round_.accepted:
                assert kinds[position] == Kind.RECOVERED
                assert rejected.pop(position) == round_.drafted[round_.accepted]
                # A coupled rejection means another pick; a residual never holds what p had no more of than q.
                assert tokens[position] != round_.drafted[round_.accepted]
                position += 1
            elif position < len(tokens) and not (round_.drafted and round_.accepted < len(round_.drafted)):
                assert kinds[position] == (Kind.BONUS if round_.drafted else Kind.PLAIN)
                position += 1
        assert position == len(tokens)
        assert not rejected
