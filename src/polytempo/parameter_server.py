"""The parameter server of a loop of one's own: `python -m polytempo.parameter_server`, started by `attach` on rank 0.

standard input     lengths of four parts (8 bytes each), then: the order as JSON, and the three of `LoopFacts.blobs`;
                   later one line of JSON, {"end": why}, where the loop has ended before its time
standard output    lines of JSON: {"ready": …}, then {"ended": …} or {"failed": why}
standard error     rank 0's: events of processes

Nothing but these values travels: it knows no function of the loop. It dies with rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from polytempo.engines.processes.fork import default_signals, die_with, ignore_ending_signals, reserve_standard_files
from polytempo.runs.own_loop.loop_server import LoopServer
from polytempo.runs.own_loop.server_process import LENGTHS
from polytempo.training.own_loop.loop_facts import LoopFacts

_MOST_BYTES = 1 << 40


def main() -> int:
    """Serve until the loop ends; the exit code."""
    reserve_standard_files()
    answers = os.dup(1)
    os.dup2(2, 1)  # the output of libraries belongs to rank 0's log
    default_signals()
    ignore_ending_signals()  # Ctrl-C is for rank 0; this process ends with it
    torch.set_num_threads(1)  # OpenMP's threads would not survive the forks
    with os.fdopen(answers, "wb") as stream:

        def say(line: Mapping[str, Any]) -> None:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()

        try:
            order, blobs = _read(sys.stdin.buffer)
            if order is None:
                return 0  # no epoch was begun
            if order["lasting"]:  # else `LoopServer` looks for rank 0's end alone
                die_with(order["launcher"])
            facts = LoopFacts.from_plain(order["facts"], *blobs)
            say({"ended": LoopServer(facts, order, say, sys.stdin.fileno()).serve()})
            return 0
        except BaseException as error:
            say({"failed": f"{type(error).__name__}: {error}"})
            return 1


def _read(stream: BinaryIO) -> tuple[Any, list[bytes]]:
    """The order and its tensors; None if the stream has ended before."""
    head = stream.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        return None, []
    lengths = LENGTHS.unpack(head)
    if sum(lengths) > _MOST_BYTES:
        raise ValueError(f"an order of {sum(lengths)} bytes is larger than any")
    order, *blobs = (stream.read(length) for length in lengths)
    return json.loads(order), blobs


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
