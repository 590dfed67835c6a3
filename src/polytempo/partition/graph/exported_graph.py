"""A model's graph by `torch.export`, for Python code that `torch.fx` refuses: decisions by sizes and types.

    if x.dim() == 3: x = x.flatten(1)        torch.fx: a proxy has no truth value       torch.export: as with the sample

`torch.export` runs the code on fake tensors and records operations. Left to itself it writes one mode into the graph
and flattens batch norm into operations on its buffers. So the modules of `torch.nn` are recorded as calls of one
operator (`_module_call`) and become single nodes again, as `torch.fx` has them. Decisions
by sizes are taken as with the sample; `Traced.check` raises for sizes that would need others. The first dimension of
each input, the samples, stays free where the code allows it.
"""

from __future__ import annotations

import inspect
import logging
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from polytempo.partition.graph.modes import modes_kept, read_flags
from polytempo.partition.graph.trace import (
    FIXED,
    REMEDY,
    Inputs,
    Traced,
    Untraceable,
    is_own,
    one_at_a_time,
    trace,
    two_graphs,
    untraceable,
)

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_NOISY = "torch.fx.experimental.symbolic_shapes"
"""The logger that prints the graph before it raises an error."""


def exported(model: nn.Module, inputs: Inputs, because: Untraceable) -> Traced:
    """The model's graph for these inputs, where `torch.fx` has failed `because`.

    Raises `Untraceable`: its own where it names another line than `because`, for that line is then the obstacle.
    """
    try:
        others = [n for n, v in zip(inputs.names, inputs.values, strict=True) if not isinstance(v, (Tensor, *FIXED))]
        if others:
            raise Untraceable(f"torch.export would fix the values of {', '.join(others)}")
        with one_at_a_time, modes_kept(model):
            traced = _in_mode(model, inputs, training=True)
            if not read_flags(traced.graph, _in_mode(model, inputs, training=False).graph):
                raise two_graphs(model)
    except Untraceable as error:
        raise (error if error.line and error.line != because.line else because) from error
    traced.graph.lint()
    return traced


def traced_or_exported(model: nn.Module, inputs: Inputs) -> Traced:
    """The model's graph by `torch.fx`, or by `torch.export` where that fails. Errors: `Untraceable`."""
    try:
        return trace(model, inputs)
    except Untraceable as error:
        return exported(model, inputs, error)


def _in_mode(model: nn.Module, inputs: Inputs, *, training: bool) -> Traced:
    model.train(training)
    args = () if inputs.by_keyword else tuple(inputs.values)
    kwargs = dict(zip(inputs.names, inputs.values, strict=True)) if inputs.by_keyword else {}
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    sizes = tree_map(lambda v: {0: Dim.AUTO} if isinstance(v, Tensor) and v.dim() else None, dict(bound))
    calls = _Calls(model)
    try:
        with calls.recorded(), _quiet():
            program = export(model, args, kwargs, dynamic_shapes=sizes, strict=False)
    except Exception as error:
        raise untraceable(model, error) from error
    return _Rebuilding(model, inputs, program, calls.made).traced()


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger(_NOISY)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():  # of attributes that modules of torch.nn set themselves
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# ---------------------------------------------------------------------- modules that stay one node


class _Call(NamedTuple):
    """One call of a module, with the arguments that a graph cannot hold."""

    path: str
    compute: Callable[..., Any]
    arguments: _Flat
    """Arguments and keywords."""
    answers: list[_Flat]
    """Answers of the module, once they have been computed."""


