"""Three sites train one model on digits that never leave them, by tickets and connections to a server.

Here the sites are threads of the server's program. On machines of their own each runs `join` alone, or
`polytempo client`, with its own ticket.

python examples/real_clients.py
"""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import Subset

import polytempo as pt

train, test = pt.data.digits()
job = pt.Job(
    model=lambda: torch.nn.Linear(64, 10),
    data=lambda path: pt.Data(train, test),
    loss=functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    correct=lambda output, target: output.argmax(dim=1) == target,
)
SITES = 3


def site(number: int, ticket: Path, address: Future[str]) -> str:
    """Be one site, with its own third of the digits."""
    own = Subset(train, range(number, len(train), SITES))
    part = pt.federated.join(job, ticket, own, server=address.result().removeprefix("tcp://"))
    return f"site {part.number}: {len(own)} samples, trained in {part.trained} of {part.rounds} rounds"


if __name__ == "__main__":
    strategy = pt.federated.fed_avg(cohort=SITES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(SITES) as pool:
        keys, address = Path(folder, "keys"), Future[str]()
        tickets = pt.federated.make_tickets(keys, SITES, "127.0.0.1:0", most_samples=5_000)
        sites = [pool.submit(site, number, ticket, address) for number, ticket in enumerate(tickets)]
        result = pt.federated.serve(
            job, strategy, keys, listen="127.0.0.1:0", test=test, steps=10, on_listening=address.set_result
        )
        for each in sites:
            print(each.result())
    print(f"{strategy}: {result.accuracy:.1%} after {result.steps} rounds")
