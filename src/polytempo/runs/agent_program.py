"""`be_agent`: what `python -m polytempo.agent` does once torch is loaded."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.engines.fork import default_signals
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.runs.agent import end_politely, serve_head


def be_agent(parent: int) -> int:
    """Be an agent, as long as `parent` is this process's; the exit code."""
    default_signals()  # the launcher held some back while it started this process
    signal.signal(signal.SIGTERM, end_politely)
    signal.signal(signal.SIGINT, end_politely)
    try:
        ticket = AgentTicket.read(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
        import_module("torch._dynamo")  # optimizers need it: once here instead of in each process
        serve_head(ticket, parent)
    except (PolytempoError, ValueError, OSError) as error:
        print(f"polytempo agent: {error}", file=sys.stderr)
        return 1
    return 0
