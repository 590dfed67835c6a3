"""An agent of a run on several hosts: `python -m polytempo.agent [TICKET_FILE]`.

Without a file, its ticket is in POLYTEMPO_TICKET, or else the first line of standard input. Engines start it (see
`runs.agent`).
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.engines.fork import default_signals
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.runs.agent import end_politely, serve_head


def main() -> int:
    """Be an agent; the exit code."""
    default_signals()  # the launcher held some back while it started this process
    signal.signal(signal.SIGTERM, end_politely)
    signal.signal(signal.SIGINT, end_politely)
    try:
        ticket = AgentTicket.read(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
        import_module("torch._dynamo")  # optimizers need it: once here instead of in each process
        serve_head(ticket)
    except (PolytempoError, ValueError, OSError) as error:
        print(f"polytempo agent: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
