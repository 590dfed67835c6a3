"""The network that options describe."""

from __future__ import annotations

from pathlib import Path

from polytempo.cluster import Link
from polytempo.cluster.cluster import rate_of
from polytempo.cluster.cluster_file import read_cluster


def network_of(link: float | None, latency_us: float | None, cluster: Path | None, usual: str = "10gbit") -> Link:
    """The network of --link and --latency-us, or of the file --cluster. ValueError for both."""
    if cluster is None:
        return Link(1e-6 * (50.0 if latency_us is None else latency_us), link or rate_of(usual))
    if link is not None or latency_us is not None:
        raise ValueError(f"--cluster {cluster}: it says the network; leave out --link and --latency-us")
    return read_cluster(cluster).network
