"""The secure sums of `explain`: bytes of a client, and seconds of the cryptography on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from polytempo.cli.options.show import size
from polytempo.core import Strategy
from polytempo.federated.secure_cost import SecureCost, secure_cost
from polytempo.spec.explanation import Explanation


def cost_of(strategy: Strategy, found: Explanation) -> SecureCost | None:
    """The cost of a round's sum; None where sums are not secure."""
    rounds = strategy.rounds
    if rounds is None or rounds.secure is None:
        return None
    clients = rounds.number if rounds.privacy is None else rounds.privacy.cohort
    sent = (found.numel, found.parameter_bytes) if found.round is None else (found.round.numel, found.round.plain_bytes)
    return secure_cost(rounds.secure, clients, *sent)


def secure_lines(cost: SecureCost) -> Iterator[str]:
    """The cost in words."""
    yield f"{cost.clients} clients with masks, on machines of their own; workers that play clients leave masks out"
    yield (
        f"a client sends {size(cost.up_bytes)} where its movement has {size(cost.plain_bytes)}, and receives "
        f"{size(cost.down_bytes)} of keys and shares"
    )
    if cost.client_s is None or cost.server_s is None or cost.lost_s is None:
        yield "seconds are measured with pip install 'polytempo[secure]'"
        return
    yield (
        f"on this machine a client computes masks for {cost.client_s:.3g} s, the server {cost.server_s:.3g} s, and "
        f"{cost.lost_s:.3g} s more for each lost client"
    )
