"""Parameter averaging averages an optimizer's state of any dtype and shape, or refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from helpers import CLUSTER
from polytempo import strategies
from polytempo.core import Port
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld

RANKS = 3


class Kept(Optimizer):
    """SGD with a momentum in `dtype`, the mean square of each row, and a count."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["velocity"] = torch.zeros_like(parameter, dtype=self._dtype)
                state["rows"] = torch.zeros(len(parameter), dtype=self._dtype)
                state["step"] = torch.tensor(0.0)
            state["step"] += 1
            state["velocity"].mul_(0.9).add_(parameter.grad)
            state["rows"].mul_(0.9).add_(parameter.grad.square().flatten(1).mean(1))
            parameter -= 0.1 * state["velocity"].to(parameter.dtype)


def trained(
    make: Callable[[Iterable[nn.Parameter]], Optimizer], dtype: torch.dtype, steps: int, period: int
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Each rank's weights and optimizer state."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 3, bias=False).to(dtype) for _ in range(RANKS)]
    replicas = [
        Replica(net, make(net.parameters()), strategies.parameter_averaging(period=period), RANKS) for net in nets
    ]

    async def program(port: Port) -> None:
        net, replica = nets[port.rank], replicas[port.rank]
        for step in range(steps):
            net.weight.grad = torch.full_like(net.weight, 1.0 + port.rank + step)
            replica.optimizer.step()
            await replica.finish_step(port)

    VirtualWorld(CLUSTER, RANKS).run(program)
    return [
        (net.weight.detach(), replica.optimizer.state[net.weight]) for net, replica in zip(nets, replicas, strict=True)
    ]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_any_dtype_and_shape_is_averaged_when_parameters_are(dtype: torch.dtype, kept: torch.dtype) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return Kept(parameters, kept)

    apart, met = trained(make, dtype, 2, period=9), trained(make, dtype, 2, period=2)
    for key in ("velocity", "rows"):
        mean = torch.stack([state[key].double() for _, state in apart]).mean(0)
        for _, state in met:
            torch.testing.assert_close(state[key].double(), mean, rtol=2 * torch.finfo(kept).eps, atol=0)
    for step in 3, 4:  # one step later they differ again, and another one later they have met
        velocities = [state["velocity"] for _, state in trained(make, dtype, step, period=2)]
        assert all(torch.equal(velocities[0], each) for each in velocities) == (step == 4)


def test_counts_are_left_alone_and_scalars_of_a_scalar_parameter_are_not() -> None:
    """torch's Adam on a scalar: its moments are scalars, and so is its count of steps."""
    nets = [nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0))}) for _ in range(2)]
    replicas = [Replica(net, torch.optim.Adam(net.parameters()), strategies.parameter_averaging(1), 2) for net in nets]

    async def program(port: Port) -> None:
        net, replica = nets[port.rank], replicas[port.rank]
        net["scale"].grad = torch.tensor(1.0 + port.rank)
        replica.optimizer.step()
        await replica.finish_step(port)

    VirtualWorld(CLUSTER, 2).run(program)
    for net, replica in zip(nets, replicas, strict=True):
        state = replica.optimizer.state[net["scale"]]
        assert state["exp_avg"].item() == pytest.approx(0.15)
        assert state["step"].item() == 1


def test_adafactor_whose_state_is_of_rows_and_columns() -> None:
    (_, first), *others = trained(torch.optim.Adafactor, torch.float32, 2, period=2)
    for _, state in others:
        assert all(torch.equal(state[key], first[key]) for key in ("row_var", "col_var"))


@pytest.mark.parametrize(
    ("value", "named"), [(torch.zeros(3, dtype=torch.uint8), "torch.uint8"), ([torch.zeros(3)], "a list")]
)
def test_state_that_has_no_mean_is_refused(value: object, named: str) -> None:
    class Codes(Kept):
        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["codes"] = value

    with pytest.raises(ValueError, match=rf"Codes keeps 'codes' as {named}, .*parameter_averaging\(optimizer_state=F"):
        trained(lambda parameters: Codes(parameters, torch.float32), torch.float32, 1, period=1)
