"""A comparison of a graph with its model: operation by operation, on fake tensors.

`torch.fx` calls `forward` with stand-ins for tensors. Code that asks for their values is an error, but `isinstance(x,
Tensor)`, `hasattr(x, …)`, `x.shape[0] in table` or `except Exception` silently decide otherwise than for tensors, and
`with torch.no_grad():` is not recorded. So both are run on the sample, and their operations on its tensors, parameters
and buffers are compared.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polytempo.device import autocast_enabled, kept_random_states
from polytempo.partition.cut import fake, fake_state
from polytempo.partition.graph.modes import attributes_kept

_DECISIONS = (ast.If, ast.IfExp, ast.Match, ast.Try, ast.While, ast.With)


class CodeLine(NamedTuple):
    """A line of the model's own code, and the innermost of its submodules that runs it."""

    file: str
    line: int
    function_line: int
    """The first line of the function."""
    module: str
    """"" for the model itself."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: `{linecache.getline(self.file, self.line).strip()}`"


class _Operation(NamedTuple):
    """One operation, and the line of the model that asked for it."""

    what: tuple[Any, ...]
    place: CodeLine | None


def first_difference(
    model: nn.Module,
    graph: fx.Graph,
    constants: Mapping[str, Tensor],
    call: Callable[[nn.Module, Sequence[Any]], Any],
    values: Sequence[Any],
    traced_values: Sequence[Any],
    is_own: Callable[[str], bool],
) -> CodeLine | None:
    """The first line of a difference between the model and its graph; None where they agree.

    `call(model, values)` calls the model; the graph is given `traced_values`. `is_own` knows the files of the model's
    code. A run that ends with an error is compared up to there. The model stays as it is.
    """
    if not any(not type(each).__module__.startswith("torch.") for each in model.modules()):
        return None  # nothing in it decides by its inputs
    theirs, all_theirs = _operations(model, _Called(model, call), values, is_own)
    ours, all_ours = _operations(model, _Interpreted(model, graph, constants), traced_values, is_own)
    before: CodeLine | None = None
    for one, other in zip_longest(theirs, ours):
        if (one is None and not all_theirs) or (other is None and not all_ours):
            return None
        if one is None or other is None or one.what != other.what:
            found = (one.place if one is not None else None) or before
            return _beginning(model) if found is None else _decision(before, found)
        before = one.place or before
    return None


def _beginning(model: nn.Module) -> CodeLine:
    """The first line of its `forward`, where no line is known."""
    code = type(model).forward.__code__
    return CodeLine(code.co_filename, code.co_firstlineno, code.co_firstlineno, "")


def _decision(before: CodeLine | None, found: CodeLine) -> CodeLine:
    """The last line up to `found` with a decision of its function, since `before`; else `found`."""
    same = before is not None and before.file == found.file and before.function_line == found.function_line
    first = before.line if same and before is not None and before.line <= found.line else found.function_line
    lines = [line for line in _decisions(found.file) if first <= line <= found.line]
    return found._replace(line=max(lines, default=found.line))


@lru_cache(maxsize=256)
def _decisions(file: str) -> tuple[int, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node.lineno for node in ast.walk(tree) if isinstance(node, _DECISIONS))


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Sequence[Any]], Any]) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, *values: Any) -> Any:
        return self._call(self.model, values)


class _Interpreted(nn.Module):
    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self._graph, self._constants = model, graph, dict(constants)

    def forward(self, *values: Any) -> Any:
        return _WithConstants(self.model, self._graph, self._constants).run(*values, enable_io_processing=False)


class _WithConstants(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self._constants = constants

    def fetch_attr(self, target: str) -> Any:
        return self._constants[target] if target in self._constants else super().fetch_attr(target)


def _operations(
    model: nn.Module, run: nn.Module, values: Sequence[Any], is_own: Callable[[str], bool]
) -> tuple[list[_Operation], bool]:
    """A run's operations on the sample's tensors and the model's, and whether it came to its end."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = fake_state(model, mode)
    given = [fake(value, mode) for value in values]
    names = {id(each): name for name, each in model.named_modules()}
    recorder = _Recorder([*state.values(), *tree_leaves(given)], names, is_own)
    with attributes_kept(model), kept_random_states(), mode, recorder, torch.enable_grad():
        try:
            functional_call(run, {f"model.{name}": each for name, each in state.items()}, tuple(given))
        except Exception:  # a sample that does not fit is reported elsewhere
            return recorder.found, False
    return recorder.found, True


class _Recorder(TorchDispatchMode):
    """Notes operations on given tensors and on results of these. Constants are made when a graph is."""

    def __init__(self, known: Sequence[Any], names: Mapping[int, str], is_own: Callable[[str], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Operation] = []
        self._kept = [each for each in known if isinstance(each, Tensor)]
        self._numbers = {id(each): number for number, each in enumerate(self._kept)}
        """(id of a given or computed tensor) -> its number in their order. The tensors are kept, so that none has
        another's id."""
        self._names, self._is_own = names, is_own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        given = [self._numbers.get(id(each)) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(number is not None for number in given):
            made = [each for each in tree_leaves(answer) if isinstance(each, Tensor)]
            for each in made:
                self._numbers.setdefault(id(each), len(self._numbers))
            self._kept += made
            shapes = [(tuple(each.shape), each.dtype) for each in made]
            context = torch.is_grad_enabled(), *autocast_enabled()
            self.found.append(_Operation((str(func), given, shapes, context), self._place()))
        return answer

    def _place(self) -> CodeLine | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not self._is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        code, line, module = frame.f_code, frame.f_lineno, ""
        while frame is not None and not module:
            module = self._names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        return CodeLine(code.co_filename, line, code.co_firstlineno, module)
