"""What a virtual world is made of: hosts, links, speeds, stragglers, failures."""

from polytempo.cluster.cluster import Cluster, Link
from polytempo.cluster.faults import Crash, Fault, Pause
from polytempo.cluster.presets import ethernet, infiniband, internet, one_host
from polytempo.cluster.stragglers import Stragglers, constant, exponential, lognormal, occasional, slow_host, uniform

__all__ = [
    "Cluster",
    "Crash",
    "Fault",
    "Link",
    "Pause",
    "Stragglers",
    "constant",
    "ethernet",
    "exponential",
    "infiniband",
    "internet",
    "lognormal",
    "occasional",
    "one_host",
    "slow_host",
    "uniform",
]
