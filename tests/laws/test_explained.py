"""`explain` tells the virtual world's counts: messages, bytes, rounds, operations, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.catalogue import HELPED, ROWS, SERVED, Row, label
from polytempo import aggregation, collectives
from polytempo import compression as c
from polytempo import strategies as s
from polytempo.cluster import Cluster, Link
from polytempo.core import Bundle, Late, Op, Port, Strategy, Task, identity, is_idle, world_port
from polytempo.core.bundle import Observed
from polytempo.core.op import Pull, Push, Start, Work
from polytempo.core.state import ProvisionalState, settled
from polytempo.spec.explanation import Explanation, explain
from polytempo.worlds import Trace, VirtualWorld

STEPS = 12
SHAPES = {"w": (33, 17), "b": (40,), "u": (64, 40), "x": (3, 5, 2)}
WAITS = {"recv", "compute", "mark", "now"}

MORE = [
    Row("a way of wires", lambda: s.bf16_sgd(route=c.all_gather)),
    Row("a way of wires", lambda: s.int8_sgd(route=c.all_gather)),
    Row("a way of wires", lambda: s.top_k_sgd(0.1, route=c.reduce_scatter)),
    Row("a codec by a route", lambda: s.local_sgd(2, route=collectives.star, codec=c.bf16())),
    Row("a merge of codes", lambda: Strategy("own", c.through(c.int8(), aggregation.median))),
    Row("a merge of codes", lambda: s.diloco(3, codec=c.feedback(c.int8()), merge=aggregation.nearest_to_median(0))),
    Row("entropy", lambda: Strategy("own", c.through(c.feedback(c.top_k(0.1, entropy=True))))),
    Row("two exchanges", lambda: Strategy("own", aggregation.mean(), aggregation.mean(collectives.halving_doubling))),
    Row("islands", lambda: s.islands(s.top_k_sgd(0.1), s.local_sgd(2, codec=c.feedback(c.top_k(0.1))))),
    Row("islands", lambda: s.islands(s.power_sgd(1, exact_below=0), s.slowmo(period=3), number=3)),
    Row("hierarchies", lambda: s.sync_sgd(collectives.hierarchical(collectives.tree))),
    Row("a late one", lambda: s.post_local_sgd(switch_step=3, period=3, route=collectives.ring)),
]
"""The strategies missing in the catalogue's rows."""
EVERY = [*ROWS, *MORE]
SLOW = Cluster(Link(latency_s=1.0, bytes_per_s=1e30), flops_per_s=1e30)
BUSY = Cluster(Link(latency_s=0.0, bytes_per_s=1e30), flops_per_s=1.0)
ON_META = 3
"""So many ranks of each strategy compute without values."""
LATE = {"acco", "co2", "delayed_sgd", "streaming_diloco"}
"""Their exchanges are under way while the next step begins, so they count in total only."""
every_row = pytest.mark.parametrize("row", EVERY, ids=lambda row: f"{row.name}: {label(row)}")


def values(rank: int, *, meta: bool) -> Bundle:
    """Each rank's own, after a step at a rate; on the meta device wires are as long as they may be."""
    given = Bundle({name: tensor.to("meta") if meta else tensor.clone() for name, tensor in drawn(rank).items()})
    given.observed = Observed(rate=0.1)
    return given


@cache
def drawn(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Counted(NamedTuple):
    """A world's counts: messages and bytes of all ranks and bytes of the busiest one in each step, and in all."""

    steps: list[tuple[int, int, int]]
    total: tuple[int, int, int]
    seconds: float
    held: list[int]
    """Bytes of each rank's states in the end."""


@cache
def run(row: Row, cluster: Cluster, num_ranks: int, *, meta: bool) -> Counted:
    """`STEPS` steps of all ranks. Several laws look at the same ones."""
    strategy = row.make()
    states: list[Any] = [None] * num_ranks

    async def program(port: Port) -> None:
        slots = [t for t in (strategy.gradients, strategy.parameters) if not is_idle(t, port.size)]
        own = [t.init(values(port.rank, meta=meta)) for t in slots]
        for step in range(1, STEPS + 1):
            await port.mark(step)
            for i, transform in enumerate(slots):
                _, own[i] = await transform.apply(port, values(port.rank, meta=meta), own[i])
        states[port.rank] = [await settled(state) for state in own]

    outcome = VirtualWorld(cluster, num_ranks).run(program)
    steps = [counted(outcome.trace, step) for step in range(1, STEPS + 1)]
    held = [sum(t.numel() * t.element_size() for t in tensors_of(state)) for state in states]
    return Counted(steps, counted(outcome.trace, None), outcome.seconds, held)


def counted(trace: Trace, step: int | None) -> tuple[int, int, int]:
    """Messages and bytes of all ranks, and bytes of the busiest one, in that step; None: in all."""
    events = [e for e in trace.events if e.op not in WAITS and step in (None, e.step)]
    by_rank: Counter[int] = Counter()
    for event in events:
        by_rank[event.rank] += event.bytes
    return len(events), sum(by_rank.values()), max(by_rank.values(), default=0)


def tensors_of(state: Any) -> Iterator[Tensor]:
    """All that a state holds."""
    if isinstance(state, ProvisionalState) and not state.coming:
        yield from drawn(0).values()  # the parameters before the step: the replica keeps them
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Bundle):
        yield state.flat
    elif isinstance(state, dict | tuple | list):
        for part in state.values() if isinstance(state, dict) else state:
            yield from tensors_of(part)
    assert not isinstance(state, Late)


