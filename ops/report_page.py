"""The atlas as one self-contained HTML page: tables of counts with α, the picture inside, nothing to be fetched."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ops.report_atlas import Atlas, Read, Tally
from ops.report_picture import ranked
from ops.report_sources import Source

MOST_REJECTED = 40
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #30363d; background: #fff; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
table { border-collapse: collapse; margin: .6rem 0; display: block; overflow-x: auto }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid #e5e7eb; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
code { background: #f3f4f6; padding: 0 .25rem; white-space: pre-wrap; overflow-wrap: anywhere }
img { width: 100%; height: auto }
mark { background: #fde68a }
.bar { display: inline-block; height: .7rem; background: #0b6e99; vertical-align: middle }
"""


def page(atlas: Atlas, source: Source, read: Read, png: bytes, title: str) -> str:
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(atlas, source),
        f'<img alt="α in four panels" src="data:image/png;base64,{b64encode(png).decode()}">',
        _tallies(
            "By position in the draft", "position", {f"{n}": atlas.by_position[n] for n in sorted(atlas.by_position)}
        ),
        _tallies("By class of the token that the target said", "class", ranked(atlas.by_class)),
        _tallies("By domain", "domain", ranked(atlas.by_domain)),
        _tallies("By temperature", "temperature", dict(sorted(atlas.by_temperature.items()))),
        _tallies("By drafter version", "version", ranked(atlas.by_version)),
        _grid(atlas),
        _rejected(atlas, read),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def agreement(atlas: Atlas, source: Source) -> str:
    """What the traces say beside what was counted while serving."""
    total = atlas.total
    said = f"{total.accepted:,} of {total.tested:,} in these traces, {source.accepted:,} of {source.tested:,} counted"
    if (total.accepted, total.tested) == (source.accepted, source.tested):
        return f"{said}: they agree"
    return f"{said}: " + (
        "; ".join(source.missing) or "requests ended while this was read, or their traces are on the way"
    )


def _facts(atlas: Atlas, source: Source) -> str:
    total = atlas.total
    alpha = f"{total.accepted / total.tested:.3f}" if total.tested else "–"
    lines = (
        f"From {source.name}: {atlas.requests:,} requests, {atlas.tokens:,} tokens, {atlas.rounds:,} rounds.",
        f"α {alpha}: {agreement(atlas, source)}.",
    )
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _tallies(title: str, name: str, tallies: Mapping[str, Tally]) -> str:
    rows = (
        f"<tr><td>{escape(key)}</td>{_number(tally.accepted)}{_number(tally.tested)}{_alpha(tally)}</tr>"
        for key, tally in tallies.items()
    )
    return _table(title, (name, "accepted", "tested", "α", ""), rows)


def _grid(atlas: Atlas) -> str:
    domains, classes = list(ranked(atlas.by_domain)), list(ranked(atlas.by_class))
    rows = []
    for domain in domains:
        cells = []
        for kind in classes:
            tally = atlas.class_by_domain.get((domain, kind), Tally())
            shown = f"{tally.accepted / tally.tested:.2f} <small>of {tally.tested:,}</small>" if tally.tested else ""
            cells.append(f'<td class="n">{shown}</td>')
        rows.append(f"<tr><td>{escape(domain)}</td>{''.join(cells)}</tr>")
    return _table("α by domain and class", ("domain", *classes), rows)


def _rejected(atlas: Atlas, read: Read) -> str:
    rows = []
    for found in atlas.most_rejected(MOST_REJECTED):
        instead = ", ".join(f"<code>{_text(read([token]))}</code> {n}" for token, n in found.instead.most_common(4))
        contexts = "<br>".join(
            f"<code>…{_text(before)}<mark>{_text(read([found.draft]))}</mark></code>" for before in found.contexts[:2]
        )
        rows.append(
            f"<tr><td><code>{_text(read([found.draft]))}</code></td>{_number(found.count)}"
            f"{_number(atlas.drafts[found.draft])}<td>{instead}</td><td>{contexts}</td></tr>"
        )
    head = ("draft", "rejected", "tested", "the target said", "where")
    return _table(f"The {len(rows)} most rejected drafts", head, rows)


def _table(title: str, head: Sequence[str], rows: Iterable[str]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<h2>{escape(title)}</h2><table><tr>{cells}</tr>{''.join(rows)}</table>"


def _alpha(tally: Tally) -> str:
    alpha = tally.accepted / tally.tested
    return f'<td class="n">{alpha:.3f}</td><td><span class="bar" style="width:{alpha * 8:.2f}rem"></span></td>'


def _number(value: int) -> str:
    return f'<td class="n">{value:,}</td>'


def _text(text: str) -> str:
    """Spaces and line ends are part of what a token is, so they are shown."""
    return escape(text).replace("\n", "⏎") or "∅"
