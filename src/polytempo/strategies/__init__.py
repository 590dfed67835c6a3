"""The recipes that people ask for by name: each a few lines over the axes, with the paper that it comes from."""

from polytempo.strategies.adasum import adasum
from polytempo.strategies.delayed_sgd import delayed_sgd
from polytempo.strategies.diloco import diloco
from polytempo.strategies.gossip import gossip
from polytempo.strategies.hogwild import hogwild
from polytempo.strategies.local_sgd import local_sgd
from polytempo.strategies.parameter_averaging import parameter_averaging
from polytempo.strategies.post_local_sgd import post_local_sgd
from polytempo.strategies.robust_sgd import robust_sgd
from polytempo.strategies.shared_memory import shared_memory
from polytempo.strategies.sync_sgd import sync_sgd

__all__ = [
    "adasum",
    "delayed_sgd",
    "diloco",
    "gossip",
    "hogwild",
    "local_sgd",
    "parameter_averaging",
    "post_local_sgd",
    "robust_sgd",
    "shared_memory",
    "sync_sgd",
]
