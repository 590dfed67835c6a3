"""How a command ends: one message on standard error, and the exit code that goes with it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager

import typer

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_VALUE_ERROR = "ValueError: "


@contextmanager
def exit_code() -> Generator[None]:
    """Turn what goes wrong inside into a message and an exit code.

    `ValueError`, a wrong value, is 2, in a worker too; Ctrl-C is 130; everything else, a run that failed, is 1. With
    `POLYTEMPO_DEBUG=1` the traceback is shown, too.
    """
    try:
        yield
    except ValueError as error:
        raise _ended(USAGE, error) from None
    except KeyboardInterrupt as error:
        raise _ended(INTERRUPTED, error) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        wrong = wrong_value(error)
        raise (_ended(FAILED, error) if wrong is None else _ended(USAGE, error, wrong)) from None


def wrong_value(error: Exception) -> str | None:
    """What a worker said of a wrong value, such as data that is not there, if that is why the run ended.

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
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        print(f"error: {message or str(error) or type(error).__name__}", file=sys.stderr)
    return typer.Exit(code)
