"""Which operations become one: small all-reduces of one kind, up to a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polytempo.horovod.negotiation.message import Agreement, TensorRequest

_ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16}
_ITEM_BYTES |= {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def num_bytes(request: TensorRequest) -> int:
    """The bytes of its tensors on one rank."""
    if len(request.dtypes) == 1:
        return _ITEM_BYTES.get(request.dtypes[0], 1) * math.prod(request.shapes[0])
    pairs = zip(request.dtypes, request.shapes, strict=True)
    return sum(_ITEM_BYTES.get(dtype, 1) * math.prod(shape) for dtype, shape in pairs)


def fused(agreements: Sequence[Agreement], most_bytes: int, *, groups_too: bool = True) -> list[list[Agreement]]:
    """Groups, in the order of their first members. All-reduces that have dtype, device, operation, process set and
    factors in common share a group as long as it has at most `most_bytes`. Adasum weighs each tensor by itself, and is
    not fused, nor is what a codec encodes, whose residuals and draws would follow from what happens to be fused.
    `groups_too`: whether what the program has grouped is fused with others.
    """
    if len(agreements) == 1:
        return [list(agreements)]
    groups: list[list[Agreement]] = []
    open_groups: dict[tuple[object, ...], tuple[list[Agreement], int]] = {}
    for agreed in agreements:
        request = agreed.request
        apart = request.op == "adasum" or request.codec or (len(request.shapes) > 1 and not groups_too)
        if request.kind != "allreduce" or apart or (len(request.dtypes) != 1 and len(set(request.dtypes)) != 1):
            groups.append([agreed])
            continue
        factors = (request.prescale, request.postscale)
        key = (request.dtypes[0], request.op, request.device, request.process_set, *factors)
        group, size = open_groups.get(key, ([], 0))
        more = num_bytes(request)
        if not group or size + more > most_bytes:
            group, size = [], 0
            groups.append(group)
        group.append(agreed)
        open_groups[key] = (group, size + more)
    return groups
