"""A script for `test_processes`: supervises a small family of processes, then ends in the way that it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from ops.processes import Supervisor

# A child, its child in a session of its own, and another that drops the environment by which it could be known.
FAMILY = """
import os, subprocess, time
plain = subprocess.Popen(["sleep", "600"], start_new_session=True)
hidden = subprocess.Popen(["env", "-i", "sleep", "600"], start_new_session=True)
print("pids", os.getpid(), plain.pid, hidden.pid, flush=True)
time.sleep(600)
"""


def main(folder: Path, ending: str) -> None:
    log = folder / "family.log"
    with Supervisor(folder) as supervisor:
        supervisor.start(
            "family", [sys.executable, "-c", FAMILY], ready=lambda: "pids" in log.read_text(), timeout_s=20
        )
        time.sleep(1.5)  # more than one look of the watchdog
        print("ready", flush=True)
        if ending == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "raise":
            raise RuntimeError("on purpose")
        if ending == "wait":
            time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
