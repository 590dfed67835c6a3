"""The recipes that people ask for by name: each a few lines over the axes, with the paper that it comes from."""

from polytempo.strategies.adasum import adasum
from polytempo.strategies.async_sgd import async_sgd
from polytempo.strategies.backup_workers import backup_workers
from polytempo.strategies.dc_asgd import dc_asgd
from polytempo.strategies.delayed_sgd import delayed_sgd
from polytempo.strategies.diloco import diloco
from polytempo.strategies.downpour import downpour
from polytempo.strategies.easgd import easgd
from polytempo.strategies.flexrr import flexrr
from polytempo.strategies.gossip import gossip
from polytempo.strategies.hogwild import hogwild
from polytempo.strategies.local_sgd import local_sgd
from polytempo.strategies.parameter_averaging import parameter_averaging
from polytempo.strategies.post_local_sgd import post_local_sgd
from polytempo.strategies.robust_sgd import robust_sgd
from polytempo.strategies.shared_memory import shared_memory
from polytempo.strategies.softsync import softsync
from polytempo.strategies.ssp import ssp
from polytempo.strategies.staleness_aware import staleness_aware
from polytempo.strategies.sync_sgd import sync_sgd

__all__ = [
    "adasum",
    "async_sgd",
    "backup_workers",
    "dc_asgd",
    "delayed_sgd",
    "diloco",
    "downpour",
    "easgd",
    "flexrr",
    "gossip",
    "hogwild",
    "local_sgd",
    "parameter_averaging",
    "post_local_sgd",
    "robust_sgd",
    "shared_memory",
    "softsync",
    "ssp",
    "staleness_aware",
    "sync_sgd",
]
