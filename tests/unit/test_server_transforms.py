"""The worker's transforms, driven by hand: their ops in each step, and their use of the answers.

A script of ops reads "push 3 [4.0]" (of step 3), "begin push 3 [4.0]" (not waited for) and "await push 3 [4.0]".
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import bundle
from polytempo.core import Bundle, Program, Promise, Transform, world_port
from polytempo.core.op import Op, Pull, Push, Start, Work
from polytempo.core.state import restored, saved, settled
from polytempo.server.worker.transforms import exchange, pull, push, push_movement

PORT = world_port(0, (0,))


def spelled(op: Op[Any]) -> str:
    match op:
        case Push(gradient, clock, samples):
            assert samples == 0, "the client knows them"
            return f"push {clock} {gradient.tolist()}"
        case Pull(clock):
            return f"pull {clock}"
        case Start(what):
            assert isinstance(what, Op), "a coroutine could not push"
            return f"begin {spelled(what)}"
        case Work(handle):
            assert type(op) is Work, "worlds know no other"
            return f"await {spelled(handle)}"
    raise AssertionError(op)


class Hand:
    """Drives coroutines. A pull is answered with its clock, 10 times over; a push with `difference`."""

    def __init__(self, difference: Tensor | None = None) -> None:
        self.script: list[str] = []
        self._difference = difference
        self.lent = torch.zeros(1, dtype=torch.float64)
        """The answer to pulls: the same memory each time."""

    def run(self, program: Program[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                op = program.send(answer)
            except StopIteration as stop:
                return stop.value
            self.script.append(spelled(op))
            answer = Work(op.what) if isinstance(op, Start) else self._answer(op.handle if isinstance(op, Work) else op)

    def _answer(self, op: Op[Any]) -> Tensor | None:
        if isinstance(op, Push):
            return self._difference
        assert isinstance(op, Pull)
        return self.lent.fill_(10.0 * op.clock)

    def steps(self, transform: Transform, values: list[float]) -> tuple[list[float | None], list[list[str]], Any]:
        """One step for each value: the answers, each step's script, and the state in the end."""
        state, answers, scripts = transform.init(bundle(0.0)), [], []
        for value in values:
            self.script = []
            given = bundle(value)
            answer, state = self.run(transform.apply(PORT, given, state))
            answers.append(None if answer is None else float(answer.flat))
            scripts.append(self.script)
        return answers, scripts, state


# ---------------------------------------------------------------------- push


def test_each_gradient_is_pushed_as_it_is_and_awaited_before_the_next() -> None:
    answers, scripts, _ = Hand().steps(push(), [1.0, 2.0, 3.0])
    assert answers == [None, None, None]
    assert scripts == [
        ["begin push 1 [1.0]"],
        ["await push 1 [1.0]", "begin push 2 [2.0]"],
        ["await push 2 [2.0]", "begin push 3 [3.0]"],
    ]


def test_the_gradient_is_pushed_from_where_it_lies() -> None:
    given, hand = bundle(1.0, 2.0), Hand()
    _, state = hand.run(push().apply(PORT, given, push().init(given)))
    (late,) = state.under_way
    assert late.work.handle.gradient.data_ptr() == given.flat.data_ptr()


def test_sums_of_every_period_are_pushed() -> None:
    answers, scripts, _ = Hand().steps(push(every=2), [1.0, 2.0, 3.0, 4.0, 5.0])
    assert answers == [None] * 5
    assert scripts == [
        [],
        ["begin push 2 [3.0]"],
        ["await push 2 [3.0]"],
        ["begin push 4 [7.0]"],
        ["await push 4 [7.0]"],
    ]


