"""Strategies that differ from plain torch even with one rank, written out by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laws.harness import OPTIMIZERS, Setting, flat, joined_batch, loss_of, model
from plain_rules import plain_halos
from polytempo import strategies
from polytempo.core import Bundle

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


def acco(num_steps: int, setting: Setting) -> list[Tensor]:
    """Even steps go by two gradients from before the odd step between them; the first step has no gradient yet."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    late: list[list[Tensor]] = []
    before = deepcopy((net.state_dict(), optimizer.state_dict()))
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        late.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        if step % 2:
            before = deepcopy((net.state_dict(), optimizer.state_dict()))
            take_step(net, optimizer, late[step - 1])
        elif step:
            net.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
            take_step(net, optimizer, [a.lerp(b, 0.5) for a, b in zip(late[step - 2], late[step - 1], strict=True)])
        history.append(flat(net))
    return history


OuterStep = Callable[[Tensor, int], Tensor]
"""The anchor's movement back, by the movement and the number of a round."""


def outer(num_steps: int, period: int, step: OuterStep, setting: Setting) -> list[Tensor]:
    """One worker's movement in `period` steps, and an outer step with it."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    anchor = flat(net)
    history = []
    for number in range(1, num_steps + 1):
        take_gradients(net, joined_batch(number - 1, setting.dtype))
        optimizer.step()
        if number % period == 0:
            anchor = anchor - step(anchor - flat(net), number // period)
            torch.nn.utils.vector_to_parameters(anchor.clone(), net.parameters())
        history.append(flat(net))
    return history


def nesterov_steps(lr: float, momentum: float) -> OuterStep:
    """Nesterov's momentum."""
    velocity: Tensor | float = 0.0

    def step(moved: Tensor, number: int) -> Tensor:
        nonlocal velocity
        velocity = momentum * velocity + moved
        return lr * (moved + momentum * velocity)

    return step


def adam_steps() -> OuterStep:
    """Adam's at lr 0.1, with 0.8, 0.9 and 0.01."""
    first = second = torch.zeros(())

    def step(moved: Tensor, number: int) -> Tensor:
        nonlocal first, second
        first = first.expand_as(moved).to(moved).lerp(moved, 1 - 0.8)
        second = (0.9 * second.to(moved)).addcmul(moved, moved, value=1 - 0.9)
        return first / ((second / (1 - 0.9**number)).sqrt() + 0.01) * (0.1 / (1 - 0.8**number))

    return step


def schedule_free_steps() -> OuterStep:
    """Schedule-free ones at lr 0.8 with beta 0.7, by the distance of their mean from the last one."""
    apart: Tensor | float = 0.0

    def step(moved: Tensor, number: int) -> Tensor:
        nonlocal apart
        before, apart = apart, (apart + 0.8 * moved) * (1 - 1 / number)
        return 0.8 * moved - 0.7 * (apart - before)

    return step


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


def co2(num_steps: int, setting: Setting) -> list[Tensor]:
    """One worker's movement in 3 steps counts a round late: half of a momentum of 0.2."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    anchor, before = flat(net), None
    velocity = torch.zeros_like(anchor)
    history = []
    for step in range(1, num_steps + 1):
        take_gradients(net, joined_batch(step - 1, setting.dtype))
        optimizer.step()
        if step % 3 == 0:
            now = anchor - flat(net)
            if before is not None:
                velocity = 0.2 * velocity + before
                anchor = anchor - 0.5 * velocity
            before = now
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


FRAGMENTS = {(4, 2): (0, 1, 1, 1), (4, 3): (0, 1, 2, 2), (2, 2): (0, 1), (2, 3): (0, 1)}
"""(Tensors, fragments) -> each tensor's fragment, of the laws' models."""


class Streams:
    """One worker of streaming DiLoCo, outer rate 0.7 and momentum 0.5, tensor by tensor."""

    def __init__(self, parameters: Iterable[Tensor], period: int, fragments: int, delay: int, blend: str) -> None:
        self.parameters = list(parameters)
        self.anchors = [p.detach().clone() for p in self.parameters]
        self.velocities = [torch.zeros_like(p) for p in self.anchors]
        self.asked = [p.clone() for p in self.anchors]
        self.period, self.delay, self.blend = period, delay, blend
        of = FRAGMENTS[len(self.parameters), fragments]
        self.first = [period * (p + 1) // fragments for p in of]

    @torch.no_grad()
    def after(self, step: int) -> None:
        """The parameters after `step`, from 1, of the inner optimizer."""
        for i, (parameter, first) in enumerate(zip(self.parameters, self.first, strict=True)):
            if step >= first + self.delay and (step - first) % self.period == self.delay:
                anchor = self.anchors[i]
                kept = self.blend == "'keep'"
                arrived = anchor + (parameter - self.asked[i]) if kept else anchor.lerp(parameter, float(self.blend))
                parameter.copy_(arrived)
            if step >= first and (step - first) % self.period == 0:
                moved = self.anchors[i] - parameter
                self.asked[i] = parameter.clone()
                self.velocities[i] = 0.5 * self.velocities[i] + moved
                self.anchors[i] = self.anchors[i] - 0.7 * (moved + 0.5 * self.velocities[i])


def streaming(num_steps: int, name: str, setting: Setting) -> list[Tensor]:
    """Streaming DiLoCo with the arguments that its name has."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    streams = Streams(net.parameters(), *streaming_arguments(name))
    history = []
    for step in range(1, num_steps + 1):
        take_gradients(net, joined_batch(step - 1, setting.dtype))
        optimizer.step()
        streams.after(step)
        history.append(flat(net))
    return history


