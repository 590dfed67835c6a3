"""Copies through the host in a step: the bytes that `polytempo explain --device` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.cli.look.device_ways import copies
from polytempo.device import HostCopy
from polytempo.interop.backend import staged
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

crew = pytest.importorskip("device.crew")
RANKS = 3
"""More than devices, so tensors travel through the host."""


def counted(world: ProcessWorld, card: torch.device, strategy: str) -> list[int]:
    """Bytes of one step to the host and from it."""
    net = nn.Linear(600, 5, bias=False).to(card)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = pt.attach(net, optimizer, pt.parse_strategy(strategy), world=world)
    found = [0, 0]
    plain_copy, plain_back, plain_wait = HostCopy.__init__, staged.copied_back, staged.StagedReceive.wait

    def to_host(self, given, *arguments, **options):  # type: ignore[no-untyped-def]
        found[0] += sum(tensor.nbytes for tensor in given)
        plain_copy(self, given, *arguments, **options)

    def back(given, targets):  # type: ignore[no-untyped-def]
        found[1] += sum(tensor.nbytes for tensor in given)
        return plain_back(given, targets)

    def waited(self, timeout=None):  # type: ignore[no-untyped-def]
        found[1] += 0 if self._is_over else self._tensor.nbytes
        return plain_wait(self, timeout)

    HostCopy.__init__, staged.copied_back, staged.StagedReceive.wait = to_host, back, waited  # type: ignore[method-assign]
    net(torch.full((2, 600), world.rank + 1.0, device=card)).square().mean().backward()
    optimizer.step()
    HostCopy.__init__, staged.copied_back, staged.StagedReceive.wait = plain_copy, plain_back, plain_wait  # type: ignore[method-assign]
    handle.detach()
    return found


STRATEGIES = (
    "sync_sgd()",
    "sync_sgd(route=ring)",
    "power_sgd()",
    "local_sgd(period=1)",
    "one_bit_sgd()",
    "top_k_sgd(0.01)",
    "robust_sgd(median)",
)


def test_a_step_copies_as_much_as_is_said(device: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> list[list[int]]:
        return [counted(world, card, strategy) for strategy in STRATEGIES]

    ranks = crew.together(device, RANKS, work)
    for number, strategy in enumerate(STRATEGIES):
        [planned] = pt.explain(strategy, RANKS, nn.Linear(600, 5, bias=False)).exchanges
        said = copies(planned.exchange, RANKS)
        found = [max(rank[number][way] for rank in ranks) for way in (0, 1)]
        assert found == pytest.approx([said.to_host, said.from_host], rel=0.02), strategy
