"""The cost of a parameter server's messages on a link."""

from __future__ import annotations

import pytest
import torch

from polytempo.server.message import (
    Ask,
    Deal,
    Install,
    Members,
    Message,
    Pull,
    Pulled,
    Push,
    PushPart,
    Replicate,
    Rows,
    Ticket,
    View,
)

FLAT, RUNNING = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
ROWS = Rows(0, torch.tensor([1, 4]), torch.zeros(2, 5))
PUSH = Push(0, 1, 7, 3, 2, 16, (0.1, 0.2), (5, 6), FLAT, (ROWS, ROWS), RUNNING)


@pytest.mark.parametrize(
    ("message", "tensor_bytes"),
    [
        (Pull(0, 1, 2, 3, -1), 0),
        (PUSH, 40 + 2 * (16 + 40) + 24),
        (Push(0, 1, 7, 3, 2, 16, (), (), FLAT, parts=(PushPart(1, 1, 1, 1, 1, 8, (), RUNNING),) * 2), 40 + 2 * 24),
        (Pulled(0, 1, 1, 2, 9, FLAT.double(), (ROWS,)), 80 + 56),
        (Replicate(0, 1, 2, PUSH), 40 + 112 + 24),
        (Install(0, 1, 2, b"state", (FLAT, RUNNING)), 5 + 40 + 24),
        (Members(-1, 1, 1, ((0, 1), (1, 1)), (1,)), 0),
        (View(1, ((4,), (5, 6)), ((0, 1), (1, 2))), 0),
        (Ask(0, 1, 1, (1, 2), (b"a row", b"two")), 8),
        (Deal(0, 1, 1, "train", (Ticket(0, 0, 0),)), 0),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_message_costs_its_tensors_and_bytes_and_a_header(message: Message, tensor_bytes: int) -> None:
    assert message.num_bytes == Message.HEADER_BYTES + tensor_bytes
