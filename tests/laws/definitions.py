"""Strategies that differ from plain torch even with one rank, written out by hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laws.harness import OPTIMIZERS, Setting, flat, joined_batch, loss_of, model

Batches = Iterable[tuple[Tensor, Tensor]]


def delayed(num_steps: int, delay: int, setting: Setting) -> list[Tensor]:
    """Step t applies the gradient of step t - delay; before that nothing."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    late: list[list[Tensor]] = []
    history = []
    for step in range(num_steps):
        gradients = torch.autograd.grad(loss_of(net, joined_batch(step, setting.dtype)), list(net.parameters()))
        late.append([g.clone() for g in gradients])
        if step >= delay:
            for parameter, gradient in zip(net.parameters(), late[step - delay], strict=True):
                parameter.grad = gradient
            optimizer.step()
        history.append(flat(net))
    return history


def diloco(num_steps: int, period: int, lr: float, momentum: float, setting: Setting) -> list[Tensor]:
    """Nesterov's momentum on one worker's movement in `period` steps."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    anchor = flat(net)
    velocity = torch.zeros_like(anchor)
    history = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(net, joined_batch(step, setting.dtype)).backward()
        optimizer.step()
        if (step + 1) % period == 0:
            moved = anchor - flat(net)
            velocity = momentum * velocity + moved
            anchor = anchor - lr * (moved + momentum * velocity)
            torch.nn.utils.vector_to_parameters(anchor.clone(), net.parameters())
        history.append(flat(net))
    return history


def slowmo(num_steps: int, period: int, lr: float, momentum: float, setting: Setting) -> list[Tensor]:
    """Momentum on one worker's movement in `period` steps."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    anchor = flat(net)
    velocity = torch.zeros_like(anchor)
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        optimizer.step()
        if (step + 1) % period == 0:
            velocity = momentum * velocity + (anchor - flat(net))
            anchor = anchor - lr * velocity
            torch.nn.utils.vector_to_parameters(anchor.clone(), net.parameters())
        history.append(flat(net))
    return history


def signum(num_steps: int, momentum: float, setting: Setting) -> list[Tensor]:
    """One worker steps by the average of its gradients."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    averages = [torch.zeros_like(p) for p in net.parameters()]
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        averages = [a.lerp(g, 1 - momentum) for a, g in zip(averages, gradients, strict=True)]
        take_step(net, optimizer, [average.clone() for average in averages])
        history.append(flat(net))
    return history


def stepped(batches: Batches, setting: Setting) -> Tensor:
    """The usual loop: the weights at the end."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    for batch in batches:
        take_gradients(net, batch)
        optimizer.step()
    return flat(net)


def downpour(batches: Batches, every: int, setting: Setting) -> Tensor:
    """One worker; the server's Adagrad on the sum of `every` gradients; pulled weights are used a step later.

    Weight decay is a part of each batch's gradient, for the worker and for the server.
    """
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    server = model(setting.dtype)
    tiny = torch.finfo(flat(server).dtype).tiny  # the paper has no ε: 0/0 is 0
    adagrad = torch.optim.Adagrad(server.parameters(), lr=optimizer.param_groups[0]["lr"], eps=tiny, foreach=False)
    accrued = arrived = None
    for step, batch in enumerate(batches, start=1):
        take_gradients(net, batch)
        decay = optimizer.param_groups[0]["weight_decay"]
        gradients = [p.grad.add(p.detach(), alpha=decay) for p in net.parameters() if p.grad is not None]
        accrued = gradients if accrued is None else [a + g for a, g in zip(accrued, gradients, strict=True)]
        optimizer.step()
        if arrived is not None:
            torch.nn.utils.vector_to_parameters(arrived, net.parameters())
            arrived = None
        if step % every == 0:
            take_step(server, adagrad, accrued)
            accrued, arrived = None, flat(server)
    if accrued is not None:  # the rest is pushed before the end
        take_step(server, adagrad, accrued)
    return flat(server)


def easgd(batches: Batches, period: int, alpha: float, setting: Setting) -> Tensor:
    """One worker x on a spring to the center, drawn together after every `period` steps and at the end."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    center = flat(net)
    step = 0
    for step, batch in enumerate(batches, start=1):
        take_gradients(net, batch)
        optimizer.step()
        if step % period == 0:
            difference = alpha * (flat(net) - center)
            torch.nn.utils.vector_to_parameters(flat(net) - difference, net.parameters())
            center = center + difference
    return center if step % period == 0 else center + alpha * (flat(net) - center)


def take_gradients(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """The gradients of the batch's mean loss alone."""
    net.zero_grad()
    loss_of(net, batch).backward()


def take_step(net: nn.Module, optimizer: Optimizer, gradients: list[Tensor]) -> None:
    """A step of the optimizer with these gradients."""
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
