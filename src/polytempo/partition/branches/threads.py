"""`threads`: how many threads a worker computes with, within one operation and for independent branches of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from polytempo.partition.branches.forward import WORTH, BranchedForward, check, install
from polytempo.partition.branches.parts import BranchedModel


@dataclass(frozen=True)
class Threads:
    """Threads of one worker; see `threads`."""

    intra: int | None = None
    inter: int = 1
    least_operations: float = WORTH

    def __post_init__(self) -> None:
        """Refuse numbers that no worker could use."""
        for name in ("intra", "inter"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} is a number of threads, at least 1, got {value!r}")
        if self.least_operations < 0:
            raise ValueError(f"least_operations must not be negative, got {self.least_operations:g}")

    def checked(self, model: nn.Module) -> Threads:
        """These, if `model` can have them; else ValueError."""
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
    """A model whose branches run on several threads. `remove` takes the threads off again."""

    def __init__(self, model: nn.Module, forward: BranchedForward | None) -> None:
        self._model, self._forward = model, forward

    @property
    def parts(self) -> BranchedModel | None:
        """How the model was divided for its last new kind of call: `parts.regions` have tasks. None: not called yet."""
        divided = () if self._forward is None else self._forward.parts
        return divided[-1] if divided else None

    def remove(self) -> None:
        """Let the model run its own `forward` again. How many threads an operation has stays as it is."""
        if self._forward is not None:
            vars(self._model).pop("forward", None)
            self._forward = None


def threads(intra: int | None = None, inter: int = 1, *, least_operations: float = WORTH) -> Threads:
    """Set a worker's numbers of threads: TensorFlow's two knobs.

        handle = pt.attach(model, optimizer, strategy, threads=pt.threads(intra=1, inter=2))
        result = pt.run(job, strategy, workers=2, threads=pt.threads(intra=1, inter=2))
        threaded = pt.threads(inter=2).apply(model)           # in a loop of your own, without attach

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
