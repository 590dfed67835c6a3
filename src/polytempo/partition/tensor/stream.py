"""What passes between split layers: whole tensors on all ranks, or, with `sequence`, each rank's part of the positions.

    whole       x ── copied ──▶ column ──▶ row ── summed ──▶ norm, dropout, +
    sequence    x ── gathered ─▶ column ──▶ row ── reduced ─▶ norm, dropout, +      each on its own positions

Both send the same bytes; with `sequence` what lies between is computed once and kept once over all ranks together.
Positions are the last dimension but one: shape (…, positions, features).
"""

from __future__ import annotations

from torch import Tensor

from polytempo.partition.tensor.division import even_sizes
from polytempo.partition.tensor.exchange import copied, gathered_to_split, reduced, scattered, shared, summed
from polytempo.partition.tensor.model_group import ModelGroup

POSITIONS = -2
"""The dimension of positions in what passes between layers."""


def entered(group: ModelGroup, tensor: Tensor) -> Tensor:
    """The whole tensor, for a layer of which each rank computes a part."""
    if not group.sequence or group.size == 1:
        return copied(group, tensor)
    check_positions(group, tensor)
    return gathered_to_split(group, tensor, group.positions, POSITIONS)


def left(group: ModelGroup, partial: Tensor) -> Tensor:
    """The sum of what the ranks computed, as it passes on."""
    if not group.sequence or group.size == 1:
        return summed(group, partial)
    return reduced(group, partial, _divide(group, partial), POSITIONS)


def passed(group: ModelGroup, whole: Tensor) -> Tensor:
    """What all ranks have computed as a whole, as it passes on."""
    if not group.sequence or group.size == 1:
        return whole
    return scattered(group, whole, _divide(group, whole), POSITIONS)


def own_parameter(group: ModelGroup, parameter: Tensor) -> Tensor:
    """A parameter that all ranks hold, used on what passes: its gradient is the sum over all positions."""
    return shared(group, parameter) if group.sequence else parameter


def check_positions(group: ModelGroup, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not this rank's part of the sequence."""
    if group.size == 1:
        return
    found = tensor.shape[POSITIONS] if tensor.dim() > 1 else None
    expected = group.positions[group.rank] if group.positions else None
    if found != expected:
        raise ValueError(
            f"with sequence=True rank {group.rank} of the model has {expected} positions, in the last dimension but "
            f'one, and a layer got a tensor of shape {tuple(tensor.shape)}; let the layer before be "scatter", "row" '
            'or "embedding"'
        )


def _divide(group: ModelGroup, whole: Tensor) -> tuple[int, ...]:
    if whole.dim() < 2:
        raise ValueError(f"with sequence=True tensors are (…, positions, features); got shape {tuple(whole.shape)}")
    group.positions = even_sizes(whole.shape[POSITIONS], group.size, what="positions")
    return group.positions
