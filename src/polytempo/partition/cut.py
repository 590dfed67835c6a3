"""A model cut into stages: the computation of each stage, and the tensors that pass between them.

stage 0 ──h──▶ stage 1 ──g──▶ stage 2        values: h (source 0, targets 1 and 2), g (source 1, target 2)
   └───────────h────────────────▲            h goes from stage 0 to stage 2 directly; stage 1 does not pass it on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from polytempo.device import kept_random_states
from polytempo.partition.graph.modes import attributes_kept, counts_unread

Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a receive buffer."""


_LONG = 40


def any_size(inputs: Sequence[Any]) -> None:
    """`Cut.check` of a model that decides nothing by sizes."""


@dataclass(frozen=True)
class Value:
    """A tensor that crosses a cut: one stage computes it, others use it."""

    name: str
    source: int
    """The stage that computes it."""
    targets: tuple[int, ...]
    """The stages that use it, ascending. It is sent once to each of them, directly."""
    requires_grad: bool = True
    """True if targets send a gradient back. False: the tensor is not floating-point, or nothing trained is behind it. A
    target that has no gradient for it sends zeros."""


@dataclass(frozen=True)
class StageCost:
    """The costs of a stage for the inputs of the cut."""

    layers: tuple[str, ...]
    """Places of the modules with parameters, and of operations between modules."""
    parameters: int
    """Numbers that the stage trains or holds."""
    parameter_bytes: int
    saved_bytes: int
    """Tensors kept from forward to backward, with the received ones."""
    operations: float
    """Floating-point operations of forward and backward; see `profile.counted`."""
    seconds: float | None
    """Measured time of forward and backward on one thread; None where it was not measured."""
    bytes_in: int
    """Values that it receives."""
    bytes_out: int
    """Values that it sends, each once per target."""

    @property
    def shown(self) -> str:
        """All layers if they are short, or the first and the last."""
        every = ", ".join(self.layers)
        return every if len(every) <= _LONG else f"{self.layers[0]} … {self.layers[-1]}"

    def memory_bytes(self, state_per_parameter: float) -> float:
        """Parameters, gradients, the optimizer's state, and one micro-batch's kept tensors."""
        return self.parameter_bytes * (2 + state_per_parameter) + self.saved_bytes


@dataclass(frozen=True)
class Stage:
    """One part of the model. `module(*inputs, *takes)` answers `gives`, then in the last stage the model's output.

    Parameters and buffers have the names that they have in the whole model, and are the same tensors: the union of
    the `state_dict`s of all stages is the whole model's.
    """

    index: int
    module: nn.Module
    inputs: tuple[str, ...]
    """Inputs of the model that it is given first, by the names of `forward`'s parameters."""
    takes: tuple[str, ...]
    """Values of other stages that it is given next, in this order."""
    gives: tuple[str, ...]
    """Values that it answers, in this order."""
    is_last: bool
    """The last stage's answer has the model's own output, of any structure, as its last item."""


@dataclass(frozen=True)
class Cut:
    """A model in stages."""

    stages: tuple[Stage, ...]
    values: tuple[Value, ...]
    """Values in the order of the model's computation."""
    shared: Mapping[str, Mapping[int, str]]
    """Parameters that several stages use (tied weights): by the whole model's name, the name that each of these stages
    has for it. Their gradients are to be summed."""
    inputs: tuple[str, ...]
    """The model's inputs, in the order of the sample."""
    begins: tuple[str, ...]
    """Names where stages but the first begin: `cut(…, by=begins)` makes the same cut."""
    costs: tuple[StageCost, ...] = ()
    check: Callable[[Sequence[Any]], None] = any_size
    """Raises ValueError for inputs with sizes that lead the model to other decisions than the sample."""

    def inputs_of(self, stage: int, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The model's inputs that the stage's module is given first."""
        given = dict(zip(self.inputs, inputs, strict=True))
        return tuple(given[name] for name in self.stages[stage].inputs)

    def layouts(self, *inputs: Any) -> dict[str, Layout]:
        """Shape and dtype of every value for these inputs of the model. No tensor is computed: fake ones are used.

        Cost: the time of the model's operations without their arithmetic (some milliseconds), no memory.
        """
        if len(inputs) != len(self.inputs):
            raise ValueError(f"the model was cut for the inputs {', '.join(self.inputs)}; got {len(inputs)} of them")
        self.check(inputs)
        sizes = ", ".join(f"{n} {described(value)}" for n, value in zip(self.inputs, inputs, strict=True))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        given = [fake(value, mode) for value in inputs]
        known: dict[str, Tensor] = {}
        with torch.no_grad(), mode, kept_random_states():
            for stage in self.stages:
                state = fake_state(stage.module, mode)
                taken = (*self.inputs_of(stage.index, given), *(known[name] for name in stage.takes))
                try:
                    with attributes_kept(stage.module), counts_unread(stage.module):
                        answer = functional_call(stage.module, state, taken)
                except Exception as error:
                    raise ValueError(
                        f"{located(stage.index, error)} cannot take inputs of these sizes: {sizes}: {error}"
                    ) from error
                known |= dict(zip(stage.gives, answer, strict=False))
        return {name: (tuple(value.shape), value.dtype) for name, value in known.items()}


def unbalanced(costs: Sequence[StageCost], each: Sequence[float], most: float = 1.25) -> str:
    """A warning where a stage costs more than `most` times the mean of `each`; "" where none does."""
    slowest, mean = max(range(len(each)), key=each.__getitem__), sum(each) / len(each)
    if each[slowest] <= most * mean:
        return ""
    return (
        f"stage {slowest} ({costs[slowest].shown}) takes {each[slowest] / mean:.1f} times the mean, and a "
        f"pipeline is as slow as its slowest stage: {len(each)} stages are at most {sum(each) / each[slowest]:.1f} "
        "times as fast as one"
    )


def located(stage: int, error: Exception) -> str:
    """The place of an error in a stage's graph: its line names the layer or the operation."""
    lines = [frame.line for frame in extract_tb(error.__traceback__) if frame.filename.startswith("<eval_with_key")]
    return f"stage {stage}" + (f" at `{lines[-1].partition(';')[0]}`" if lines and lines[-1] else "")


def described(value: Any) -> str:
    """A tensor's shape and dtype; else the value."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)


def fake(value: Any, mode: FakeTensorMode) -> Any:
    """The same structure with fake tensors."""
    return torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, value)


def fake_state(module: nn.Module, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Parameters and buffers as fake tensors; a tensor with several names is one fake tensor."""
    made: dict[int, Tensor] = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: made.setdefault(id(each), mode.from_tensor(each)) for name, each in tensors}
