"""A model as a graph of its layers and operations, in the order of their computation.

`torch.fx` is the base, with the modules of `torch.nn` as single nodes. So dropout and batch norm stay modules, with
their state and their two modes, and every parameter keeps its name. Code that it cannot trace, `exported` may.

Differences from `torch.fx.symbolic_trace`:

- A submodule that cannot be traced stays whole: it is one node, which no cut divides.
- `x += y` and `x[i] = y` stay operations in place, and `torch.arange(x.shape[1])` and its like are recorded.
- The model is traced in training and in evaluation. Where only a flag differs, as in
  `dropout(x, training=self.training)`, the graph reads the flag when it runs.
- Checks, which are `assert …` and `if …: raise …`, are taken as passed: the sample passes them.
- Parameters of `forward` that the sample does not give keep their defaults.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from polytempo.partition.cut import any_size
from polytempo.partition.graph.modes import attributes_kept, modes_kept, read_flags
from polytempo.partition.graph.same_operations import CodeLine, first_difference

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_MADE = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")
_DRAWN = ("normal", "rand", "randint", "randn", "randperm")
_IN_PLACE = ("add", "and", "floordiv", "matmul", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
FIXED = (bool, str, type(None))
REMEDY = (
    "move these lines into a submodule, which then stays whole; or build the model as an nn.Sequential of its parts, "
    "and cut that by their names"
)
_OTHERWISE = (
    "does something else for the stand-ins that torch.fx gives it than for tensors, as isinstance(x, Tensor), hasattr "
    "and no_grad() do"
)
one_at_a_time = threading.RLock()
"""Tracing replaces methods of `nn.Module` and functions of `torch` while it lasts, for all threads."""


class Untraceable(ValueError):
    """A model's code that cannot be traced, and the remedy."""

    def __init__(self, message: str, line: tuple[str, int] | None = None) -> None:
        super().__init__(message)
        self.line = line
        """File and number of the line of the model's own code that cannot be traced."""


class Inputs(NamedTuple):
    """The model's inputs: names of `forward`'s parameters, their values, and whether they are keywords."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    by_keyword: bool = False

    @property
    def traced(self) -> tuple[str, ...]:
        """Inputs of the graph, without flags, texts and None: these stay as they are in the sample."""
        return tuple(n for n, value in zip(self.names, self.values, strict=True) if not isinstance(value, FIXED))

    @property
    def traced_values(self) -> tuple[Any, ...]:
        """The values of those."""
        return tuple(value for value in self.values if not isinstance(value, FIXED))

    def call(self, function: Callable[..., Any], *before: Any, values: Sequence[Any]) -> Any:
        """`function(*before, *values)`, or with the values as keywords."""
        if self.by_keyword:
            return function(*before, **dict(zip(self.names, values, strict=True)))
        return function(*before, *values)


@dataclass
class Traced:
    """A model's graph. Nodes `get_attr` and `call_module` have the model's own names as targets."""

    graph: fx.Graph
    constants: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that `forward` makes from nothing, by the names that the graph has for them."""
    whole: dict[str, str] = field(default_factory=dict)
    """Submodules that could not be traced, each with the reason."""
    check: Callable[[Sequence[Any]], None] = any_size
    """Raises ValueError for inputs of sizes that the graph is not right for."""


def inputs_of(model: nn.Module, sample: Any) -> Inputs:
    """The sample as the model's inputs: a tensor is the only one, a tuple or list has all, a mapping goes by names."""
    if isinstance(sample, Mapping):
        return Inputs(tuple(str(name) for name in sample), tuple(sample.values()), by_keyword=True)
    values = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
    try:
        bound = inspect.signature(model.forward).bind(*values)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.forward cannot be called with the {len(values)} inputs of the sample: {error}"
        ) from None
    names: list[str] = []
    for name, value in bound.arguments.items():
        several = bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{number}" for number in range(len(value))] if several else [name]
    return Inputs(tuple(names), values)


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """The model's graph. `Untraceable` names the first construct that cannot be traced, and a remedy."""
    whole: dict[str, str] = {}
    with one_at_a_time, modes_kept(model):
        while True:
            traced = _in_mode(model, inputs, whole, training=True)
            other = _in_mode(model, inputs, whole, training=False)
            if read_flags(traced.graph, other.graph):
                traced.graph.lint()
                return traced
            reading = {name for name, each in model.named_modules() if name and _reads_mode(each)} - set(whole)
            if not reading:
                raise two_graphs(model)
            whole |= dict.fromkeys(reading, "it does other things in training than in evaluation")


