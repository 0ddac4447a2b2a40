"""`redraft plan`: replicas, devices and cost for a load, from a model's config and a device's figures alone.

Nothing is loaded and no step is ever timed to answer. Of `--device cpu` a memory read, a matrix product and single
calls are timed here, unless they are given. `--validate` is the one mode that runs the engine, to compare it with what
was predicted.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from ops import plan_text
from ops.percentiles import percentile
from ops.plan_answer import Answer, Question, answer
from ops.plan_calls import NO_CALLS, Calls, count_calls
from ops.plan_capacity import Goal, Load
from ops.plan_device import REACHED_BANDWIDTH, REACHED_FLOPS, TABLE, Device, Given, device_of, with_given
from ops.plan_rounds import ALPHAS, KINDS, Kind
from ops.plan_shape import BYTES, ModelShape, read_shape
from shared.config import DEFAULT_TARGET, DrafterConfig, EngineConfig, load_config
from shared.errors import ConfigError
from shared.openmp import openmp_environment

_GPU_CHUNK = 2048  # prompt tokens a step, where a step of few rows leaves most of the arithmetic idle


def add_arguments(parser: ArgumentParser) -> None:
    what = parser.add_argument_group("model and device")
    what.add_argument("--target", default=DEFAULT_TARGET, metavar="X", help="config.json, a folder, or a hub name")
    what.add_argument("--dtype", default="auto", choices=["auto", *BYTES], help="weight format")
    what.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help=f"one of {', '.join(TABLE)}, or cpu: this machine's, measured where it is not given",
    )
    what.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="memory of the device, in GB (default: the table's, or this machine's)",
    )
    what.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/s",
        help="read bandwidth that is really reached, in GB/s (default: see --reached; of a CPU measured)",
    )
    what.add_argument(
        "--flops",
        type=float,
        metavar="TFLOP/s",
        help="arithmetic that is really reached, in TFLOP/s (default: see --reached; of a CPU measured)",
    )
    what.add_argument(
        "--reached",
        metavar="B,F",
        help=f"shares of the table's peaks that are reached (default: {REACHED_BANDWIDTH},{REACHED_FLOPS})",
    )
    what.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="of one device for an hour, in any currency (default: no costs are shown)",
    )
    load = parser.add_argument_group("load and goals")
    load.add_argument("--qps", type=float, default=1.0, metavar="N", help="requests a second")
    load.add_argument("--prompt-tokens", type=int, default=1000, metavar="N", help="tokens of a prompt")
    load.add_argument("--output-tokens", type=int, default=250, metavar="N", help="tokens of an answer")
    load.add_argument(
        "--ttft", type=float, default=inf, metavar="S", help="most seconds to the first token, mean (default: no goal)"
    )
    load.add_argument(
        "--itl", type=float, default=inf, metavar="S", help="most seconds between tokens, mean (default: no goal)"
    )
    load.add_argument(
        "--utilisation", type=float, default=0.8, metavar="X", help="share of a replica's rate to use, 0 to 1"
    )
    draft = parser.add_argument_group("drafting")
    draft.add_argument(
        "--drafter",
        choices=KINDS,
        help="the way to draft that is worked out; default: the cheapest that this release serves",
    )
    defaults = ", ".join(f"{kind}={alpha:g}" for kind, alpha in ALPHAS.items() if alpha)
    draft.add_argument("--alpha", metavar="X", help=f"one for all, or by kind (default: {defaults})")
    draft.add_argument("--draft-model", metavar="X", help="config of a draft model to compare with (default: none)")
    draft.add_argument("--draft-vocab", type=int, default=32000, metavar="N", help="tokens that an EAGLE-3 head knows")
    draft.add_argument(
        "--gamma-max", type=int, default=DrafterConfig().gamma_max, metavar="N", help="most tokens drafted a step"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-batch", type=int, default=256, metavar="N", help="requests decoded together")
    engine.add_argument(
        "--prefill-tokens",
        type=int,
        metavar="N",
        help=f"prompt tokens a step beside decoding (default: {EngineConfig().prefill_tokens}; of a GPU {_GPU_CHUNK})",
    )
    engine.add_argument(
        "--memory-share",
        type=float,
        default=0.9,
        metavar="X",
        help="share of the device's memory for model and KV, 0 to 1",
    )
    out = parser.add_argument_group("cross-checks and output")
    out.add_argument(
        "--simulate",
        type=int,
        nargs="?",
        const=3000,
        default=0,
        metavar="N",
        help="simulate N requests (default: none; 3000 without a number)",
    )
    out.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulation")
    out.add_argument("--validate", action="store_true", help="compare with this machine's CPU engine")
    out.add_argument("--json", type=Path, metavar="FILE", help="write every number there")


def main(arguments: Namespace) -> int:
    _check(arguments)
    if arguments.drafter == "model" and not arguments.draft_model:
        raise ConfigError("--drafter", "a draft model needs a config", "Name one with --draft-model")
    if arguments.validate:
        return _validate(arguments)
    found = answer(
        question_of(arguments), drafter=arguments.drafter, simulated_requests=arguments.simulate, seed=arguments.seed
    )
    sys.stdout.write(plan_text.render(found, arguments.price))
    if arguments.json is not None:
        _write(arguments.json, _plain(found))
    return 0


def question_of(arguments: Namespace) -> Question:
    """Raises ConfigError naming the flag."""
    target = read_shape(_place(arguments.target), "--target")
    draft = read_shape(_place(arguments.draft_model), "--draft-model") if arguments.draft_model else None
    weights = _weights(arguments)
    device = _device(arguments, weights, target)
    if not device.on_cpu and weights == "int8":
        raise ConfigError("--dtype", "int8 is a CPU format in this release", "Use bf16")
    chunk = arguments.prefill_tokens or (EngineConfig().prefill_tokens if device.on_cpu else _GPU_CHUNK)
    return Question(
        target=target,
        weights=weights,
        device=device,
        load=Load(arguments.qps, arguments.prompt_tokens, arguments.output_tokens, chunk, arguments.utilisation),
        goal=Goal(arguments.ttft, arguments.itl),
        alphas=_alphas(arguments.alpha),
        gamma_max=arguments.gamma_max,
        draft_vocab=arguments.draft_vocab,
        draft_model=draft,
        memory_share=arguments.memory_share,
        max_batch=arguments.max_batch,
        calls=_calls(arguments.target, "--target", weights, device),
        draft_calls=_calls(arguments.draft_model, "--draft-model", weights, device) if draft else NO_CALLS,
    )


def _place(spec: str) -> str:
    """The built-in target's name means its folder; any other name is taken as it is."""
    if spec.lower() != DEFAULT_TARGET:
        return spec
    from shared.models.target import resolve_model

    return str(resolve_model(spec, load_config().home_path, field="--target"))


