"""The share of a batch, when batches are taken before their turn: literal stories."""

from __future__ import annotations

import torch
from torch import Tensor

from polytempo.worlds.process.shares import Shares


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 4), torch.zeros(rows)


def share_of(shares: Shares, *inputs: object) -> float | None:
    found = shares.of(*inputs)
    return None if found is None else found.share


def test_a_batch_is_known_by_its_tensors_wherever_they_are() -> None:
    shares, ahead, after = Shares(), batch(4), batch(4)
    epoch = shares.begin()
    epoch.give(ahead, 0.5)
    epoch.give({"inputs": after[0], "more": [after[1]]}, 0.25)
    assert share_of(shares, (), {"named": {"inputs": after[0]}}) == 0.25
    assert share_of(shares, (ahead[0],)) == 0.5
    assert share_of(shares, [[ahead[1]]]) == 0.5


def test_moved_tensors_belong_to_the_oldest_unused_batch_of_their_shapes() -> None:
    shares, kept = Shares(), [batch(4), batch(4), batch(2)]
    epoch = shares.begin()
    for each, share in zip(kept, (0.5, 0.6, 0.7), strict=True):
        epoch.give(each, share)
    assert share_of(shares, kept[0][0].clone()) == 0.5
    assert share_of(shares, kept[1][0].clone()) == 0.6
    assert share_of(shares, torch.zeros(9, 4)) is None
    assert share_of(shares, kept[2][0].clone()) == 0.7
    assert share_of(shares, kept[2][0].clone()) is None, "it has been used; who asks knows it already"


def test_what_was_used_is_forgotten_as_new_batches_come() -> None:
    shares, first = Shares(), batch(4)
    epoch = shares.begin()
    epoch.give(first, 0.5)
    assert share_of(shares, first[0]) == 0.5
    second, third = batch(4), batch(4)
    epoch.give(second, 0.6)
    assert share_of(shares, second[0]) == 0.6
    epoch.give(third, 0.7)
    assert share_of(shares, first[0]) == 0.7, "moved, for all that is known: the oldest unused of its shape"


def test_a_new_pass_over_the_data_begins_with_nothing() -> None:
    shares, kept = Shares(), batch(4)
    epoch = shares.begin()
    epoch.give(kept, 0.5)
    shares.end(epoch)
    assert shares.last is None
    assert share_of(shares, kept[0]) == 0.5, "of a loader that looks ahead"
    shares.begin()
    assert share_of(shares, kept[0]) is None


def test_a_pass_inside_another_takes_nothing_from_it() -> None:
    shares, kept, other = Shares(), batch(4), batch(4)
    epoch = shares.begin()
    shares.give(epoch, kept, 0.6)
    validation = shares.begin()
    validation.give(other, 0.5)
    assert share_of(shares, other[0]) == 0.5
    shares.give(validation, batch(4), 0.4)
    assert shares.last == 0.4
    shares.end(validation)
    assert shares.last == 0.6
    assert share_of(shares, kept[0].clone()) == 0.6, "before what the validation has not used"
    assert share_of(shares, kept[0]) == 0.6


def test_what_is_not_recognised_is_the_batch_that_was_dealt_last_and_to_whom() -> None:
    shares, other = Shares(), torch.zeros(9, 4)
    assert shares.given(other) is None
    epoch = shares.begin((0, 2))
    epoch.give(batch(4), 0.5)
    epoch.give(batch(4), 0.6)
    assert shares.given(other) == shares.given(other) != shares.given(torch.zeros(4, 4))
    found = shares.given(other)
    assert found is not None
    assert (found.share, found.ranks) == (0.6, (0, 2))
    shares.end(epoch)
    assert shares.given(other) is None


def test_a_batch_of_which_no_tensor_lives_is_known_by_its_shapes() -> None:
    shares = Shares()
    epoch = shares.begin()
    epoch.give(batch(4), 0.5)
    assert share_of(shares, torch.ones(4, 4)) == 0.5
