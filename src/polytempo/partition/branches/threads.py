"""`threads`: the threads of a worker, within one operation and for independent branches of a model.

A model is traced when it is first called, for the inputs that it is called with, and divided into parts (`parts_of`).
It is divided again for a later difference: other kinds of inputs, twice their size, another mode, layers that freeze.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from polytempo.partition.branches.parts import BranchedModel, Code, Region, parts_of
from polytempo.partition.branches.passes import run_region
from polytempo.partition.branches.pool import Pool, is_caching, is_plain
from polytempo.partition.branches.units import HOOKS, has_hooks
from polytempo.partition.graph.exported_graph import traced_or_exported
from polytempo.partition.graph.modes import attributes_kept
from polytempo.partition.graph.profile import counted
from polytempo.partition.graph.trace import FIXED, Inputs, Traced, Untraceable

WORTH = 4e6
"""Operations that a region must save to be run on several threads: about the cost of handing over its tasks."""

_MOST = 64
"""Kinds of inputs, and of modes, that are divided; calls of further ones run as they are."""


class BranchedForward:
    """Takes the place of the `forward` of a model and of its copies; `install` puts it there.

    In a copy by `copy.deepcopy` it goes on serving; files of `pickle` or `torch.save` have the class's own `forward`.
    """

    __name__ = "forward"

    def __init__(self, threads: int, least_operations: float = WORTH) -> None:
        self.pool = Pool(threads)
        self._least = least_operations
        self._graphs: dict[Any, _Graph] = {}
        self._parts: dict[Any, BranchedModel] = {}
        self._told = False

    @property
    def parts(self) -> tuple[BranchedModel, ...]:
        """Divisions of the models, by kinds of inputs and modes, in the order of their first calls."""
        return tuple(self._parts.values())

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The answer of the model's own `forward`, to the same bits."""
        parts, values = self._of_call(model, args, kwargs) if is_plain() else (None, ())
        if parts is None or not parts.regions or (parts.shares_parameters and is_caching()):
            return type(model).forward(model, *args, **kwargs)
        return run_parts(parts, model, values, self.pool)

    def _of_call(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[BranchedModel | None, Sequence[Any]]:
        """The parts for such a call, and the graph's inputs. None: the graph cannot stand for this call."""
        inputs = _inputs_of(model, args, kwargs)
        kind = tuple(map(_kind, inputs.values)), inputs.names
        if kind not in self._graphs:
            if len(self._graphs) == _MOST or torch.is_inference_mode_enabled():  # it has no gradients to be counted
                return None, ()
            self._graphs[kind] = _Graph.of(model, inputs)
        graph, modes = self._graphs[kind], list[bool]()
        if _has_any_global_hook():
            return None, ()
        for name, module in _named_modules(model, "", {}).items():
            if name in graph.containers and has_hooks(module):
                return None, ()
            modes.append(module.training)
            for parameter in module._parameters.values():
                if parameter is not None:
                    modes.append(parameter.requires_grad)
                    if parameter._backward_hooks:
                        return None, ()
        try:
            graph.traced.check(inputs.values)
        except ValueError:  # it decides by sizes, and these are others than the first ones
            return None, ()
        sizes = (each.numel().bit_length() for each in tree_leaves(inputs.values) if isinstance(each, Tensor))
        key = kind, *sizes, *modes
        if key not in self._parts:
            if len(self._parts) == _MOST or torch.is_inference_mode_enabled():
                return None, ()
            self._parts[key] = self._divided(model, graph.traced, inputs)
        return self._parts[key], inputs.traced_values

    def _divided(self, model: nn.Module, traced: Traced, inputs: Inputs) -> BranchedModel:
        with _bare(model):
            try:
                facts = counted(model, traced, inputs)
            except ValueError as error:
                raise ValueError(f"{error}; {_without(model)}") from error
        parts = parts_of(model, traced, facts, threads=self.pool.size, least_operations=self._least)
        if not parts.regions and not self._told:
            self._told = True
            warnings.warn(
                f"{type(model).__name__} has no branches that are worth running on several threads, so "
                f"inter={self.pool.size} is the same as inter=1",
                UserWarning,
                stacklevel=4,
            )
        return parts


def install(model: nn.Module, forward: BranchedForward) -> None:
    """Let calls of `model` go by `forward`. ValueError as of `check`."""
    check(model)
    model.forward = types.MethodType(forward, model)


def check(model: nn.Module) -> None:
    """ValueError where its `forward` has been replaced already, and for parameters on other devices."""
    if "forward" in vars(model):
        raise ValueError(
            f"the forward of this {type(model).__name__} has been replaced already, by pt.partition.threads or by "
            "other code; remove that first"
        )
    if away := sorted({str(each.device) for each in model.parameters()} - {"cpu", "meta"}):
        raise ValueError(
            f"branches run on threads of the CPU, and the model has parameters on {away[0]}; leave out inter"
        )


def run_parts(parts: BranchedModel, model: nn.Module, values: Sequence[Any], pool: Pool) -> Any:
    """The model's answer for these inputs."""
    known: dict[fx.Node, Any] = dict(zip(parts.inputs, values, strict=True))
    for part, over in zip(parts.parts, parts.last_uses, strict=True):
        if isinstance(part, Region):
            known |= run_region(part, model, known, pool)
        else:
            known |= zip(part.gives, _ran(part, model, known), strict=True)
        for node in over:
            del known[node]
    return _ran(parts.output, model, known)


def _ran(code: Code, model: nn.Module, known: Mapping[fx.Node, Any]) -> Any:
    return code(model, [known[take.source] for take in code.takes])


def _inputs_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """The model's inputs, by the names of its own `forward`."""
    bound = _signature(type(model).forward).bind(model, *args, **kwargs)
    _, *given = bound.arguments.items()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    kinds = {name: bound.signature.parameters[name].kind for name, _ in given}
    if not any(kind in several for kind in kinds.values()):
        return Inputs(tuple(name for name, _ in given), tuple(value for _, value in given), by_keyword=True)
    if kwargs:
        raise ValueError(
            f"{type(model).__name__}.forward takes any number of inputs, and is called with keywords as well; "
            f"{_without(model)}"
        )
    return Inputs(tuple(f"input_{number}" for number in range(len(args))), tuple(args))


_signature = lru_cache(maxsize=256)(inspect.signature)


def _kind(value: Any) -> Any:
    """The facts of an input that the graph depends on."""
    if isinstance(value, FIXED):
        return value
    if isinstance(value, tuple | list):
        return type(value), *map(_kind, value)
    if isinstance(value, Mapping):
        return type(value), *((key, _kind(each)) for key, each in value.items())
    return type(value), isinstance(value, Tensor) and value.requires_grad


class _Graph(NamedTuple):
    """A model's graph for inputs of one kind."""

    traced: Traced
    containers: frozenset[str]
    """Modules that are made of operations of the graph and are not its nodes, so that hooks on them would not be
    called."""

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> _Graph:
        """Trace the model. ValueError where that is impossible."""
        with _bare(model):
            try:
                traced = traced_or_exported(model, inputs)
            except Untraceable as error:
                raise ValueError(
                    f"{str(error).replace(' cannot be cut', ' has no graph', 1)}; {_without(model)}"
                ) from error
        called = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
        names = [name for name, _ in model.named_modules() if name]
        return cls(traced, frozenset(name for name in names if not called & set(_owners(name))))


def _named_modules(module: nn.Module, name: str, found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """`module.named_modules()` with one name each. Each call needs it, and this takes a tenth of the time."""
    found[name] = module
    for own, each in module._modules.items():
        if each is not None:
            _named_modules(each, f"{name}.{own}" if name else own, found)
    return found


def _owners(name: str) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` for `a.b.c`."""
    return accumulate(name.split("."), "{}.{}".format)


@contextmanager
def _bare(model: nn.Module) -> Iterator[None]:
    """Give the model its own `forward` inside, and no hooks: a trace must not call them."""
    with attributes_kept(model):
        vars(model).pop("forward", None)
        for module in model.modules():
            vars(module).update({name: OrderedDict() for name in HOOKS})
        yield


def _without(model: nn.Module) -> str:
    return f"or leave out inter, and {type(model).__name__} runs as it is"


@dataclass(frozen=True)
class Threads:
    """Threads of one worker; see `threads`."""

    intra: int | None = None
    inter: int = 1
    least_operations: float = WORTH

    def __post_init__(self) -> None:
        for name in ("intra", "inter"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} is a number of threads, at least 1, got {value!r}")
        if self.least_operations < 0:
            raise ValueError(f"least_operations must not be negative, got {self.least_operations:g}")

    def checked(self, model: nn.Module) -> Threads:
        """Return these settings, if `model` can have them; else ValueError."""
        if self.inter > 1:
            check(model)
        return self

    def apply(self, model: nn.Module) -> ThreadedModel:
        """Use them in this process from now on, and let the calls of `model` run branches on `inter` threads."""
        forward = BranchedForward(self.inter, self.least_operations) if self.inter > 1 else None
        if forward is not None:
            install(model, forward)
        if self.intra is not None:
            torch.set_num_threads(self.intra)
        return ThreadedModel(model, forward)


class ThreadedModel:
    """A model with branches on several threads. `remove` takes the threads off again."""

    def __init__(self, model: nn.Module, forward: BranchedForward | None) -> None:
        self._model, self._forward = model, forward

    @property
    def parts(self) -> BranchedModel | None:
        """The division of the model for its last new kind of call: `parts.regions` have tasks. None: not called yet."""
        divided = () if self._forward is None else self._forward.parts
        return divided[-1] if divided else None

    def remove(self) -> None:
        """Let the model run its own `forward` again. The threads of an operation stay."""
        if self._forward is not None:
            vars(self._model).pop("forward", None)
            self._forward = None


def threads(intra: int | None = None, inter: int = 1, *, least_operations: float = WORTH) -> Threads:
    """Set a worker's numbers of threads: TensorFlow's two knobs.

        handle = pt.attach(model, optimizer, strategy, threads=1, inter_threads=2)
        result = pt.run(job, strategy, workers=2, threads=1, inter_threads=2)
        threaded = pt.partition.threads(intra=1, inter=2).apply(model)           # in a loop of your own, without attach

    `intra`: threads of one operation, such as a matrix product (torch's own; None: unchanged). `inter`: threads for the
    model's independent branches, forward and backward, each with `intra` of its own. Calls of the model compute the
    same bits as without: gradients are summed in one order, random numbers are drawn in the order of the program. The
    model is traced when it is first called; a region with branches is used where it saves at least `least_operations`
    (floating-point operations and bytes, as `pt.partition.cut` counts them) of a step.

    Calls run as they are under `torch.func` transforms, other tracers, hooks for saved tensors (`save_on_cpu`,
    checkpoints around the model), hooks on containers of layers and on gradients of single parameters, and where
    autocast keeps a copy of a parameter that several layers share. Parameters and inputs may get further gradients
    from outside of the model; a recurrent layer's are then equal to rounding. Autocast: one pass in each context.

    Cost: a first call of some traces and passes over fake tensors; then tens of microseconds for each task.

    Errors: ValueError for numbers below 1, parameters that are not on the CPU, and, in the first call, for a model
    that cannot be traced; RuntimeError for second derivatives (`create_graph=True`).

    Source: Abadi et al., TensorFlow: a system for large-scale machine learning (2016), section 3.3 and its
    `intra_op_parallelism_threads` and `inter_op_parallelism_threads`; Dean et al., Large scale distributed deep
    networks (2012), section 3, divides a model over cores and machines in the same way.
    """
    return Threads(intra, inter, least_operations)
