"""Sandblaster L-BFGS: operations against a textbook's recursion, and machines with mail in any order."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo.server.lbfgs.coordinator import LbfgsCoordinator, Portions
from polytempo.server.lbfgs.messages import Contribute, Contributed, Fetched, Open, PortionDone, PortionTask
from polytempo.server.lbfgs.operations import Iteration, LossAt, VectorOperation, X, lbfgs
from polytempo.server.lbfgs.replica import LbfgsReplica
from polytempo.server.lbfgs.vector_shard import Vectors, VectorShard
from polytempo.server.loop import Machine
from polytempo.server.message import Message

N, SAMPLES, PORTIONS, HISTORY = 7, 24, 6, 4
drawn = torch.Generator().manual_seed(7)
INPUTS = torch.randn(SAMPLES, N, generator=drawn, dtype=torch.float64)
LABELS = (INPUTS @ torch.randn(N, generator=drawn, dtype=torch.float64) + 0.5).sign()
START = torch.randn(N, generator=drawn, dtype=torch.float64)


def logistic(point: Tensor, begin: int = 0, end: int = SAMPLES) -> tuple[float, Tensor]:
    """The part of some samples in a regularised logistic loss, and in its gradient."""
    margins = LABELS[begin:end] * (INPUTS[begin:end] @ point)
    share = (end - begin) / SAMPLES
    loss = torch.nn.functional.softplus(-margins).sum() / SAMPLES + 0.05 * share * point @ point
    gradient = -(INPUTS[begin:end] * (LABELS[begin:end] * torch.sigmoid(-margins)).unsqueeze(1)).sum(0) / SAMPLES
    return float(loss), gradient + 0.1 * share * point


def rosenbrock(point: Tensor) -> tuple[float, Tensor]:
    x = point.detach().clone().requires_grad_()
    loss = (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, x)
    return float(loss.detach()), gradient


Loss = Callable[[Tensor], tuple[float, Tensor]]


def local(loss: Loss, start: Tensor, iterations: int, history: int = HISTORY) -> tuple[Tensor, list[Iteration]]:
    """The same operations on whole vectors, in one place."""
    vectors, done = Vectors(start), []
    asking, answer = lbfgs(iterations, history, 1e-12, 20), None
    while True:
        try:
            asked = next(asking) if answer is None else asking.send(answer)
        except StopIteration:
            return vectors[X], done
        if isinstance(asked, Iteration):
            done.append(asked)
            answer = 0.0
        elif isinstance(asked, LossAt):
            answer, gradient = loss(vectors[asked.at])
            vectors.zero_(asked.into)
            vectors[asked.into].add_(gradient)
        else:
            answer = vectors.perform_(asked)


def textbook(loss: Loss, start: Tensor, iterations: int, history: int = HISTORY) -> tuple[np.ndarray, list[float]]:
    """Nocedal and Wright's algorithms 7.4 and 7.5 with the same line search, in numpy, with vectors in lists."""
    x = start.numpy().copy()

    def at(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = loss(torch.from_numpy(point))
        return value, gradient.numpy()

    f, g = at(x)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    losses = []
    for _ in range(iterations):
        q, alphas = g.copy(), []
        for s, y in reversed(pairs):
            alphas.append((s @ q) / (y @ s))
            q -= alphas[-1] * y
        r = q * (pairs[-1][0] @ pairs[-1][1] / (pairs[-1][1] @ pairs[-1][1])) if pairs else q
        for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
            r = r + s * (alpha - (y @ r) / (y @ s))
        low, high, t = 0.0, math.inf, 1.0 if pairs else min(1.0, 1 / float(np.linalg.norm(g)))
        for _ in range(20):
            found, slope = at(x - t * r), -float(g @ r)
            if found[0] > f + 1e-4 * t * slope:
                high = t
            elif -float(found[1] @ r) < 0.9 * slope:
                low = t
            else:
                break
            t = 2 * low if high == math.inf else (low + high) / 2
        pairs = [*pairs, (-t * r, found[1] - g)][-history:]
        x, (f, g) = x - t * r, found
        losses.append(f)
    return x, losses


@pytest.mark.parametrize(("loss", "iterations"), [(logistic, 12), (rosenbrock, 25)])
def test_operations_are_the_textbooks_recursion(loss: Loss, iterations: int) -> None:
    found, done = local(loss, START, iterations)
    expected, losses = textbook(loss, START, iterations)
    assert np.abs(found.numpy() - expected).max() < 1e-10
    assert [each.loss for each in done] == pytest.approx(losses, abs=1e-10)


def test_it_goes_down_to_the_minimum() -> None:
    found, done = local(rosenbrock, START, 200)
    assert torch.allclose(found, torch.ones(N, dtype=torch.float64), atol=1e-5)
    assert all(after.loss < before.loss for before, after in pairwise(done))
    assert done[-1].gradient_norm < 1e-6


def test_a_loss_that_is_no_number_is_refused_at_first_and_passed_over_later() -> None:
    with pytest.raises(ValueError, match="the loss is nan before the first step"):
        local(lambda point: (math.nan, point), START, 3)

    def beyond(point: Tensor) -> tuple[float, Tensor]:
        return (math.nan, point) if float(point @ point) > 2 else (-float(point.sum()), -torch.ones_like(point))

    found, done = local(beyond, torch.zeros(N, dtype=torch.float64), 30)
    assert math.isfinite(done[-1].loss)
    assert float(found @ found) <= 2


def test_a_pair_is_never_written_over_while_it_is_kept() -> None:
    """There is one slot more than pairs, also where pairs are left out."""
    asking, answer, held = lbfgs(40, 2, 0.0, 1), 0.0, set()
    values = Random(3)
    next(asking)
    kept: deque[str] = deque(maxlen=2)
    for _ in range(400):
        try:
            asked = asking.send(answer)
        except StopIteration:
            break
        answer = values.uniform(0.1, 1.0)
        if isinstance(asked, LossAt):
            answer = -1e9
        if isinstance(asked, VectorOperation) and asked.kind == "scale" and asked.out.startswith("s"):
            assert asked.out not in kept
            held.add(asked.out)
        if isinstance(asked, VectorOperation) and (asked.kind, asked.a[0], asked.b) == ("dot", "s", "y" + asked.a[1:]):
            answer = values.choice([-1.0, 1.0])
            if answer > 0:
                kept.append(asked.a)
    assert held == {"s0", "s1", "s2"}


class Net:
    """All nodes of a run, in one process: mail of each line in order, lines in an order drawn from a seed."""

    def __init__(self, seed: int, replicas: int, shards: int, iterations: int, slow: int = -1) -> None:
        self.random, self.slow = Random(seed), slow
        self.replicas = list(range(replicas))
        self.shards = list(range(replicas, replicas + shards))
        self.coordinator = replicas + shards
        parts = START.tensor_split(shards)
        self.iterations: list[Iteration] = []
        bounds = [SAMPLES * k // PORTIONS for k in range(PORTIONS + 1)]
        self.machine = LbfgsCoordinator(
            lbfgs(iterations, HISTORY, 1e-12, 20), self.shards, self.replicas, bounds, self.iterations.append
        )
        self.nodes: dict[int, Machine] = {self.coordinator: self.machine}
        self.nodes |= {s: VectorShard(self.coordinator, part) for s, part in zip(self.shards, parts, strict=True)}
        sizes = [part.numel() for part in parts]
        self.nodes |= {r: LbfgsReplica(self.coordinator, self.shards, sizes, logistic) for r in self.replicas}
        self.lines: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.seen: list[tuple[int, int, Message]] = []

    def post(self, source: int, out: Sequence[tuple[int, Message]]) -> None:
        for to, message in out:
            if source in self.nodes and to in self.nodes:
                self.lines[source, to].append(message)

    def kill(self, replica: int) -> None:
        """The node dies while it sends: part of its mail under way may be lost."""
        for line in [each for each in self.lines if replica in each]:
            for _ in range(self.random.randint(0, len(self.lines[line]))):
                self.lines[line].pop()
        for line in [each for each in self.lines if each[1] == replica]:
            del self.lines[line]
        del self.nodes[replica]
        self.post(self.coordinator, self.machine.lost(replica))

    def run(self, kills: dict[int, int] | None = None) -> Tensor:
        """Deliver until all is done; `kills`: after so many messages, which replica. Returns x."""
        self.post(self.coordinator, self.machine.tick(0.0))
        for number in range(100_000):
            if kills and number in kills:
                self.kill(kills[number])
            waiting = [line for line, held in self.lines.items() if held]
            quick = [line for line in waiting if self.slow not in line]
            if self.machine.finished or not waiting:
                break
            source, to = self.random.choice(quick or waiting)
            message = self.lines[source, to].popleft()
            if to in self.nodes:
                self.seen.append((source, to, message))
                self.post(to, self.nodes[to].receive(0.0, source, message))
        assert self.machine.finished
        return torch.cat([self.nodes[shard].vectors[X] for shard in self.shards])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (3, 4), (7, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_sharded_is_local_whatever_comes_first(shards: int, replicas: int, seed: int) -> None:
    net = Net(seed, replicas, shards, 10)
    found, (expected, done) = net.run(), local(logistic, START, 10)
    assert float((found - expected).abs().max()) < 1e-10
    assert [each.loss for each in net.iterations] == pytest.approx([each.loss for each in done], abs=1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_killed_replicas_change_nothing(seed: int) -> None:
    """Three of four, one after the other, in the middle of batches; each portion is in each gradient once."""
    random = Random(1000 + seed)
    first = random.randint(3, 120)
    kills = {first: 2, first + random.randint(1, 60): 0, first + random.randint(61, 200): 3}
    net = Net(seed, 4, 3, 10)
    found, (expected, _) = net.run(kills), local(logistic, START, 10)
    assert float((found - expected).abs().max()) < 1e-10
    assert net.machine.replicas == [1]


def test_the_last_replica_is_missed() -> None:
    net = Net(0, 1, 1, 10)
    net.post(net.coordinator, net.machine.tick(0.0))
    with pytest.raises(RuntimeError, match="the last replica, node 0, is lost"):
        net.machine.lost(0)


def test_a_slow_replicas_portions_are_computed_by_others_too() -> None:
    """Replica 0's mail comes only where there is no other: no other process waits for it."""
    net = Net(5, 3, 2, 4, slow=0)
    found, (expected, _) = net.run(), local(logistic, START, 4)
    assert float((found - expected).abs().max()) < 1e-10
    assert net.machine.copies >= len(net.iterations)
    done = [message.portion for source, _, message in net.seen if isinstance(message, PortionDone) and source == 0]
    assert not done


def test_the_coordinator_sees_no_tensor() -> None:
    net = Net(1, 2, 2, 6)
    net.run()
    to_coordinator = [message for _, to, message in net.seen if to == net.coordinator]
    assert to_coordinator
    assert all(message.num_bytes == Message.HEADER_BYTES for message in to_coordinator)


def test_portions_are_dealt_to_those_without_work_and_then_twice() -> None:
    portions = Portions(3)
    assert portions.deal([0, 1]) == [(0, 0), (1, 1)]
    assert portions.deal([0, 1]) == []
    portions.computed(0, 0, 0.5)
    assert portions.deal([0, 1, 2]) == [(0, 2), (2, 1)]  # replica 2 copies the earliest unfinished deal
    assert portions.copies == 1
    assert portions.deal([3]) == [(3, 2)]
    assert portions.deal([4]) == []  # all have two
    portions.computed(2, 1, 0.25)
    portions.computed(1, 1, 99.0)  # the first result counts
    portions.lost(0)  # replica 3 has its portion
    assert not portions.done
    portions.lost(3)
    assert portions.deal([1]) == [(1, 2)]
    portions.computed(1, 2, 0.25)
    assert portions.done
    assert portions.losses == {0: 0.5, 1: 0.25, 2: 0.25}


def test_a_shard_adds_a_portion_once_and_nothing_of_an_earlier_point() -> None:
    shard = VectorShard(9, torch.zeros(2))
    one = torch.ones(2, dtype=torch.float64)
    shard.receive(0.0, 9, Open(1, X, "g"))
    for source in (0, 1):
        [(to, answer)] = shard.receive(0.0, source, Contribute(1, 4, one))
        assert (to, isinstance(answer, Contributed)) == (source, True)
    shard.receive(0.0, 0, Contribute(0, 5, one))
    assert torch.equal(shard.vectors["g"], one)
    with pytest.raises(ValueError, match="vectors know dot, scale and add, not 'sum'"):
        shard.vectors.perform_(VectorOperation("sum", X, X))


def test_a_replica_fetches_a_point_once_and_leaves_an_old_one() -> None:
    computed = []

    def compute(point: Tensor, begin: int, end: int) -> tuple[float, Tensor]:
        computed.append((begin, end))
        return 1.0, point

    replica = LbfgsReplica(9, [7, 8], [1, 1], compute)
    kinds = lambda out: [(to, type(message).__name__) for to, message in out]  # noqa: E731
    assert kinds(replica.receive(0.0, 9, PortionTask(0, 0, 0, 4))) == [(7, "Fetch"), (8, "Fetch")]
    assert replica.receive(0.0, 7, Fetched(0, torch.zeros(1))) == []
    assert kinds(replica.receive(0.0, 9, PortionTask(1, 3, 4, 8))) == [(7, "Fetch"), (8, "Fetch")]
    assert replica.receive(0.0, 8, Fetched(0, torch.zeros(1))) == []
    replica.receive(0.0, 7, Fetched(1, torch.zeros(1)))
    assert kinds(replica.receive(0.0, 8, Fetched(1, torch.zeros(1)))) == [(7, "Contribute"), (8, "Contribute")]
    assert replica.receive(0.0, 7, Contributed(1, 3)) == []
    assert kinds(replica.receive(0.0, 8, Contributed(1, 3))) == [(9, "PortionDone")]
    assert kinds(replica.receive(0.0, 9, PortionTask(1, 4, 8, 12))) == [(7, "Contribute"), (8, "Contribute")]
    assert computed == [(4, 8), (8, 12)]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"portions": 0}, "portions must be at least 1"),
        ({"shards": 1000}, "1000 shards cannot share 650 parameters"),
    ],
)
def test_what_cannot_be_run_is_refused(given: dict[str, int], complaint: str) -> None:
    model: Callable[[], torch.nn.Module] = lambda: torch.nn.Linear(64, 10)  # noqa: E731
    with pytest.raises(ValueError, match=complaint):
        pt.lbfgs(job_of(model), **given)


def test_batch_norms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"with batch norms \(1\) it depends on which are computed together"):
        pt.lbfgs(job_of(lambda: torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))))


def job_of(model: Callable[[], torch.nn.Module]) -> pt.Job:
    return pt.Job(
        model=model,
        data=lambda path: pt.Data(*pt.data.digits()),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )
