"""`Bucket`: parameters that exchange their gradients together, in one flat buffer.

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

Empty = Callable[[int, torch.dtype], Tensor]
"""Makes flat buffers, shape (numel,)."""


class _Exchange(NamedTuple):
    """The result of an exchange that no optimizer step has used yet."""

    state: State
    answered: bool
    """True if the transform did something, so `.grad` is an answer and not this rank's gradient."""


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
        self._tentative: _Exchange | None = None
        self._free: list[Tensor] = []
        """Residuals' memory for the next exchange."""
        self.unused: set[str] = set()
        """Parameters without a gradient on this rank in the last exchange."""
        self.silent: list[str] = []
        """Trained parameters that are zero in the last answer: perhaps no rank had a gradient."""
        self._witnesses: Tensor | None = None
        """An index into the flat buffer for each parameter, at an element that was not 0 at its last check; int64."""
        self.withheld = False
        """True if the coming step must not update these parameters."""
        self.sparse_tables: frozenset[str] = frozenset()
        """Parameters with sparse gradients, known also in a step that leaves them out."""
        self._memory: Bundle | None = None
        self._placed: tuple[Mapping[str, Tensor], Tensor, int] | None = None
        """The last answer's views in `.grad`, its flat buffer, and that buffer's version."""
        self._row_sparse: set[str] = set()
        self._frozen: set[str] = set()

    async def agree(self, port: Port) -> None:
        """Exchange facts that `gathered` needs. Dense gradients need none."""

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
        if all(places):  # accumulated in the last answer's memory: nothing to copy
            memory.share = share
            return memory
        taken = any(places) or _most_references(memory.views.values()) > _UNSHARED  # the loop has kept a `.grad`
        return Bundle(gradients, share, into=self._fresh(gradients) if taken else memory)

    def _begin_exchange(self) -> Bundle | None:
        """Forget the last answer; returns its memory."""
        memory, self._memory = self._memory, None
        self._placed = None
        self._frozen = {name for name, p in self.parameters.items() if not p.requires_grad}
        self.unused = {name for name, p in self.parameters.items() if p.grad is None}
        return memory

    def _fresh(self, gradients: Mapping[str, Tensor]) -> Bundle | None:
        like = next(iter(self.parameters.values()))
        if self._empty is None or like.device.type != "cpu":
            return None
        return Bundle(gradients, flat=self._empty(self.numel, like.dtype))

    def lend(self, flat: Tensor) -> None:
        """Make `.grad` views of `flat`, as if it were the last answer."""
        self._memory = Bundle(self.parameters, flat=flat)
        for parameter, view in zip(self.parameters.values(), self._memory.views.values(), strict=True):
            parameter.grad = view

    def lies_in(self, flat: Tensor) -> bool:
        """True if `.grad` are views of `flat`: the last answer came back in the memory that was lent."""
        changed = self._frozen or self._row_sparse or self.unused
        return self._memory is not None and self._memory.flat is flat and not changed

    # ------------------------------------------------------------------ the state

    def begin(self, state: State) -> None:
        """Go on from this state."""
        self.state, self._tentative, self._free = state, None, []

    async def spendable(self) -> State:
        """A copy of the last step's state for an exchange to spend. Drops the result of an exchange that no step has
        used."""
        if self._tentative is not None:
            dropped, self._tentative = await settled(self._tentative.state), None
            self._free = list(residual_tensors(dropped))
        free, self._free = iter(self._free), []
        return duplicate(self.state, free)

    def propose(self, state: State, *, answered: bool) -> None:
        """Set the state for a step that uses the present exchange."""
        self._tentative = _Exchange(state, answered)

    @property
    def answered(self) -> bool:
        """True if the last exchange did something, and no step has used it yet."""
        return self._tentative is not None and self._tentative.answered

    def commit(self) -> bool:
        """An optimizer step has used the last exchange. Returns True if that exchange did something."""
        if self._tentative is None:
            return False
        self._free = list(residual_tensors(self.state))
        (self.state, answered), self._tentative = self._tentative, None
        return answered

    # ------------------------------------------------------------------ gradients

    def place(self, answer: Bundle | None, *, answered: bool) -> None:
        """Point every parameter's `.grad` at its part of `answer`; None: no gradient in this step.

        A frozen parameter gets none, even if a late answer or a residual has a value. `answered`: the transform did
        something, so `.grad` is not this rank's own gradient any more.
        """
        self._placed = None
        if answer is None:
            for parameter in self.parameters.values():
                parameter.grad = None
            return
        self._show(answer.views, answer, answered=answered)

    def _show(self, views: Mapping[str, Tensor], answer: Bundle, *, answered: bool) -> None:
        """Let `.grad` be `views` of `answer`, or their rows for parameters with sparse gradients."""
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
        """Find the parameters that are zero in the answer.

        `alike`: all ranks have the same answer, and find the same. Without it, and on accelerators, where a look would
        make the host wait, these are all trained parameters. Cost: one element of each parameter, and a pass over
        parameters with a 0 there.
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
        """Remove this parameter's gradient, unless the answer has a late gradient."""
        parameter = self.parameters[name]
        if parameter.grad is None or _any(parameter.grad):
            return
        parameter.grad = None
        if all(each.grad is None for each in self.parameters.values()):
            self._placed = None

    @property
    def dropped(self) -> bool:
        """True if all gradients of the last answer are None."""
        return self._placed is not None and all(self.parameters[name].grad is None for name in self._placed[0])

    def holds_answer(self, arrived: Tensor | None) -> bool:
        """True if `.grad` still holds the last answer, so that new gradients are added to it.

        Asked when the first gradient since the exchange has `arrived` (None: none has). A loop drops an answer by
        another tensor, by None, or by zeros: then all gradients but the arrived one are zero. Cost: a look at each
        parameter; one pass over gradients that were changed in place.
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
"""References to a tensor that one dictionary holds, and nothing else."""


def _are(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> bool:
    return all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))


def _first_value(flat: Tensor) -> int | None:
    """Index of the first element that is not 0; None: all are 0."""
    for i, part in enumerate(flat.split(_PART)):
        least, most = (torch.view_as_real(part) if part.is_complex() else part).aminmax()  # many times as fast as any()
        if least != 0 or most != 0:
            return i * _PART + int((part != 0).to(torch.uint8).argmax())
    return None


def _any(gradient: Tensor) -> bool:
    """True if a dense or coalesced gradient has an element that is not 0."""
    values = gradient if gradient.layout is torch.strided else gradient.values()
    return values.numel() > 0 and _first_value(values.reshape(-1)) is not None


def _rows(dense: Tensor) -> Tensor:
    """The non-zero rows of a gradient, as an embedding's sparse gradient."""
    rows = dense.flatten(1).any(dim=1).nonzero().flatten()
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
    )
