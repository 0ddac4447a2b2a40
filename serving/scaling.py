"""How many replicas there should be: enough for the requests that wait and for the tokens that they hold.

Requests alone mislead: a few long contexts fill a replica's KV cache while its batch looks empty. So the wish is the
larger of the two. Bounds, delays and factors of the autoscaling configuration are applied by Serve afterwards. Serve
carries this module to its controller by value, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any, Protocol

KV_USAGE = "kv_usage"  # share of a replica's KV blocks that are taken, 0..1
FULL = 0.8  # a replica beyond this share soon makes requests wait for blocks


class Blocks(Protocol):
    @property
    def blocks_free(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...


def kv_usage(blocks: Blocks) -> float:
    return 1 - blocks.blocks_free / blocks.blocks_total if blocks.blocks_total else 0.0


def by_requests_and_tokens(context: Any) -> tuple[float, dict[str, Any]]:
    """(wished replicas, nothing to remember) of a Serve AutoscalingContext.

    Requests: all that run or wait, over `target_ongoing_requests`. Tokens: the sum of the replicas' shares of taken KV
    blocks, over FULL.
    """
    target = context.config.get_target_ongoing_requests()
    usage = (context.aggregated_metrics or {}).get(KV_USAGE, {})
    return max(context.total_num_requests / target, sum(usage.values()) / FULL), {}
