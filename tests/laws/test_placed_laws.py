"""Branches of a model on several workers: equal to one process, and each tensor between two places is sent once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from branch_models import WIDTH, Drawn, Towers
from polytempo.core import Port
from some_cases import ALL
from split_models import Pass as FoundPass
from split_models import assert_equal, made, outcome_of, squares, whole_pass

X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ITEM = 8
"""Bytes of a float64."""


class Block(nn.Module):
    """Branches of several lengths that fork and meet, and a tuple that passes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(8, 6)
        self.branches = nn.ModuleList(
            nn.Sequential(*(each for _ in range(depth) for each in (nn.Linear(6, 6), nn.Tanh()))) for depth in (1, 2, 3)
        )
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.scores = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.begin(x))
        out, (hidden, _) = self.recurrent(x.unsqueeze(1))
        first, second, third = (branch(x) for branch in self.branches)
        third = third.reshape(second.shape[0], -1) / second.shape[0]
        scores: Tensor = self.scores(torch.cat([first * second, third, out.squeeze(1), hidden[0]], dim=1))
        return scores


def placed_pass(model: Callable[[], nn.Module], inputs: Tensor, port: Port, steps: int = 1) -> FoundPass:
    """One rank's last pass."""
    net = pt.training.place(made(model), sample=inputs, port=port)
    for _ in range(steps):
        net.zero_grad()
        output = net(inputs)
        loss = squares(output)
        loss.backward()
    return FoundPass(loss.detach(), output.detach(), net.full_gradients())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [Towers, Block])
def test_equal_to_one_process(model: Callable[[], nn.Module], num_ranks: int) -> None:
    expected = whole_pass(model, X)._replace(inputs=None)
    for found in outcome_of(num_ranks, lambda port: placed_pass(model, X, port, steps=2)).results:
        assert_equal(found, expected, 1e-12)


def test_other_sizes_and_evaluation() -> None:
    """Batches of other sizes than the sample's, and a pass without gradients between passes with them."""

    def work(port: Port) -> list[Tensor]:
        net = pt.training.place(made(Block), sample=X, port=port)
        found = [net(X[:size]).detach() for size in (5, 2, 3, 2)]
        with torch.no_grad():
            return [*found, net.eval()(X[:4])]

    whole = made(Block)
    expected = [whole(X[:size]).detach() for size in (5, 2, 3, 2, 4)]
    for found in outcome_of(3, work).results:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_each_tensor_is_sent_once() -> None:
    """Two towers on two ranks: the first layer's value goes over and a tower's comes back, each (5, 8), and both
    gradients go the other way; the answer of (5, 3) goes over."""

    def work(port: Port, steps: int) -> dict[str, int]:
        net = pt.training.place(made(Towers), sample=X, port=port)
        for _ in range(steps):
            squares(net(X)).backward()
        return net.places

    def sent(steps: int) -> int:
        return int(sum(outcome_of(2, lambda port: work(port, steps)).trace.bytes_sent.values()))

    [places, other] = outcome_of(2, lambda port: work(port, 0)).results
    assert places == other
    assert {name for name, place in places.items() if place == 1} == {name for name in places if "towers.1." in name}
    assert sent(3) - sent(2) == ITEM * 5 * (4 * 8 + 3)


def test_what_cannot_be_placed() -> None:
    def refused(model: Callable[[], nn.Module], then: Callable[[Any], Any] = lambda net: None) -> str:
        def work(port: Port) -> str:
            with pytest.raises(ValueError, match=r"\w") as error:
                then(pt.training.place(made(model), sample=X, port=port))
            return str(error.value)

        return str(outcome_of(2, work).results[0])

    assert "Sequential has no branches that could run at the same time" in refused(
        lambda: nn.Sequential(nn.Linear(8, 2))
    )
    assert "have no gradient, and one of these needs it" in refused(Towers, lambda net: net(X.clone().requires_grad_()))
    assert "was placed for the inputs x, and got 1 and y" in refused(Towers, lambda net: net(X, y=X))


DRAWN = 12 if ALL else 4


def test_drawn_models() -> None:
    """Models of all kinds of operations, in evaluation, where none draws random numbers."""
    inputs = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def passed(net: nn.Module) -> tuple[list[Tensor], Tensor]:
        answer = net.eval()(inputs)
        loss = torch.stack([squares(each) for each in answer]).sum()
        if loss.requires_grad:
            loss.backward()
        return [each.detach() for each in answer], loss.detach()

    placed = 0
    for seed in range(DRAWN):

        def work(port: Port, seed: int = seed) -> Any:
            try:
                net = pt.training.place(made(lambda: Drawn(seed)), sample=inputs, port=port)
            except ValueError as error:
                return str(error)
            answer, loss = passed(net)
            return answer, loss, net.full_gradients()

        whole = made(lambda seed=seed: Drawn(seed))
        answer, loss = passed(whole)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.named_parameters()}
        for found in outcome_of(2, work).results:
            if isinstance(found, str):
                assert "no branches" in found or "would be needed at two places" in found, found
                continue
            placed += 1
            for one, other in zip([*found[0], found[1]], [*answer, loss], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"seed {seed}")
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[2][name], gradient, rtol=1e-12, atol=1e-12, msg=f"seed {seed}: {name}")
    assert placed >= DRAWN / 2
