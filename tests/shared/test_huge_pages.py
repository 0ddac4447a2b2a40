"""Huge pages: the right ranges are asked for, and what lies on them is what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.models import huge_pages
from shared.models.huge_pages import bytes_on_huge_pages, use_huge_pages

MIB = 2**20


def test_only_whole_huge_pages_of_memory_without_a_file_are_asked_for() -> None:
    mappings = [
        "7f0000100000-7f0000700000 rw-p 00000000 00:00 0 ",  # from 1 to 7 MiB: two whole pages
        "7f0001000000-7f0001100000 rw-p 00000000 00:00 0 ",  # too small
        "7f0002000000-7f0002400000 r--p 00000000 00:00 0 ",  # cannot be written to
        "7f0003000000-7f0003400000 rw-p 00000000 fe:00 123 /usr/lib/libc.so",
        "7f0004000000-7f0004400000 rw-s 00000000 00:01 9 /dev/shm/plasma",
        "7f0005000000-7f0005400000 rw-p 00000000 00:00 0 [stack]",
        "550000000000-550009000000 rw-p 00000000 00:00 0                          [heap]",  # 144 MiB, in pieces
    ]
    assert list(huge_pages._ranges(mappings)) == [
        (0x7F0000200000, 4 * MIB),
        (0x550000000000, 64 * MIB),
        (0x550004000000, 64 * MIB),
        (0x550008000000, 16 * MIB),
    ]


def test_what_lies_on_huge_pages_is_unchanged() -> None:
    table = torch.arange(8 * MIB, dtype=torch.int32)  # 32 MiB
    expected = int(table.sum())
    granted = use_huge_pages()
    assert int(table.sum()) == expected
    assert granted % (2 * MIB) == 0
    assert bytes_on_huge_pages() >= min(granted, 1), "what was granted is seen to be there"


def test_a_system_without_them_is_served_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(Path, "read_text", missing)
    assert use_huge_pages() == bytes_on_huge_pages() == 0
