"""What the values of a configuration must keep to: the span of each number, and the rules between several of them.

Types and unknown keys are refused earlier, by `shared.config`, whose sections this reads and does not know how to make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.config import Config

# Key -> (least, most) of every number that has bounds; None is unbounded.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "drafter.gamma_max": (0, 16),
    "drafter.exploration": (0, 1),
    "drafter.swap_poll_s": (0.01, 3600),
    "engine.block_size": (1, 1024),
    "engine.kv_tokens": (16, None),
    "engine.max_batch": (1, 1024),
    "engine.prefill_tokens": (1, None),
    "engine.max_queue": (1, None),
    "engine.max_context": (0, None),
    "engine.threads": (0, 1024),
    "serve.port": (0, 65535),
    "serve.replicas": (1, 1024),
    "serve.replica_cpus": (0, None),
    "serve.replica_gpus": (0, None),
    "serve.drain_s": (0, None),
    "serve.max_domains": (1, 4096),
    "trace.topk": (1, 4096),
    "trace.position_share": (0, 1),
    "trace.feature_share": (0, 1),
    "trace.feature_tokens": (0, None),
    "trace.queue": (1, None),
    "trace.stream_bytes": (65536, None),
    "privacy.share": (0, 1),
    "privacy.keep_s": (0, None),
    "redis.maxmemory": (2**20, None),
    "learner.threads": (1, 1024),
    "learner.cpus": (0, None),
    "learner.gpus": (0, None),
    "learner.lora_rank": (1, 1024),
    "learner.lora_alpha": (1, None),
    "learner.learning_rate": (1e-8, 1),
    "learner.batch_tokens": (1, None),
    "learner.attempt_tokens": (1, None),
    "learner.min_fresh_tokens": (1, None),
    "learner.budget_share": (0.001, 1),
    "learner.replay_share": (0, 0.95),
    "learner.rejected_weight": (0, 100),
    "learner.ttt_steps": (1, 16),
    "learner.buffer_recent": (1, None),
    "learner.buffer_reservoir": (0, None),
    "gate.confidence": (0.5, 0.9999),
    "gate.min_requests": (2, None),
    "gate.min_gain": (-1, 100),
    "gate.probe_loss": (0, 1),
    "gate.resamples": (100, None),
    "gate.wait_s": (0, None),
    "rollout.watch_tokens": (0, None),
    "rollout.confidence": (0.5, 0.9999),
    "rollout.fall": (0, 1),
    "rollout.slowdown": (0, 100),
    "rollout.cooldown_tokens": (0, None),
    "mlflow.window_s": (0.1, None),
}


def validate(config: Config) -> None:
    """Raises ConfigError naming the key, what is wrong with it, and what would be right."""
    for key, (least, most) in BOUNDS.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if not (least <= value and (most is None or value <= most)):
            span = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ConfigError(key, f"{value} is out of range", f"It must be {span}.")
    gamma = config.drafter.gamma
    if gamma != "auto" and not 0 <= gamma <= config.drafter.gamma_max:
        raise ConfigError(
            "drafter.gamma",
            f"{gamma} is not between 0 and drafter.gamma_max ({config.drafter.gamma_max})",
            "Raise drafter.gamma_max or lower gamma.",
        )
    if config.trace.stream_bytes * 2 > config.redis.maxmemory:
        raise ConfigError(
            "trace.stream_bytes",
            f"{config.trace.stream_bytes} is more than half of redis.maxmemory ({config.redis.maxmemory})",
            "Adapter blobs and the champion pointer need the rest: lower it or raise redis.maxmemory.",
        )
