"""An agent of a run on several hosts: `python -m polytempo.agent [TICKET_FILE]`.

Without a file, its ticket is in POLYTEMPO_TICKET, or else the first line of standard input. Engines start it (see
`runs.process.agent`). Nothing here loads torch: it takes seconds, and the starting process may end meanwhile.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from polytempo.engines.processes.fork import reserve_standard_files


def main() -> int:
    """Be an agent; the exit code."""
    parent = os.getppid()
    reserve_standard_files()
    code: int = import_module("polytempo.runs.process.agent").be_agent(parent)
    return code


if __name__ == "__main__":
    sys.exit(main())
