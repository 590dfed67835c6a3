"""The end of a command: one message on standard error, and its exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager

import typer

from polytempo.engines.join.environment import recognise
from polytempo.native.address_space import address_space_advice
from polytempo.spec.text.plain_text import plain_text

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
_VALUE_ERROR = "ValueError: "


class Terminated(KeyboardInterrupt):
    """SIGTERM ends a command as Ctrl-C does: its processes and files end with it."""


@contextmanager
def exit_code() -> Generator[None]:
    """Turn an error inside into a message and an exit code.

    `ValueError`, a wrong value, is 2, in a worker too; Ctrl-C is 130, SIGTERM 143; everything else, a run that failed,
    is 1. A run that has saved and left after SIGTERM ends with 75, after Ctrl-C with 130 (see `core.notice`).
    With `POLYTEMPO_DEBUG=1` the traceback is shown, too.
    """
    try:
        with _sigterm_raises():
            yield
    except ValueError as error:
        raise _ended(USAGE, error) from None
    except Terminated as error:
        raise _ended(TERMINATED, error) from None
    except KeyboardInterrupt as error:
        raise _ended(INTERRUPTED, error) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        wrong = wrong_value(error)
        raise (_ended(FAILED, error) if wrong is None else _ended(USAGE, error, wrong)) from None


@contextmanager
def _sigterm_raises() -> Generator[None]:
    """Let SIGTERM raise, so that open files close. A launcher's worker may wait in native code, which cannot raise:
    there it ends the process, as always.
    """
    handled = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not handled or _is_one_of_several():
        yield
        return
    signal.signal(signal.SIGTERM, _Terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_one_of_several() -> bool:
    """True if torchrun, Slurm or MPI has started this process with others, and ends them. A batch script is alone."""
    try:
        return recognise(os.environ).size > 1
    except ValueError:  # a command that needs the world will raise it
        return True


class _Terminate:
    """The handler. A run that can save puts its own in its place meanwhile (see `core.notice`)."""

    ends = True

    def __call__(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait
        raise Terminated


def wrong_value(error: Exception) -> str | None:
    """A worker's words about a wrong value, such as missing data, if that ended the run.

    Its `ValueError` reaches the launcher as the last lines of the worker's log.
    """
    lines = getattr(error, "last_lines", [])
    begins = [number for number, line in enumerate(lines) if line.startswith(_VALUE_ERROR)]
    if not begins or "raised ValueError" not in str(error).partition("\n")[0]:
        return None
    return "\n".join(lines[begins[-1] :]).removeprefix(_VALUE_ERROR)


def _ended(code: int, error: BaseException, message: str = "") -> typer.Exit:
    if os.environ.get("POLYTEMPO_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, SystemExit):
        return typer.Exit(code)  # the run has named its checkpoint
    if isinstance(error, KeyboardInterrupt):
        print("terminated" if isinstance(error, Terminated) else "interrupted", file=sys.stderr)
    else:
        said = plain_text(message or str(error)) or type(error).__name__
        advice = address_space_advice(f"{type(error).__name__}: {said}")
        print(f"error: {said}{'. ' if advice else ''}{advice}", file=sys.stderr)
        worlds = sys.modules.get("polytempo.worlds")  # where no command has loaded it, there is no world
        if worlds is not None and (deaths := worlds.current().deaths) is not None:
            deaths.report(error)
        elif (death := getattr(error, "death", None)) is not None:
            print(death, file=sys.stderr)
    return typer.Exit(code)
