"""`be_agent`: what `python -m polytempo.agent` does once torch is loaded."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from polytempo.core.errors import PolytempoError
from polytempo.engines.processes.fork import default_signals
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.runs.process.agent import end_politely, serve_head


def be_agent(parent: int) -> int:
    """Be an agent, as long as `parent` is this process's; the exit code."""
    default_signals()  # the launcher held some back while it started this process
    signal.signal(signal.SIGTERM, end_politely)
    signal.signal(signal.SIGINT, end_politely)
    try:
        ticket = AgentTicket.read(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
        _warm_up()
        serve_head(ticket, parent)
    except (PolytempoError, ValueError, OSError) as error:
        print(f"polytempo agent: {error}", file=sys.stderr)
        return 1
    return 0


def _warm_up() -> None:
    """Load what torch loads when an optimizer is first used: once here, and not in each process's first step, which is
    training."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    optimizer.zero_grad()
    optimizer.step()
