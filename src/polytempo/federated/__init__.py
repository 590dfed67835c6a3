"""Federated learning: clients with data of their own, their partitions, and strategies of rounds."""

from polytempo.federated import strategies
from polytempo.federated.clients import Client, Clients, Cohorts, PartitionFacts, clients
from polytempo.federated.partitions import Partition, by, by_size, dirichlet, iid, shards
from polytempo.federated.strategies import (
    fed_adagrad,
    fed_adam,
    fed_avg,
    fed_avg_m,
    fed_nova,
    fed_prox,
    fed_yogi,
    scaffold,
)

__all__ = [
    "Client",
    "Clients",
    "Cohorts",
    "Partition",
    "PartitionFacts",
    "by",
    "by_size",
    "clients",
    "dirichlet",
    "fed_adagrad",
    "fed_adam",
    "fed_avg",
    "fed_avg_m",
    "fed_nova",
    "fed_prox",
    "fed_yogi",
    "iid",
    "scaffold",
    "shards",
    "strategies",
]
