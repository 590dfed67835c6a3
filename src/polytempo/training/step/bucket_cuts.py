"""`buckets`: groups of parameters that exchange their gradients together; of a `TableBucket` rows only.

ranks' rows   {3, 7}   {7, 9}   ──▶   all ranks: {3, 7, 9}   ──▶   the transform of a bundle of these three rows
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, Port
from polytempo.training.model.table_rows import rows_of
from polytempo.training.step.bucket import Bucket

MakeBucket = Callable[[int, Mapping[str, nn.Parameter]], Bucket]

DEFAULT_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20
_MAX_BUCKETS = 400


def buckets(
    parameters: Mapping[str, nn.Parameter],
    bucket_bytes: int | None,
    make: MakeBucket = Bucket,
    tables: Collection[str] = (),
) -> list[Bucket]:
    """Cut parameters into buckets in the order of backward; none spans two dtypes or devices.

    One bucket of each dtype and device is open at a time. It is closed as soon as it holds `bucket_bytes`, so a large
    layer does not wait for the small ones below it, and the first much sooner, so communication begins early. Their
    numbers follow backward's order, too. Very large models get larger buckets, at most 401 and one of each kind. None:
    one bucket, which needs one dtype. `make` makes each of them. `tables`: parameters that exchange rows only, each in
    a bucket of its own.
    """
    backward_order = list(reversed(list(parameters.items())))
    total = sum(_num_bytes(p) for _, p in backward_order)
    full = 2**62 if bucket_bytes is None else max(bucket_bytes, -(-total // _MAX_BUCKETS))
    first = full if bucket_bytes is None else min(full, _FIRST_BUCKET_BYTES)
    groups: list[dict[str, nn.Parameter]] = []
    open_now: dict[tuple[torch.dtype, torch.device], tuple[dict[str, nn.Parameter], int]] = {}
    for name, parameter in backward_order:
        if name in tables:
            groups.append({name: parameter})
            continue
        kind = (parameter.dtype, parameter.device)
        group, room = open_now.get(kind, ({}, 0))
        if room <= 0:
            group, room = {}, full if groups else first
            groups.append(group)
        group[name] = parameter
        open_now[kind] = (group, room - _num_bytes(parameter))
    if bucket_bytes is None and len(groups) > 1:
        raise ValueError("this strategy looks at the whole gradient together, so all parameters must share one dtype")
    reached = {name: position for position, (name, _) in enumerate(backward_order)}
    groups.sort(key=lambda group: reached[next(reversed(group))])
    return [
        TableBucket(i, *next(iter(group.items()))) if group.keys() & set(tables) else make(i, group)
        for i, group in enumerate(groups)
    ]


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


class TableBucket(Bucket):
    """One parameter with sparse gradients, shape (rows, width), and a transform that remembers nothing of a row.

    Cost of a step: two small all-gathers, of the ranks' numbers of rows and of the rows' indices (8 bytes each), and
    the exchange of all rows with a gradient on any rank. If the ranks' rows together are as many as the table has, the
    second one is left out, and the whole table is exchanged.
    """

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        super().__init__(index, {name: parameter})
        self._name, self._table = name, parameter
        self._rows: Tensor | None = None
        """The rows of this exchange, ascending. None: all."""
        self._own: tuple[Tensor, Tensor]
        """The rows of this rank's gradient, ascending, and their values."""

    async def agree(self, port: Port) -> None:
        """Find out which rows any rank has a gradient for."""
        self._memory = None  # it has other rows
        table = self._table
        if table.grad is None:
            self._own = torch.empty(0, dtype=torch.int64, device=table.device), table.new_empty((0, *table.shape[1:]))
        else:
            self._own = rows_of(table.grad)
        own, _ = self._own
        counts = [int(count) for count in await port.all_gather(own.new_tensor([len(own)]))]
        if sum(counts) >= len(self._table):
            self._rows = None
            return
        self._rows = own.new_empty(0)
        if most := max(counts):
            padded = torch.cat([own, own.new_zeros(most - len(own))])
            everyone = await port.all_gather(padded)
            self._rows = torch.cat([theirs[:count] for theirs, count in zip(everyone, counts, strict=True)]).unique()

    def gathered(self, share: float | None) -> Bundle:
        """The gradients of the rows agreed on, shape (rows, width); one row of zeros where there are none."""
        if self._rows is None:
            return super().gathered(share)
        values = self._table.new_zeros((max(len(self._rows), 1), *self._table.shape[1:]))
        rows, own = self._own
        values[torch.searchsorted(self._rows, rows)] = own
        self._begin_exchange()
        return Bundle({self._name: values}, share)

    def place(self, answer: Bundle | None, *, answered: bool) -> None:
        """`.grad` becomes the rows of the answer, as a sparse gradient."""
        if answer is None or self._rows is None:
            super().place(answer, answered=answered)
            return
        values = answer.views[self._name][: len(self._rows)]
        gradient = torch.sparse_coo_tensor(
            self._rows.unsqueeze(0), values, self._table.shape, is_coalesced=True, check_invariants=False
        )
        self._point({self._name: gradient}, answer, answered=answered)