def simulated(row: Row, cluster: Cluster, num_ranks: int) -> Counted:
    """A run with the longest allowed wires. With values where that is the same: they compute much faster."""
    exact = all(planned.exchange.exact for planned in explained(row.make(), num_ranks).exchanges)
    return run(row, cluster, num_ranks, meta=num_ranks == ON_META or not exact)


def explained(strategy: Strategy, num_ranks: int) -> Explanation:
    return explain(strategy, num_ranks, values(0, meta=True).tensors)


@every_row
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_messages_and_bytes_are_those_of_a_simulated_step(row: Row, num_ranks: int) -> None:
    strategy = row.make()
    if "krum" in str(strategy) or "trimmed" in str(strategy):
        num_ranks = max(num_ranks, 5)
    found = explained(strategy, num_ranks)
    ran = simulated(row, SLOW, num_ranks)
    if row.name not in LATE:
        for step, (messages, num_bytes, busiest) in enumerate(ran.steps, 1):
            said = found.at(step)
            assert (said.messages, said.bytes) == (messages, num_bytes), (
                f"step {step} of {num_ranks} ranks: its cost says {said.messages} messages and {said.bytes} bytes, "
                f"its ops are {messages} and {num_bytes} (with one rank `apply` should await none)"
            )
            assert busiest <= said.busiest_bytes <= busiest + 64 * num_ranks, step
    total = [found.at(step) for step in range(1, STEPS + 1)]
    assert (sum(t.messages for t in total), sum(t.bytes for t in total)) == ran.total[:2]


@every_row
def test_with_values_it_is_the_same_or_the_most(row: Row) -> None:
    strategy, num_ranks = row.make(), 5
    found = explained(strategy, num_ranks)
    ran = run(row, SLOW, num_ranks, meta=False)
    messages = sum(found.at(step).messages for step in range(1, STEPS + 1))
    num_bytes = sum(found.at(step).bytes for step in range(1, STEPS + 1))
    assert ran.total[0] == messages
    if all(planned.exchange.exact for planned in found.exchanges):
        assert ran.total[1] == num_bytes
    else:
        assert 0 < ran.total[1] <= num_bytes


@every_row
def test_what_is_remembered_is_what_a_state_holds(row: Row) -> None:
    said = explained(row.make(), 5).memory_bytes
    held = run(row, SLOW, 5, meta=False).held
    assert max(held) == said
    assert row.name == "islands" or min(held) == said, "only the first worker of an island holds a residual back"


@every_row
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_rounds_are_seconds_where_only_latency_counts(row: Row, num_ranks: int) -> None:
    strategy = row.make()
    if row.name in LATE or any(rule in str(strategy) for rule in ("krum", "trimmed", "bulyan")):
        num_ranks = 8
    seconds = simulated(row, SLOW, num_ranks).seconds
    rounds = sum(explained(strategy, num_ranks).at(step).rounds for step in range(1, STEPS + 1))
    if row.name in LATE:
        assert 0 < seconds <= rounds
    else:
        assert seconds == pytest.approx(rounds)


@every_row
def test_operations_are_seconds_where_only_they_count(row: Row) -> None:
    strategy = row.make()
    seconds = simulated(row, BUSY, 8).seconds
    flops = sum(explained(strategy, 8).at(step).flops for step in range(1, STEPS + 1))
    assert seconds == pytest.approx(flops) if flops else seconds < 1e-20


# ---------------------------------------------------------------------- parameter servers


