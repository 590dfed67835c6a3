"""`DistributedOptimizer`: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polytempo.core import Codec, Strategy
from polytempo.horovod.runtime.codec_exchange import CodecExchange
from polytempo.horovod.torch.collectives import (
    Adasum,
    Average,
    ReductionOp,
    Sum,
    allreduce_async_,
    encoded_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from polytempo.horovod.torch.compression import AnyCompression, CodecCompression, Compression
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.process_sets import ProcessSet, global_process_set
from polytempo.horovod.torch.strategy_optimizer import with_strategy
from polytempo.training.requirements import check_momentum


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
    """`optimizer` as one whose `step` first reduces the gradients over all ranks, parameter by parameter.

    The answer is of a subclass of the optimizer's own class and shares its state. A gradient is submitted as soon as
    it has been accumulated `backward_passes_per_step` times (the sum of these, not their mean). With Average it is
    multiplied by 1/`gradient_predivide_factor` before the sum and by the factor after it. `groups`: how many parts
    the parameters are dealt to, or lists of parameters, whose gradients are reduced as one; `num_groups` is its older
    name. Sparse gradients are gathered, or made dense first (`sparse_as_dense`). `compression`: a cast, or a codec, by
    which each group's gradients travel, and which sends later what it leaves out (`CodecCompression`). `op=Adasum`
    reduces what the optimizer's own step changes, and applies the adaptive sum of that.

    Besides `step` it has `synchronize()`, after which `.grad` holds the answer, for clipping and the like; then call
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
    options = _Reduction(names, compression, chosen, gradient_predivide_factor, sparse_as_dense, process_set)
    distributed._begin(options, backward_passes_per_step, _grouped(names, groups))
    return distributed


def _given(values: Mapping[str, Any]) -> list[str]:
    """Which arguments besides the parameters' names are not as they are by default."""
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
    """The parameters whose gradients are reduced as one."""
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


