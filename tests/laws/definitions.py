"""Strategies that differ from plain torch even with one rank, written out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from laws.harness import OPTIMIZERS, Setting, flat, joined_batch, loss_of, model


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
    """Nesterov's momentum on what one worker moves in `period` steps."""
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
