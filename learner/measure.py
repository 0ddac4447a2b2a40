"""Judges requests as they arrive, before any of them is learnt from: the drafter that served them, and the base.

The replay's gamma is what the request was typically drafted with. What the rounds that really served it should have
counted is kept too, to be held against what they did count. Requests of one drafter and gamma are judged together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from learner.bank import DrafterBank
from learner.base import BASE_VERSION, Base
from learner.buffer import Measured
from learner.evaluator import Judged, judge
from learner.example import Example
from learner.unroll import Drafter
from shared.config import DrafterConfig
from shared.trace import TraceRecord


class Measurer:
    """`champion` names the version that stands for requests that nothing drafted for."""

    def __init__(self, base: Base, bank: DrafterBank, *, gamma: int, champion: Callable[[], str]) -> None:
        self._base, self._bank, self._gamma, self._champion = base, bank, gamma, champion
        self.unknown_versions = 0  # requests judged by the champion because their drafter is not known any more
        self.constrained = 0  # requests that cannot be judged: a grammar or min_tokens masked their tokens

    def measure(self, examples: Sequence[Example]) -> list[Measured]:
        """One for each example, in order. Raises TraceError for features that do not fit."""
        self.constrained += sum(1 for example in examples if example.record.sampling.constrained)
        gammas = [typical_gamma(example.record, self._gamma) for example in examples]
        versions = [self._version(example.record) for example in examples]
        static = judge_each(self._base.module, examples, gammas, self._base.token_count)
        live = list(static)
        for version in set(versions) - {BASE_VERSION}:
            module = self._bank.get(version)
            assert module is not None, "_version has looked"
            mine = [i for i, other in enumerate(versions) if other == version]
            judged = judge_each(module, [examples[i] for i in mine], [gammas[i] for i in mine], self._base.token_count)
            for i, found in zip(mine, judged, strict=True):
                live[i] = found
        return [
            measured_as(example.record, version, gamma, mine, theirs)
            for example, version, gamma, mine, theirs in zip(examples, versions, gammas, live, static, strict=True)
        ]

    def _version(self, record: TraceRecord) -> str:
        version = served_version(record) or self._champion()
        if self._bank.get(version) is not None:
            return version
        self.unknown_versions += 1
        return self._champion() if self._bank.get(self._champion()) is not None else BASE_VERSION


def judge_each(drafter: Drafter, examples: Sequence[Example], gammas: Sequence[int], token_count: int) -> list[Judged]:
    """One Judged for each example, in order, each at its own gamma."""
    found: dict[int, Judged] = {}
    for gamma in sorted(set(gammas)):
        mine = [i for i, other in enumerate(gammas) if other == gamma]
        judged = judge(drafter, [examples[i] for i in mine], gamma, token_count=token_count)
        found.update(zip(mine, judged, strict=True))
    return [found[i] for i in range(len(examples))]


def served_version(record: TraceRecord) -> str:
    """The version that drafted most of the request's rounds; empty when none did."""
    rounds = Counter(round_.version for round_ in record.rounds if round_.drafted)
    return max(rounds, key=lambda version: rounds[version], default="")


def gamma_of(drafter: DrafterConfig) -> int:
    """That of the replay of a request that was decoded plainly."""
    return drafter.gamma if isinstance(drafter.gamma, int) and drafter.gamma else max(drafter.gamma_max, 1)


def typical_gamma(record: TraceRecord, otherwise: int) -> int:
    """Mean length of the request's drafts, rounded; `otherwise` when it was decoded plainly."""
    drafted = [len(round_.drafted) for round_ in record.rounds if round_.drafted]
    return max(round(sum(drafted) / len(drafted)), 1) if drafted else otherwise


def measured_as(record: TraceRecord, version: str, gamma: int, live: Judged, static: Judged) -> Measured:
    one_version = {round_.version for round_ in record.rounds if round_.drafted} == {version}
    return Measured(
        version=version,
        gamma=gamma,
        positions=live.positions,
        live_sum=live.first,
        static_sum=static.first,
        live_expected_accepted=live.accepted,
        live_expected_tested=live.tested,
        live_expected_steps=live.steps,
        static_expected_accepted=static.accepted,
        static_expected_tested=static.tested,
        rounds_accepted=live.rounds_accepted if one_version else 0.0,
        rounds_tested=live.rounds_tested if one_version else 0.0,
        accepted=sum(round_.accepted for round_ in record.rounds),
        tested=sum(round_.tested for round_ in record.rounds),
    )
