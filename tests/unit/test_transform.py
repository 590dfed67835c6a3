"""Transforms: chain, split, identity, steps without an update, and when a transform can be left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polytempo.cluster import Cluster, Link
from polytempo.core import Bundle, Port, Promise, State, Transform, chain, identity, is_idle, split, stateless
from polytempo.worlds import VirtualWorld

Step = Callable[[Bundle, int], Bundle | None]


def counting(step: Step, *, promises: Promise = Promise.SEPARABLE) -> Transform:
    """`step(bundle, calls so far)`; the state is the number of calls."""

    async def apply(port: Port, bundle: Bundle, state: State) -> tuple[Bundle | None, State]:
        return step(bundle, state), state + 1

    return Transform(lambda parameters: 0, apply, promises)


def add(amount: float) -> Transform:
    return counting(lambda bundle, calls: bundle.map(lambda flat: flat + amount))


def times(factor: float) -> Transform:
    return counting(lambda bundle, calls: bundle.map(lambda flat: flat * factor))


def skips(*calls_without_update: int) -> Transform:
    return counting(lambda bundle, calls: None if calls in calls_without_update else bundle)


def tensors() -> dict[str, Tensor]:
    return {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]]), "c": torch.tensor(4.0)}


def steps(transform: Transform, count: int = 1) -> tuple[list[list[float] | None], State]:
    """The flat answers of `count` steps that all begin with `tensors()`, on one rank, and the last state."""

    async def program(port: Port) -> tuple[list[list[float] | None], State]:
        state, answers = transform.init(Bundle(tensors())), []
        for _ in range(count):
            answer, state = await transform.apply(port, Bundle(tensors()), state)
            answers.append(None if answer is None else answer.flat.tolist())
        return answers, state

    result = VirtualWorld(Cluster(Link(0, 1)), 1).run(program).results[0]
    assert result is not None
    return result


def one_step_returns_what_it_was_given(transform: Transform, bundle: Bundle, num_ranks: int = 1) -> bool:
    async def program(port: Port) -> bool:
        answer, _ = await transform.apply(port, bundle, transform.init(bundle))
        return answer is bundle

    return VirtualWorld(Cluster(Link(0, 1)), num_ranks).run(program).results[0] is True


def test_identity_returns_the_very_bundle_and_packs_nothing() -> None:
    bundle = Bundle(tensors())
    assert one_step_returns_what_it_was_given(identity(), bundle)
    assert not bundle.packed


def test_a_chain_runs_in_order_and_keeps_a_state_for_each() -> None:
    assert steps(chain(add(1), times(10)), 2) == ([[20, 30, 40, 50]] * 2, (2, 2))
    assert steps(chain(times(10), add(1))) == ([[11, 21, 31, 41]], (1, 1))


def test_an_empty_chain_is_the_identity() -> None:
    bundle = Bundle(tensors())
    assert one_step_returns_what_it_was_given(chain(), bundle)


def test_a_step_without_update_ends_the_chain_for_that_step_only() -> None:
    answers, state = steps(chain(add(1), skips(0, 2), times(10)), 4)
    assert answers == [None, [20, 30, 40, 50], None, [20, 30, 40, 50]]
    assert state == (4, 4, 2), "the part after the gap has not been called"


# tensors: a = 1 2, b = 3, c = 4
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"a": "ten", "b": "one", "c": "ten"}, [10, 20, 4, 40]),
        ({"a": "one", "b": "ten", "c": "one"}, [2, 3, 30, 5]),
        ({"a": "none", "b": "ten", "c": "none"}, [1, 2, 30, 4]),
        ({"a": "ten", "b": "ten", "c": "ten"}, [10, 20, 30, 40]),
        ({"a": "none", "b": "none", "c": "none"}, [1, 2, 3, 4]),
    ],
)
def test_split_reassembles_the_tensors_in_their_own_order(labels: dict[str, str], expected: list[float]) -> None:
    routed = split(lambda name, tensor: labels[name], {"ten": times(10), "one": add(1), "none": identity()})
    assert steps(routed)[0] == [expected]


def test_split_keeps_a_state_for_each_branch_that_has_tensors() -> None:
    by_size = split(
        lambda name, tensor: "large" if tensor.numel() > 1 else "small",
        {"large": times(10), "small": chain(add(1), add(1)), "unused": add(9)},
    )
    assert steps(by_size, 3) == ([[10, 20, 5, 6]] * 3, {"large": 3, "small": (3, 3)})


def test_split_of_idle_branches_returns_the_very_bundle() -> None:
    bundle = Bundle(tensors())
    assert one_step_returns_what_it_was_given(
        split(lambda name, tensor: name, dict.fromkeys("abc", identity())), bundle
    )
    assert not bundle.packed


def test_split_sees_values_that_an_earlier_transform_has_packed() -> None:
    late = chain(add(1), split(lambda name, tensor: name, {"a": times(10), "b": identity(), "c": times(100)}))
    assert steps(late)[0] == [[20, 30, 4, 500]]


def test_split_keeps_the_share() -> None:
    seen: list[float | None] = []

    def look(bundle: Bundle, calls: int) -> Bundle:
        seen.append(bundle.share)
        return bundle.map(lambda flat: flat + 0)

    async def program(port: Port) -> float | None:
        transform = split(lambda name, tensor: name, dict.fromkeys("abc", counting(look)))
        bundle = Bundle(tensors(), share=0.125)
        answer, _ = await transform.apply(port, bundle, transform.init(bundle))
        return None if answer is None else answer.share

    assert VirtualWorld(Cluster(Link(0, 1)), 1).run(program).results == [0.125]
    assert seen == [0.125] * 3


def test_split_has_no_update_when_no_branch_has_one() -> None:
    both = split(lambda name, tensor: "x" if name == "a" else "y", {"x": skips(0), "y": skips(0)})
    assert steps(both, 2)[0] == [None, [1, 2, 3, 4]]


def test_split_refuses_branches_that_update_on_different_steps() -> None:
    uneven = split(lambda name, tensor: "x" if name == "a" else "y", {"x": skips(0), "y": add(1)})
    with pytest.raises(ValueError, match="branches of a split must update on the same steps; use the same period"):
        steps(uneven)


def test_split_refuses_a_label_without_a_branch() -> None:
    with pytest.raises(ValueError, match=r"split sends 'a' to branch 'dense', but there are only \['low_rank'\]"):
        steps(split(lambda name, tensor: "dense", {"low_rank": identity()}))


shares_of_names = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["x", "y", "z"]), min_size=1)


@given(shares_of_names)
def test_however_a_bundle_is_split_elementwise_work_comes_out_the_same(labels: dict[str, str]) -> None:
    values = {name: torch.arange(i + 1.0) - i for i, name in enumerate(labels)}
    routed = split(lambda name, tensor: labels[name], dict.fromkeys("xyz", times(3)))

    async def program(port: Port) -> Bundle | None:
        return (await routed.apply(port, Bundle(values), routed.init(Bundle(values))))[0]

    answer = VirtualWorld(Cluster(Link(0, 1)), 1).run(program).results[0]
    assert answer is not None
    assert answer.names == list(labels)
    assert torch.equal(answer.flat, Bundle(values).flat * 3)


async def _summed(port: Port, bundle: Bundle) -> Bundle:
    return bundle.with_flat(await port.all_reduce(bundle.flat))


SUM = stateless(_summed)
WHOLE = stateless(_summed, promises=Promise(0))


@pytest.mark.parametrize(
    ("transform", "idle_alone", "idle_among_two", "separable"),
    [
        (identity(), True, True, True),
        (SUM, True, False, True),
        (WHOLE, True, False, False),
        (add(1), False, False, True),
        (chain(SUM, SUM), True, False, True),
        (chain(SUM, add(1)), False, False, True),
        (chain(SUM, WHOLE), True, False, False),
        (split(lambda name, tensor: "s", {"s": SUM, "i": identity()}), True, False, True),
        (split(lambda name, tensor: "s", {"s": WHOLE, "a": add(1)}), False, False, False),
    ],
)
def test_flags(transform: Transform, idle_alone: bool, idle_among_two: bool, separable: bool) -> None:
    assert is_idle(transform, 1) is idle_alone
    assert is_idle(transform, 2) is idle_among_two
    assert (Promise.SEPARABLE in transform.promises) is separable


WEIGHED = SUM._replace(promises=SUM.promises | Promise.WEIGHS)


@pytest.mark.parametrize(
    ("transform", "weighs"),
    [
        (identity(), True),
        (SUM, False),
        (add(1), False),
        (WEIGHED, True),
        (chain(WEIGHED, identity()), True),
        (chain(WEIGHED, SUM), False),
        (split(lambda name, tensor: "a", {"a": WEIGHED, "b": identity()}), True),
        (split(lambda name, tensor: "a", {"a": WEIGHED, "b": SUM}), False),
    ],
)
def test_only_what_weighs_throughout_weighs(transform: Transform, weighs: bool) -> None:
    assert (Promise.WEIGHS in transform.promises) is weighs


def test_a_stateless_transform_leaves_a_lone_rank_alone() -> None:
    bundle = Bundle(tensors())
    assert one_step_returns_what_it_was_given(SUM, bundle)
    assert not bundle.packed
    assert not one_step_returns_what_it_was_given(SUM, Bundle(tensors()), num_ranks=2)
