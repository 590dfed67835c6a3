"""Rounds of clients on a device: the CPU's models, also where the state of clients moves, is saved and goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from device.crew import check_all, first_fault, last_line, together
from laws import test_private_rounds
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

accountant = test_private_rounds.accountant
TOLERANCE = {"pretend": 0.0, "cuda": 1e-3}
CLIENTS = "by_size(6, sigma=0.7)"
STRATEGIES = {
    "fed_avg(3, batch_size=4)": CLIENTS,
    "fed_prox(3, mu=0.2, batch_size=4)": CLIENTS,
    "fed_adam(3, batch_size=4)": CLIENTS,
    "fed_nova(3, batch_size=4)": CLIENTS,
    "q_fed_avg(3, batch_size=4)": CLIENTS,
    "scaffold(3, batch_size=4)": CLIENTS,
    "fed_rep(3, batch_size=4)": CLIENTS,
    "fed_bn(3, batch_size=4)": CLIENTS,
    "fed_buff(2, concurrency=3, batch_size=4)": CLIENTS,
    "fed_robust(fed_avg(3, batch_size=4))": CLIENTS,
    "fed_coded(fed_avg(3, batch_size=4), int8())": CLIENTS,
    "secure(fed_avg(3, batch_size=4))": CLIENTS,
    "private(fed_avg(3, batch_size=4), clip=0.2, noise=0.5)": "iid(6)",
    "dp_sgd(fed_avg(3, batch_size=4), clip=0.2, noise=0.5)": CLIENTS,
    "dp_sgd(clip=0.2, noise=0.5)": None,
}


def model() -> nn.Module:
    """A model with a normalisation that clients may keep, and a tensor that codecs encode."""
    return nn.Sequential(nn.Linear(4, 300), nn.LayerNorm(300), nn.Tanh(), nn.Dropout(0.1), nn.Linear(300, 3))


def points() -> TensorDataset:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(11))
    return TensorDataset(x, x[:, :3].argmax(1))


JOB = pt.Job(
    model=model,
    data=lambda folder: pt.Data(points(), points()),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    correct=lambda output, target: output.argmax(1) == target,
    lr=0.05,
)


@pytest.mark.usefixtures("accountant")
def test_clients_of_a_device_train_the_cpus_model(device: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        return first_fault({strategy: partial(fault, strategy, card) for strategy in STRATEGIES})

    check_all(together(device, 1, work))


def fault(strategy: str, card: torch.device) -> str:
    """The strategy's error, or nothing."""
    try:
        there, here = trained(strategy, str(card)), trained(strategy, "cpu")
    except Exception as error:
        return last_line(error)
    if strays := [name for name, tensor in there.items() if tensor.device != card]:
        return f"not on the device: {strays}"
    distance = max(float((there[name].cpu() - tensor).abs().max()) for name, tensor in here.items())
    return "" if distance <= TOLERANCE[card.type] else f"{distance:.2e} from the CPU's"


def trained(strategy: str, place: str) -> dict[str, Tensor]:
    """The final parameters, and the tensors of the server and of the optimizer."""
    options: dict[str, Any] = {"clients": STRATEGIES[strategy], "seed": 5, "steps": 3, "device": place}
    trainer = pt.Trainer(JOB, strategy, **options)
    trainer.fit()
    replica = trainer.context.replica
    found = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    found |= {} if replica.clients is None else replica.clients.server
    states = [value for state in replica.optimizer.state.values() for value in state.values()]
    return found | {f"state {i}": value for i, value in enumerate(states) if value.dim()}


def test_states_of_clients_move_between_workers_and_go_on(device: str, tmp_path: Path) -> None:
    """A state was received on the host where the client trains on a device, and read there from a checkpoint."""
    options: dict[str, Any] = {"clients": CLIENTS, "threads": 1, "seed": 5}
    given: dict[str, Any] = options | {"checkpoint_every": 2, "out": tmp_path / "there", "device": device}
    pt.run(JOB, "scaffold(4, batch_size=4)", 2, steps=2, **given)
    found = pt.run(JOB, "scaffold(4, batch_size=4)", 2, steps=5, resume=True, **given)
    expected = pt.run(JOB, "scaffold(4, batch_size=4)", 2, steps=5, device="cpu", **options)
    assert found.loss == pytest.approx(expected.loss, rel=0 if device == "pretend" else 0.05)
    if device == "pretend":
        assert found.parameters_sha256 == expected.parameters_sha256
