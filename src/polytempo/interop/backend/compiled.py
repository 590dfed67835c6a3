"""`leave_alone`: keeps torch.compile from translating code that DDP calls while a compiled model runs."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch._C._dynamo import eval_frame


def leave_alone(*classes: type) -> None:
    """Have torch.compile run the methods of `classes`, and all that they call, as they are.

    What a compiled model asks for is in its graph. But DDP's reducer, which is not compiled, calls a process group from
    C++ in the middle of a compiled frame, where torch would look at every Python frame. This is what
    `torch.compiler.disable` does, without loading the compiler (a second) for those who never compile.
    """
    for each in classes:
        for member in vars(each).values():
            function = getattr(member, "func", getattr(member, "fget", member))  # as a (cached) property has it
            if isinstance(function, FunctionType):
                _skip(function.__code__)


def _skip(code: Any) -> None:
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    else:  # older versions of torch can only skip them, not what they call
        eval_frame.skip_code(code)  # type: ignore[attr-defined]
