"""`buckets`: which parameters are exchanged together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from polytempo.training.step.bucket import Bucket
from polytempo.training.step.table_bucket import TableBucket

MakeBucket = Callable[[int, Mapping[str, nn.Parameter]], Bucket]
"""From a bucket's number and its parameters."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20
_MAX_BUCKETS = 400


def buckets(
    parameters: Mapping[str, nn.Parameter],
    bucket_bytes: int | None,
    make: MakeBucket = Bucket,
    tables: Collection[str] = (),
) -> list[Bucket]:
    """Cut parameters into buckets in the order in which backward reaches them; none spans two dtypes or devices.

    One bucket of each dtype and device is open at a time. It is closed as soon as it holds `bucket_bytes`, so a
    large layer does not wait for the small ones below it, and the first much sooner, so communication begins
    early. They are numbered in the order in which backward completes them. Very large models get larger
    buckets, at most 401 and one of each kind. None: one bucket, which needs one dtype. `make` makes each of them.
    `tables`: parameters of which only rows travel, each in a bucket of its own.
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
        raise ValueError("this strategy looks at the whole gradient at once, so all parameters must share one dtype")
    reached = {name: position for position, (name, _) in enumerate(backward_order)}
    groups.sort(key=lambda group: reached[next(reversed(group))])
    return [
        TableBucket(i, *next(iter(group.items()))) if group.keys() & set(tables) else make(i, group)
        for i, group in enumerate(groups)
    ]


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
