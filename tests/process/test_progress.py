"""Launched operations go on while a program computes: same bits, same trace, same errors as when it waits first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import polytempo as pt
from polytempo.aggregation import exponential_graph
from polytempo.collectives import halving_doubling, native, ring, star, tree
from polytempo.compression import int8, through
from polytempo.core import Bundle, PeerLost, Port, Strategy, TimedOut
from polytempo.core.port import barrier
from polytempo.engines.join.init import init
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.spec.result import parameters_sha256
from polytempo.worlds import ProcessWorld
from process.crew import batches, loop, mine, small

pytestmark = pytest.mark.process

LIMIT_S = 20.0
"""The expected event has happened by then."""


def on_two_hosts(work: Callable[[ProcessWorld], Result]) -> list[Any]:
    """The value of `work(world)` on two ranks that send to each other as between hosts."""

    def serve(rank_info: RankInfo) -> Result:
        init(timeout_s=LIMIT_S, quiet=True, backend="gloo")
        return work(ProcessWorld(rank_info.rank, [0, 1]))

    return launch(serve, 2, threads=1, timeout_s=60)


def numbers(rank: int) -> Tensor:
    return torch.arange(6.0) + 10 * rank


def test_an_exchange_of_several_rounds_is_over_before_the_program_waits_for_it() -> None:
    def work(world: ProcessWorld) -> Result:
        over = threading.Event()

        async def exchange() -> list[float]:
            total = await ring(world.port, numbers(world.rank))
            over.set()
            return total.tolist()

        strand = world.launch(exchange())
        went_on = over.wait(LIMIT_S)  # the program computes
        events = len(world.trace.events)
        return [went_on, events, strand.wait(), [event.op for event in world.trace.events]]

    total = (numbers(0) + numbers(1)).tolist()
    assert on_two_hosts(work) == [[True, 0, total, ["recv", "send"] * 2]] * 2


def test_an_encoded_exchange_past_a_step_is_over_before_the_program_waits_for_it() -> None:
    """Equal bits by messages and by two collectives."""

    def work(world: ProcessWorld) -> Result:
        over = threading.Event()
        exchange = through(int8())
        given = Bundle({"weight": torch.linspace(-1, 1 + world.rank, 3000)})

        async def meet(port: Port) -> list[float]:
            found, _ = await exchange.apply(port, given.copy(), exchange.init(given))
            over.set()
            assert found is not None
            return found.flat.tolist()

        strand = world.launch(meet(world.port.on_channel_of_series()))
        went_on = over.wait(LIMIT_S)
        return [went_on, strand.wait() == world.drive(meet(world.port))]

    assert on_two_hosts(work) == [[True, True]] * 2


def test_on_one_host_nothing_goes_on_alone() -> None:
    def work(world: ProcessWorld) -> Result:
        before = threading.active_count()
        strand = ProcessWorld(world.rank, [0, 0]).launch(ring(world.port, numbers(world.rank)))
        return [threading.active_count() - before, strand.wait().tolist()]

    assert on_two_hosts(work) == [[0, (numbers(0) + numbers(1)).tolist()]] * 2


def test_what_is_no_message_waits_for_the_program_and_so_does_what_was_launched_after_it() -> None:
    """All ranks begin their collectives in the program's order."""

    def work(world: ProcessWorld) -> Result:
        said: list[str] = []
        first, second = world.port.on_channel(1), world.port.on_channel(2)

        async def with_a_sum() -> None:
            await ring(first, numbers(world.rank))
            said.append("messages")
            await first.all_reduce(numbers(world.rank))
            said.append("sum")

        async def messages() -> None:
            await ring(second, numbers(world.rank))
            said.append("messages of the second")

        strands = [world.launch(with_a_sum()), world.launch(messages())]
        progress = world.progress
        assert progress is not None
        with progress.changed:
            stands = progress.changed.wait_for(lambda: said and not strands[0].awaits_message, LIMIT_S)
        before = list(said)
        for strand in strands:
            strand.wait()
        return [stands, before, said]

    order = ["messages", "sum", "messages of the second"]
    assert on_two_hosts(work) == [[True, ["messages"], order]] * 2


