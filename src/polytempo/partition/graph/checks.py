"""Checks in a model's code, `assert …` and `if …: raise …`: which outcome lets the model go on."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

_OTHERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def passing_outcome(frame: FrameType | None) -> bool | None:
    """The truth of the value that a model's code asks for in the innermost of its frames, so that a check passes.

    None where the code is no check, or has a `not` within its condition.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    if frame is None:
        return None
    found = [each for each in _checks(frame.f_code.co_filename) if each.first <= frame.f_lineno <= each.last]
    return max(found, key=lambda each: each.first).outcome if found else None


class _Check:
    def __init__(self, node: ast.Assert | ast.If) -> None:
        test, self.outcome = node.test, isinstance(node, ast.Assert)
        self.first, self.last = node.lineno, test.end_lineno or node.lineno
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, self.outcome = test.operand, not self.outcome
        self.is_plain = not any(isinstance(each, ast.Not) for each in ast.walk(test))


@lru_cache(maxsize=256)
def _checks(file: str) -> tuple[_Check, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    guards = [
        _Check(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body))
    ]
    return tuple(check for check in guards if check.is_plain)