@pytest.mark.parametrize("row", [*SERVED, *HELPED], ids=label)
def test_pushes_and_pulls_come_in_the_steps_that_are_said(row: Row) -> None:
    strategy = row.make()
    found, parameters = explained(strategy, 4), values(0, meta=False)
    port, asked = world_port(0, [0, 0]), Counter[tuple[str, int]]()
    slots = [strategy.gradients, strategy.parameters]
    states = [transform.init(parameters) for transform in slots]

    async def one() -> None:
        for i, transform in enumerate(slots):
            _, states[i] = await transform.apply(port, parameters.copy(), states[i])

    for step in range(1, STEPS + 1):

        def begin(op: Op[Any], step: int = step) -> Any:
            what = op.what if isinstance(op, Start) else op
            if isinstance(what, Push):
                asked["push", step] += 1
            if isinstance(what, Pull):
                asked["pull", step] += 1
            answer = parameters.flat.clone()
            if isinstance(op, Start):
                if not isinstance(op.what, Op):
                    nested = Task(op.what)
                    assert nested.resume(begin)
                    return Work(nested.result())
                return Work(answer)
            return op.handle if isinstance(op, Work) else answer

        task = Task(one())
        assert task.resume(begin)
        task.result()
    elastic = "elastic" in str(strategy) or row.name == "easgd"
    for step in range(1, STEPS + 1):
        for kind in ("push", "pull"):
            said = sum(p.exchange.server == kind and p.exchange.steps.has(step) for p in found.exchanges)
            assert said == asked["push" if elastic else kind, step], (kind, step)


def test_bytes_of_pushes_and_pulls() -> None:
    """A message to each shard, by the codecs of either direction."""
    found = pt.explain(
        s.downpour(shards=2, push_every=5, pull_every=2, pull_codec=c.bf16()), 4, {"w": torch.empty(4096)}
    )
    assert found.at(5)[:4] == (8, 4 * 4 * 4096, 0, 0)
    assert found.at(2)[:4] == (8, 0, 4 * 2 * 4096, 0)
    assert found.mean[:3] == (8 / 5 + 8 / 2, 4 * 4 * 4096 / 5, 4 * 2 * 4096 / 2)


# ---------------------------------------------------------------------- as a planner reads it


def test_numbers_in_figures() -> None:
    found = pt.explain(s.local_sgd(period=8, route=collectives.ring), workers=4, parameters=1000)
    assert (found.strategy, found.workers, found.tensors, found.numel) == (
        "local_sgd(period=8, route=ring)",
        4,
        1,
        1000,
    )
    assert (found.parameter_bytes, found.memory_bytes) == (4000, 0)
    assert found.at(7) == (0, 0, 0, 0, 0, 0, 0)
    assert found.at(8) == (24, 0, 24_000, 0, 6000, 6, 0)
    assert found.mean == (3, 0, 3000, 0, 750, 0.75, 0)
    assert found.mean.bytes == 3000


def test_a_hierarchy_counts_by_hosts() -> None:
    found = pt.explain(s.sync_sgd(collectives.hierarchical()), 4, 1000, hosts=[0, 0, 1, 1]).at(1)
    assert found == (2 * 2 + 4, 24_000, 0, 0, 4000 + 4000, 2 + 2, 0)


def test_a_model_counts_what_is_trained() -> None:
    model = torch.nn.Linear(10, 5)
    model.bias.requires_grad_(False)
    assert pt.explain(s.sync_sgd(), parameters=model).numel == 50


def test_what_cannot_be_explained_is_refused_with_a_remedy() -> None:
    async def own(port: Port, bundle: Bundle) -> Bundle:
        return bundle

    async def own_route(port: Port, buffer: Tensor) -> Tensor:
        return buffer

    with pytest.raises(ValueError, match="does not say its cost; give its transform cost="):
        pt.explain(Strategy("own", gradients=pt.core.stateless(own)))
    with pytest.raises(
        ValueError, match="the messages of route=own_route are not known; known are halving_doubling, native"
    ):
        pt.explain(s.sync_sgd(own_route))
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        pt.explain(s.sync_sgd(), workers=0)
    with pytest.raises(ValueError, match="no parameters that are trained"):
        pt.explain(s.sync_sgd(), parameters={})
    with pytest.raises(ValueError, match="a host for each of 8 workers, got 2"):
        pt.explain(s.sync_sgd(), hosts=[0, 1])
    assert pt.explain(Strategy("none", gradients=identity())).exchanges == ()
