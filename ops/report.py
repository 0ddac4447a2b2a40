"""`redraft report`: the atlas of rejections, as an HTML page and a picture, from the live stream or a learner's buffer.

Reads only. Its counts are of the same rounds as the replicas' counters, and the report says whether they agree.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ops import settings
from ops.report_atlas import Atlas, Read, Tally
from ops.report_page import MOST_REJECTED, agreement, page
from ops.report_picture import picture
from ops.report_sources import Source, live, newest_buffer, recorded
from ops.report_words import Class, class_of
from ops.run_file import read_run_file, redis_to_ask
from shared.config import Config
from shared.errors import ConfigError
from shared.models.fingerprint import checkpoint_fingerprint
from shared.models.target import resolve_model
from shared.store import Store

NOTHING = 1


def add_arguments(parser: ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument("--buffer", metavar="FILE", help="recorded traces: a buffer.sqlite, or `newest` of this home")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="page; PNG beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")


def main(arguments: Namespace) -> int:
    config = settings.read_settings(arguments).config
    folder = resolve_model(config.target.model, config.home_path, field="target.model")
    source = _source(arguments, config, checkpoint_fingerprint(folder, config.home_path, "target.model"))
    read, kind = _words(folder)
    atlas = Atlas()
    for record in source.traces:
        atlas.add(record, read, kind)
    if not atlas.total.tested:
        why = "".join(f"; {reason}" for reason in source.missing)
        print(f"{source.name} has no tested drafts ({atlas.requests} requests{why})", file=sys.stderr)
        return NOTHING
    alpha = atlas.total.accepted / atlas.total.tested
    title = f"Rejections of {folder.name}: α {alpha:.3f} over {atlas.total.tested:,} tested drafts"
    png = picture(atlas, title)
    _write(arguments.out, page(atlas, source, read, png, title).encode())
    _write(arguments.out.with_suffix(".png"), png)
    if arguments.json is not None:
        _write(arguments.json, (json.dumps(counts(atlas, source, read), indent=1, ensure_ascii=False) + "\n").encode())
    print(f"{title}\n{agreement(atlas, source)}\n{arguments.out}, {arguments.out.with_suffix('.png')}")
    return 0


def counts(atlas: Atlas, source: Source, read: Read) -> dict[str, Any]:
    """Counts and nothing but counts."""

    def plain(tallies: Mapping[Any, Tally]) -> dict[str, dict[str, int]]:
        return {str(key): asdict(tally) for key, tally in tallies.items()}

    return {
        "source": {
            "name": source.name,
            "accepted": source.accepted,
            "tested": source.tested,
            "missing": source.missing,
        },
        "requests": atlas.requests,
        "tokens": atlas.tokens,
        "rounds": atlas.rounds,
        "drafted": atlas.drafted,
        "total": asdict(atlas.total),
        "by_position": plain(atlas.by_position),
        "by_class": plain(atlas.by_class),
        "by_domain": plain(atlas.by_domain),
        "by_temperature": plain(atlas.by_temperature),
        "by_version": plain(atlas.by_version),
        "most_rejected": [
            {
                "draft": read([found.draft]),
                "rejected": found.count,
                "tested": atlas.drafts[found.draft],
                "instead": {read([token]): count for token, count in found.instead.most_common(4)},
                "contexts": found.contexts,
            }
            for found in atlas.most_rejected(MOST_REJECTED)
        ],
    }


def _source(arguments: Namespace, config: Config, target: str) -> Source:
    if arguments.buffer is not None:
        home = config.home_path
        return recorded(newest_buffer(home) if arguments.buffer == "newest" else Path(arguments.buffer), target)
    instead = ", or read recorded traces with --buffer newest"
    store = Store(redis_to_ask(config, read_run_file(config.home_path), instead=instead), config.redis.prefix)
    try:
        return live(store, target)
    finally:
        store.close()


def _words(folder: Path) -> tuple[Read, Any]:
    """How to read tokens of the target, and the class of each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    special = set(tokenizer.all_special_ids)
    known: dict[int, Class] = {}

    def kind(token: int) -> Class:
        if token not in known:
            known[token] = class_of(str(tokenizer.decode([token])), special=token in special)
        return known[token]

    return lambda ids: str(tokenizer.decode(list(ids))), kind


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise ConfigError("--out", f"{file} cannot be written ({error.strerror})", "Name a writable file") from error
