"""Moves what this process holds in memory onto huge pages: once, when its weights are loaded.

A decode step reads every weight. On pages of 4 KiB, and in a virtual machine above all, a third of that time goes into
address translation. Linux copies resident memory to pages of 2 MiB when it is asked to (MADV_COLLAPSE, since 6.1).
Temporary tensors stay on small pages, because filling a huge one for each of them costs more than it saves.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25
_HUGE = 2 * 2**20  # bytes
_AT_ONCE = 64 * 2**20  # bytes a call: one page that cannot be had does not fail the rest
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?$")
_HELD = re.compile(r"^AnonHugePages: +(\d+) kB", re.MULTILINE)

log = logging.getLogger(__name__)


def use_huge_pages() -> int:
    """Bytes that were asked for and granted; 0 where the system has no such thing."""
    advise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    try:
        mappings = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    if advise is None:
        return 0
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    granted = 0
    for start, size in _ranges(mappings):
        if advise(start, size, _MADV_COLLAPSE) == 0:
            granted += size
    log.info("%d MiB lie on huge pages", granted >> 20)
    return granted


def bytes_on_huge_pages() -> int:
    """What this process holds on huge pages now; 0 where the system does not say."""
    try:
        found = _HELD.search(Path("/proc/self/smaps_rollup").read_text(encoding="ascii"))
    except OSError:
        return 0
    return int(found[1]) * 1024 if found is not None else 0


def _ranges(mappings: list[str]) -> Iterator[tuple[int, int]]:  # (address, bytes)
    """The whole huge pages of private memory that belongs to no file, in pieces."""
    for line in mappings:
        found = _MAPPING.match(line)
        if found is None:
            continue
        start = -(-int(found[1], 16) // _HUGE) * _HUGE
        end = int(found[2], 16) // _HUGE * _HUGE
        for piece in range(start, end, _AT_ONCE):
            yield piece, min(_AT_ONCE, end - piece)
