"""No child outlives its supervisor, however that one ends; and failures to start say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ops import reaper
from ops.processes import Supervisor
from shared.errors import ServiceDown

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run_family(folder: Path, ending: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.ops.orphans", str(folder), ending]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def pids_of(folder: Path) -> list[int]:
    line = next(line for line in (folder / "family.log").read_text().splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


def left_over(pids: list[int], *, within_s: float) -> list[int]:
    """Those that still run after the time that they are given to end."""
    deadline = time.monotonic() + within_s
    while True:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("raise", 1), ("sigkill", -signal.SIGKILL)])
def test_nothing_outlives_the_supervisor(tmp_path: Path, ending: str, code: int) -> None:
    parent = run_family(tmp_path, ending)
    assert parent.wait(240) == code
    pids = pids_of(tmp_path)
    assert len(pids) == 3
    # The watchdog is told at once; what ignores SIGTERM would have GRACE_S.
    assert left_over(pids, within_s=reaper.GRACE_S + 5) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_python_does_not_handle_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    parent = run_family(tmp_path, "wait")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(number)
    assert parent.wait(240) == -number
    assert left_over(pids_of(tmp_path), within_s=reaper.GRACE_S + 5) == []


def test_the_kernel_ends_the_child_when_the_watchdog_is_killed_first(tmp_path: Path) -> None:
    parent = run_family(tmp_path, "wait")
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    for process in psutil.Process(parent.pid).children():
        if "reaper.py" in " ".join(process.cmdline()):
            process.kill()
    parent.kill()
    parent.wait(240)
    child, *others = pids_of(tmp_path)
    try:
        assert left_over([child], within_s=5) == []
    finally:
        for pid in others:  # only the watchdog could have known them
            os.kill(pid, signal.SIGKILL)


def test_children_end_in_reverse_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal, sys, time\n"
        "def leave(*_):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[1] + ' ')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with Supervisor(tmp_path) as supervisor:
        for name in ("first", "second"):
            log = tmp_path / f"{name}.log"
            supervisor.start(name, [*python(code), name], ready=lambda log=log: "up" in log.read_text(), timeout_s=60)
        supervisor.on_exit(lambda: order.write_text("cleanup "))
    assert order.read_text() == "cleanup second first "


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "deaf.log"
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start("deaf", python(code), ready=lambda: "up" in log.read_text(), timeout_s=60)
        child.stop(patience_s=0.3)
        assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_dies_at_its_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('one'); print('the reason'); sys.exit(3)"
    with (
        Supervisor(tmp_path) as supervisor,
        pytest.raises(ServiceDown, match=r"(?s)broken ended with exit code 3.*the reason"),
    ):
        supervisor.start("broken", python(code), ready=lambda: False, timeout_s=60)


def test_a_child_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    with (
        Supervisor(tmp_path) as supervisor,
        pytest.raises(ServiceDown, match=r"slow was not ready within 0 s"),
    ):
        supervisor.start("slow", ["sleep", "600"], ready=lambda: False, timeout_s=0.3)


def test_a_dead_child_is_started_again_and_not_in_a_hurry(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start("frail", ["sleep", "600"], ready=lambda: True, timeout_s=5)
        assert supervisor.revive() == []
        first = child.pid
        child.process.kill()
        child.process.wait()
        assert supervisor.revive() == ["frail"]
        assert child.pid != first
        assert child.alive
        child.process.kill()
        child.process.wait()
        assert supervisor.revive() == []  # dead again at once: it has to wait
        child.retry_at = 0.0
        assert supervisor.revive() == ["frail"]
    assert not child.alive


def test_what_a_dead_child_leaves_behind_makes_room_for_its_successor(tmp_path: Path) -> None:
    """The worker of a web server, say, that would keep the port."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    log = tmp_path / "master.log"
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start("master", python(code), ready=lambda: "up" in log.read_text(), timeout_s=60)
        [worker] = psutil.Process(child.pid).children()
        child.process.kill()
        child.process.wait()
        assert worker.is_running()
        assert supervisor.revive() == ["master"]
        assert left_over([worker.pid], within_s=5) == []


def test_the_environment_is_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    with Supervisor(tmp_path):
        assert os.environ != before
    assert dict(os.environ) == before
