"""Parts of a virtual world: hosts, links, speeds, stragglers, failures."""

from polytempo.cluster.cluster import Cluster, Crash, Fault, Link, Pause
from polytempo.cluster.collective_link import CollectiveLink
from polytempo.cluster.computing_time import JobPace, KernelSpeed, Speeds
from polytempo.cluster.device_speeds import DeviceSpeeds
from polytempo.cluster.presets import bucket, ethernet, infiniband, internet, one_host
from polytempo.cluster.slow_spells import CorrelatedStragglers, correlated, slow_spells
from polytempo.cluster.stragglers import Stragglers, constant, exponential, lognormal, occasional, slow_host, uniform

__all__ = [
    "Cluster",
    "CollectiveLink",
    "CorrelatedStragglers",
    "Crash",
    "DeviceSpeeds",
    "Fault",
    "JobPace",
    "KernelSpeed",
    "Link",
    "Pause",
    "Speeds",
    "Stragglers",
    "bucket",
    "constant",
    "correlated",
    "ethernet",
    "exponential",
    "infiniband",
    "internet",
    "lognormal",
    "occasional",
    "one_host",
    "slow_host",
    "slow_spells",
    "uniform",
]
