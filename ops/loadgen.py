"""`redraft loadgen`: load against any OpenAI-compatible server, streamed, and what its users saw.

Open loop (`--rate`) or closed loop (`--concurrency`). Definitions are those of public load generators: TTFT to the
first chunk with text, ITL = (last - first) / (tokens - 1) for each request, throughput over the whole measured span.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from ops.demo_chat import served_model
from ops.loadgen_beside import beside
from ops.loadgen_figures import figures, read_goal
from ops.loadgen_request import Form, Prompt, Sample
from ops.loadgen_traffic import Plan, run
from ops.percentiles import SHOWN
from ops.prompt_sets import domains, load_prompts, read_traffic
from ops.run_file import read_run_file
from shared.config import load_config
from shared.errors import ConfigError, ServiceDown

KEY_VARIABLES = ("REDRAFT_API_KEY", "OPENAI_API_KEY")
FAILED = 1
_USERS = 4
_TIMEOUT = httpx.Timeout(10.0, read=600.0, pool=None)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="server, with or without /v1; default: the running stack")
    parser.add_argument("--model", metavar="X", help="default: the first that the server lists")
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="what is asked")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: ${' or $'.join(KEY_VARIABLES)}")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=float, metavar="N", help="open loop: N requests a second, Poisson (default: a closed loop)"
    )
    pace.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"closed loop: N users who wait for their answers (default: {_USERS})",
    )
    parser.add_argument(
        "--requests", type=int, default=100, metavar="N", help="requests sent at most, warm-up included"
    )
    parser.add_argument("--duration", type=float, metavar="S", help="send nothing after S seconds (default: no limit)")
    parser.add_argument("--warmup", type=int, default=0, metavar="N", help="first requests that are not measured")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and of the order of prompts")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSONL: prompt, messages or turns a line (default: the shipped prompts)",
    )
    parser.add_argument(
        "--domains", metavar="A,B", help=f"whose shipped prompts: of {', '.join(domains())} (default: all)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of sampling; 0 is greedy")
    parser.add_argument("--extra", default="{}", metavar="JSON", help='more fields, such as {"ignore_eos": true}')
    parser.add_argument("--no-metadata", action="store_true", help="for servers that refuse the field metadata")
    parser.add_argument(
        "--slo", metavar="GOALS", help="ttft=0.5,itl=0.1,e2e=10 in seconds: what goodput counts (default: none)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and every sample there")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="compare with aiperf's JSON export of the same load"
    )


def main(arguments: Namespace) -> int:
    plan, goal = _plan(arguments), read_goal(arguments.slo)
    prompts, extra = _prompts(arguments), _extra(arguments.extra)
    api, headers = _api(arguments), _headers(arguments)
    model = arguments.model or served_model(api, get=partial(httpx.get, headers=headers))
    form = Form(
        chat=arguments.endpoint == "chat",
        model=model,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        metadata=not arguments.no_metadata,
        extra=tuple(extra.items()),
    )
    samples = asyncio.run(_drive(api, headers, form, prompts, plan))
    report = {
        "server": {"url": api, "model": model, "endpoint": arguments.endpoint},
        "load": asdict(plan) | {"max_tokens": form.max_tokens, "temperature": form.temperature},
        **figures(samples, warm_up=arguments.warmup, goal=goal),
    }
    Console().print(render(report))
    if arguments.json is not None:
        _write(arguments.json, report, samples)
    if not report["requests"]["measured"] or report["requests"]["failed"] == report["requests"]["measured"]:
        return FAILED
    return 0 if arguments.beside is None or _compare(report, arguments.beside) else FAILED


def _compare(report: dict[str, Any], file: Path) -> bool:
    rows = beside(report, file)
    table = Table(title=f"beside {file.name}", title_justify="left")
    for column in ("", "ours", "theirs", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        mark = "" if row.agrees else "  differs"
        table.add_row(row.name, f"{row.ours:,.2f}", f"{row.theirs:,.2f}", f"{row.ratio:.3f}{mark}")
    Console().print(table)
    return all(row.agrees for row in rows)


async def _drive(api: str, headers: dict[str, str], form: Form, prompts: list[Prompt], plan: Plan) -> list[Sample]:
    # No bound on connections: a queue in the client would hide one in the server.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    ended = 0

    def heard(_: Sample) -> None:
        nonlocal ended
        ended += 1
        if sys.stderr.isatty():
            print(f"\r{ended} answers ", end="", file=sys.stderr, flush=True)

    async with httpx.AsyncClient(
        base_url=api, headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False
    ) as client:
        samples = await run(client, form, prompts, plan, heard)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    return samples


def render(report: dict[str, Any]) -> Table:
    """One table: latencies by percentile, then rates and counts."""
    requests, rates, tokens, goal = (report[name] for name in ("requests", "rates", "tokens", "goal"))
    table = Table(title=f"{report['server']['model']} at {report['server']['url']}", title_justify="left")
    for column in ("ms", "mean", *(f"p{number}" for number in SHOWN), "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows = (("TTFT", "ttft"), ("ITL", "itl"), ("E2E", "e2e"), ("gap between chunks", "gap"), ("sent late", "late"))
    for name, key in rows:
        found = report[key]
        if found["count"]:
            shown = ("mean", *(f"p{number}" for number in SHOWN), "max")
            table.add_row(name, *(f"{found[column] * 1e3:,.1f}" for column in shown))
    lines = [
        f"{requests['measured'] - requests['failed']} answered, {requests['failed']} failed of {requests['measured']} "
        f"measured (after {requests['warm_up']} for warm-up) in {report['seconds']:.1f} s",
        f"{_number(rates['requests'])} requests/s, {_number(rates['output_tokens'])} output tokens/s",
    ]
    if any(goal[name] is not None for name in ("ttft", "itl", "e2e")):
        lines.append(
            f"goodput {_number(rates['good_requests'])} requests/s: {goal['met']} of {goal['of']} met the goal"
        )
    drafts = report["drafts"]
    if drafts["tested"]:
        alpha = drafts["accepted"] / drafts["tested"]
        lines.append(f"α {alpha:.3f} ({drafts['accepted']} of {drafts['tested']}), {', '.join(drafts['versions'])}")
    if not tokens["counted_by_server"]:
        lines.append("tokens are chunks with text: the server gives no usage")
    lines += [f"{count} × {error}" for error, count in requests["errors"].items()]
    table.caption, table.caption_justify = "\n".join(lines), "left"
    return table


def _plan(arguments: Namespace) -> Plan:
    concurrency = arguments.concurrency if arguments.concurrency or arguments.rate else _USERS
    for flag, value in (
        ("--rate", arguments.rate),
        ("--concurrency", concurrency),
        ("--requests", arguments.requests),
        ("--duration", arguments.duration),
        ("--max-tokens", arguments.max_tokens),
    ):
        if value is not None and value <= 0:
            raise ConfigError(flag, f"{value} is not positive", "Give a number above 0")
    if not 0 <= arguments.warmup < arguments.requests:
        raise ConfigError("--warmup", f"{arguments.warmup} of {arguments.requests} requests", "Leave some to measure")
    return Plan(arguments.requests, arguments.rate, concurrency, arguments.duration, arguments.seed)


def _prompts(arguments: Namespace) -> list[Prompt]:
    if arguments.prompts is not None:
        return [Prompt(row.domain, row.messages) for row in read_traffic(arguments.prompts)]
    chosen = [name.strip() for name in arguments.domains.split(",")] if arguments.domains else domains()
    return [
        Prompt(domain, [{"role": "user", "content": text}])
        for domain in chosen
        for text in load_prompts(domain, "demo")
    ]


def _api(arguments: Namespace) -> str:
    if arguments.url:
        url = str(arguments.url).rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError("--url", f"{arguments.url!r} is no URL", "Write http://127.0.0.1:8000")
        return url
    config = load_config()
    running = read_run_file(config.home_path)
    return running.api if running else f"http://{config.serve.host}:{config.serve.port}"


def _headers(arguments: Namespace) -> dict[str, str]:
    key = arguments.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError("--extra", f"is not JSON ({error})", 'Write {"ignore_eos": true}') from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra", "is not a JSON object", 'Write {"ignore_eos": true}')
    return extra


def _write(file: Path, report: dict[str, Any], samples: list[Sample]) -> None:
    rows = [asdict(sample) | {"gaps": len(sample.gaps)} for sample in samples]
    try:
        file.write_text(json.dumps(report | {"samples": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ServiceDown(f"{file} cannot be written ({error.strerror})") from error


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
