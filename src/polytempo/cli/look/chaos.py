"""`polytempo chaos`: many seeds of the fault simulation, on all cores."""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
import typer

from polytempo.chaos.planted.bugs import planted
from polytempo.chaos.scenario import ChaosOutcome, run
from polytempo.cli.look.look_options import ChaosOptions
from polytempo.engines.processes.fork import default_signals, die_with, fork

_MOST_SHOWN = 3
_PROGRESS_S = 5.0
_READ_BYTES = 1 << 16


def chaos(asked: ChaosOptions) -> None:
    """Simulate each seed; ends with exit code 1 if one fails.

    Each process takes its share of the seeds and writes a line of JSON for each to its pipe.
    """
    seeds, first, processes, bug = asked.seeds, asked.first, asked.processes, asked.bug
    assert processes is not None
    if bug is not None:
        planted(bug)
    begin_s = shown_s = time.monotonic()
    done, failed = 0, 0
    for line in _lines([range(first + i, first + seeds, processes) for i in range(min(processes, seeds))], bug):
        outcome = ChaosOutcome(**json.loads(line))
        done += 1
        failed += outcome.violation is not None
        if outcome.violation is not None and failed <= _MOST_SHOWN:
            _show(outcome, bug)
        if time.monotonic() - shown_s > _PROGRESS_S:
            shown_s = time.monotonic()
            print(f"{done} of {seeds} seeds, {failed} failed", file=sys.stderr)
    if done < seeds:
        raise RuntimeError(f"only {done} of {seeds} seeds were run: a process ended early")
    print(f"{seeds} seeds in {time.monotonic() - begin_s:.1f} s: {seeds - failed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _show(outcome: ChaosOutcome, bug: str | None) -> None:
    """The broken promise, the faults, the last events, and the command that repeats them."""
    again = f"polytempo chaos --seeds 1 --first {outcome.seed}" + (f" --bug {bug}" if bug else "")
    print(f"seed {outcome.seed} failed: {outcome.violation}\n  {outcome.scenario}")
    print("  faults:", *outcome.plan, sep="\n    ")
    print("  last events:", *outcome.events, sep="\n    ")
    print(f"  repeat with: {again}", flush=True)


def _lines(shares: list[range], bug: str | None) -> Iterator[str]:
    """The lines that the children write, as they come. Children end with this process."""
    parent, pipes, children = os.getpid(), [], []
    for share in shares:
        reader, writer = os.pipe()
        children.append(fork(_child(share, bug, reader, writer, parent)))
        os.close(writer)
        pipes.append(reader)
    try:
        with closing(selectors.DefaultSelector()) as selector:
            for pipe in pipes:
                selector.register(pipe, selectors.EVENT_READ, bytearray())
            while selector.get_map():
                for key, _ in selector.select():
                    yield from _read(selector, key)
    finally:
        for pipe in pipes:
            os.close(pipe)  # a child that writes on ends
        for child in children:
            os.waitpid(child, 0)


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> Iterator[str]:
    assert isinstance(key.fd, int)
    chunk = os.read(key.fd, _READ_BYTES)
    if not chunk:
        selector.unregister(key.fd)
        return
    key.data.extend(chunk)
    *lines, rest = bytes(key.data).split(b"\n")
    key.data[:] = rest
    yield from (line.decode() for line in lines)


def _child(share: range, bug: str | None, reader: int, writer: int, parent: int) -> Callable[[], None]:
    def child() -> None:
        default_signals()
        die_with(parent)
        os.close(reader)
        torch.set_num_threads(1)
        with open(writer, "w", encoding="utf-8", buffering=1) as pipe:
            for seed in share:
                pipe.write(json.dumps(run(seed, bug)._asdict()) + "\n")
        os._exit(0)

    return child