def _weights(arguments: Namespace) -> str:
    if arguments.dtype != "auto":
        return str(arguments.dtype)
    if arguments.device != "cpu":
        return "bf16"
    from shared.models.target import resolve_device, resolve_weights

    return resolve_weights("auto", resolve_device("cpu"))


def _device(arguments: Namespace, weights: str, target: ModelShape) -> Device:
    given = Given(arguments.memory, arguments.bandwidth, arguments.flops)
    if arguments.device == "cpu":
        if arguments.reached is not None:
            raise ConfigError("--reached", "a CPU has no entry in the table", "Give --bandwidth and --flops as reached")
        if arguments.validate or not given.complete:
            return with_given(_measured(weights, target), given)
    elif arguments.validate:
        raise ConfigError("--validate", f"only a CPU is measured, not {arguments.device}", "Add --device cpu")
    return device_of(arguments.device, given, reached=_shares(arguments.reached))


def _measured(weights: str, target: ModelShape) -> Device:
    print("Measuring this CPU; --memory, --bandwidth and --flops say it instead.", file=sys.stderr)
    threads = load_config().engine.threads or os.cpu_count() or 1
    os.environ.update(
        openmp_environment(threads, alone=True) | os.environ
    )  # as a replica, and before torch starts its threads
    import torch

    from ops.plan_measure import measure_cpu

    torch.set_num_threads(threads)
    return measure_cpu(weights, (target.body + target.head) * BYTES[weights])


def _calls(spec: str, field: str, weights: str, device: Device) -> Calls:
    return count_calls(_place(spec), field, weights) if device.calls.any else NO_CALLS


def _alphas(text: str | None) -> dict[Kind, float]:
    if text is None:
        return {}
    found: dict[Kind, float] = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        kinds = [kind for kind in KINDS if kind != "none" and (kind == name.strip() or not equals)]
        try:
            alpha = float(value)
        except ValueError:
            alpha = -1.0
        if not kinds or not 0 <= alpha <= 1:
            raise ConfigError("--alpha", f"{part!r} is not understood", "Write 0.7, or eagle3=0.7,model=0.8,ngram=0.3")
        found.update(dict.fromkeys(kinds, alpha))
    return found


def _shares(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        bandwidth, flops = (float(part) for part in text.split(","))
    except ValueError:
        bandwidth = flops = 0.0
    if not (0 < bandwidth <= 1 and 0 < flops <= 1):
        raise ConfigError("--reached", f"{text!r} is not two shares", "Write 0.8,0.6")
    return bandwidth, flops


_BOUNDS: dict[str, tuple[float, float]] = {
    "memory": (1e-3, 1e6),
    "bandwidth": (1e-3, 1e6),
    "flops": (1e-6, 1e6),
    "price": (0, 1e9),
    "qps": (1e-6, 1e9),
    "prompt_tokens": (1, 10**8),
    "output_tokens": (2, 10**8),
    "ttft": (1e-6, inf),
    "itl": (1e-6, inf),
    "utilisation": (0.01, 1),
    "draft_vocab": (1, 10**8),
    "gamma_max": (0, 16),
    "max_batch": (1, 1024),
    "prefill_tokens": (1, 10**8),
    "memory_share": (0.01, 1),
    "simulate": (0, 10**6),
}


def _check(arguments: Namespace) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(flag, f"{value:g} is out of range", f"It must be between {least:g} and {most:g}")


def _validate(arguments: Namespace) -> int:
    from ops.plan_compared import validate

    compared = validate(question_of(arguments), arguments.target)
    sys.stdout.write(compared.text())
    if arguments.json is not None:
        _write(arguments.json, compared.plain())
    return 0 if compared.within else 1


def _plain(found: Answer) -> dict[str, Any]:
    tree = asdict(found)
    if found.check is not None:  # thousands of samples say no more than these
        samples = tree["check"]["simulated"]
        for name in ("ttft", "itl"):
            values = samples[name]
            samples[name] = {f"p{p}": percentile(values, p / 100) for p in (50, 90, 95, 99)}
    return tree | {"devices": found.devices}


def _write(file: Path, tree: dict[str, Any]) -> None:
    # JSON has no infinity: a goal that was not set is null.
    text = json.dumps(_finite(tree), indent=1, ensure_ascii=False, allow_nan=False)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--json", f"{file} cannot be written ({error.strerror})", "Name a writable file") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value in (inf, -inf) else value
