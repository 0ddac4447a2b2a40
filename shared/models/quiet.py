"""Silences transformers' own progress bars for a while: a bar for each load is noise in a server's log.

The previous state comes back after; warnings and errors are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers draws no progress bars."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # its functions carry no types

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
