"""How many tokens to draft, for each request and step: the gamma that makes the most tokens a second, 0 included.

Keeps two things learnt online: an acceptance rate for each domain (decayed counts, so that it follows drift), and the
seconds of target steps by rows and of drafting by batch and depth. Tokens a step are (1-a^(g+1))/(1-a) for each
request (Leviathan et al. 2023); the batch as a whole is maximised. At least `exploration` of a domain's rounds draft
whatever the estimate says, and a new drafter version starts with the benefit of the doubt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_DECAY = 0.99  # of a domain's counts for each round it drafts in: a memory of about 100 rounds
_PRIOR_ALPHA, _PRIOR_TESTED = 0.5, 4.0
_HYSTERESIS = 1.02  # leaving the present gammas must pay this much
_EXPLORE_ROUNDS = 4  # an exploring request drafts this many rounds in a row, so that one look says something


class AcceptanceRate:
    """Decayed accepted and tested counts around a prior."""

    def __init__(self) -> None:
        self.accepted, self.tested = _PRIOR_ALPHA * _PRIOR_TESTED, _PRIOR_TESTED

    def add(self, accepted: int, tested: int) -> None:
        self.accepted = self.accepted * _DECAY + accepted
        self.tested = self.tested * _DECAY + tested

    @property
    def alpha(self) -> float:
        return self.accepted / self.tested


class CostCurve:
    """Seconds by size, measured online in buckets, read by interpolation."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        """Follows a lasting change in some ten steps; one slow step among many moves it by no more than a tenth."""
        known = self._seconds.get(size)
        if known is None:
            self._sizes.insert(bisect_left(self._sizes, size), size)
            self._seconds[size] = seconds
        else:
            self._seconds[size] = known + 0.1 * (min(seconds, 2 * known) - known)

    def __call__(self, size: int) -> float:
        """Linear between the measured sizes, proportional above the largest, flat below the smallest."""
        sizes = self._sizes
        if not sizes:
            return 0.0
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return self._seconds[sizes[-1]] * size / sizes[-1]
        upper = sizes[place]
        if place == 0 or upper == size:
            return self._seconds[upper]
        lower = sizes[place - 1]
        share = (size - lower) / (upper - lower)
        return self._seconds[lower] + share * (self._seconds[upper] - self._seconds[lower])

    @property
    def known(self) -> bool:
        return bool(self._sizes)


@dataclass
class _Domain:
    rate: AcceptanceRate
    rounds: int = 0
    exploring: int = 0  # rounds of the present exploration that are left


class GammaController:
    """Chooses gammas; `fixed` turns the choice off."""

    def __init__(self, *, fixed: int | None, most: int, exploration: float) -> None:
        self.most = most
        self._fixed, self._exploration = fixed, exploration
        self._domains: dict[str, _Domain] = {}
        self.target_cost = CostCurve()  # forward, decision and commit, by rows
        self.draft_first = CostCurve()  # catching up and the first draft, by batch
        self.draft_next = CostCurve()  # each further draft, by batch

    def new_version(self) -> None:
        """Another drafter serves from now on: what is known of the old one's acceptance is forgotten."""
        for domain in self._domains.values():
            domain.rate = AcceptanceRate()

    def observe(self, domain: str, accepted: int, tested: int) -> None:
        self._of(domain).rate.add(accepted, tested)

    def observe_draft(self, batch: int, depth: int, seconds: float) -> None:
        """Drafting `depth` tokens for `batch` requests took this long; the first costs what the others leave over."""
        if depth == 1:
            self.draft_first.add(batch, seconds)
            return
        first = self.draft_first(batch) if self.draft_first.known else seconds / depth
        self.draft_next.add(batch, max(seconds - first, 0.2 * seconds / depth * (depth - 1)) / (depth - 1))
        self.draft_first.add(batch, max(seconds - (depth - 1) * self.draft_next(batch), seconds / depth * 0.5))

    def choose(self, domains: Sequence[str], limits: Sequence[int], *, plain: int = 0) -> list[int]:
        """A gamma for each request, at most its limit (room in the cap, the context and the drafter).

        `plain` more requests decode beside them without drafts.
        """
        limits = [max(0, min(limit, self.most)) for limit in limits]
        if self._fixed is not None:
            return [min(self._fixed, limit) for limit in limits]
        gammas = self._best([self._of(domain).rate.alpha for domain in domains], limits, plain)
        return self._explore(domains, limits, gammas)

    def alpha(self, domain: str) -> float:
        return self._of(domain).rate.alpha

    def step_seconds(self, gammas: Sequence[int], plain: int = 0) -> float:
        """Expected seconds of a round with these gammas beside `plain` undrafted requests."""
        drafting = [sum(1 for gamma in gammas if gamma >= level) for level in range(1, max(gammas, default=0) + 1)]
        return self.target_cost(len(gammas) + plain + sum(gammas)) + self._draft_seconds(drafting)

    def _draft_seconds(self, drafting: Sequence[int]) -> float:
        """Of a draft in which so many requests take part at each level."""
        if not drafting:
            return 0.0
        return self.draft_first(drafting[0]) + sum(self._next_cost(batch) for batch in drafting[1:] if batch)

    def _next_cost(self, batch: int) -> float:
        return self.draft_next(batch) if self.draft_next.known else self.draft_first(batch)

    def _best(self, alphas: Sequence[float], limits: Sequence[int], plain: int) -> list[int]:
        """The best batch of each depth, since a deep draft of one request delays all, and of these the best."""
        best, idle = [0] * len(alphas), self.step_seconds([0] * len(alphas), plain)
        # Plain decoding is left only for a gain beyond the noise of the measured costs.
        best_rate = (len(alphas) + plain) / max(idle, 1e-9) * _HYSTERESIS
        for depth in range(1, max(limits, default=0) + 1):
            gammas, rate = self._best_within(depth, alphas, limits, plain)
            if rate > best_rate:
                best, best_rate = gammas, rate
        return best

    def _best_within(
        self, depth: int, alphas: Sequence[float], limits: Sequence[int], plain: int
    ) -> tuple[list[int], float]:
        """Adds drafts in the order of what they earn; the best gammas on the way, and their tokens a second."""
        offers = sorted(
            (-(alpha**level), level, index)
            for index, alpha in enumerate(alphas)
            for level in range(1, min(limits[index], depth) + 1)
        )
        drafting = [0] * depth  # requests that draft at each level
        rows, tokens = len(alphas) + plain, float(len(alphas) + plain)
        best, best_rate = 0, 0.0
        for count, (earned, level, _) in enumerate(offers, 1):
            drafting[level - 1] += 1
            tokens -= earned
            seconds = self.target_cost(rows + count) + self._draft_seconds(drafting)
            rate = tokens / max(seconds, 1e-9)
            if rate > best_rate:
                best, best_rate = count, rate
        gammas = [0] * len(alphas)
        for _, _, index in offers[:best]:
            gammas[index] += 1
        return gammas, best_rate

    def _explore(self, domains: Sequence[str], limits: Sequence[int], gammas: list[int]) -> list[int]:
        period = int(_EXPLORE_ROUNDS / self._exploration) if self._exploration else 0
        for index, name in enumerate(domains):
            domain = self._of(name)
            due = period and domain.rounds % period == 0  # at the start of a period: the share holds at any moment
            domain.rounds += 1
            if gammas[index]:
                continue
            if due:
                domain.exploring = _EXPLORE_ROUNDS
            if domain.exploring and limits[index]:
                domain.exploring -= 1
                gammas[index] = 1
        return gammas

    def _of(self, domain: str) -> _Domain:
        return self._domains.setdefault(domain, _Domain(AcceptanceRate()))
