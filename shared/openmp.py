"""OpenMP's environment of a process that computes with torch; it must be set before torch is imported.

A decode step calls some two hundred small parallel regions. Workers that sleep between them cost 0.1 ms a region to
wake, twice the work itself; workers that spin take the cores from whoever shares them. So they spin only where nobody
does, and briefly: longer than the gap between two operators of a step, shorter than a scheduler's time slice. (SmolLM2,
fp16, two cores of a Sapphire Rapids: 32, 25.5, 22 and 21.5 ms a step with 1,000, 4,000, 20,000 and 100,000 rounds.)
"""

from __future__ import annotations

# Rounds of libgomp's spin loop, each some 40 ns: about 0.8 ms.
_SPINS = 20_000


def openmp_environment(threads: int, *, alone: bool) -> dict[str, str]:
    """The variables for `threads` OpenMP threads; `alone`: nothing else computes on their cores."""
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**environment, "GOMP_SPINCOUNT": str(_SPINS)} if alone else environment
