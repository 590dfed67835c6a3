"""A program that is client 0 of a server with secure sums: `sum_client.py HOST:PORT TICKET STATE ROUND`.

It is killed when it has made its shares of the last phase of ROUND, before it sends them. The cryptography is a
stand-in.
"""

from __future__ import annotations

import os
import signal
import sys

from laws.test_federated import job
from laws.test_secure_sum import TOY
from polytempo import federated as fed
from polytempo.runs.clients import join
from polytempo.runs.clients.client_messages import SumAsk, SumTell
from polytempo.runs.clients.opened_sums import OpenedSums
from polytempo.runs.clients.sum_part import SumPart
from process.client_processes import part

_tells = SumPart.tells


def main(server: str, ticket: str, state: str, killed_in: int) -> None:
    """Be the client."""

    def tells(own: SumPart, asked: SumAsk, opened: OpenedSums) -> SumTell:
        told = _tells(own, asked, opened)
        if (asked.round, asked.phase) == (killed_in, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return told

    SumPart.tells = tells  # type: ignore[method-assign]
    join.primitives = lambda: TOY  # type: ignore[attr-defined]
    fed.join(job(), ticket, part(0), server=server, state=state)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