class _Reduction:
    """How gradients are reduced: arguments of `DistributedOptimizer`, by their names there."""

    def __init__(
        self,
        names: dict[Tensor, str],
        compression: AnyCompression,
        op: ReductionOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names, self.op = names, op
        self.codec = compression if isinstance(compression, CodecCompression) else None
        self.cast = Compression.none if isinstance(compression, CodecCompression) else compression
        self.factors = (1.0 / predivide, predivide)
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        self._exchanges: dict[str, CodecExchange] = {}
        """Of a codec, by name: what of each gradient is sent later."""

    def begin(self, group: Sequence[Tensor]) -> Callable[[], None]:
        """Submit the gradients of `group`; what is answered waits for them, and puts them in place."""
        made_dense: dict[Tensor, int] = {}
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse and self.sparse_as_dense:
                made_dense[parameter] = parameter.grad.sparse_dim()
                parameter.grad = parameter.grad.to_dense()
        sparse = [parameter for parameter in group if _gradient(parameter).is_sparse]
        dense = [parameter for parameter in group if not _gradient(parameter).is_sparse]
        waits = [self._begin_sparse(parameter) for parameter in sparse]
        if dense:
            waits.append(self._begin_dense(dense))

        def wait() -> None:
            for each in waits:
                each()
            for parameter, dims in made_dense.items():
                parameter.grad = _gradient(parameter).to_sparse(dims)

        return wait

    def _begin_dense(self, group: Sequence[Tensor]) -> Callable[[], None]:
        if self.codec is not None:
            return self._begin_encoded(group, self.codec)
        pairs = [self.cast.compress(_gradient(parameter)) for parameter in group]
        sent = [pair[0] for pair in pairs]
        name, (before, after) = self.names[group[0]], self.factors
        if len(sent) == 1:
            handle = allreduce_async_(sent[0], None, name, self.op, before, after, self.process_set)
        else:
            handle = grouped_allreduce_async_(sent, None, f"group.{name}", self.op, before, after, self.process_set)

        def wait() -> None:
            synchronize(handle)
            for parameter, tensor, (_, context) in zip(group, sent, pairs, strict=True):
                answer = self.cast.decompress(tensor, context)
                if answer is not parameter.grad:
                    _gradient(parameter).copy_(answer)

        return wait

    def _begin_encoded(self, group: Sequence[Tensor], by: CodecCompression) -> Callable[[], None]:
        name = self.names[group[0]]
        if name not in self._exchanges:
            self._exchanges[name] = by.lasting()
        given, exchange = [_gradient(parameter) for parameter in group], self._exchanges[name]
        options = (self.op, self.factors, self.process_set, exchange)
        handle = encoded_allreduce_async(given, f"encoded.{name}", *options, in_place=True)
        return partial(synchronize, handle)

    def _begin_sparse(self, parameter: Tensor) -> Callable[[], None]:
        later = sparse_allreduce_async(_gradient(parameter), self.names[parameter], self.op, self.process_set)

        def wait() -> None:
            parameter.grad = later()

        return wait


class _Distributed(Optimizer):
    """What both kinds of distributed optimizers have."""

    _reduction: _Reduction

    def _begin(self, reduction: _Reduction, passes: int, groups: list[list[Tensor]]) -> None:
        self._reduction, self._passes, self._groups = reduction, passes, groups

    @property
    def _takes_part(self) -> bool:
        """Whether there are others; their number may change in an elastic run."""
        process_set = self._reduction.process_set
        return process_set.included() and process_set.size() > 1

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """Where Horovod has them."""
        return self._reduction.names

    @property
    def backward_passes_per_step(self) -> int:
        """How many times gradients are accumulated before they are reduced."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change that; accumulations are counted anew."""
        self._passes = passes

    def synchronize(self) -> None:
        """Wait for what is reduced."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not call `synchronize`: it has been called."""
        yield


class _ReducedGradients(_Distributed):
    """Gradients are reduced as they come."""

    def _begin(self, reduction: _Reduction, passes: int, groups: list[list[Tensor]]) -> None:
        super()._begin(reduction, passes, groups)
        self._group_of = {parameter: place for place, group in enumerate(groups) for parameter in group}
        self._counts = dict.fromkeys(self._group_of, 0)
        self._waits: dict[int, Callable[[], None]] = {}
        self._synchronized = False
        self._synchronizes = True
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._group_of]

    def _accumulated(self, parameter: Tensor) -> None:
        """`parameter` has got a gradient."""
        if not self._takes_part:
            return
        group = self._group_of[parameter]
        if group in self._waits or self._counts[parameter] >= self._passes:
            raise AssertionError(
                f"gradients were computed more than backward_passes_per_step={self._passes} times before step(); "
                "increase backward_passes_per_step to accumulate gradients"
            )
        self._counts[parameter] += 1
        self._synchronized = False
        if all(self._counts[other] == self._passes for other in self._groups[group]):
            self._waits[group] = self._reduction.begin(self._groups[group])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; gradients that are under way are forgotten."""
        self._waits = {}
        self._counts = dict.fromkeys(self._counts, 0)
        self._synchronized = False
        super().load_state_dict(state_dict)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate `passes` times from now on; what is accumulated already is not counted."""
        super().set_backward_passes_per_step(passes)
        self._counts = dict.fromkeys(self._counts, 0)

    def synchronize(self) -> None:
        """Wait until `.grad` of every parameter is reduced. What has no gradient yet is submitted as it is."""
        if self._takes_part:
            for place, group in enumerate(self._groups):
                if place not in self._waits:
                    self._waits[place] = self._reduction.begin(group)
            waits, self._waits = self._waits, {}
            for place in sorted(waits):
                waits[place]()
            self._counts = dict.fromkeys(self._counts, 0)
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
        """Reduce what is not reduced yet, then the optimizer's own step; after each call of `closure`, if there is one.

        All ranks call a closure equally often: so does every optimizer whose step does not depend on the loss.
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
            return loss

        answer = super().step(reduced)
        self._synchronized = False
        return answer

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. AssertionError while gradients are under way."""
        if self._waits:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward() and before step() or synchronize(), while "
                "gradients are reduced; call it before backward()"
            )
        super().zero_grad(*args, **kwargs)


class _AdasumSteps(_Distributed):
    """What the optimizer's own step has changed is reduced: p ← p₀ + Adasum over ranks of (p - p₀)."""

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


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
