"""How many tokens to draft, for each request and step: the gammas that make the most tokens a second, 0 included.

Tokens a step are (1-a^(g+1))/(1-a) for each request (Leviathan et al. 2023), seconds come from `costs.py`; the batch
as a whole is maximised, since a deep draft of one request delays all. A first draft also earns what its outcome tells:
the doubt about a, so that drafts which failed by chance are not given up before enough of them were seen. A choice is
kept while it is about as good as the best and the same requests are there. At least `exploration` of a domain's rounds
draft whatever the estimate says: some rounds in a row by the one request that has the least to catch up with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from serving.spec.costs import RoundCosts
from serving.spec.cut import ConfidenceCut
from serving.spec.rates import Domain, Rates, request_rate

_ENTER = 1.02  # plain decoding is left only for a gain beyond the noise of the measured costs
_CHANGE = 1.01  # one way of drafting for another
_KEEP_ROUNDS = 4  # the same requests keep their gammas so long before the choice is thought over
_EXPLORE_ROUNDS = 4  # an exploring request drafts so many rounds in a row: one look says little and costs a catch-up


class Recent:
    """What the controller keeps of a request while it runs. Compared by identity."""

    __slots__ = ("exploring", "gamma", "least", "rate", "version")

    def __init__(self) -> None:
        self.rate = request_rate()
        self.gamma = 0  # of the last choice
        self.least = 0.0  # chance of the drafts so far under which it pays to stop, as the drafter names chances
        self.exploring = 0  # rounds of exploration that are left
        self.version = 0  # the controller's count of drafters when `rate` was begun


@dataclass(frozen=True, slots=True)
class Chance:
    """What drafts of a request are expected to earn."""

    alpha: float
    doubt: float  # how far above it alpha may lie

    def tokens(self, gamma: int) -> float:
        """(1 - a^(gamma+1)) / (1 - a)."""
        return sum(self.alpha**level for level in range(gamma + 1))

    def worth(self, level: int) -> float:
        """Tokens that the draft at this level, from 1, earns; the first one also lessens the doubt."""
        return self.alpha**level + (self.doubt if level == 1 else 0.0)

    def hoped(self, gamma: int) -> float:
        """Tokens of a step, with what looking is worth."""
        return self.tokens(gamma) + (self.doubt if gamma else 0.0)


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that may draft in this step."""

    domain: str
    limit: int  # room in its cap, the context and the drafter
    recent: Recent
    backlog: int = 0  # positions that the drafter would have to read first