def streaming_arguments(name: str) -> tuple[int, int, int, str]:
    """The period, the fragments, the delay, and the blend."""
    match = re.search(r"period=(\d+), fragments=(\d+), delay=(\d+), blend=([^,]+)", name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3]), match[4]


def lion(num_steps: int, momentum: tuple[float, float] | None, setting: Setting) -> list[Tensor]:
    """One worker steps by a hundredth of a sign: Lion's, or the gradient's."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    averages = [torch.zeros_like(p) for p in net.parameters()]
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        directions = gradients
        if momentum is not None:
            directions = [a.lerp(g, 1 - momentum[0]) for a, g in zip(averages, gradients, strict=True)]
            averages = [a.lerp(g, 1 - momentum[1]) for a, g in zip(averages, gradients, strict=True)]
        take_step(net, optimizer, [direction.sign() * 0.01 for direction in directions])
        history.append(flat(net))
    return history


def quasi_global(num_steps: int, momentum: float, smoothing: float, setting: Setting) -> list[Tensor]:
    """One worker, moved on by the average of its own movements."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    before = flat(net)
    velocity = torch.zeros_like(before)
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        optimizer.step()
        after = torch.sub(flat(net), velocity, alpha=momentum)
        velocity = velocity.lerp(before - after, 1 - smoothing)
        before = after
        torch.nn.utils.vector_to_parameters(after.clone(), net.parameters())
        history.append(flat(net))
    return history


def muon(num_steps: int, setting: Setting) -> list[Tensor]:
    """One worker's matrices go along the orthogonal factor of a momentum of 0.95, a fifth as far; others as they do."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    averages = [torch.zeros_like(p) for p in net.parameters()]
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        averages = [a.lerp(g, 1 - 0.95) for a, g in zip(averages, gradients, strict=True)]
        ahead = [g.lerp(a, 0.95) for a, g in zip(averages, gradients, strict=True)]
        take_step(net, optimizer, [near(a) if a.dim() == 2 else g for a, g in zip(ahead, gradients, strict=True)])
        history.append(flat(net))
    return history


def near(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps, times 0.2 √max(1, rows / columns)."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if tall else x) * (0.2 * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def dion(num_steps: int, setting: Setting) -> list[Tensor]:
    """One worker's matrices go along the two directions of a power iteration; vectors go by plain gradients."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    begin = strategies.dion(2, exact_below=0).gradients.init(Bundle(dict(net.named_parameters())))
    rights = {name: each.right for name, each in begin.matrices.items()}
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    history = []
    for step in range(num_steps):
        take_gradients(net, joined_batch(step, setting.dtype))
        directions = []
        for name, p in net.named_parameters():
            assert p.grad is not None
            direction = p.grad.clone()
            if name in rights:
                sums[name] = sums[name] + direction
                left = torch.linalg.qr((rights[name] @ sums[name].t()).double().t()).Q.t().to(p.dtype).contiguous()
                found = left @ sums[name]
                sums[name] = torch.sub(sums[name], left.t() @ found, alpha=1 - 0.95)
                rights[name] = found / found.norm(dim=1, keepdim=True)
                direction = left.t() @ rights[name] * (0.2 * (p.shape[0] / p.shape[1]) ** 0.5)
            directions.append(direction)
        take_step(net, optimizer, directions)
        history.append(flat(net))
    return history


