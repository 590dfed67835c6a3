"""`OneCopy`: the parameters and the optimizer's state of a model, once for all ranks of a host.

rank 0's memory     [ parameters | first moments | second moments ]   ◀── every rank's model and optimizer alias it
each rank's memory  [ gradients ]                                     ◀── its `.grad`, which the others read

backward()          each fresh gradient is copied to its place, and its own memory given back
optimizer.step()    before torch's step: all meet, each rank updates its slice from all gradients, all meet; then
                    torch's own step finds no gradients, and does nothing
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from polytempo.core import PolytempoError, Port, Strategy
from polytempo.native.common import Common, layout
from polytempo.native.group import Group
from polytempo.native.kernels.step import Item, StepPlan, most_row_bytes
from polytempo.native.library import why_not
from polytempo.one_host.update_rule import hypers_of, layer_hypers, rule_of, takes_rows
from polytempo.worlds import ProcessWorld


def host_group(world: ProcessWorld, data: Port, strategy: Strategy) -> Group | None:
    """The group with one copy of the parameters by `strategy`; None where every rank has its own.

    All ranks call it; `data` are the ranks that hold the same parameters. Raises ValueError where ranks that should
    share memory cannot, and the strategy needs it.
    """
    if strategy.one_copy is None or data.size == 1:
        return None
    parts = world.size // data.size
    group = world.host_group() if parts == 1 else None
    if group is None:
        why = why_not() or "the ranks are on several hosts"
        why = why if parts == 1 else f"the mesh has {parts} ranks for the parts of one model"
        if strategy.one_copy != "together":
            raise ValueError(f"{strategy} needs ranks that share memory: {why}; or use sync_sgd()")
        if world.rank == 0:
            print(f"polytempo: every rank keeps its own copy, as in sync_sgd(): {why}", file=sys.stderr)
    return group


def share_parameters(world: ProcessWorld, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Common]:
    """One copy of `tensors` for all ranks of a host: rank 0's values; and their memory. All ranks call it.

    Raises ValueError where the ranks do not share memory, MemoryError where there is too little of it.
    """
    group = world.host_group()
    if group is None:
        raise ValueError(f"the ranks share no memory: {why_not() or 'they are on several hosts'}; use sync_sgd()")
    offsets, num_bytes = layout(list(tensors.values()))
    common = Common(group, max(1, num_bytes))
    shared = {n: common.tensor(offset, t) for offset, (n, t) in zip(offsets, tensors.items(), strict=True)}
    if group.rank == 0:
        for name, tensor in tensors.items():
            shared[name].copy_(tensor.detach())
    group.barrier()
    return shared, common


def alias_parameters(world: ProcessWorld, parameters: Mapping[str, nn.Parameter]) -> Common:
    """Let the parameters of all ranks be one copy, with rank 0's values; its memory. All ranks call it."""
    shared, common = share_parameters(world, {n: p.detach() for n, p in parameters.items()})
    for name, alias in shared.items():
        parameters[name].data = alias
    return common


def own_parameters(world: ProcessWorld, parameters: Mapping[str, nn.Parameter], common: Common | None) -> None:
    """Give the parameters memory of their own again, equal on all ranks, and free the common one. All ranks call it."""
    group = world.host_group()
    with suppress(PolytempoError):  # where a rank is lost no rank waits; the memory goes when all others have left
        if group is not None:
            group.barrier()  # no rank copies before the last update
    for parameter in parameters.values():
        parameter.data = parameter.data.clone()
    if common is not None:
        with suppress(PolytempoError):
            common.release()


_HELD = [torch.empty(0)]
_UNSHARED = sys.getrefcount(_HELD[0])
"""The number of references to a tensor that only one list holds."""


