"""A stand-in for `polytempo.agent`: it reads a ticket from its standard input, and obeys it."""

from __future__ import annotations

import json
import signal
import sys


def main() -> int:
    """`{"code": …, "say": …}` ends immediately; "wait" waits for SIGTERM, and "stubborn" ignores it."""
    ticket = json.loads(sys.stdin.readline())
    if "note" in ticket:
        with open(ticket["note"], "w", encoding="ascii") as file:
            file.write("begun")
    if ticket["do"] == "end":
        print(ticket["say"])
        return int(ticket["code"])
    if ticket["do"] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waiting", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
