"""State: saved by parameter, restored into the next run's buckets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.cluster import Cluster, Link
from polytempo.core import Bundle, Late, Port
from polytempo.core.state import Saved, restored, saved, settled
from polytempo.worlds import VirtualWorld


class Momentum(NamedTuple):
    """A state as transforms have it."""

    step: int
    velocity: Bundle


def parameters(*names: str) -> Bundle:
    return Bundle({name: torch.full((2, 3), float(ord(name))) for name in names})


def fresh(layout: Bundle) -> Any:
    """The value of a transform's `init`."""
    return (Momentum(0, layout.map(torch.zeros_like)), {"inner": (0.0, "", True)}, None)


def used(layout: Bundle) -> Any:
    """The same tree after some steps."""
    return (Momentum(7, layout.map(lambda flat: flat / 2)), {"inner": (0.25, "text", False)}, None)


def test_leaves_are_named_by_path_and_parameter() -> None:
    found = saved(used(parameters("a", "b")), "gradients")
    assert sorted(found.tensors) == ["gradients/0/1/a", "gradients/0/1/b"]
    assert found.tensors["gradients/0/1/a"].tolist() == [[48.5] * 3] * 2
    assert found.scalars == {
        "gradients/0/0": 7,
        "gradients/1/inner/0": 0.25,
        "gradients/1/inner/1": "text",
        "gradients/1/inner/2": False,
        "gradients/2": None,
    }


def merged_states(layouts: list[Bundle]) -> Saved:
    """A replica's saved state: every bucket's leaves under one path."""
    found = Saved({}, {})
    for layout in layouts:
        tensors, scalars = saved(used(layout), "g")
        found.tensors.update(tensors)
        found.scalars.update(scalars)
    return found


@given(st.permutations("abcdef"), st.permutations("abcdef"), st.sets(st.integers(1, 5)), st.sets(st.integers(1, 5)))
def test_buckets_may_be_cut_otherwise_when_a_state_is_restored(
    before: list[str], after: list[str], cuts_before: set[int], cuts_after: set[int]
) -> None:
    def bucketed(names: list[str], cuts: set[int]) -> list[Bundle]:
        edges = [0, *sorted(cuts), 6]
        return [parameters(*names[a:b]) for a, b in pairwise(edges)]

    source = merged_states(bucketed(before, cuts_before))
    for layout in bucketed(after, cuts_after):
        momentum, scalars, nothing = restored(fresh(layout), source, "g", layout)
        assert isinstance(momentum, Momentum)
        assert momentum.velocity.names == layout.names
        assert torch.equal(momentum.velocity.flat, layout.flat / 2)
        assert (momentum.step, scalars, nothing) == (7, {"inner": (0.25, "text", False)}, None)


def test_a_tensor_leaf_comes_back_in_the_dtype_of_the_fresh_state() -> None:
    source = saved((torch.tensor([1.5, 2.5], dtype=torch.float64),), "s")
    (back,) = restored((torch.zeros(2),), source, "s", parameters("a"))
    assert (back.dtype, back.tolist()) == (torch.float32, [1.5, 2.5])


def test_a_bundle_that_waited_in_a_queue_is_restored_where_init_had_none() -> None:
    layout = parameters("a", "b")
    source = saved((None, layout.map(torch.neg)), "queue")
    first, second = restored((None, None), source, "queue", layout)
    assert first is None
    assert torch.equal(second.flat, -layout.flat)


def test_what_waited_in_a_queue_comes_back_in_the_dtype_and_on_the_device_of_the_parameters() -> None:
    source = saved((parameters("a"),), "queue")
    layout = Bundle({"a": torch.zeros(2, 3, dtype=torch.float64, device="meta")})
    (back,) = restored((None,), source, "queue", layout)
    assert (back.flat.dtype, back.flat.device.type) == (torch.float64, "meta")


def test_settled_waits_for_answers_that_are_on_their_way() -> None:
    async def sleep_and_answer(port: Port) -> tuple[Bundle, int]:
        await port.compute(lambda: None, flops=3.0)
        return parameters("a"), 5

    async def program(port: Port) -> tuple[float, Any]:
        work = await port.start(sleep_and_answer(port))
        state = {"queue": (None, Late(work, 0)), "inner": Momentum(2, Late(work, 1)), "x": 1.0}  # type: ignore[arg-type]
        done = await settled(state)
        return await port.now(), done

    cluster = Cluster(Link(0, 1), flops_per_s=1.0)
    result = VirtualWorld(cluster, 1).run(program).results[0]
    assert result is not None
    seconds, state = result
    assert seconds == 3.0
    assert state["queue"][1].names == ["a"]
    assert state["inner"] == Momentum(2, 5)  # type: ignore[arg-type]
    assert saved(state, "s").scalars == {"s/queue/0": None, "s/inner/0": 2, "s/inner/1": 5, "s/x": 1.0}


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"other": 0}, r"the saved state has no 's/other'; was it saved by another strategy\?"),
        ({"tensor": torch.zeros(1)}, r"the saved state has no 's/tensor'; was it saved by another strategy\?"),
        ({"velocity": parameters("a", "z")}, r"the saved state has no s/velocity/z; was it saved for another model"),
    ],
)
def test_a_state_of_another_strategy_or_model_is_refused(like: Any, message: str) -> None:
    source = saved({"velocity": parameters("a", "b"), "step": 3}, "s")
    with pytest.raises(ValueError, match=message):
        restored(like, source, "s", parameters("a", "b"))


def test_what_cannot_be_saved_is_refused_by_its_path() -> None:
    with pytest.raises(TypeError, match="s/0/log: a state may hold tensors, bundles and numbers, not list"):
        saved(({"log": [1, 2]},), "s")
