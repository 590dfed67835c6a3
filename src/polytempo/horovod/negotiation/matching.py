"""Agreement of all ranks' requests under one name, and the fusion of small all-reduces, up to a threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from polytempo.horovod.negotiation.message import Agreement, TensorRequest

_JOINABLE = ("allreduce", "barrier")
_COMPARED: tuple[tuple[str, Callable[[TensorRequest], object]], ...] = (
    ("operations", lambda request: request.kind),
    ("numbers of tensors", lambda request: len(request.shapes)),
    ("data types", lambda request: list(request.dtypes)),
    ("devices", lambda request: request.device),
    ("reduction operations", lambda request: request.op),
    ("codecs", lambda request: request.codec or "none"),
    ("root ranks", lambda request: request.root),
    ("prescale factors", lambda request: request.prescale),
    ("postscale factors", lambda request: request.postscale),
)


def refusal(requests: Mapping[int, TensorRequest], ranks: Sequence[int]) -> str:
    """The reason why the requests of all of `ranks` cannot be performed, naming tensor and ranks; "" if they can."""
    first = requests[min(requests)]
    for what, read in _COMPARED:
        if problem := _differs(requests, what, read):
            return problem
    gathers = first.kind == "allgather"
    shapes = "shapes but for the first dimension" if gathers else "shapes"
    if problem := _differs(requests, shapes, lambda request: [_rest(shape, request) for shape in request.shapes]):
        return problem
    if first.kind in ("add_set", "remove_set"):
        return _differs(requests, "process sets", lambda request: list(request.numbers))
    if first.kind == "broadcast" and first.root not in ranks:
        return f"{_named(first)}: root rank {first.root} is not among the ranks {list(ranks)} of its process set"
    if first.kind == "reducescatter" and first.op == "adasum":
        return f"{_named(first)}: a reducescatter is by average, sum, min, max or product, not by adasum"
    scalar = any(not shape for request in requests.values() for shape in request.shapes)
    if scalar and first.kind in ("allgather", "alltoall", "reducescatter"):
        return f"{_named(first)}: a tensor without dimensions has no rows; give it one dimension"
    return _split_problem(requests, ranks) if first.kind == "alltoall" else ""


def with_joined(request: TensorRequest, joined: Sequence[int]) -> str:
    """The reason why a request cannot be performed while ranks have joined; "" if it can."""
    if request.kind in _JOINABLE and request.op != "adasum" and not request.codec:
        return ""
    what = "adasum" if request.op == "adasum" else request.codec or request.kind
    return f"{_named(request)}: {what} is not supported while ranks {list(joined)} have called join()"


def agreement(requests: Mapping[int, TensorRequest], ranks: Sequence[int]) -> Agreement:
    """The operation that all ranks perform."""
    first = requests[min(requests)]
    sizes: tuple[tuple[int, ...], ...] = ()
    if first.kind == "allgather":
        sizes = tuple(tuple(shape[0] for shape in requests[rank].shapes) for rank in ranks)
    elif first.kind == "alltoall":
        sizes = tuple(requests[rank].numbers for rank in ranks)
    return Agreement(first, sizes)


def _rest(shape: tuple[int, ...], request: TensorRequest) -> list[int] | tuple[int, ...]:
    return list(shape[1:]) if request.kind in ("allgather", "alltoall") and shape else list(shape)


def _split_problem(requests: Mapping[int, TensorRequest], ranks: Sequence[int]) -> str:
    for rank, request in requests.items():
        rows = request.shapes[0][0]
        if len(request.numbers) != len(ranks) or sum(request.numbers) > rows or min(request.numbers) < 0:
            return (
                f"{_named(request)}: rank {rank} splits {rows} rows into {list(request.numbers)}; {len(ranks)} splits "
                "that add up to the rows at most are needed"
            )
    return ""


def _differs(requests: Mapping[int, TensorRequest], what: str, read: Callable[[TensorRequest], object]) -> str:
    first = min(requests)
    expected = read(requests[first])
    for rank in sorted(requests):
        if (found := read(requests[rank])) != expected:
            return f"Mismatched {what} for {_named(requests[first])}: rank {first} has {expected}, rank {rank} {found}"
    return ""


def _named(request: TensorRequest) -> str:
    return f"{request.kind} {request.name!r}"


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
    factors in common share a group as long as it has at most `most_bytes`. Adasum weighs each tensor alone, and is not
    fused. Nor are tensors under a codec: residuals and draws would depend on the other tensors. `groups_too`: True to
    fuse the program's groups with others.
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
