"""Federated averaging without normalisation layers, which stay with each client."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.kept_tensors import normalisation
from polytempo.federated.rounds import in_rounds


def fed_bn(cohort: int = 10, epochs: int = 1, batch_size: int | None = 10) -> Strategy:
    """`fed_avg` of all but normalisation layers: their parameters and running statistics stay with each client.

    This is for clients with inputs of different kinds, such as cameras or scanners. Models with `BatchNorm` are allowed
    here, because its statistics are a client's. On test samples of clients each client's own model is
    scored, on another test set the model of a client that never took part. `pt.training.client_model(run, client)` is a
    client's own model.

    Cost: as `fed_avg`, without these layers. Memory: the layers of each client that has taken part.

    Source: X. Li, M. Jiang, X. Zhang, M. Kamp and Q. Dou, "FedBN: Federated learning on non-IID features via local
    batch normalization", 2021, Algorithm 1. Deviation: clients weigh by their samples.
    """
    local = LocalTraining(epochs, batch_size, keeps=normalisation)
    return in_rounds(call_name(fed_bn, locals()), cohort, local)
