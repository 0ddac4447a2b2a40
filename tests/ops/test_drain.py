"""The leaving of a node: it waits while replicas are here, gives up in time, and never stands in the pod's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops import drain


def test_it_waits_until_the_last_replica_has_gone() -> None:
    counts = iter([2, 2, 1, 0])
    slept: list[float] = []
    assert drain.wait_until_empty(100.0, lambda: next(counts), clock=lambda: 0.0, sleep=slept.append) == 0
    assert len(slept) == 3  # once for each look that saw a replica


def test_it_gives_up_at_the_deadline() -> None:
    now = iter([0.0, 5.0, 10.0])
    assert drain.wait_until_empty(10.0, lambda: 1, clock=lambda: next(now), sleep=lambda _: None) == 1


def test_a_replica_is_known_by_the_title_of_its_process() -> None:
    title = f"{drain.REPLICA}redraft:Replica"
    process = subprocess.Popen(
        [title, "-c", "import sys; sys.stdin.read()"], executable=sys.executable, stdin=subprocess.PIPE
    )
    try:
        assert drain.replicas_here() >= 1
    finally:
        process.communicate()


@pytest.mark.parametrize("script", ["#!/bin/sh\necho no cluster >&2; exit 1\n", None])
def test_a_cluster_that_is_gone_is_no_failure(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if script is not None:
        (tmp_path / "ray").write_text(script)
        (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    assert drain.main(["--seconds", "5"]) == 0
    assert "the cluster was not told" in capsys.readouterr().err


def test_rays_command_takes_these_words() -> None:
    """It is not a stable interface, so a new Ray must fail here and not in a pod that ends."""
    from ray.scripts.scripts import drain_node

    options = {option for parameter in drain_node.params for option in parameter.opts}
    assert {"--reason", "--reason-message", "--deadline-remaining-seconds"} <= options
    [reason] = [parameter for parameter in drain_node.params if "--reason" in parameter.opts]
    assert "DRAIN_NODE_REASON_PREEMPTION" in reason.type.choices