class GammaController:
    """Chooses gammas; `fixed` turns the choice off. With `cut`, a chosen gamma may end early for want of confidence."""

    def __init__(self, *, fixed: int | None, most: int, exploration: float, cut: bool = False) -> None:
        self.most, self.costs = most, RoundCosts()
        self._cut = ConfidenceCut() if cut else None
        self._fixed, self._exploration = fixed, exploration
        self._rates = Rates()
        self._version = 0
        self._group: list[Recent] = []  # who the last choice was made for, beside how many others
        self._plain = self._kept = 0

    def new_version(self) -> None:
        """Another drafter serves from now on: what is known of the old one's acceptance is forgotten."""
        self._rates.forget()
        if self._cut is not None:
            self._cut = ConfidenceCut()
        self._version += 1
        self._group = []

    def observe(self, domain: str, accepted: int, tested: int, recent: Recent | None = None) -> None:
        """What became of a request's draft."""
        self._rates.add(domain, accepted, tested)
        if recent is not None:
            self._refresh(recent)
            recent.rate.add(accepted, tested)

    def observe_chance(self, chance: float, held: bool) -> None:
        """A draft that ended with this chance was accepted as a whole, or not."""
        if self._cut is not None:
            self._cut.observe(chance, held)

    def alpha(self, domain: str) -> float:
        return self._rates.alpha(domain)

    def choose(self, asking: Sequence[Asking], *, plain: int = 0) -> list[int]:
        """A gamma for each request, at most its limit; `plain` more requests decode beside them without drafts."""
        limits = [max(0, min(one.limit, self.most)) for one in asking]
        if self._fixed is not None or not asking:
            return [min(self._fixed or 0, limit) for limit in limits]
        group = [one.recent for one in asking]
        if self._kept and group == self._group and plain == self._plain:
            self._kept -= 1
        else:
            self._think(asking, limits, plain)
            self._group, self._plain, self._kept = group, plain, _KEEP_ROUNDS - 1
        gammas = [min(one.recent.gamma, limit) for one, limit in zip(asking, limits, strict=True)]
        self._explore(asking, limits, gammas)
        return gammas

    def step_seconds(self, gammas: Sequence[int], plain: int = 0) -> float:
        """Expected seconds of a round with these gammas beside `plain` undrafted requests."""
        batch = len(gammas) + plain
        target = max(self.costs.target(batch, batch), self.costs.target(batch, batch + sum(gammas)))
        drafting = [sum(1 for gamma in gammas if gamma >= level) for level in range(1, max(gammas, default=0) + 1)]
        return target + self.costs.draft(drafting)

    def _chances(self, asking: Sequence[Asking]) -> list[Chance]:
        """Many draft together, and a look at many tells more: the doubt is that about their mean."""
        found = []
        for one in asking:
            self._refresh(one.recent)
            rate = one.recent.rate
            doubt = self._rates.doubt(one.domain, rate) / math.sqrt(len(asking))
            found.append(Chance(self._rates.alpha(one.domain, rate), doubt))
        return found

    def round_seconds(self, batch: int) -> tuple[float, ...]:
        """Expected seconds of a round by gamma, from 0 on, when `batch` requests draft alike; empty: not measured."""
        if not (self.costs.by_rows.known and self.costs.draft_first.known):
            return ()
        return tuple(self.step_seconds([gamma] * batch) for gamma in range(self.most + 1))

    def _refresh(self, recent: Recent) -> None:
        if recent.version != self._version:
            recent.rate, recent.version = request_rate(), self._version

    def _think(self, asking: Sequence[Asking], limits: Sequence[int], plain: int) -> None:
        """Sets each request's gamma."""
        chances = self._chances(asking)
        present = [min(one.recent.gamma, limit) for one, limit in zip(asking, limits, strict=True)]
        tokens = plain + sum(chance.hoped(gamma) for chance, gamma in zip(chances, present, strict=True))
        standing = tokens / max(self.step_seconds(present, plain), 1e-9)
        idle = (len(asking) + plain) / max(self.step_seconds([0] * len(asking), plain), 1e-9)
        if idle >= standing:
            present, least = [0] * len(asking), idle * _ENTER
        else:
            least = max(standing * _CHANGE, idle * _ENTER)
        gammas, rate = self._best(chances, limits, plain)
        chosen = gammas if rate > least else present
        for one, gamma in zip(asking, chosen, strict=True):
            one.recent.gamma = gamma
        if self._cut is not None and any(chosen):
            self._set_least(self._cut, asking, chances, chosen, plain)

    def _set_least(
        self, cut: ConfidenceCut, asking: Sequence[Asking], chances: Sequence[Chance], gammas: Sequence[int], plain: int
    ) -> None:
        """One more draft earns (chance that those before hold) * alpha tokens, and costs what it costs at this rate."""
        batch, drafting = len(asking) + plain, sum(1 for gamma in gammas if gamma)
        rows = batch + sum(gammas)
        tokens = plain + sum(chance.tokens(gamma) for chance, gamma in zip(chances, gammas, strict=True))
        seconds = self.costs.draft_further(drafting) / drafting
        seconds += max(self.costs.target(batch, rows) - self.costs.target(batch, rows - 1), 0.0)
        needed = seconds * tokens / self.step_seconds(gammas, plain)
        for one, chance in zip(asking, chances, strict=True):
            one.recent.least = cut.least(needed / max(chance.alpha, 1e-3))

    def _best(self, chances: Sequence[Chance], limits: Sequence[int], plain: int) -> tuple[list[int], float]:
        """Of each depth the best batch, adding drafts in the order of what they earn; of these the best."""
        offers = sorted(
            (-chance.worth(level), level, index)
            for index, chance in enumerate(chances)
            for level in range(1, limits[index] + 1)
        )
        batch = len(chances) + plain
        # No step is cheaper for reading more, whatever noise says.
        target = list(accumulate((self.costs.target(batch, batch + count) for count in range(len(offers) + 1)), max))
        best: list[tuple[float, int, int]] = []
        best_rate = 0.0
        for depth in range(1, max(limits, default=0) + 1):
            within = [offer for offer in offers if offer[1] <= depth]
            count, rate = self._best_count(within, depth, batch, target)
            if rate > best_rate:
                best, best_rate = within[:count], rate
        gammas = [0] * len(chances)
        for _, _, index in best:
            gammas[index] += 1
        return gammas, best_rate

    def _best_count(
        self, offers: Iterable[tuple[float, int, int]], depth: int, batch: int, target: Sequence[float]
    ) -> tuple[int, float]:
        """How many of the offers to take, and tokens a second then."""
        costs, drafting, seconds = self.costs, [0] * depth, [0.0] * depth  # requests and their cost at each level
        tokens, best, best_rate, drafts = float(batch), 0, 0.0, 0.0
        for count, (earned, level, _) in enumerate(offers, 1):
            drafting[level - 1] += 1
            cost = (costs.draft_first if level == 1 else costs.draft_further)(drafting[level - 1])
            drafts += cost - seconds[level - 1]
            seconds[level - 1] = cost
            tokens -= earned
            rate = tokens / max(target[count] + drafts, 1e-9)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def _explore(self, asking: Sequence[Asking], limits: Sequence[int], gammas: list[int]) -> None:
        """Raises a 0 to 1 where a domain would draft too seldom."""
        period = int(_EXPLORE_ROUNDS / self._exploration) if self._exploration else 0
        able: dict[str, list[int]] = {}
        domains: dict[str, Domain] = {}
        for index, one in enumerate(asking):
            domain = domains.get(one.domain) or domains.setdefault(one.domain, self._rates.domain(one.domain))
            if period and domain.rounds % period == 0:  # at the start of a period: the share holds at any moment
                domain.due = _EXPLORE_ROUNDS
            domain.rounds += 1
            if gammas[index]:
                domain.due = max(domain.due - 1, 0)
                continue
            one.recent.rate.add(0, 0)
            domain.rate.fade()
            if domain.due and limits[index]:
                able.setdefault(one.domain, []).append(index)
        for name, indices in able.items():
            if not domains[name].due:
                continue
            chosen = min(indices, key=lambda i: (-asking[i].recent.exploring, asking[i].backlog))
            recent = asking[chosen].recent
            recent.exploring = (recent.exploring or _EXPLORE_ROUNDS) - 1
            domains[name].due -= 1
            gammas[chosen] = 1
