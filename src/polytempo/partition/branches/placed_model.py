"""`PlacedModel`: a model with branches on several workers, called as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from polytempo.core import Port
from polytempo.partition.branches.parts import parts_of
from polytempo.partition.branches.placed_passes import Leaf, PlacedPass, Sizes, backward, forward, parameters_of
from polytempo.partition.branches.placement import Placement, placement
from polytempo.partition.cut import Layout
from polytempo.partition.graph.exported_graph import traced_or_exported
from polytempo.partition.graph.profile import counted
from polytempo.partition.graph.trace import FIXED, Inputs, Traced, inputs_of
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.parted_model import PartedModel


class PlacedModel(PartedModel):
    """Takes a model's place, with the parameters and buffers of this rank's branches under their names.

    All ranks call it with equal inputs, all have its answer, and all call backward on the same loss.
    """

    def __init__(self, model: nn.Module, group: ModelGroup, plan: Placement, traced: Traced, inputs: Inputs) -> None:
        layouts = {name: (tuple(t.shape), t.dtype) for name, t in model.named_parameters()}
        owners = {name: plan.owners.get(id(tensor), 0) for name, tensor in model.named_parameters()}
        _keep_own(model, plan.owners, group.rank)
        super().__init__(model, group)
        self.plan, self._layouts, self._owners = plan, layouts, owners
        self._traced, self._inputs = traced, inputs
        self._sizes: dict[Any, Sizes] = {}

    @property
    def places(self) -> dict[str, int]:
        """The worker that has each parameter."""
        return dict(self._owners)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer, on every rank. ValueError for inputs of another kind than the sample."""
        values = self._values(args, kwargs)
        kind = tuple(each.shape for each in tree_leaves(values) if isinstance(each, Tensor))
        sizes = self._sizes.get(kind)
        learns = torch.is_grad_enabled()
        model, plan = self.__dict__["model"], self.plan
        done: PlacedPass = self.group.drive(forward(self.group.port, plan, model, values, sizes, learns=learns))
        self._sizes[kind] = done.sizes
        known = {take.source: done.known[take.source] for take in plan.output.takes}
        if learns:
            known = self._joined(done, known)
        return plan.output(model, [known[take.source] for take in plan.output.takes])

    def full_parameters(self) -> dict[str, Tensor]:
        """The whole model's parameters by its names, on every rank. All ranks call it. Cost: a broadcast of each."""
        return self._whole({name: each.detach() for name, each in self.named_parameters()})

    def full_gradients(self) -> dict[str, Tensor]:
        """The whole model's gradients; zeros for parameters without one."""
        found = {name: (each, each.grad) for name, each in self.named_parameters()}
        return self._whole({name: torch.zeros_like(each) if g is None else g for name, (each, g) in found.items()})

    def replicated(self) -> list[nn.Parameter]:
        """None: every parameter is at one rank."""
        return []

    def _whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.group.drive(_gathered(self.group.port, own, self._layouts, self._owners))
        return found

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        names = self._inputs.names
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or given.keys() != set(names):
            raise ValueError(
                f"the model was placed for the inputs {', '.join(names)}, and got {len(args)} and {', '.join(kwargs)}"
            )
        values = tuple(given[name] for name in names)
        for name, value, placed in zip(names, values, self._inputs.values, strict=True):
            if isinstance(placed, FIXED) and value != placed:
                raise ValueError(f"the model was placed for {name}={placed!r}, and got {value!r}; place it once more")
        self._traced.check(values)
        if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in tree_leaves(values)):
            raise ValueError("inputs of a placed model have no gradient, and one of these needs it; detach it")
        return self._inputs._replace(values=values).traced_values

    def _joined(self, done: PlacedPass, known: Mapping[Any, Any]) -> dict[Any, Any]:
        """The values of the answer behind one operation of autograd; its backward runs the backward passes of all
        places."""
        model, plan = self.__dict__["model"], self.plan
        own = [task for task in plan.tasks if task.place == self.group.rank]
        parameters = list({id(p): p for task in own for p in parameters_of(model, task)}.values())
        flat = {node: tree_flatten(value) for node, value in known.items()}
        leaving: list[tuple[Leaf, Tensor]] = [
            ((node, number), leaf)
            for node, (leaves, _) in flat.items()
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not leaving:
            return dict(known)
        anchor = torch.empty(0, requires_grad=True)  # a rank without parameters takes part in backward, too
        answers = _Placed.apply(self, done, leaving, parameters, anchor, *parameters)  # type: ignore[no-untyped-call]
        for ((node, number), _), answer in zip(leaving, answers, strict=True):
            flat[node][0][number] = answer
        return {node: tree_unflatten(leaves, structure) for node, (leaves, structure) in flat.items()}


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        model: PlacedModel,
        done: PlacedPass,
        leaving: list[tuple[Leaf, Tensor]],
        parameters: list[Tensor],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.placed, ctx.done, ctx.parameters = model, done, parameters
        ctx.leaving = [leaf for leaf, _ in leaving]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for _, tensor in leaving)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.done is None:
            raise RuntimeError("backward a second time; call the first one with retain_graph=True")
        placed: PlacedModel = ctx.placed
        given = {leaf: each for leaf, each in zip(ctx.leaving, gradients, strict=True) if each is not None}
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        port, model = placed.group.port, placed.__dict__["model"]
        found = placed.group.drive(backward(port, placed.plan, model, ctx.done.records, given, keep=keep))
        if not keep:
            ctx.done = None
        return *[None] * 5, *(found.get(id(parameter)) for parameter in ctx.parameters)


def placed(model: nn.Module, sample: Any, group: ModelGroup) -> PlacedModel:
    """Keep this rank's branches of `model`. The answer takes its place.

    Errors: ValueError for a model that cannot be traced, and for one without branches.
    """
    inputs = inputs_of(model, sample)
    traced = traced_or_exported(model, inputs)
    facts = counted(model, traced, inputs)
    parts = parts_of(model, traced, facts, threads=max(2, group.size), least_operations=0)
    if not parts.regions and group.size > 1:
        raise ValueError(
            f"{type(model).__name__} has no branches that could run at the same time, so {group.size} workers would do "
            "the work of one; split its layers (pt.split), or cut it into stages (pt.pipeline)"
        )
    return PlacedModel(model, group, placement(model, parts, facts, group.size), traced, inputs)


def _keep_own(model: nn.Module, owners: Mapping[int, int], rank: int) -> None:
    for module in model.modules():
        for held, where in ((module._parameters, 0), (module._buffers, rank)):
            for name, tensor in held.items():
                if tensor is not None and owners.get(id(tensor), where) != rank:
                    held[name] = None


async def _gathered(
    port: Port,
    own: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    owners: Mapping[str, int],
) -> dict[str, Tensor]:
    found = {}
    for name, (shape, dtype) in layouts.items():
        mine = own[name].clone().contiguous() if name in own else torch.empty(shape, dtype=dtype)
        found[name] = await port.broadcast(mine, owners[name])
    return found
