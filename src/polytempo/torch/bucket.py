"""`Bucket`: some parameters whose gradients are exchanged together, through one flat buffer.

parameters   [ ... layer 1 ... | ... layer 2 ... | ... layer 3 ... ]
buckets                [        1        ][         0         ]       backward fills bucket 0 first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, State

Empty = Callable[[int, torch.dtype], Tensor]
"""Makes flat buffers, shape (numel,)."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20
_MAX_BUCKETS = 400


class Bucket:
    """Parameters of one dtype and device, the state of their transform, and the memory of their flat buffer."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter], empty: Empty | None = None) -> None:
        self.index = index
        self._empty = empty
        self.parameters = dict(parameters)
        self.numel = sum(p.numel() for p in parameters.values())
        self.state: State = None
        self.keep_none: frozenset[str] = frozenset()
        """Parameters that no rank used in this step: `.grad` stays None unless the answer has something for them."""
        self.sparse_tables: frozenset[str] = frozenset()
        """Parameters whose gradient is sparse, though a step that leaves them out does not show it."""
        self._memory: Bundle | None = None
        self._row_sparse: set[str] = set()

    def gathered(self, share: float | None) -> Bundle:
        """The gradients as a bundle, packed when its flat buffer is asked for. Unused parameters count as zero."""
        gradients = {name: self._gradient(name, p) for name, p in self.parameters.items()}
        memory, self._memory = self._memory, None
        if memory is None:
            return Bundle(gradients, share, into=self._fresh(gradients))
        places = [g.data_ptr() == v.data_ptr() for g, v in zip(gradients.values(), memory.views.values(), strict=True)]
        if all(places):  # accumulated where the last answer lay: nothing to copy
            memory.share = share
            return memory
        return Bundle(gradients, share, into=self._fresh(gradients) if any(places) else memory)

    def _fresh(self, gradients: Mapping[str, Tensor]) -> Bundle | None:
        """Memory to pack into, where it has to be of a certain kind."""
        like = next(iter(self.parameters.values()))
        if self._empty is None or like.device.type != "cpu":
            return None
        return Bundle(gradients, flat=self._empty(self.numel, like.dtype))

    def place(self, answer: Bundle | None) -> None:
        """Point every parameter's `.grad` at its part of `answer`; None: no gradient in this step."""
        if answer is None:
            for parameter in self.parameters.values():
                parameter.grad = None
            return
        for (name, parameter), view in zip(self.parameters.items(), answer.views.values(), strict=True):
            if name in self.keep_none and not view.any():  # a late answer may still be one that moves it
                parameter.grad = None
            elif name in self._row_sparse:
                parameter.grad = _rows(view)
            else:
                parameter.grad = view
        self._memory = answer

    @property
    def remembers(self) -> bool:
        """Whether the transform carries something from exchange to exchange."""
        return _holds_something(self.state)

    @property
    def accumulating(self) -> bool:
        """Whether a gradient still lies where the last answer was placed: nobody has dropped it since."""
        if self._memory is None:
            return False
        pairs = zip(self.parameters.values(), self._memory.views.values(), strict=True)
        return any(p.grad is not None and p.numel() and p.grad.data_ptr() == view.data_ptr() for p, view in pairs)

    def _gradient(self, name: str, parameter: nn.Parameter) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            if name in self.sparse_tables:
                self._row_sparse.add(name)
            return torch.zeros_like(parameter)
        if gradient.layout != torch.strided:
            self._row_sparse.add(name)
            return gradient.to_dense()
        return gradient.detach()


def _holds_something(state: Any) -> bool:
    if isinstance(state, dict):
        return any(_holds_something(value) for value in state.values())
    if isinstance(state, tuple):
        return any(_holds_something(value) for value in state)
    return state is not None


def _rows(dense: Tensor) -> Tensor:
    """The non-zero rows of a gradient, as an embedding's sparse gradient."""
    rows = dense.flatten(1).any(dim=1).nonzero().flatten()
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
    )


def buckets(
    parameters: Mapping[str, nn.Parameter], bucket_bytes: int | None, empty: Empty | None = None
) -> list[Bucket]:
    """Cut parameters into buckets in the order in which backward reaches them; none spans two dtypes or devices.

    One bucket of each dtype and device is open at a time. It is closed as soon as it holds `bucket_bytes`, so a
    large layer does not wait for the small ones below it, and the first much sooner, so communication begins
    early. They are numbered in the order in which backward completes them. Very large models get larger
    buckets, at most 401 and one of each kind. None: one bucket, which needs one dtype. `empty` makes their memory.
    """
    backward_order = list(reversed(list(parameters.items())))
    total = sum(_num_bytes(p) for _, p in backward_order)
    full = 2**62 if bucket_bytes is None else max(bucket_bytes, -(-total // _MAX_BUCKETS))
    first = full if bucket_bytes is None else min(full, _FIRST_BUCKET_BYTES)
    groups: list[dict[str, nn.Parameter]] = []
    open_now: dict[tuple[torch.dtype, torch.device], tuple[dict[str, nn.Parameter], int]] = {}
    for name, parameter in backward_order:
        kind = (parameter.dtype, parameter.device)
        group, room = open_now.get(kind, ({}, 0))
        if room <= 0:
            group, room = {}, full if groups else first
            groups.append(group)
        group[name] = parameter
        open_now[kind] = (group, room - _num_bytes(parameter))
    if bucket_bytes is None and len(groups) > 1:
        raise ValueError("this strategy looks at the whole gradient at once, so all parameters must share one dtype")
    reached = {name: position for position, (name, _) in enumerate(backward_order)}
    groups.sort(key=lambda group: reached[next(reversed(group))])
    return [Bucket(i, group, empty) for i, group in enumerate(groups)]


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
