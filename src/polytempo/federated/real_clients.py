"""Clients that are machines of their own: `serve` performs a run's rounds, and `join` is a client, which dials out.

pt.federated.make_tickets("keys", clients=3, server="host.example:7777", most_samples=5_000)
result = pt.federated.serve(job, pt.federated.fed_avg(cohort=3), "keys", listen="0.0.0.0:7777", epochs=100)

pt.federated.join(job, "client-0.ticket", data)        on each client's machine, with its own ticket and data
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from polytempo.core import Strategy


@dataclass(frozen=True)
class RoundRules:
    """Waiting times of a server of rounds, and the numbers of clients that it waits for."""

    extra: float = 0.0
    """The server asks ⌈cohort · (1 + extra)⌉ clients, and takes the first to answer."""
    there: int | None = None
    """Clients that must be there before the server's first round. None: as many as the strategy's cohort."""
    fewest: int | None = None
    """Clients that must be there before a later round, and the fewest answers of a round: with fewer it draws further
    clients that are there, and then it is given up. None: half of the cohort, rounded up."""
    deadline_s: float = 60.0
    """Seconds for the answers of a draw; of `fed_buff` for one answer, before another client begins as well."""
    wait_s: float = 600.0
    """Seconds for enough clients to be there, and of `fed_buff` for the next answer; then the run ends."""
    return_s: float = 5.0
    """Seconds for a client with a broken connection to come back within a round."""
    draws: int = 4
    """Draws of a round, or secure sums of it, at most. As many rounds given up one after the other end the run."""

    def __post_init__(self) -> None:
        """ValueError for numbers that no server could use."""
        times = self.deadline_s, self.wait_s, self.return_s
        counts = self.draws, *(1 if each is None else each for each in (self.there, self.fewest))
        if not self.extra >= 0 or min(counts) < 1 or not all(0 < each < math.inf for each in times):
            raise ValueError(
                f"extra is at least 0, there, fewest and draws are at least 1, and times are above 0; got {self}"
            )

    def least(self, cohort: int) -> int:
        """The fewest answers of a round of `cohort` clients."""
        return min(cohort, -(-cohort // 2) if self.fewest is None else self.fewest)


def serve(
    job: Any,
    strategy: Strategy | str,
    keys: str | Path,
    *,
    listen: str = "127.0.0.1:7777",
    test: Any = None,
    rules: RoundRules | None = None,
    options: Any = None,
    on_listening: Callable[[str], None] | None = None,
    progress: Any = None,
    **more: Any,
) -> Any:
    """Train `job` by a strategy of rounds with clients that dial in, and return the run's `Result`.

        pt.federated.serve(job, pt.federated.fed_avg(cohort=10), "keys", listen="0.0.0.0:7777", epochs=100)

    The server never sees a client's data: a round sends the model, and a client answers with θ - θₖ, its number of
    samples, its loss, and, where it has a test set, how many of its predictions with the round's model are right. With
    the same clients, all there and all answering, the result is `pt.run`'s with `pt.federated.clients`, bit for bit.
    Codes, control variates (`scaffold`), the loss before (`q_fed_avg`) and personal heads are as in `pt.run`, too. Of
    `fed_buff` clients train while the server goes on, and their arrivals are their own; its bits are of a simulated run
    with the same arrivals. Of `private` draws and noise come from a secret of the server, in the run's `noise.jsonl`.
    Of `dp_sgd` a client's noise comes from its own secrets, and each order to it counts.
    Of `secure` a client answers with keys, and its movement has masks that only a sum of clients takes off; a sum that
    too few clients stay in is made again.

    A round with too few answers leaves the model as it is, and the next one goes on.

    `keys`: the folder that `make_tickets` has made; the key of a connection says which client it is. `listen`:
    the address; loopback by default. `test`: the server's own test set, for scores of rounds (None: it has none).
    `rules`: waiting times, over-selection. Options, `out` and `resume` included, are as of `pt.run`. A server that was
    killed goes on from its checkpoint, and its clients connect again.

    Refused by name, while the round goes on: an answer with NaN, infinity, numbers above √max, other tensors, shapes or
    dtypes; more samples than the ticket's bound, or others than the client said before; an answer to another round or
    another model; a revoked ticket. Silence until the deadline, and a connection that stays broken, leave a client out
    of the round. `clients` of the run's stream of records tells each, and the names in each round.

    Cost: 2 models a client and round, one down, one up, or their codes; of `scaffold` 4. The server holds a cohort of
    movements.

    Errors: `Incompatible` (PT2516) for strategies without rounds, or that need simulated clients; PT2517 for keys that
    cannot be read; PT2518 where too few clients come, or answer in `draws` rounds; PT2533 where a private run cannot go
    on with its noise.

    Source: K. Bonawitz et al., "Towards federated learning at scale: System design", 2019, for rounds with selection
    and a deadline. Deviation: clients hold their connection between rounds.
    """
    performed = import_module("polytempo.runs.clients.serve").serve
    return performed(
        *(job, strategy, keys),
        listen=listen,
        test=test,
        rules=rules,
        options=options,
        on_listening=on_listening,
        progress=progress,
        **more,
    )


def join(
    job: Any,
    ticket: str | Path,
    data: Any = None,
    *,
    server: str | None = None,
    patience_s: float = 600.0,
    on_round: Callable[[int], None] | None = None,
    state: str | Path | None = None,
) -> Any:
    """Be a client of the server of `ticket` until its run is over: train on `data`, which stay here.

        pt.federated.join("mnist", "client-0.ticket", "my/mnist")

    `job`: the server's, from the client's own code; the server names no code that a client would load. `data`: a data
    set, `pt.Data` (its test set is scored in each round), or the path that the job's `data` reads. `server`: another
    address than the ticket's. `patience_s`: the longest time without the server. `state`: a folder for the tensors that
    this client keeps between rounds, such as its control variate or its head, and for its record of opened secure sums
    (None: in memory); it is made.
    It has a folder for each client and run, with at most eight states; of `scaffold` each is a model, also in memory.

    Returns the client's number, the run's rounds, and the number of rounds that this process has trained in.

    Errors: `PolytempoError` where the server stays away, or refuses this client for good; PT2517 for a ticket that
    cannot be read.
    """
    joined = import_module("polytempo.runs.clients.join").join
    return joined(job, ticket, data, server=server, patience_s=patience_s, on_round=on_round, state=state)


def make_tickets(folder: str | Path, clients: int, server: str, most_samples: int = 1_000_000) -> list[Path]:
    """Make keys of a server and of so many clients in a new folder; the paths of the clients' tickets.

        pt.federated.make_tickets("keys", clients=10, server="host.example:7777", most_samples=5_000)

    `server`: the address that clients dial, "host:port". `most_samples`: a client that says to have more is refused,
    so it bounds the weight of each in a mean. Hand each client its own ticket, by a way that no other can read.

    Errors: ValueError for numbers that cannot be; FileExistsError where the folder has a roster already.
    """
    found: list[Path] = import_module("polytempo.runs.clients.tickets").make_tickets(
        folder, clients, server, most_samples
    )
    return found


def revoke(folder: str | Path, client: int) -> None:
    """Let client number `client` of the keys in `folder` take part no more; a server that runs follows in seconds.

    ValueError for a client that the roster does not have.
    """
    import_module("polytempo.runs.clients.tickets").revoke(folder, client)
