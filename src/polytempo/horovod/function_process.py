"""A function on a rank that is a new interpreter: found by its name; arguments and answer are plain values.

run ── name, arguments (standard input) ──▶ a new interpreter: main() ── answer (a file) ──▶ run
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from polytempo.engines.processes.command_process import ANSWER_FILE
from polytempo.horovod.plain_values import decoded, encoded

WORDS = ("-c", "from polytempo.horovod.function_process import main; main()")


def called(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What such a process reads. ValueError for a function that has no name there; TypeError as `plain_values`."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name:
        raise ValueError(
            f"{module}.{name} cannot be found by name in a new interpreter; put it at the top level of a module that "
            "ranks can import. On this host alone, and without min_np, max_np and hosts, any function will do"
        )
    return json.dumps([module, name, encoded([list(args), dict(kwargs)]).hex()])


def answer_of(text: str | None) -> Any:
    """The value of what the process has left; None where it has left nothing."""
    return None if text is None else decoded(bytes.fromhex(text))


def main() -> None:
    """Call the function that standard input names, and leave what it returns."""
    sys.path.insert(0, os.getcwd())
    module, name, data = json.load(sys.stdin)
    args, kwargs = decoded(bytes.fromhex(data))
    answer = attrgetter(name)(import_module(module))(*args, **kwargs)
    Path(os.environ[ANSWER_FILE]).write_text(encoded(answer).hex(), encoding="ascii")
