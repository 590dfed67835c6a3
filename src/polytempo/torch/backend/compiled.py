"""`leave_alone`: keeps torch.compile from translating code that DDP calls while a compiled model runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from torch._C._dynamo.eval_frame import skip_code


def leave_alone(*modules: ModuleType) -> None:
    """Have torch.compile run all functions of `modules` as they are.

    Collectives that a compiled model asks for are functional ones, in the graph. But DDP's reducer, which is not
    compiled, calls a process group's methods from C++ in the middle of a compiled frame, where every Python frame would
    be looked at.
    """
    for module in modules:
        for thing in vars(module).values():
            if getattr(thing, "__module__", None) == module.__name__:
                for code in _codes(thing):
                    skip_code(code)


def _codes(thing: object) -> Iterator[CodeType]:
    """The code of a function, or of a class's methods, and of what is defined within it."""
    if isinstance(thing, FunctionType):
        yield from _within(thing.__code__)
    elif isinstance(thing, property):
        yield from _codes(thing.fget)
    elif isinstance(thing, type):
        for member in vars(thing).values():
            yield from _codes(getattr(member, "__func__", member))


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