def _in_mode(model: nn.Module, inputs: Inputs, whole: dict[str, str], *, training: bool) -> Traced:
    """One trace; `whole` grows by the submodules that turn out to be impossible to trace."""
    model.train(training)
    while True:
        tracer = _Tracer(inputs, set(whole))
        known = set(vars(model))
        try:
            with attributes_kept(model), _factories(tracer):
                graph = tracer.trace(model)
                constants = {name: vars(model)[name] for name in set(vars(model)) - known}
        except Exception as error:
            if tracer.failed is None:
                raise untraceable(model, error) from error
            whole[tracer.failed] = _construct(error)
            continue
        traced = Traced(graph, constants, dict(whole))
        other = _otherwise(model, inputs, traced) if training else None  # both graphs are to be the same
        if other is None:
            return traced
        if not other.module or other.module in whole:
            raise Untraceable(f"{type(model).__name__} cannot be cut: {other} {_OTHERWISE}; {REMEDY}", other[:2])
        whole[other.module] = f"{other} {_OTHERWISE}"


def _otherwise(model: nn.Module, inputs: Inputs, traced: Traced) -> CodeLine | None:
    """The first line of a difference between the model and the graph."""
    return first_difference(
        *(model, traced.graph, traced.constants),
        call=lambda called, values: inputs.call(called, values=values),
        values=inputs.values,
        traced_values=inputs.traced_values,
        is_own=is_own,
    )


def untraceable(model: nn.Module, error: Exception) -> Untraceable:
    """The error that names the line of the model's own code that failed under a tracer."""
    frames = _own_frames(error)
    line = (frames[-1].filename, frames[-1].lineno or 0) if frames else None
    return Untraceable(f"{type(model).__name__} cannot be cut: {_construct(error)}; {REMEDY}", line)


def two_graphs(model: nn.Module) -> Untraceable:
    """The error for a model that decides by its mode."""
    return Untraceable(
        f"{type(model).__name__}.forward does other things in training than in evaluation, and a cut model has one "
        f"graph for both; {REMEDY}"
    )


def _construct(error: Exception) -> str:
    """The line of the model's own code that failed under the tracer, and the reason."""
    own = _own_frames(error)
    said = " ".join(str(error).split())
    reason = said if len(said) <= 160 else said[:157] + "..."
    if not own:
        return f"{type(error).__name__}: {reason}"
    return f"{own[-1].filename}:{own[-1].lineno}: `{own[-1].line}` cannot be traced ({type(error).__name__}: {reason})"


def _own_frames(error: Exception) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]


def is_own(file: str) -> bool:
    """True if it is the user's file, neither ours nor torch's."""
    return not file.startswith((_OURS, _TORCH, "<"))


def _reads_mode(module: nn.Module) -> bool:
    own = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")]
    functions = [each for cls in own for each in vars(cls).values() if isinstance(each, FunctionType)]
    return any("training" in function.__code__.co_names for function in functions)


# ---------------------------------------------------------------------- the tracer


class _Proxy(fx.Proxy):
    """A proxy that records operations in place as such; torch's own would turn `x += y` into `x = x + y`."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], Any]:
    def record(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _name in _IN_PLACE:
    setattr(_Proxy, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, inputs: Inputs, whole: set[str]) -> None:
        super().__init__()
        self._inputs, self._whole, self._thread = inputs, whole, threading.get_ident()
        self.failed: str | None = None
        """The innermost submodule that could not be traced."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._whole or bool(super().is_leaf_module(m, module_qualified_name))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:  # another one computes meanwhile
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise

    def to_bool(self, obj: fx.Proxy) -> bool:
        passed = passing_outcome(inspect.currentframe())
        return bool(super().to_bool(obj)) if passed is None else passed

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def traces(self, given: Any, *, drawn: bool) -> bool:
        """True if a call that makes a tensor is recorded: it draws, or has a proxy among its arguments."""
        found = [drawn]
        fx.node.map_aggregate(given, lambda each: found.append(isinstance(each, fx.Proxy)))
        return any(found) and threading.get_ident() == self._thread

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        if root_module := sys.modules.get(type(self.root).__module__):
            self._autowrap_search.append(root_module)  # `from math import sqrt` in the model's own file
        values = [
            value if isinstance(value, FIXED) else self.create_proxy("placeholder", name, (), {})
            for name, value in zip(self._inputs.names, self._inputs.values, strict=True)
        ]
        return lambda root, *given: self._inputs.call(root_fn, root, values=given), [self.root, *values]


@contextmanager
def _factories(tracer: _Tracer) -> Iterator[None]:
    """Record calls that make tensors from traced sizes, and calls that draw: a drawn tensor is not a constant."""

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if tracer.traces(given=(args, kwargs), drawn=name in _DRAWN):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return make

    originals = {name: getattr(torch, name) for name in (*_MADE, *_DRAWN)}
    try:
        for name, original in originals.items():
            setattr(torch, name, recording(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def passing_outcome(frame: FrameType | None) -> bool | None:
    """The truth of the value that a model's code asks for in the innermost of its frames, so that a check passes.

    None where the code is not a check, or has a `not` within its condition.
    """
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
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
