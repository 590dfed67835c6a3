"""The computation, costs and side effects of each node of a graph: counted on fake tensors, or measured on one thread.

Counted costs are the same on every machine. A node's operations are its matrix products, convolutions and attention,
forward and backward (by `torch.utils.flop_counter`), and `OPERATIONS_PER_BYTE` for each byte that it writes: forward
once, backward twice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from polytempo.device import kept_random_states
from polytempo.partition.cut import fake, fake_state
from polytempo.partition.graph.modes import counts_unread
from polytempo.partition.graph.trace import Inputs, Traced

OPERATIONS_PER_BYTE = 2.0
"""Twice as many operations a second as bytes written: a core with 20 Gflop/s and 10 GB/s."""
_WRITTEN = 3
"""A node writes its output forward, and about twice as much backward."""
_REPEATS = 5


class Fact(NamedTuple):
    """The facts of one node in a run on fake tensors."""

    value: Any
    """The computed value."""
    operations: float
    saved: Mapping[int, int]
    """Storages that it keeps for backward, with their bytes; parameters are not among them."""
    changed: frozenset[int]
    """Storages that it changed in place."""
    draws: bool
    """True if it drew random numbers."""
    uses: Mapping[fx.Node | str, int]
    """The number of gradients that its backward adds, one by one, to each argument's gradient, and each parameter's by
    name."""


def counted(model: nn.Module, traced: Traced, inputs: Inputs) -> dict[fx.Node, Fact]:
    """Run the graph on fake tensors. ValueError names the node that cannot run on the sample."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = fake_state(model, mode) | {name: mode.from_tensor(each) for name, each in traced.constants.items()}
    counter, draws = FlopCounterMode(display=False, custom_mapping=attention_flops()), _Draws()
    vars(counter)["mod_tracker"] = (
        _NoModules()
    )  # torch's hooks refuse modules that are given a parameter, as parametrizations are
    with kept_random_states(), counts_unread(model), mode, counter, draws, torch.enable_grad():
        walk = _Counting(model, traced.graph, state, counter, draws)
        _run(walk, [fake(value, mode) for value in inputs.traced_values])
        return walk.facts


def measured(model: nn.Module, traced: Traced, inputs: Inputs) -> dict[fx.Node, float]:
    """Seconds of each node, forward and backward, on the sample and one thread: the median of five runs.

    The model's buffers, gradients and the generators of random numbers stay as they are.
    """
    threads = torch.get_num_threads()
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    given = [tree_map_only(Tensor, torch.clone, value) for value in inputs.traced_values]
    runs = []
    torch.set_num_threads(1)
    try:
        with kept_random_states(), torch.enable_grad():
            for _ in range(_REPEATS + 1):
                walk = _Timing(model, traced.graph, traced.constants)
                _run(walk, given)
                runs.append(walk.seconds)
    finally:
        torch.set_num_threads(threads)
        for buffer, kept in before:
            buffer.copy_(kept)
    return {node: median(run[node] for run in runs[1:]) for node in runs[0]}


def storage(tensor: Tensor) -> int:
    """A key that tells a storage from others while it is alive; views of one tensor share it."""
    return int(tensor.untyped_storage()._cdata)


def _run(walk: _Walk, given: list[Any]) -> None:
    try:
        walk.run(*given, enable_io_processing=False)
    except Exception as error:
        said = " ".join(str(error).split("\n\nWhile executing")[0].split())[:300]
        node = walk.current
        raise ValueError(
            f"the model cannot be run on the sample: {node.op} {node.target} raised {type(error).__name__}: {said}"
        ) from error


class _Walk(fx.Interpreter):
    """Runs a graph node by node, with tensors of `state` in place of the model's."""

    def __init__(self, model: nn.Module, graph: fx.Graph, state: Mapping[str, Tensor]) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.state = state
        self.current: fx.Node = next(iter(graph.nodes))

    def fetch_attr(self, target: str) -> Any:
        return self.state[target] if target in self.state else super().fetch_attr(target)

    def parameters_of(self, target: str) -> list[Tensor]:
        return list(self.submodules[target].parameters())

    def alone(self, n: fx.Node) -> _Alone:
        """The node's call apart from the nodes of its arguments, so that its backward ends at them."""
        leaves: list[Tensor] = []
        begins: list[tuple[Tensor, Any]] = []

        def copied(each: Tensor) -> Tensor:
            leaves.append(each.detach().requires_grad_(each.requires_grad))
            copy = leaves[-1].clone()  # a leaf itself must not be changed in place
            begins.append((each, copy.grad_fn))
            return copy

        args, kwargs = tree_map_only(Tensor, copied, self.fetch_args_kwargs_from_env(n))
        leaves += self.parameters_of(str(n.target)) if n.op == "call_module" else []
        forward = partial(getattr(self, n.op), n.target, args, kwargs)
        return _Alone(forward, [each for each in leaves if each.requires_grad], begins)