def test_with_overlap_two_pushes_may_be_under_way() -> None:
    _, scripts, _ = Hand().steps(push(every=2, overlap=True), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert scripts == [
        [],
        ["begin push 2 [3.0]"],
        [],
        ["begin push 4 [7.0]"],
        ["await push 2 [3.0]"],
        ["begin push 6 [11.0]"],
        ["await push 4 [7.0]"],
    ]


def test_with_overlap_every_step_too() -> None:
    _, scripts, _ = Hand().steps(push(overlap=True), [1.0, 2.0, 3.0])
    assert scripts == [
        ["begin push 1 [1.0]"],
        ["begin push 2 [2.0]"],
        ["await push 1 [1.0]", "begin push 3 [3.0]"],
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_a_local_step_gets_the_gradient_unchanged_and_cannot_reach_what_is_pushed(every: int, overlap: bool) -> None:
    transform, hand = push(every, overlap=overlap, steps_locally=True), Hand()
    state = transform.init(bundle(0.0))
    for step in range(1, every + 1):
        given = bundle(float(step))
        answer, state = hand.run(transform.apply(PORT, given, state))
        assert answer is given
        assert given.flat.tolist() == [step]
        given.flat.fill_(float("nan"))  # the worker may do anything with its gradient now
    assert state.under_way[-1].work.handle.gradient.tolist() == [sum(range(1, every + 1))]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_under_way_stays_as_it_is_while_the_next_sum_grows(overlap: bool) -> None:
    """Every pushed buffer, looked at when it is awaited, is still the sum it was."""
    hand = Hand()
    _, scripts, state = hand.steps(push(every=3, overlap=overlap), [float(i) for i in range(1, 13)])
    hand.run(settled(state))
    begun = [line.removeprefix("begin ") for step in scripts for line in step if line.startswith("begin")]
    awaited = [line.removeprefix("await ") for step in [*scripts, hand.script] for line in step if "await" in line]
    assert begun == awaited[: len(begun)] == ["push 3 [6.0]", "push 6 [15.0]", "push 9 [24.0]", "push 12 [33.0]"]


# ---------------------------------------------------------------------- pull


def test_parameters_are_the_servers_in_every_step() -> None:
    answers, scripts, _ = Hand().steps(pull(), [1.0, 2.0, 3.0])
    assert answers == [10.0, 20.0, 30.0]
    assert scripts == [["pull 1"], ["pull 2"], ["pull 3"]]


def test_between_pulls_they_are_the_workers_own() -> None:
    answers, scripts, _ = Hand().steps(pull(every=3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert answers == [1.0, 2.0, 30.0, 4.0, 5.0, 60.0]
    assert scripts == [[], [], ["pull 3"], [], [], ["pull 6"]]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_without_a_pull_hands_out_the_very_same_bundle(overlap: bool) -> None:
    given, transform = bundle(1.0), pull(every=2, overlap=overlap)
    answer, _ = Hand().run(transform.apply(PORT, given, transform.init(given)))
    assert answer is given
    assert not given.packed


def test_with_overlap_they_arrive_a_step_later() -> None:
    answers, scripts, _ = Hand().steps(pull(every=3, overlap=True), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert answers == [1.0, 2.0, 3.0, 30.0, 5.0, 6.0, 60.0]
    assert scripts == [[], [], ["begin pull 3"], ["await pull 3"], [], ["begin pull 6"], ["await pull 6"]]


def test_with_overlap_in_every_step_the_answer_is_read_before_the_next_is_asked_for() -> None:
    hand, transform = Hand(), pull(overlap=True)
    state, answers = transform.init(bundle(0.0)), []
    for value in (1.0, 2.0, 3.0):
        hand.script = []
        answer, state = hand.run(transform.apply(PORT, bundle(value), state))
        hand.lent.fill_(float("nan"))  # lent only until the next request
        answers.append(float(answer.flat))
    assert answers == [1.0, 10.0, 20.0]
    assert hand.script == ["await pull 2", "begin pull 3"]


# ---------------------------------------------------------------------- exchange


def test_every_period_the_worker_continues_from_x_minus_d() -> None:
    hand = Hand(torch.tensor([0.5], dtype=torch.float64))
    answers, scripts, _ = hand.steps(exchange(2), [1.0, 2.0, 3.0, 4.0])
    assert answers == [1.0, 1.5, 3.0, 3.5]
    assert scripts == [[], ["push 2 [2.0]"], [], ["push 4 [4.0]"]]


def test_an_exchange_answers_another_bundle_so_that_it_is_copied_back() -> None:
    given = bundle(1.0)
    answer, _ = Hand(torch.ones(1, dtype=torch.float64)).run(exchange(1).apply(PORT, given, exchange(1).init(given)))
    assert answer is not given


def test_a_push_that_the_server_had_already_moves_nobody() -> None:
    given = bundle(1.0)
    answer, _ = Hand(None).run(exchange(1).apply(PORT, given, exchange(1).init(given)))
    assert answer is given


# ---------------------------------------------------------------------- push_movement


def test_a_movement_is_pushed_and_the_worker_continues_from_the_servers_parameters() -> None:
    answers, scripts, _ = Hand().steps(push_movement(2), [1.0, 2.0, 21.0, 23.0])
    assert answers == [1.0, 20.0, 21.0, 40.0]
    assert scripts == [
        *([], ["begin push 2 [-2.0]", "pull 2", "await push 2 [-2.0]"]),
        *([], ["begin push 4 [-3.0]", "pull 4", "await push 4 [-3.0]"]),
    ]


def test_a_worker_goes_on_while_they_travel_and_no_step_is_lost_or_pushed_twice() -> None:
    """The step from 3 to 5 was made meanwhile: it is kept, and is a part of the second push."""
    answers, scripts, _ = Hand().steps(push_movement(3, delay=1), [1.0, 2.0, 3.0, 5.0, 33.0, 34.0, 36.0])
    assert answers == [1.0, 2.0, 3.0, 30.0 + (5.0 - 3.0), 33.0, 34.0, 60.0 + (36.0 - 34.0)]
    assert scripts == [
        *([], [], ["begin push 3 [-3.0]", "begin pull 3"]),
        *(["await pull 3"], [], ["begin push 6 [-4.0]", "begin pull 6"]),
        ["await pull 6"],
    ]


def test_lent_parameters_are_read_when_they_are_taken_in() -> None:
    hand, transform = Hand(), push_movement(2, delay=1)
    state = transform.init(bundle(0.0))
    for value in (1.0, 2.0, 3.0):
        _, state = hand.run(transform.apply(PORT, bundle(value), state))
    hand.lent.fill_(float("nan"))  # lent only until the next request
    assert float(state.anchor.flat) == 20.0


@pytest.mark.parametrize("delay", [-1, 2])
def test_a_late_answer_comes_before_the_next_push(delay: int) -> None:
    with pytest.raises(ValueError, match=f"comes {delay} steps late needs a period of more steps, got 2"):
        push_movement(2, delay)


# ---------------------------------------------------------------------- all of them


@pytest.mark.parametrize("stop_after", range(1, 7))
@pytest.mark.parametrize(
    "transform",
    [
        push(),
        push(3),
        push(3, overlap=True),
        push(2, overlap=True, steps_locally=True),
        pull(2),
        pull(2, overlap=True),
        pull(overlap=True),
        exchange(2),
        push_movement(3, delay=2),
    ],
    ids=[
        *("push", "push 3", "push 3 overlap", "push 2 local", "pull 2", "pull 2 overlap", "pull overlap", "exchange"),
        "push_movement",
    ],
)
def test_saved_and_restored_equals_never_having_stopped(transform: Transform, stop_after: int) -> None:
    """The same answers, and the same requests; exchanges under way end before the stop."""
    layout = Bundle({"w": torch.zeros(1, dtype=torch.float64)})

    def after(stop: int | None) -> tuple[list[float | None], list[str]]:
        hand, answers = Hand(torch.full((1,), 0.25, dtype=torch.float64)), []
        state = transform.init(layout)
        for step in range(1, 9):
            answer, state = hand.run(transform.apply(PORT, bundle(float(step)), state))
            answers.append(None if answer is None else float(answer.flat))
            if step == stop:
                source = saved(hand.run(settled(state)), "state")
                state = restored(transform.init(layout), source, "state", layout)
        return answers, [line for line in hand.script if not line.startswith("await")]

    assert after(stop_after) == after(None)


@pytest.mark.parametrize("transform", [push(), pull(), exchange(1)])
def test_they_see_the_whole_model_and_are_never_idle(transform: Transform) -> None:
    assert transform.promises == Promise(0)


@pytest.mark.parametrize(
    ("make", "name"), [(push, "push"), (pull, "pull"), (exchange, "exchange"), (push_movement, "push_movement")]
)
def test_a_period_below_one_is_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs a period of at least 1 step, got every=0"):
        make(0)