class _Flat(NamedTuple):
    """A structure of tensors and other values without its tensors."""

    structure: TreeSpec
    others: list[Any]
    """The structure's leaves, with `_TENSOR` in the places of tensors."""

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The structure with these in the places of tensors."""
        left = iter(tensors)
        return tree_unflatten([next(left) if each is _TENSOR else each for each in self.others], self.structure)


def _flat(value: Any) -> tuple[list[Tensor], _Flat]:
    leaves, structure = tree_flatten(value)
    others = [_TENSOR if isinstance(each, Tensor) else each for each in leaves]
    return [each for each in leaves if isinstance(each, Tensor)], _Flat(structure, others)


_TENSOR = object()
_made: list[_Call] = []
"""Calls of the trace under way; there is one at a time."""


@torch.library.custom_op("polytempo::module_call", mutates_args=())
def _module_call(tensors: list[Tensor], call: int) -> list[Tensor]:
    raise AssertionError("only traced, never run")


@_module_call.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    own = _made[call]
    args, kwargs = own.arguments.filled(tensors)
    answer, rest = _flat(own.compute(*args, **kwargs))
    own.answers.append(rest)
    return [torch.empty_like(each) for each in answer]


class _Calls:
    """Records the calls of a model's modules of `torch.nn`."""

    def __init__(self, model: nn.Module) -> None:
        tracer = fx.Tracer()
        named = [(name, each) for name, each in model.named_modules() if name]
        self._leaves = [(name, each) for name, each in named if tracer.is_leaf_module(each, name)]
        self._thread = threading.get_ident()
        self.made = _made

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Make a module's forward one operation inside, but for calls that an operator cannot have."""
        self.made.clear()
        leaves = [(name, each) for name, each in self._leaves if "forward" not in vars(each)]
        for name, module in leaves:
            module.forward = self._recording(name, module, module.forward)
        try:
            yield
        finally:
            for _, module in leaves:
                del module.forward

    def _recording(self, name: str, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            """Compute modules with statistics in evaluation, so that they stay as they are; the sizes are the same."""
            with modes_kept(module):
                module.train(module.training and not any(True for _ in module.buffers()))
                return original(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors, arguments = _flat((args, kwargs))
            if threading.get_ident() != self._thread or any(
                isinstance(each, torch.SymInt) for each in arguments.others
            ):
                return original(*args, **kwargs)
            self.made.append(call := _Call(name, compute, arguments, []))
            answer = _module_call(tensors, len(self.made) - 1)
            return call.answers[-1].filled(answer)

        return forward


# ---------------------------------------------------------------------- the graph in our own form


class _Rebuilding:
    """An exported program as a graph over the model's own modules and names."""

    def __init__(self, model: nn.Module, inputs: Inputs, program: ExportedProgram, calls: Sequence[_Call]) -> None:
        self._model, self._inputs, self._calls = model, inputs, list(calls)
        self._module: Any = program.module(check_guards=True)
        structure = program.call_spec.in_spec
        assert structure is not None
        placeholders = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        args, kwargs = tree_unflatten(placeholders, structure)
        order = [kwargs[name] for name in inputs.names] if inputs.by_keyword else [*args, *kwargs.values()]
        named = dict(zip(order, inputs.names, strict=True))
        self._names = {node: named[node] for node in placeholders}
        tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        self._own = {name for each in tensors for name, _ in each}
        self._outputs = program.call_spec.out_spec
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._constants: dict[str, Tensor] = {}

    def traced(self) -> Traced:
        """The graph, and its check of sizes."""
        for name in self._inputs.traced:
            node = next(each for each, own in self._names.items() if own == name)
            self._made[node] = self._graph.placeholder(name)
        for node in self._module.graph.nodes:
            self._take(node)
        for node in reversed(self._graph.nodes):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)
        return Traced(self._graph, self._constants, {}, self._check())

    def _take(self, node: fx.Node) -> None:
        if node.op == "placeholder" or _is_check(node):
            return
        if node.op == "get_attr":
            self._made[node] = self._attribute(node)
        elif node.op == "output":
            assert self._outputs is not None
            self._graph.output(tree_unflatten(self._mapped(node.args[0]), self._outputs))
        elif node.target is torch.ops.polytempo.module_call.default:
            self._made[node] = self._called(node)
        elif node.target is operator.getitem and isinstance(self._made[node.args[0]], list):  # type: ignore[index]
            self._made[node] = self._made[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            self._made[node] = self._graph.node_copy(node, lambda each: self._made[each])

    def _mapped(self, nodes: Any) -> list[Any]:
        return [self._made[each] if isinstance(each, fx.Node) else each for each in nodes]

    def _attribute(self, node: fx.Node) -> fx.Node:
        target = str(node.target)
        found = operator.attrgetter(target)(self._module)
        if not isinstance(found, Tensor):
            raise _region(self._model, node, found)
        if target not in self._own:
            target = target.replace(".", "_")
            self._constants[target] = found
        return self._graph.get_attr(target)

    def _called(self, node: fx.Node) -> list[fx.Node]:
        tensors, number = node.args
        call = self._calls[cast(int, number)]
        args, kwargs = call.arguments.filled(self._mapped(tensors))
        made = self._graph.call_module(call.path, args, kwargs)
        made.meta = dict(node.meta)
        answer = call.answers[-1]
        places = tree_flatten_with_path(answer.filled([_TENSOR] * answer.others.count(_TENSOR)))[0]
        return [self._picked(made, path) for path, leaf in places if leaf is _TENSOR]

    def _picked(self, node: fx.Node, path: Sequence[Any]) -> fx.Node:
        for step in path:
            node = self._graph.call_function(operator.getitem, (node, step.idx if hasattr(step, "idx") else step.key))
        return node

    def _check(self) -> Callable[[Sequence[Any]], None]:
        guards = getattr(self._module, "_guards_fn", None)
        order = [self._inputs.names.index(name) for name in self._names.values()]

        def check(inputs: Sequence[Any]) -> None:
            if guards is None:
                return
            try:
                guards(*(inputs[place] for place in order))
            except AssertionError as error:
                raise ValueError(
                    f"the model decides by sizes, and was cut for {str(error).removeprefix('Guard failed: ')}, as the "
                    "sample has it; call it with such inputs, or cut it with another sample (len(x) and int(…) in the "
                    "model's code fix a size; x.shape[0] does not)"
                ) from None

        return check


def _is_check(node: fx.Node) -> bool:
    """True if the node only looks at sizes and dtypes."""
    if node.op == "call_module":
        return node.target == "_guards_fn"
    return not node.users and getattr(node.target, "__name__", "").startswith(_CHECKS)


def _region(model: nn.Module, node: fx.Node, region: Any) -> Untraceable:
    """The error for lines that run in another mode than the rest, or only sometimes: export has a graph for each."""
    inner = region.graph.nodes if isinstance(region, fx.GraphModule) else ()
    kind = str(next(iter(node.users), node).target)
    stacks = [str(each.meta["stack_trace"]) for each in inner if each.meta.get("stack_trace")]
    frames = re.findall(r'File "(.+)", line (\d+), in .*\n(.*)', stacks[0]) if stacks else []
    found = [frame for frame in frames if is_own(frame[0])]
    file, line, code = found[-1] if found else ("", "0", "")
    where = f"{file}:{line}: `{code.strip()}` is in" if found else "it has"
    return Untraceable(
        f"{type(model).__name__} cannot be cut: {where} a region of its own ({kind}); {REMEDY}", (file, int(line))
    )
