"""Exchanges of areas, with their gradients: each rank gets the places that it needs, from the ranks that have them.

    forward     buffer_r[piece(s, r)] = x_s[piece(s, r)] for each rank s; `fill` outside of the picture
    backward    ∂x_s[piece(s, r)] += ∂buffer_r[piece(s, r)] for each rank r, in the order of ranks

Messages go between ranks that need something of each other: in a grid the neighbours, with those at the corners. Bytes
of all ranks, each way: Σ over s ≠ r of |piece(s, r)| · the other dimensions · the bytes of a number.

Source: N. Dryden, N. Maruyama, T. Benson, T. Moon, M. Snir, B. Van Essen, "Improving strong-scaling of CNN training by
exploiting finer-grained parallelism", 2019, section III.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from polytempo.partition.tensor.exchange import linear_pair
from polytempo.partition.tensor.model_group import ModelGroup
from polytempo.partition.tensor.spatial.areas import Area, Areas, begins, cut_out, pieces, volume


def with_halos(group: ModelGroup, part: Tensor, have: Areas, want: Areas, fill: float = 0.0) -> Tensor:
    """This rank's `want`, from all ranks' `have`: (…, places of have[rank]) to (…, places of want[rank]).

    Areas that are wanted may reach out of the picture.
    """
    if have == want:
        return part
    forward = partial(_forward, group, have, want, fill)
    return linear_pair(group, part, forward, partial(_backward, group, have, want))


def halo_numbers(have: Areas, want: Areas) -> int:
    """PictureGrid that travel in `with_halos`, of all ranks."""
    return sum(volume(area) for (sender, receiver), area in pieces(have, want).items() if sender != receiver)


def _forward(group: ModelGroup, have: Areas, want: Areas, fill: float, part: Tensor) -> Tensor:
    rank, plan = group.rank, pieces(have, want)
    held, wanted = have[rank], want[rank]
    before = part.shape[: -len(held)]
    buffer = part.new_full([*before, *(end - begin for begin, end in wanted)], fill)
    sent = {r: cut_out(part, area, begins(held)) for (s, r), area in plan.items() if s == rank}
    if rank in sent:
        cut_out(buffer, plan[rank, rank], begins(wanted)).copy_(sent.pop(rank))
    rooms = {s: cut_out(buffer, area, begins(wanted)) for (s, r), area in plan.items() if r == rank != s}
    found = group.deal(sent, rooms, [_like(part, area, len(held)) for (s, r), area in plan.items() if s != r])
    for sender, room in rooms.items():
        room.copy_(found[sender])
    return buffer


def _backward(group: ModelGroup, have: Areas, want: Areas, gradient: Tensor) -> Tensor:
    rank, plan = group.rank, pieces(have, want)
    held, wanted = have[rank], want[rank]
    before = gradient.shape[: -len(held)]
    total = gradient.new_zeros([*before, *(end - begin for begin, end in held)])
    sent = {s: cut_out(gradient, area, begins(wanted)) for (s, r), area in plan.items() if r == rank}
    own = {rank: sent.pop(rank)} if rank in sent else {}
    rooms = {r: cut_out(total, area, begins(held)) for (s, r), area in plan.items() if s == rank}
    likes = {r: room for r, room in rooms.items() if r != rank}
    found = own | group.deal(sent, likes, [_like(gradient, area, len(held)) for (s, r), area in plan.items() if s != r])
    for receiver in sorted(found):
        rooms[receiver] += found[receiver]
    return total


def _like(part: Tensor, area: Area, dims: int) -> Tensor:
    """A flat tensor without memory, as large as a piece."""
    return part.new_empty(()).expand(part.shape[:-dims].numel() * volume(area))