class _Alone(NamedTuple):
    """A node's forward, and the leaves of its backward."""

    forward: Callable[[], Any]
    leaves: list[Tensor]
    begins: list[tuple[Tensor, Any]]
    """Each tensor among its arguments, and the end of its copy's backward (None: it needs no gradient)."""

    def backward(self, value: Any) -> None:
        """Compute the leaves' gradients from ones, and drop them."""
        outputs = [each for each in tensors_in(value) if each.grad_fn is not None]
        if outputs and self.leaves:
            ones = [torch.ones_like(each) for each in outputs]
            torch.autograd.grad(outputs, self.leaves, ones, allow_unused=True)

    def gradients(self, value: Any) -> Counter[int]:
        """The number of gradients that the backward of `value` adds up for each argument and each leaf, by its `id`."""
        arrive: Counter[int] = Counter()
        reached: dict[int, Any] = {}
        left = [each.grad_fn for each in tensors_in(value) if each.grad_fn is not None]
        while left:
            function = left.pop()
            if id(function) not in reached:
                reached[id(function)] = function  # kept, so that no other gets its id
                following = [each for each, _ in function.next_functions if each is not None]
                arrive.update(id(getattr(each, "variable", each)) for each in following)
                left += following
        found = Counter({id(leaf): arrive[id(leaf)] for leaf in self.leaves})
        for tensor, end in self.begins:
            found[id(tensor)] += max(1, arrive[id(end)]) if id(end) in reached else 0
        return found


class _NoModules:
    """Counts all operations together, and not by modules: an empty tracker for the counter."""

    parents: ClassVar = {"Global"}

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None:
        """End."""


class _Draws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Counting(_Walk):
    def __init__(
        self, model: nn.Module, graph: fx.Graph, state: Mapping[str, Tensor], counter: FlopCounterMode, draws: _Draws
    ) -> None:
        super().__init__(model, graph, state)
        self.counter, self.draws = counter, draws
        self.facts: dict[fx.Node, Fact] = {}
        self.own = {storage(each) for each in state.values()}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(self.submodules[target], self._state_of(target), args, kwargs)

    def parameters_of(self, target: str) -> list[Tensor]:
        return list(self._state_of(target).values())

    def _state_of(self, target: str) -> dict[str, Tensor]:
        begin = f"{target}."
        return {name.removeprefix(begin): each for name, each in self.state.items() if name.startswith(begin)}

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        saved: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            if (key := storage(tensor)) not in self.own:
                saved[key] = tensor.untyped_storage().nbytes()
            return tensor

        args = tensors_in(self.fetch_args_kwargs_from_env(n))
        versions = [each._version for each in args]
        before, self.draws.seen = self.counter.get_total_flops(), False
        alone = self.alone(n) if _computes(n) else None
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            value = super().run_node(n)
        changed = {storage(each) for each, version in zip(args, versions, strict=True) if each._version != version}
        forward, drew = self.counter.get_total_flops() - before, self.draws.seen
        uses: dict[fx.Node | str, int] = {}
        if alone is not None:
            again = alone.forward()
            uses = self._uses(n, alone.gradients(again))
            alone.backward(again)
        flops = self.counter.get_total_flops() - before - (forward if alone is not None else 0)
        known = {storage(each) for each in args}
        written = {key: each.nbytes for each in tensors_in(value) if (key := storage(each)) not in known}
        moved = 0 if n.op in ("placeholder", "get_attr") else _WRITTEN * sum(written.values())
        self.facts[n] = Fact(value, flops + OPERATIONS_PER_BYTE * moved, saved, frozenset(changed), drew, uses)
        return value

    def _uses(self, n: fx.Node, found: Counter[int]) -> dict[fx.Node | str, int]:
        uses: dict[fx.Node | str, int] = {}
        for each in n.all_input_nodes:
            uses[each] = max((found[id(tensor)] for tensor in tensors_in(self.env[each])), default=0)
        if n.op == "call_module":
            own = self._state_of(str(n.target))
            uses |= {f"{n.target}.{name}": found[id(tensor)] for name, tensor in own.items()}
        return uses


class _Timing(_Walk):
    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
        super().__init__(model, graph, constants)
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if not _computes(n):
            self.seconds[n] = 0.0
            return super().run_node(n)
        alone = self.alone(n)
        begin = time.perf_counter()
        value = alone.forward()
        alone.backward(value)
        self.seconds[n] = time.perf_counter() - begin
        return tree_map_only(Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), value)


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_module", "call_function", "call_method") and not is_pick(node)


def is_pick(node: fx.Node) -> bool:
    """True if the node takes a part out of a value: `pair[0]`, `result.values`."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in ("getitem", "getattr")


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value of any structure."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
"""Torch's fused kernels; its counter does not know the one for CPUs."""


def attention_flops(backward: int = 5) -> dict[Any, Any]:
    """Operations of fused attention: two matrix products forward, and so many backward."""

    def count(products: int, first: int) -> Any:
        def flops(*shapes: Any, out_shape: Any = None, **options: Any) -> int:
            (*batch, length, width), key = shapes[first : first + 2]
            return int(products * 2 * prod(batch) * length * key[-2] * width)

        return flops

    found: dict[Any, Any] = {}
    for kernel in (f"_scaled_dot_product_{each}" for each in _ATTENTION):
        for name, counts in ((kernel, count(2, first=0)), (f"{kernel}_backward", count(backward, first=1))):
            if (op := getattr(torch.ops.aten, name, None)) is not None:
                found[op] = counts
    return found
