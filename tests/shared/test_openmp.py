"""OpenMP's environment: workers spin only where nobody else needs the core."""

from __future__ import annotations

from shared.openmp import openmp_environment


def test_threads_sleep_at_once_where_others_compute() -> None:
    shared, alone = openmp_environment(2, alone=False), openmp_environment(2, alone=True)
    assert shared == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    assert int(alone.pop("GOMP_SPINCOUNT")) > 0
    assert alone == shared
