"""`Bucket`: some parameters whose gradients are exchanged together, through one flat buffer.

parameters   [ ... layer 1 ... | ... layer 2 ... | ... layer 3 ... ]
buckets                [        1        ][         0         ]       backward fills bucket 0 first
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, Port, State
from polytempo.core.state import duplicate, residual_tensors, settled

_PART = 1 << 18
"""Elements that are looked at together."""

Empty = Callable[[int, torch.dtype], Tensor]
"""Makes flat buffers, shape (numel,)."""


class _Exchange(NamedTuple):
    """What an exchange left that no optimizer step has used yet."""

    state: State
    answered: bool
    """Whether the transform did something, so that `.grad` is an answer, and no more what this rank computed."""


class Bucket:
    """Parameters of one dtype and device, the state of their transform, and the memory of their flat buffer.

    state ──▶ exchange ──▶ tentative ──▶ commit (optimizer.step) ──▶ state
      └─────▶ exchange ──▶ tentative ──▶ no step: the next exchange starts from `state` again
    """

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], empty: Empty | None = None) -> None:
        self.index = index
        self._empty = empty
        self.parameters = dict(parameters)
        self.numel = sum(p.numel() for p in parameters.values())
        self.state: State = None
        """As the last optimizer step left it."""
        self._tentative: _Exchange | None = None
        self._free: list[Tensor] = []
        """Memory of residuals that the next exchange may write to."""
        self.unused: set[str] = set()
        """Parameters for which this rank had no gradient in the last exchange."""
        self.silent: list[str] = []
        """Trained parameters for which the last answer has nothing: perhaps no rank had a gradient."""
        self._witnesses: Tensor | None = None
        """For each parameter an element of the flat buffer that was not 0 when it was last looked for; int64."""
        self.withheld = False
        """Whether the coming step must have no update at all of these parameters."""
        self.sparse_tables: frozenset[str] = frozenset()
        """Parameters whose gradient is sparse, though a step that leaves them out does not show it."""
        self._memory: Bundle | None = None
        self._placed: tuple[Mapping[str, Tensor], Tensor, int] | None = None
        """What was put into `.grad` since the last exchange answered something, its flat buffer, and a version."""
        self._row_sparse: set[str] = set()
        self._frozen: set[str] = set()

    async def agree(self, port: Port) -> None:
        """What ranks must know of each other's gradients before `gathered`: nothing, if all are dense."""

    def gathered(self, share: float | None) -> Bundle:
        """The gradients as a bundle, packed when its flat buffer is asked for. Unused parameters count as zero."""
        memory = self._begin_exchange()
        if memory is not None and _are(self.parameters.values(), memory.views.values()):
            memory.share = share
            return memory
        gradients = {name: self._gradient(name, p) for name, p in self.parameters.items()}
        if memory is None:
            return Bundle(gradients, share, into=self._fresh(gradients))
        places = [g.data_ptr() == v.data_ptr() for g, v in zip(gradients.values(), memory.views.values(), strict=True)]
        if all(places):  # accumulated where the last answer lay: nothing to copy
            memory.share = share
            return memory
        taken = any(places) or _most_references(memory.views.values()) > _UNSHARED  # the loop has kept a `.grad`
        return Bundle(gradients, share, into=self._fresh(gradients) if taken else memory)

    def _begin_exchange(self) -> Bundle | None:
        """Forget the last answer; returns the memory in which it lies."""
        memory, self._memory = self._memory, None
        self._placed = None
        self._frozen = {name for name, p in self.parameters.items() if not p.requires_grad}
        self.unused = {name for name, p in self.parameters.items() if p.grad is None}
        return memory

    def _fresh(self, gradients: Mapping[str, Tensor]) -> Bundle | None:
        """Memory to pack into, where it has to be of a certain kind."""
        like = next(iter(self.parameters.values()))
        if self._empty is None or like.device.type != "cpu":
            return None
        return Bundle(gradients, flat=self._empty(self.numel, like.dtype))

    def lend(self, flat: Tensor) -> None:
        """`.grad` are views of `flat` from now on, as if an answer lay there."""
        self._memory = Bundle(self.parameters, flat=flat)
        for parameter, view in zip(self.parameters.values(), self._memory.views.values(), strict=True):
            parameter.grad = view

    def lies_in(self, flat: Tensor) -> bool:
        """Whether `.grad` are views of `flat`: the last answer came back in the memory that was lent."""
        changed = self._frozen or self._row_sparse or self.unused
        return self._memory is not None and self._memory.flat is flat and not changed

    # ------------------------------------------------------------------ the state

    def begin(self, state: State) -> None:
        """Go on from this state."""
        self.state, self._tentative, self._free = state, None, []

    async def spendable(self) -> State:
        """The state of the last step, for an exchange to spend. What an exchange since then has left is dropped."""
        if self._tentative is not None:
            dropped, self._tentative = await settled(self._tentative.state), None
            self._free = list(residual_tensors(dropped))
        free, self._free = iter(self._free), []
        return duplicate(self.state, free)

    def propose(self, state: State, *, answered: bool) -> None:
        """The state after the step, if that uses the present exchange."""
        self._tentative = _Exchange(state, answered)

    @property
    def answered(self) -> bool:
        """Whether the last exchange did something, and no step was made of it yet."""
        return self._tentative is not None and self._tentative.answered

    def commit(self) -> bool:
        """An optimizer step was made of the last exchange. Returns whether that did something."""
        if self._tentative is None:
            return False
        self._free = list(residual_tensors(self.state))
        (self.state, answered), self._tentative = self._tentative, None
        return answered

    # ------------------------------------------------------------------ gradients

    def place(self, answer: Bundle | None, *, answered: bool) -> None:
        """Point every parameter's `.grad` at its part of `answer`; None: no gradient in this step.

        A frozen parameter has none, whatever late answer or residual there is for it. `answered`: the transform did
        something, so that this is no more what the rank computed.
        """
        self._placed = None
        if answer is None:
            for parameter in self.parameters.values():
                parameter.grad = None
            return
        self._show(answer.views, answer, answered=answered)

    def _show(self, views: Mapping[str, Tensor], answer: Bundle, *, answered: bool) -> None:
        """Let `.grad` be `views`, which lie in `answer`, or their rows where gradients come as rows."""
        rows = {name: _rows(views[name]) for name in self._row_sparse}
        self._point({**views, **rows} if rows else views, answer, answered=answered)

    def _point(self, views: Mapping[str, Tensor], answer: Bundle, *, answered: bool) -> None:
        for parameter, view in zip(self.parameters.values(), views.values(), strict=True):
            if parameter.grad is not view:
                parameter.grad = view
        for name in self._frozen:
            self.parameters[name].grad = None
        self._memory = answer
        if answered and len(self._frozen) < len(views):
            self._placed = views, answer.flat, answer.flat._version

    def listen(self, answer: Bundle | None, *, alike: bool) -> None:
        """Find out for which parameters the answer has nothing. `alike`: all ranks have the same answer, and find the
        same; else, and on accelerators, where a look would make the host wait, these are all trained parameters.

        Cost: one element of each parameter, and a pass over those where that is 0.
        """
        names = [name for name, p in self.parameters.items() if p.numel() and name not in self._frozen]
        if answer is None or answer.flat.is_meta or not names:
            self.silent = []
        elif alike and answer.flat.device.type == "cpu":
            empty = self._without_values(answer)
            self.silent = [name for name in names if name in empty]
        else:
            self.silent = names

    def _without_values(self, answer: Bundle) -> set[str]:
        views, flat = list(answer.views.values()), answer.flat
        begins = [0, *accumulate(view.numel() for view in views)]
        if self._witnesses is None or begins[-1] != self.numel:  # rows of a table are others each time
            self._witnesses = torch.tensor([min(begin, flat.numel() - 1) for begin in begins[:-1]])
        found: set[str] = set()
        for i in (flat[self._witnesses] == 0).nonzero().flatten().tolist():
            own = flat[begins[i] : begins[i + 1]]
            place = _first_value(own) if len(own) else None
            if place is None:
                found.add(answer.names[i])
            else:
                self._witnesses[i] = begins[i] + place
        return found

    def leave(self, name: str) -> None:
        """The optimizer leaves this parameter alone, unless the answer has something for it: a late gradient."""
        parameter = self.parameters[name]
        if parameter.grad is None or _any(parameter.grad):
            return
        parameter.grad = None
        if all(each.grad is None for each in self.parameters.values()):
            self._placed = None

    @property
    def dropped(self) -> bool:
        """Whether nothing is left of the last answer: all gradients are None."""
        return self._placed is not None and all(self.parameters[name].grad is None for name in self._placed[0])

    def holds_answer(self, arrived: Tensor | None) -> bool:
        """Whether `.grad` still holds the last answer, so that what comes now is added to it.

        To be asked when the first gradient since the exchange has `arrived` (None: none has). Dropped is a gradient
        that is another tensor or None, or that was set to zero: then all the others, to which nothing has come yet, are
        zero. Cost: a look at each parameter; one pass over the gradients where they were changed in place.
        """
        if self._placed is None:
            return False
        placed, flat, version = self._placed
        still = [p for p, gradient in zip(self.parameters.values(), placed.values(), strict=True) if p.grad is gradient]
        if not still:
            return False
        others = [parameter for parameter in still if parameter is not arrived]
        if flat._version - version <= len(still) - len(others):
            return True
        return any(bool(parameter.grad.any()) for parameter in others if parameter.grad is not None)

    def _gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            if name in self.sparse_tables:
                self._row_sparse.add(name)
            return torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            self._row_sparse.add(name)
            return gradient.to_dense()
        return gradient.detach() if gradient.requires_grad else gradient


def _most_references(tensors: Iterable[Tensor]) -> int:
    return max(map(sys.getrefcount, tensors), default=0)


_UNSHARED = _most_references({"view": torch.empty(0)}.values())
"""How many references there are to a tensor that one dictionary holds, and nothing else."""


def _are(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> bool:
    """Whether each `.grad` is that very tensor."""
    return all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))


def _first_value(flat: Tensor) -> int | None:
    """The place of the first element that is not 0; None: all are 0."""
    for i, part in enumerate(flat.split(_PART)):
        least, most = (torch.view_as_real(part) if part.is_complex() else part).aminmax()  # many times as fast as any()
        if least != 0 or most != 0:
            return i * _PART + int((part != 0).to(torch.uint8).argmax())
    return None


def _any(gradient: Tensor) -> bool:
    """Whether a gradient, dense or coalesced, is anywhere not 0."""
    values = gradient if gradient.layout is torch.strided else gradient.values()
    return values.numel() > 0 and _first_value(values.reshape(-1)) is not None


def _rows(dense: Tensor) -> Tensor:
    """The non-zero rows of a gradient, as an embedding's sparse gradient."""
    rows = dense.flatten(1).any(dim=1).nonzero().flatten()
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
    )
