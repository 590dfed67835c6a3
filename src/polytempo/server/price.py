"""What a synchronous step with a parameter server costs: every worker pushes its gradient and pulls the parameters."""

from __future__ import annotations

from polytempo.core import Price


def server_price(num_workers: int, num_bytes: float, latency_s: float, bytes_per_s: float, *, shards: int = 1) -> Price:
    """N·K/S bytes through each of S shards on hosts of their own, there and back; no less than K through a worker.

        2α + 2 · max(N/S, 1) · K/B

    Raises ValueError for fewer than one shard. Source: F. Iandola et al., "FireCaffe", 2016, section 4.
    """
    if shards < 1:
        raise ValueError(f"a parameter server has at least 1 shard, got {shards}")
    if num_workers == 1:
        return Price(0, 0.0, 0.0)
    busiest = max(num_workers / shards, 1.0) * num_bytes
    return Price(2, busiest, 2 * (latency_s + busiest / bytes_per_s))
