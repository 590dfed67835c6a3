"""Thirty clients with two classes of digits each, trained by federated averaging and by a server with Adam.

python examples/federated.py
"""

from __future__ import annotations

import torch
from torch.nn import functional

import polytempo as pt

train, test = pt.data.digits()
clients = pt.federated.clients(train, pt.federated.shards(30, per_client=2))
job = pt.Job(
    model=lambda: torch.nn.Linear(64, 10),
    data=lambda path: pt.Data(clients, test),
    loss=functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    correct=lambda output, target: output.argmax(dim=1) == target,
)

if __name__ == "__main__":
    facts = clients.facts()
    print(f"{facts.clients} clients of {facts.sizes[0]} to {facts.sizes[2]} samples, entropy {facts.entropy:.2f} bits")
    for strategy in (pt.federated.fed_avg(cohort=6), pt.federated.fed_adam(cohort=6)):
        result = pt.run(job, strategy, workers=2, steps=30)
        print(f"{strategy}: {result.accuracy:.1%} after {result.steps} rounds")
