"""Federated averaging of a model's body; each client keeps a head of its own."""

from __future__ import annotations

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import LocalTraining
from polytempo.federated.kept_tensors import head as head_of
from polytempo.federated.rounds import in_rounds


def fed_rep(
    cohort: int = 10,
    epochs: int = 1,
    batch_size: int | None = 10,
    head_epochs: int = 1,
    head: str | None = None,
) -> Strategy:
    """Each client trains its own head, the body fixed, then the body, the head fixed. Bodies merge as in `fed_avg`.

    `head`: the name of the head's module (None: the last one with parameters). `head_epochs`: passes over a client's
    data for the head, before `epochs` passes for the body. 0: head and body train together, which is FedPer.

    A head stays with its client: in the state of clients, never in the mean. The server's copy has its first values;
    a new client begins with them. On test samples of clients (`client_test=0.2`) each client's own model is scored, on
    another test set the model of a client that never took part. `pt.training.client_model(run, client)` is a client's
    own model.

    Cost: a client receives and sends the body. Memory: a head for each client that has taken part.

    Source: L. Collins, H. Hassani, A. Mokhtari and S. Shakkottai, "Exploiting shared representations for personalized
    federated learning", 2021, Algorithm 1; for head_epochs=0 M. G. Arivazhagan et al., "Federated learning with
    personalization layers", 2019. Deviation: clients weigh by their samples.
    """
    local = LocalTraining(epochs, batch_size, keeps=head_of(head), head_epochs=head_epochs)
    return in_rounds(call_name(fed_rep, locals()), cohort, local)
