"""What a round costs in seconds: target steps by batch and rows, drafting by batch and depth.

A target step is a curve by rows, timed at load, plus what each batch size costs beside it (its caches, sampling, a busy
machine): the latter is learnt fast, the curve slowly and only where drafts were verified, so that a bucket which is
seldom measured stays comparable with the one that is measured all the time. The first measurements of a bucket are the
slow ones (allocation, kernel selection): the least of them counts, and until then its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left

_FIRST = 3  # measurements of which the least counts
_STEP = 0.1  # share of a later difference that a bucket takes over
_CURVE = 0.5  # of that, for the curve by rows
_OTHERS = 0.5  # of a relative difference, for the other buckets of a flat curve
_OUTLIER = 2.0  # a step counts as no slower than so many times its estimate


class CostCurve:
    """Seconds by size, measured online in buckets, read by interpolation."""

    def __init__(self, *, flat: bool = False) -> None:
        """`flat`: sizes cost about the same, so that what one measures says something of all."""
        self._flat = flat
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._first: dict[int, tuple[int, float]] = {}  # of buckets that are not believed yet: measurements, the least

    def add(self, size: int, seconds: float) -> None:
        """Follows a lasting change in some ten steps; one slow step among many moves it by no more than a tenth."""
        known = self._seconds.get(size)
        if known is not None:
            change = _STEP * (min(seconds / known, _OUTLIER) - 1)
            if self._flat:
                for other in self._sizes:
                    self._seconds[other] *= 1 + _OTHERS * change
            self._seconds[size] = known * (1 + change)
            return
        count, least = self._first.get(size, (0, seconds))
        self._first[size] = count + 1, min(least, seconds)
        if count + 1 >= _FIRST:
            self.set(size, self._first.pop(size)[1])

    def set(self, size: int, seconds: float) -> None:
        """Believe this from now on."""
        if size not in self._seconds:
            self._sizes.insert(bisect_left(self._sizes, size), size)
        self._seconds[size] = seconds

    def __call__(self, size: int) -> float:
        """Linear between the measured sizes and flat below the smallest; above the largest proportional, or `flat`."""
        known = self._seconds.get(size)
        if known is not None:
            return known
        sizes = self._sizes
        if not sizes:
            return min((least for _, least in self._first.values()), default=0.0)
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return self._seconds[sizes[-1]] * (1.0 if self._flat else size / sizes[-1])
        upper = sizes[place]
        if place == 0:
            return self._seconds[upper]
        lower = sizes[place - 1]
        share = (size - lower) / (upper - lower)
        return self._seconds[lower] + share * (self._seconds[upper] - self._seconds[lower])

    @property
    def known(self) -> bool:
        return bool(self._sizes or self._first)


class RoundCosts:
    """Target steps and drafts."""

    def __init__(self) -> None:
        self.by_rows = CostCurve()  # a target step by rows, as timed at load
        self._beside: dict[int, float] = {}  # batch -> what its steps cost beyond `by_rows`
        self._measured: dict[int, int] = {}
        self.draft_first = CostCurve(flat=True)  # catching up and the first draft, by batch
        self.draft_next = CostCurve(flat=True)  # each further draft, by batch

    def add_target(self, batch: int, rows: int, seconds: float) -> None:
        """A step that read `rows` rows of `batch` decoding requests took so long."""
        if not self.by_rows.known:
            self.by_rows.set(rows, seconds)
            return
        known = self.target(batch, rows)
        left = min(seconds, _OUTLIER * known) - known
        count, beside = self._measured.get(batch, 0), self._extra(batch)
        self._measured[batch] = count + 1
        if count == 0:
            self._beside[batch] = beside + left
        else:
            self._beside[batch] = beside + (min(left, 0.0) if count < _FIRST else _STEP * left)
        if rows > batch:
            self.by_rows.set(rows, self.by_rows(rows) + _CURVE * _STEP * left)

    def target(self, batch: int, rows: int) -> float:
        """A step of `rows` rows for `batch` decoding requests."""
        return max(self.by_rows(rows) + self._extra(batch), 1e-9)

    def _extra(self, batch: int) -> float:
        known = self._beside.get(batch)
        if known is None and self._beside:
            nearest = min(self._beside, key=lambda other: abs(other - batch))
            return self._beside[nearest] * batch / nearest
        return known or 0.0

    def add_draft(self, batch: int, depth: int, seconds: float) -> None:
        """Drafting `depth` tokens for `batch` requests took this long; the first costs what the others leave over."""
        if depth == 1:
            self.draft_first.add(batch, seconds)
            return
        first = self.draft_first(batch) if self.draft_first.known else seconds / depth
        self.draft_next.add(batch, max(seconds - first, 0.2 * seconds / depth * (depth - 1)) / (depth - 1))
        self.draft_first.add(batch, max(seconds - (depth - 1) * self.draft_next(batch), seconds / depth * 0.5))

    def draft_further(self, batch: int) -> float:
        """One more draft for each of `batch` requests."""
        return self.draft_next(batch) if self.draft_next.known else self.draft_first(batch)

    def draft(self, drafting: list[int]) -> float:
        """A draft in which so many requests take part at each level; none stands for no draft."""
        if not drafting:
            return 0.0
        return self.draft_first(drafting[0]) + sum(self.draft_further(batch) for batch in drafting[1:] if batch)
