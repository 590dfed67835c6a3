"""`DistributedOptimizer`: an optimizer with gradients of all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from polytempo.core import Codec, Strategy
from polytempo.horovod.torch.collectives import Adasum, Average, ReductionOp, Sum, grouped_allreduce_async_
from polytempo.horovod.torch.compression import AnyCompression, CodecCompression, Compression
from polytempo.horovod.torch.gradient_reduction import GradientArrivals, GradientReduction
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.process_state import PROCESS, ProcessSet, global_process_set
from polytempo.runs.own_loop.attach import attach
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.hooks.handle import Handle
from polytempo.training.model.requirements import check_momentum


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: AnyCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    strategy: Strategy | str | None = None,
) -> Any:
    """`optimizer` with a `step` that first reduces the gradients over all ranks, parameter by parameter.

    The answer is of a subclass of the optimizer's own class and shares its state. A gradient is submitted once it has
    been accumulated `backward_passes_per_step` times (the sum of these, not their mean), together with others
    (`gradient_arrivals`), and under a name of its own. With Average it is multiplied by 1/`gradient_predivide_factor`
    before the sum and by the factor after it. `groups`: the number of parts of the parameters, or lists of parameters,
    with gradients that are reduced as one; `num_groups` is its older name. Sparse gradients are gathered, or made dense
    first (`sparse_as_dense`). `compression`: a cast, or a codec for each group's gradients, which sends omitted parts
    later (`CodecCompression`). `op=Adasum` reduces the changes of the optimizer's own step, and applies their adaptive
    sum.

    In addition to `step` it has `synchronize()`: then `.grad` holds the answer, for clipping and the like; then call
    `step()` inside `with optimizer.skip_synchronize():`. Parameters that got no gradient count as zeros.

    `strategy`, which Horovod does not have, is one of this library's (`strategy_optimizer.with_strategy`).

    Errors: ValueError for names that are missing or not unique, and for arguments that do not go together.
    """
    if strategy is not None:
        return with_strategy(optimizer, named_parameters, strategy, _given(locals()))
    chosen = ReductionOp(op)
    if gradient_predivide_factor != 1.0 and chosen is not Average:
        raise ValueError("gradient_predivide_factor is for op=Average alone")
    if isinstance(compression, CodecCompression):
        _check_codec(compression.codec(), chosen, optimizer)
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
    if num_groups and groups is None:
        groups = num_groups
    names = _names(optimizer, named_parameters)
    kind = _AdasumSteps if chosen is Adasum else _ReducedGradients
    own = type(optimizer)
    made = type(own.__name__, (kind, own), {"__module__": own.__module__})
    distributed: Any = object.__new__(made)
    distributed.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    options = GradientReduction(names, compression, chosen, gradient_predivide_factor, sparse_as_dense, process_set)
    distributed._begin(options, backward_passes_per_step, _grouped(names, groups))
    return distributed


def _given(values: Mapping[str, Any]) -> list[str]:
    """The given arguments that differ from their defaults, without the parameters' names."""
    parameters = inspect.signature(DistributedOptimizer).parameters
    rest = {name: p.default for name, p in parameters.items() if p.default is not None or name == "groups"}
    return [name for name, default in rest.items() if name != "optimizer" and values[name] != default]


def _check_codec(codec: Codec, op: ReductionOp, optimizer: Optimizer) -> None:
    if op not in (Average, Sum):
        raise ValueError(
            f"{codec.facts.name} goes with op=Average or Sum, not {op.name}; use Compression.none or a cast"
        )
    check_momentum(optimizer, codec.facts.momentum, codec.facts.name)


