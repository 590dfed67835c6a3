"""`Bucket`: some parameters whose gradients are exchanged together, through one flat buffer.

parameters   [ ... layer 1 ... | ... layer 2 ... | ... layer 3 ... ]
buckets                [        1        ][         0         ]       backward fills bucket 0 first
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, State

_FIRST_BUCKET_BYTES = 2**20


class Bucket:
    """Parameters of one dtype and device, the state of their transform, and the memory of their flat buffer."""

    def __init__(self, index: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self.index = index
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
            return Bundle(gradients, share)
        places = [g.data_ptr() == v.data_ptr() for g, v in zip(gradients.values(), memory.views.values(), strict=True)]
        if all(places):  # accumulated where the last answer lay: nothing to copy
            memory.share = share
            return memory
        return Bundle(gradients, share, into=None if any(places) else memory)

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


def _rows(dense: Tensor) -> Tensor:
    """The non-zero rows of a gradient, as an embedding's sparse gradient."""
    rows = dense.flatten(1).any(dim=1).nonzero().flatten()
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), dense[rows], dense.shape, is_coalesced=True, check_invariants=False
    )


def buckets(parameters: Mapping[str, nn.Parameter], max_bytes: int | None) -> list[Bucket]:
    """Cut parameters into buckets of about `max_bytes` in the order in which backward reaches them.

    The first is small, so that communication begins early. None: one bucket, which needs one dtype.
    """
    groups: list[dict[str, nn.Parameter]] = []
    backward_order = list(reversed(list(parameters.items())))
    for _, same_kind in groupby(backward_order, key=lambda item: (item[1].dtype, item[1].device)):
        size, limit = 0, -1
        for name, parameter in same_kind:
            num_bytes = parameter.numel() * parameter.element_size()
            if size + num_bytes > limit:
                if max_bytes is not None or not size:
                    groups.append({})
                size, limit = 0, max_bytes or 2**62
                if max_bytes and len(groups) == 1:
                    limit = min(_FIRST_BUCKET_BYTES, max_bytes)
            groups[-1][name] = parameter
            size += num_bytes
    if max_bytes is None and len(groups) > 1:
        raise ValueError("this strategy looks at the whole gradient at once, so all parameters must share one dtype")
    if len(groups) > 900:
        raise ValueError(f"{len(groups)} buckets are too many; raise bucket_bytes")
    return [Bucket(i, group) for i, group in enumerate(groups)]
