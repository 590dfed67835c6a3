"""Memory of slices by speed: a rank holds its nodes of the tree once while it exchanges them."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core import Port, Work
from polytempo.core.op import Recv, Start
from polytempo.training.job.sliced_step import SlicedGradients

NUMEL = 5003
"""Numbers of the gradients. No other tensor has as many."""


def held() -> int:
    """The number of gradients in memory, packed or not."""
    memory = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
    return len({each.data_ptr() for each in memory if each.nbytes() // 4 in (NUMEL, NUMEL + 1)})


def test_nodes_are_held_once() -> None:
    """8 slices on 3 ranks. They computed 4, 2 and 2 of them: rank 1 sends 4 and 5, and is sent 2 and 3."""
    sliced: Any = object.__new__(SlicedGradients)
    sliced._parameters, sliced._dealt = [nn.Parameter(torch.zeros(NUMEL))], (4, 2, 2)
    sliced._found = {range(4, 6): [torch.full((NUMEL,), 2.0), torch.ones(1)]}
    assert held() == 1
    meeting, answer, told = sliced.meet(Port(1, (0, 1, 2), (0, 0, 0))), None, []
    while True:
        try:
            op = meeting.send(answer)
        except StopIteration:
            break
        what = op.what if isinstance(op, Start) else op.handle
        told.append((type(op).__name__, str(what), held()))
        received = isinstance(op, Work) and isinstance(what, Recv)
        answer = Work(what) if isinstance(op, Start) else torch.full((NUMEL + 1,), 3.0) if received else None
    recv, send = "recv from rank 0 (tag 0)", "send to rank 2 (tag 0)"
    assert told == [("Start", recv, 1), ("Start", send, 1), ("Work", recv, 1), ("Work", send, 2)]
    assert (sliced._parameters[0].grad == 3).all()