def _names(optimizer: Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """The name of each parameter that the optimizer has and that requires a gradient, in the optimizer's order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if given is None:
        return {p: f"noname.{place}" for place, p in enumerate(parameters) if p.requires_grad}
    pairs = list(given)
    if any(not (isinstance(pair, tuple) and len(pair) == 2) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), as model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"parameter names in named_parameters must be unique, and these are not: {twice}")
    by_parameter = {parameter: name for name, parameter in pairs}
    unnamed = [tuple(p.shape) for p in parameters if p not in by_parameter]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} of the optimizer's parameters are not named "
            f"(shapes {unnamed[:5]}); give all of them, or none"
        )
    return {p: by_parameter[p] for p in parameters if p.requires_grad}


def _grouped(names: dict[Tensor, str], groups: int | Sequence[Sequence[Tensor]] | None) -> list[list[Tensor]]:
    """The parameters with gradients that are reduced as one."""
    parameters = list(names)
    if groups is None or groups == 0:
        return [[parameter] for parameter in parameters]
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups={groups} must be a number of parts that is not negative, or lists of parameters")
        parts = min(groups, len(parameters)) or 1
        bounds = [place * len(parameters) // parts for place in range(parts + 1)]
        return [parameters[start:end] for start, end in pairwise(bounds) if end > start]
    if wrong := [type(p) for group in groups for p in group if not isinstance(p, Tensor)]:
        raise ValueError(f"groups must be lists of parameters, and have {wrong[:5]}")
    listed = [[p for p in group if p in names] for group in groups]
    inside = [p for group in listed for p in group]
    if len(set(inside)) < len(inside):
        raise ValueError("groups must be disjoint, and a parameter is in several of them")
    return [group for group in listed if group] + [[p] for p in parameters if p not in set(inside)]


class _Distributed(Optimizer):
    """The common part of both kinds of distributed optimizers."""

    _reduction: GradientReduction

    def _begin(self, reduction: GradientReduction, passes: int, groups: list[list[Tensor]]) -> None:
        self._reduction, self._passes, self._groups = reduction, passes, groups

    @property
    def _takes_part(self) -> bool:
        """True if there are others; their number may change in an elastic run."""
        process_set = self._reduction.process_set
        return process_set.included() and process_set.size() > 1

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The place of Horovod's attributes."""
        return self._reduction.names

    @property
    def backward_passes_per_step(self) -> int:
        """The number of accumulations before gradients are reduced."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change that; accumulations are counted from 0 again."""
        self._passes = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own method. The given optimizer has it, too: a schedule may have been made for that."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(self.state)
        self.param_groups, self.state = groups, state

    def synchronize(self) -> None:
        """Wait for the reduced gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not call `synchronize`: it has been called."""
        yield


class _ReducedGradients(_Distributed):
    """Gradients are reduced: complete ones while the backward pass goes on, if a core is to spare."""

    def _begin(self, reduction: GradientReduction, passes: int, groups: list[list[Tensor]]) -> None:
        super()._begin(reduction, passes, groups)
        self._arrivals = GradientArrivals([[parameter.nbytes for parameter in group] for group in groups], passes)
        self._waits: dict[int, Callable[[], None]] = {}
        self._counts_now: bool | None = None
        """True if there are others in this step; None before its first gradient."""
        self._synchronized = False
        self._synchronizes = True
        parameters = (parameter for group in groups for parameter in group)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, place))
            for place, parameter in enumerate(parameters)
        ]

    def _accumulated(self, place: int, parameter: Tensor) -> None:
        """`parameter`, the one at `place` in the order of the groups, has got a gradient."""
        if self._counts_now is None:
            self._counts_now = self._takes_part
            self._arrivals.begin(self._passes, overlaps=self._counts_now and PROCESS.opened().overlaps)
        if not self._counts_now:
            return
        self._synchronized = False
        enough = self._arrivals.arrived(place)
        if enough is None:
            raise AssertionError(
                f"gradients were computed more than backward_passes_per_step={self._passes} times before step(); "
                "increase backward_passes_per_step to accumulate gradients"
            )
        if enough:
            self._submit(self._arrivals.take())

    def _submit(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._waits[group] = self._reduction.begin(self._groups[group])

    def _forget(self) -> None:
        """The step's gradients are reduced, or will not be."""
        self._waits, self._counts_now = {}, None
        self._arrivals.begin(self._passes, overlaps=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like the optimizer's own; gradients under way are forgotten."""
        self._forget()
        self._synchronized = False
        super().load_state_dict(state_dict)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate `passes` times from now on; earlier accumulations are not counted."""
        super().set_backward_passes_per_step(passes)
        self._arrivals.count_anew(passes)

    def synchronize(self) -> None:
        """Wait until `.grad` of every parameter is reduced. A parameter without a gradient is submitted as it is."""
        try:
            if self._takes_part:
                self._submit(self._arrivals.take_rest())
                for _, wait in sorted(self._waits.items()):
                    wait()
        finally:
            self._forget()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not call `synchronize`: it has been called."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the remaining gradients, then the optimizer's own step; after each call of `closure`, if there is one.

        All ranks call a closure equally often: so does every optimizer with a step that does not depend on the loss.
        LBFGS, with a step that does, gets the loss of all ranks, reduced as the gradients are.
        """
        if closure is not None and self._takes_part:
            return self._step_with(closure)
        if self._synchronizes:
            if self._synchronized and self._takes_part:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced twice",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def reduced() -> Any:
            loss = closure()
            if self._synchronizes and not self._synchronized:
                self.synchronize()
            return self._reduction.reduced_loss(loss) if isinstance(self, LBFGS) else loss

        answer = super().step(reduced)
        self._synchronized = False
        return answer

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Like the optimizer's own. AssertionError while gradients are under way."""
        if self._arrivals.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward() and before step() or synchronize(), while "
                "gradients are reduced; call it before backward()"
            )
        super().zero_grad(*args, **kwargs)


class _AdasumSteps(_Distributed):
    """The changes of the optimizer's own step are reduced: p ← p₀ + Adasum over ranks of (p - p₀)."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own step, then the adaptive sum of all ranks' changes."""
        if not self._takes_part:
            return super().step(closure)
        parameters = [parameter for group in self._groups for parameter in group]
        before = [parameter.detach().clone() for parameter in parameters]
        loss = super().step(closure)
        with torch.no_grad():
            pairs = [
                self._reduction.cast.compress(parameter - start)
                for parameter, start in zip(parameters, before, strict=True)
            ]
            changes = [pair[0] for pair in pairs]
            process_set = self._reduction.process_set
            synchronize(grouped_allreduce_async_(changes, name="adasum.steps", op=Adasum, process_set=process_set))
            for parameter, start, change, (_, context) in zip(parameters, before, changes, pairs, strict=True):
                parameter.copy_(start + self._reduction.cast.decompress(change, context))
        return loss


def with_strategy(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    strategy: Strategy | str,
    given: Sequence[str],
) -> Any:
    """`optimizer` itself, attached, with `handle` (the one of `pt.attach`), `synchronize` and `skip_synchronize`.

    The strategy is a value, or text: "local_sgd(period=8)". Buffers of the model stay each rank's own, as in Horovod.
    `given`: the other given arguments, which exclude a strategy.
    """
    world = PROCESS.opened().world
    if given:
        raise ValueError(
            f"strategy={strategy} decides how ranks exchange, so {', '.join(given)} cannot be given beside it; codecs, "
            "periods and routes are arguments of strategies, as local_sgd(period=8, codec=int8)"
        )
    if PROCESS.place is not None:
        raise ValueError(
            f"strategy={strategy} belongs to one group of ranks, and in an elastic run groups change; leave it out, or "
            "use polytempo.elastic, which attaches it again in each group"
        )
    if hasattr(optimizer, "handle"):
        raise ValueError("this optimizer has a strategy already; call optimizer.handle.detach() first")
    if named_parameters is None:
        raise ValueError("a strategy knows parameters by name; give named_parameters=model.named_parameters()")
    chosen = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    attached: Any = optimizer
    attached.handle = handle = attach(_module_of(named_parameters), optimizer, chosen, world=world)
    attached.synchronize = handle.complete if isinstance(handle, Handle) else lambda: None
    attached.skip_synchronize = nullcontext
    return attached


def _module_of(named_parameters: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """A module with these parameters under these names, and nothing else: Horovod is given no model."""
    root = nn.Module()
    for name, parameter in named_parameters:
        if not isinstance(parameter, nn.Parameter):
            raise ValueError(f"{name!r} is not an nn.Parameter; give named_parameters=model.named_parameters()")
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, parameter)
    return root