def one_bit_adam(num_steps: int, warmup: int, setting: Setting, beta1: float = 0.0) -> list[Tensor]:
    """One worker, for whom nothing is encoded: a hundredth of Adam's step, with a second moment that stays."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()]
    history = []
    for step in range(1, num_steps + 1):
        take_gradients(net, joined_batch(step - 1, setting.dtype))
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        directions = []
        for i, gradient in enumerate(gradients):
            first, second = moments[i]
            first = first.lerp(gradient, 1 - beta1)
            second = second.lerp(gradient.square(), 1 - 0.999) if step <= warmup else second
            moments[i] = first, second
            root = (second / (1 - 0.999 ** min(step, warmup))).sqrt() + 1e-8
            directions.append(first / root * (0.01 / (1 - beta1**step)))
        take_step(net, optimizer, directions)
        history.append(flat(net))
    return history


def zero_one_adam(num_steps: int, setting: Setting) -> list[Tensor]:
    """One worker encodes nothing: its second moment is of steps 1, 2, 4 and 6, and later meetings change nothing."""
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    seconds = [torch.zeros_like(p) for p in net.parameters()]
    updates = [1, 2, 4, 6]
    anchor = flat(net)
    history = []
    for step in range(1, num_steps + 1):
        take_gradients(net, joined_batch(step - 1, setting.dtype))
        directions = []
        for i, gradient in enumerate([p.grad.clone() for p in net.parameters() if p.grad is not None]):
            second = seconds[i].lerp(gradient.square(), 1 - 0.999) if step in updates else seconds[i]
            root = (second / (1 - 0.999 ** sum(each <= step for each in updates))).sqrt() + 1e-8
            if step < 6 and step not in updates:
                gradient = gradient / root * root
            seconds[i] = second
            directions.append(gradient / root * 0.01)
        take_step(net, optimizer, directions)
        if step == 6:
            anchor = flat(net)
        if step in (7, 8, 10, 12):
            anchor = anchor - (anchor - flat(net))
            torch.nn.utils.vector_to_parameters(anchor.clone(), net.parameters())
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


def async_diloco(batches: Batches, period: int, name: str, setting: Setting) -> Tensor:
    """One worker; a server's Nesterov step by its movement in `period` steps, and by the rest at the end.

    With momentum_every=N each N-th step has the momentum; with a delay the worker goes on, and takes the server's
    parameters in later. With an outer Adam the step is that one's.
    """
    server = model(setting.dtype)
    lr, momentum = (float(each) for each in re.findall(r"outer_(?:lr|momentum)=([\d.]+)", name))
    late, delay = (int((re.findall(rf"{each}=(\d+)", name) or [0])[0]) for each in ("momentum_every", "delay"))
    plain = {} if late else {"momentum": momentum, "nesterov": momentum > 0}
    outer: Optimizer = torch.optim.SGD(server.parameters(), lr=lr, foreach=False, **plain)
    if "adam(lr=0.1, beta1=0.8, beta2=0.9, eps=0.01)" in name:
        outer = torch.optim.Adam(server.parameters(), lr=0.1, betas=(0.8, 0.9), eps=0.01, foreach=False)
    velocity, pushes = torch.zeros_like(flat(server)), 0

    def push(moved: Tensor) -> Tensor:
        nonlocal velocity, pushes
        pushes += 1
        velocity = (momentum * velocity if late and pushes % late == 1 else velocity) + moved
        if late and pushes % late == 0:
            moved = moved.add(velocity, alpha=momentum)
        take_step(server, outer, unflattened(moved, server))
        return flat(server)

    pushed_movements(batches, period, delay, push, setting)
    return flat(server)


def halos(batches: Batches, period: int, name: str, setting: Setting) -> Tensor:
    """One worker, alone in the only region."""
    start, delay = flat(model(setting.dtype)), re.findall(r"delay=(\d+)", name)
    server = plain_halos(name, start, lambda x, y, factor: torch.add(x, y, alpha=factor), torch.lerp)
    server.set_members([0])

    def push(moved: Tensor) -> Tensor:
        found: Tensor = server.push(0, moved, [0])
        return found

    pushed_movements(batches, period, int(delay[0]) if delay else 0, push, setting)
    found: Tensor = server.theta
    return found


def pushed_movements(
    batches: Batches, period: int, delay: int, push: Callable[[Tensor], Tensor], setting: Setting
) -> None:
    """One worker that pushes its movement in `period` steps, and the rest at the end, and goes on from the answer.

    With a delay it takes the answer in so many steps later.
    """
    net = model(setting.dtype)
    optimizer = OPTIMIZERS[setting.optimizer](net.parameters())
    anchor, asked, answer = flat(net), None, flat(net)
    every = list(batches)
    for step in range(1, -(-len(every) // period) * period + 1):  # the last ones without a batch
        if step <= len(every):
            take_gradients(net, every[step - 1])
            optimizer.step()
        own = flat(net)
        if step % period == 0:
            asked, answer = own, push(anchor - own)
        if asked is not None and step % period == delay:
            anchor = answer
            own = anchor + (own - asked) if delay else anchor
            torch.nn.utils.vector_to_parameters(own.clone(), net.parameters())


def unflattened(values: Tensor, like: nn.Module) -> list[Tensor]:
    """Parts of `values`, with the shapes of the parameters."""
    parts = values.split([each.numel() for each in like.parameters()])
    return [part.view_as(each) for part, each in zip(parts, like.parameters(), strict=True)]


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
