"""The watchdog: a process that outlives its parent only to end whatever the parent leaves behind.

It reads a pipe whose other end only the parent holds, so it wakes when the parent is gone in any way, SIGKILL
included. What to end is known by a mark in the environment, which every descendant inherits (Ray's daemons and
workers too), and by descent from marked processes. It runs as a bare script: standard library and psutil only.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import psutil

MARK_VARIABLE = "_REDRAFT_STACK"  # not REDRAFT_*: those are settings
GRACE_S = 5.0
LOOK_S = 1.0
SETTLED_S = 10.0  # between a fork and its exec a process still has its parent's environment


class Family:
    """Every process that was seen to carry the mark, or to descend from one that does; never this one.

    Looked at again and again, because a process that rewrites its title may overwrite its environment, and then
    only its parent tells; and when the parent has died, only memory does.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._members: dict[int, psutil.Process] = {}
        self._strangers: dict[int, psutil.Process] = {}  # too old to change: what execs late, execs early

    def look(self) -> list[psutil.Process]:
        """The living members. A number that was used anew is a new process."""
        running = {process.pid: process for process in psutil.process_iter() if process.pid != os.getpid()}
        for known in (self._members, self._strangers):
            for pid in [pid for pid, process in known.items() if running.get(pid) != process]:
                del known[pid]
        unknown = {pid: process for pid, process in running.items() if pid not in self._members}
        for pid, process in list(unknown.items()):
            if pid not in self._strangers and self._is_marked(process):
                self._members[pid] = unknown.pop(pid)
        while adopted := [pid for pid, process in unknown.items() if _parent(process) in self._members]:
            self._members.update({pid: unknown.pop(pid) for pid in adopted})
        old = time.time() - SETTLED_S
        self._strangers = {pid: process for pid, process in unknown.items() if process.create_time() < old}
        return [process for process in self._members.values() if _runs(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK_VARIABLE) == self._mark
        except psutil.Error:
            return False

    def end(self, *, grace_s: float = GRACE_S) -> None:
        """Ends every member, politely first, those that appear meanwhile included."""
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GRACE_S)):
            deadline = time.monotonic() + patience_s
            told: set[int] = set()
            while left := self.look():
                if time.monotonic() > deadline:
                    break
                for process in left:
                    if process.pid not in told:
                        told.add(process.pid)
                        _send(process, number)
                time.sleep(0.05)
            if not left:
                return


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def main() -> None:
    family, parent = Family(sys.argv[1]), os.getppid()
    # A Ctrl-C or a hang-up of the terminal is the parent's business; this process must outlast it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Asking for the parent as well: a fork of it that never execs would hold the pipe open.
    while os.getppid() == parent:
        if select.select([0], [], [], LOOK_S)[0] and not os.read(0, 4096):
            break
        family.look()
    family.end()


if __name__ == "__main__":
    main()
