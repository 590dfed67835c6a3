"""Federated learning: clients with data of their own, their partitions, and strategies of rounds."""

from polytempo.federated import strategies
from polytempo.federated.arrivals import Arrivals, ClientArrival
from polytempo.federated.client_folders import from_folder
from polytempo.federated.client_tests import ClientTests
from polytempo.federated.clients import Client, Clients, Cohorts, PartitionFacts, clients
from polytempo.federated.partitions import Partition, by, by_size, dirichlet, iid, shards
from polytempo.federated.privacy import private
from polytempo.federated.real_clients import RoundRules, join, make_tickets, revoke, serve
from polytempo.federated.sample_privacy import dp_sgd
from polytempo.federated.sampling import Sampling, both, day_and_night, drop_outs, over_selected, weighted
from polytempo.federated.secure_sum import FixedPoint, secure_bytes, secure_sum
from polytempo.federated.strategies import (
    fed_adagrad,
    fed_adam,
    fed_avg,
    fed_avg_m,
    fed_bn,
    fed_buff,
    fed_coded,
    fed_nova,
    fed_prox,
    fed_rep,
    fed_robust,
    fed_yogi,
    q_fed_avg,
    scaffold,
    secure,
)

__all__ = [
    "Arrivals",
    "Client",
    "ClientArrival",
    "ClientTests",
    "Clients",
    "Cohorts",
    "FixedPoint",
    "Partition",
    "PartitionFacts",
    "RoundRules",
    "Sampling",
    "both",
    "by",
    "by_size",
    "clients",
    "day_and_night",
    "dirichlet",
    "dp_sgd",
    "drop_outs",
    "fed_adagrad",
    "fed_adam",
    "fed_avg",
    "fed_avg_m",
    "fed_bn",
    "fed_buff",
    "fed_coded",
    "fed_nova",
    "fed_prox",
    "fed_rep",
    "fed_robust",
    "fed_yogi",
    "from_folder",
    "iid",
    "join",
    "make_tickets",
    "over_selected",
    "private",
    "q_fed_avg",
    "revoke",
    "scaffold",
    "secure",
    "secure_bytes",
    "secure_sum",
    "serve",
    "shards",
    "strategies",
    "weighted",
]