def test_a_coroutine_runs_under_the_settings_of_the_thread_that_launched_it() -> None:
    def work(world: ProcessWorld) -> Result:
        async def exchange() -> list[Any]:
            await ring(world.port, numbers(world.rank))
            return [threading.current_thread().name, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]

        found = []
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=gradients):
                strand = world.launch(exchange())
            with world.progress.changed:
                world.progress.changed.wait_for(lambda strand=strand: strand.task.done, LIMIT_S)
            found.append(strand.wait())
        return found

    expected = [["polytempo-progress", False, False], ["polytempo-progress", True, True]]
    assert on_two_hosts(work) == [expected] * 2


def test_a_peer_that_is_lost_meanwhile_is_an_error_at_the_await(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> Result:
        world.step = 3
        world.drive(barrier(world.port))
        if world.rank == 1:
            while not (tmp_path / "met").exists():  # gloo would take the end for one within the barrier
                os.sched_yield()
            os._exit(5)
        (tmp_path / "met").touch()
        strand = world.launch(ring(world.port, numbers(0)))
        try:
            strand.wait()
        except PeerLost as error:
            (tmp_path / "said").write_text(f"{error.rank} {error.step} {error.operation} {error.peer}")
        return None

    with pytest.raises(pt.errors.WorkerDied, match="rank 1 of 2 ended without a result"):
        on_two_hosts(work)
    assert (tmp_path / "said").read_text() in ("0 3 recv from rank 1 (tag 0) 1", "0 3 send to rank 1 (tag 0) 1")


def test_a_deadline_holds_from_the_beginning_of_the_operation() -> None:
    def work(world: ProcessWorld) -> Result:
        strand = world.launch(ring(world.port.within(0.3), numbers(0))) if world.rank == 0 else None
        said = ""
        if strand is not None:
            with world.progress.changed:
                world.progress.changed.wait_for(lambda: strand.task.done, LIMIT_S)
            late = strand.task.done and not strand.done
            try:
                strand.wait()
            except TimedOut as error:
                said = f"{late} {error}"
        stay_together(world)
        return said

    text = "True rank 0, step 0: timed out: recv from rank 1 (tag 0) did not finish within 0.3 s"
    assert on_two_hosts(work) == [text, ""]


def stay_together(world: ProcessWorld) -> None:
    """Leave together, without the pairs that a deadline has closed."""
    home = Path(os.environ["POLYTEMPO_RENDEZVOUS"])
    (home / f"waited-{world.rank}").touch()
    while not (home / f"waited-{1 - world.rank}").exists():
        os.sched_yield()


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **{
        f"sync_sgd({route.__name__})": lambda route=route: pt.strategies.sync_sgd(route=route)
        for route in (native, ring, tree, halving_doubling, star)
    },
    "delayed_sgd": lambda: pt.strategies.delayed_sgd(delay=2),
    "delayed_sgd(ring)": lambda: pt.strategies.delayed_sgd(delay=1, route=ring),
    "gossip": lambda: pt.strategies.gossip(exponential_graph),
    "adasum": pt.strategies.adasum,
    "power_sgd": lambda: pt.strategies.power_sgd(rank=1, exact_below=1),
    "one_bit_sgd": lambda: pt.strategies.one_bit_sgd(exact_below=1),
    "local_sgd(ring)": lambda: pt.strategies.local_sgd(period=2, route=ring),
}


@cache
def trained(alone: bool) -> list[dict[str, list[str]]]:
    """Hashes of parameters and of the trace, for each strategy on each rank; `alone`: nothing goes on meanwhile."""

    def work(world: ProcessWorld) -> Result:
        found = {}
        for name, make in STRATEGIES.items():
            here = ProcessWorld(world.rank, [0, 1])
            if alone:
                here.progress = None
            net = small()
            optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
            handle = pt.attach(net, optimizer, make(), world=here, bucket_bytes=64)
            here.begin()
            loop(net, optimizer, mine(batches(5), here))
            handle.state_dict()  # no exchange is left under way, for which one rank alone would wait
            found[name] = [parameters_sha256(net.parameters()), here.trace.hash]
            handle.detach()
        return found

    return on_two_hosts(work)


@pytest.mark.parametrize("name", STRATEGIES)
def test_bits_and_trace_are_those_of_a_program_that_does_everything_itself(name: str) -> None:
    assert [rank[name] for rank in trained(alone=False)] == [rank[name] for rank in trained(alone=True)]


def test_a_process_ends_while_its_thread_waits_for_a_message_that_never_comes() -> None:
    def work(world: ProcessWorld) -> Result:
        strand = world.launch(ring(world.port, numbers(0))) if world.rank == 0 else None
        stay_together(world)
        return strand is not None and strand.done

    assert on_two_hosts(work) == [False, False]
