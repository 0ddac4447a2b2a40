"""`python -m ops.drain`: a worker node leaves its Ray cluster with nothing on it (the preStop hook of its pod).

Ray is told that the node will go, so Serve starts the replicas that it holds elsewhere, then lets these finish what
they have begun. This waits for that, or until the time is up; it never fails, because the pod leaves either way.
"""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable

import psutil

REPLICA = "ray::ServeReplica:"  # how Ray names the processes of replicas
POLL_S = 1.0


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m ops.drain", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=int, required=True, help="the most that it may take")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    if not announce(arguments.seconds):
        return 0
    left = wait_until_empty(deadline)
    print(f"{left} replicas are left" if left else "the node is empty", file=sys.stderr)
    return 0


def announce(seconds: int) -> bool:
    """Tells the cluster that this node goes; False when nobody listens (the whole cluster is being deleted)."""
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "its pod is leaving", "--deadline-remaining-seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds / 2, 1), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"the cluster was not told: {error}", file=sys.stderr)
        return False
    if done.returncode:
        print(f"the cluster was not told: {done.stderr.strip()[-500:]}", file=sys.stderr)
    return done.returncode == 0


def wait_until_empty(
    deadline: float,
    replicas: Callable[[], int] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Replicas that are still here at `deadline` (of `clock`); 0 as soon as there are none."""
    count = replicas or replicas_here
    while (left := count()) and clock() < deadline:
        sleep(POLL_S)
    return left


def replicas_here() -> int:
    """Replica processes of this pod: in a container one sees only one's own."""
    return sum(_title(process).startswith(REPLICA) for process in psutil.process_iter())


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


if __name__ == "__main__":
    sys.exit(main())