class OneCopy:
    """The parameters of one rank's model as aliases of the one copy, and the steps on it. All ranks make it.

    `.grad` holds this rank's own gradient, before any exchange. A parameter without a gradient on every rank is left
    alone by a step, as torch does. Cost of a step on N ranks with K bytes of parameters: two meetings; each rank
    reads K of gradients and reads and writes K/N of the parameters and of each moment. Memory: K for each rank's
    gradients, K for the parameters and each moment once.
    """

    def __init__(
        self,
        group: Group,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        sparse_tables: frozenset[str],
    ) -> None:
        self._group, self._optimizer = group, optimizer
        self._rule = rule_of(optimizer)
        self._parameters = list(parameters.values())
        items = self._items(parameters, sparse_tables)
        self._by_rows = [item.by_rows for item in items]
        self.plan = StepPlan(group, items, (self._rule.first is not None, self._rule.second is not None))
        self._places = [-1 if view is None else view.data_ptr() for view in self.plan.gradients]
        self._scale = 1.0
        """The factor of clipping, until the next step or the next backward pass."""
        self._hidden: list[Tensor | None] = []
        self._without_state: list[int] = []
        self._num_with_state = 0
        self._adopt(writes=group.rank == 0, fresh=True)
        for parameter, alias in zip(self._parameters, self.plan.parameters, strict=True):
            assert alias is not None
            parameter.data = alias
        self._homes = [parameter.data_ptr() for parameter in self._parameters]
        group.barrier()  # rank 0 has written the moments
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._arrival(index))
            for index, parameter in enumerate(self._parameters)
        ]
        weakly = ref(self)

        def loaded(_: Optimizer) -> None:
            copy = weakly()
            if copy is not None:
                copy._adopt(writes=True, fresh=False)

        self._hooks.append(optimizer.register_load_state_dict_post_hook(loaded))

    def _items(self, parameters: Mapping[str, nn.Parameter], sparse_tables: frozenset[str]) -> list[Item]:
        groups = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        items: list[Item] = []
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64) or parameter.device.type != "cpu":
                raise ValueError(
                    f"shared_memory() trains float32 and float64 on the CPU, and parameter {name!r} is "
                    f"{parameter.dtype} on {parameter.device}; use sync_sgd()"
                )
            group = groups[id(parameter)]
            by_rows = name in sparse_tables and takes_rows(self._rule, self._optimizer.param_groups[group])
            row_bytes = parameter.nbytes // max(1, parameter.shape[0]) if parameter.dim() else parameter.nbytes
            fits = parameter.is_contiguous() and row_bytes <= most_row_bytes(self._group)
            items.append(Item(parameter.detach(), len(items) if self._rule.by_layer else group, by_rows and fits))
        return items

    # ------------------------------------------------------------------ gradients

    def _arrival(self, index: int) -> Callable[[Tensor], None]:
        weakly = ref(self)  # torch keeps a parameter's hooks where the garbage collector does not look

        def arrived(parameter: Tensor) -> None:
            copy, gradient = weakly(), parameter.grad
            if copy is None or gradient is None:
                return
            copy._scale = 1.0  # a step that was clipped and then left out leaves nothing behind
            if not copy._by_rows[index] and gradient.data_ptr() != copy._places[index]:
                copy._place(index, parameter, gradient)

        return arrived

    def _place(self, index: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Copy a gradient to the place where the others read it, and free its own memory."""
        if sys.getrefcount(self.plan.gradients[index]) > _UNSHARED:
            self._leave_to_loop(index)
        place = self.plan.gradients[index]
        assert place is not None
        place.copy_(gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense())
        parameter.grad = place
        return place

    def _leave_to_loop(self, index: int) -> None:
        """The loop has kept the last `.grad`: give that memory of its own, for the next gradient takes its place."""
        kept = self.plan.gradients[index]
        assert kept is not None
        self.plan.gradients[index] = kept.detach()
        kept.data = kept.clone()

    def _bring(self, index: int, parameter: Tensor) -> Tensor | None:
        """This parameter's gradient, once the others can read it."""
        if parameter.data_ptr() != self._homes[index]:
            raise RuntimeError(
                f"parameter {index} of shape {list(parameter.shape)} was given other memory (`.data = …`, "
                "`model.to(…)`), so it is no longer the one copy; write into it with `copy_`, or detach() and "
                "attach again"
            )
        gradient = parameter.grad
        self.plan.used[index] = gradient is not None
        if gradient is None:
            return None
        if self._by_rows[index]:
            if gradient.layout == torch.strided:
                rows, values = torch.arange(parameter.shape[0]), gradient.detach()
            else:
                rows, values = gradient._indices()[0], gradient._values()
            self.plan.set_rows(index, rows, values)
        elif gradient.data_ptr() != self._places[index]:
            return self._place(index, parameter, gradient)
        return gradient

    def _bring_all(self) -> list[Tensor | None]:
        return [self._bring(index, parameter) for index, parameter in enumerate(self._parameters)]

    def clip_grad_norm_(self, max_norm: float, share: float | None) -> Tensor:
        """Let the next step scale the mean gradient so that its norm is at most `max_norm`; returns its norm now.

        All ranks call it. Cost: two meetings, and one pass over all ranks' gradients, each rank its slice.
        """
        self._bring_all()
        norm = self.plan.norm(self._weight(share))
        self._scale *= min(1.0, max_norm / (norm + 1e-6))
        return torch.tensor(norm)

    def _weight(self, share: float | None) -> float:
        return (1 / self._group.size if share is None else share) * self._scale

    # ------------------------------------------------------------------ the step

    def step(self, share: float | None) -> None:
        """Update the one copy together with all other ranks, and hide the gradients from torch's own step.

        When a rank dies meanwhile the others raise PeerLost, with all of the step made, or none of it.
        """
        hypers = None if self._rule.by_layer else hypers_of(self._rule, self._optimizer)
        if len(self._optimizer.state) < self._num_with_state:  # the loop has cleared it: moments begin again at 0
            self._adopt(writes=True, fresh=False)
        gradients = self._bring_all()
        weight = self._weight(share)
        try:
            self.plan.step(hypers or layer_hypers(self._optimizer, self._parameters, self.plan, weight), weight)
        finally:
            self._scale = 1.0
            self._show_state()
        self._hidden = gradients
        for parameter in self._parameters:
            parameter.grad = None
            increment_version(parameter)

    def end_step(self) -> None:
        """Give the parameters their gradients back."""
        for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = []

    def _show_state(self) -> None:
        """Let the optimizer's state show the moments of those parameters that have made their first step."""
        if self._without_state:
            self._without_state = [i for i in self._without_state if not self._shown(i)]

    def _shown(self, index: int) -> bool:
        if not self.plan.steps[index]:
            return False
        moments = {self._rule.first: self.plan.first[index], self._rule.second: self.plan.second[index]}
        state = {name: moment for name, moment in moments.items() if name is not None}
        if self._rule.counts:
            state = {"step": self.plan.steps[index], **state}
        if state:
            self._optimizer.state[self._parameters[index]] = state
            self._num_with_state += 1
        return True

    @torch.no_grad()
    def _adopt(self, *, writes: bool, fresh: bool) -> None:
        """Take over the present optimizer state, and let it alias the one copy. `fresh`: all moments are still zero."""
        self._without_state, self._num_with_state = [], 0
        for index, parameter in enumerate(self._parameters):
            state: dict[str, Any] = self._optimizer.state.get(parameter) or {}
            moments = ((self._rule.first, self.plan.first[index]), (self._rule.second, self.plan.second[index]))
            present = False
            for name, place in moments:
                value = None if name is None else state.get(name)
                if value is not None and place is not None:
                    present = True
                    if writes:
                        place.copy_(value)
                    state[str(name)] = place
                elif place is not None and writes and not fresh:
                    place.zero_()
            self.plan.steps[index] = float(state.get("step", present or self._rule.begins_at_zero))
            if self._rule.counts and "step" in state:
                state["step"] = self.plan.steps[index]
            if not present:
                self._without_state.append(index)
            self._num_with_state += present

    # ------------------------------------------------------------------ the end

    @torch.no_grad()
    def detach(self) -> None:
        """Give parameters, gradients and state memory of their own. All ranks call it while all live."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                state[name] = value.clone() if isinstance(value, Tensor) else value
        with suppress(PolytempoError):  # where a rank is lost the memory goes when all others have left
            self.plan.common.release()


def one_copy_of(
    group: Group | None,
    strategy: Strategy,
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tables: frozenset[str],
) -> OneCopy | None:
    """The one copy where all ranks' gradients make one update; None where there is no group or each rank its turn."""
    if group is None or strategy.one_copy != "together":
        return None
    return OneCopy(group, optimizer, parameters, tables)
