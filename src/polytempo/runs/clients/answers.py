"""`checked`: a client's message as an answer to a round, or the reason to refuse it."""

from __future__ import annotations

import math

from torch import Tensor

from polytempo.core import EncodeContext
from polytempo.federated.rounds import CONTROL
from polytempo.runs.clients.client_messages import ClientHello, ClientMovement, problem_of, unpacked
from polytempo.training.federated.client_movements import from_wire
from polytempo.training.federated.remote_rounds import ClientAnswer, RoundTask


def hello_problem(hello: ClientHello, own_layout: str, most_samples: int) -> str | None:
    """The reason to refuse a client for good."""
    if hello.model != own_layout:
        return "its job has another model: other names, shapes or dtypes"
    if not 1 <= hello.samples <= most_samples:
        return f"it says that it has {hello.samples:,} samples, and its ticket is for 1 to {most_samples:,}"
    return None


def checked(client: int, message: ClientMovement, task: RoundTask) -> tuple[ClientAnswer, str | None]:
    """A client's answer in round `task`, to the model of this round or an earlier one, and the reason to refuse it.

    An answer for a secure sum has no movement: its keys are the sum's.
    """
    movement, problem = _movement(client, message, task) if task.sum is None else ({}, None)
    numbers = message.loss, message.first_loss
    if not (all(map(math.isfinite, numbers)) and 0 <= message.right <= message.tested < math.inf):
        problem = problem or f"its loss is {message.loss}, and {message.right} of {message.tested} are right"
    told = message.samples, message.loss, movement, message.right, message.tested, message.first_loss
    answer = ClientAnswer(client, *told, age=task.number - message.round)
    return answer, problem or task.problem(answer)


def _movement(client: int, message: ClientMovement, task: RoundTask) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a message, and the reason to refuse them."""
    try:
        movement = unpacked(message.movement)
        if task.codec is not None:
            when = EncodeContext(step=message.round + 1, rank=client)
            movement = {name: _decoded(name, each, task, when) for name, each in movement.items()}
        return movement, problem_of(movement, task.expected)
    except ValueError as error:
        return {}, str(error)


def _decoded(name: str, wire: Tensor, task: RoundTask, when: EncodeContext) -> Tensor:
    """The tensor of a code; others as they are. ValueError for a code of no such tensor."""
    if name not in task.expected or name.startswith(CONTROL) or task.codec is None:
        return wire
    try:
        return from_wire(wire, task.expected[name], task.codec, when, name)
    except Exception as error:  # of hostile codes IndexError, RuntimeError, too
        raise ValueError(f"{name} is not a code of {task.codec.facts.name} ({type(error).__name__})") from error
