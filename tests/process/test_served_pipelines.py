"""`pt.pipeline` in a user's loop with parameter servers for the stages: real ranks, real servers, and jobs."""

from __future__ import annotations

import io
import os
import select
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import polytempo as pt
from polytempo.core import Strategy
from polytempo.runs.own_loop.served_pipeline import ServedPipeline
from polytempo.server.message import Beat, View
from polytempo.spec.result import parameters_sha256
from polytempo.training.model.agree import gather_json
from polytempo.worlds import ProcessWorld
from process.crew import together
from staged_job import plain, points

pytestmark = pytest.mark.process

s = pt.strategies
SAMPLES, SEED, RATE = 72, 0, 0.05
WAIT_S = 60.0
"""Only ever waited for where something is broken."""


def job() -> pt.Job:
    """The loop below as a job."""
    return replace(
        plain(), data=lambda _: pt.Data(points(SAMPLES, 0)), optimizer=momentum, lr=RATE, batch_size=8, schedule=None
    )


def momentum(parameters: Any, lr: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def piped(strategy: Strategy, **options: Any) -> tuple[ServedPipeline, Any]:
    """The pipeline of this rank, and its batches."""
    torch.manual_seed(SEED)
    shard = pt.shard(points(SAMPLES, 0), batch_size=8, seed=SEED)
    sample = points(8, 0).tensors[0]
    pipe = pt.pipeline(plain().model(), momentum, job().loss, strategy, sample=sample, seed=SEED, **options)
    assert isinstance(pipe, ServedPipeline)
    return pipe, shard


def hashed(state: dict[str, torch.Tensor]) -> str:
    return parameters_sha256(state[name] for name, _ in plain().model().named_parameters())


def trained(strategy: Strategy, epochs: int, world: ProcessWorld) -> list[Any]:
    """(the model's hash, the ledger of samples) after so many epochs."""
    pipe, batches = piped(strategy)
    for _ in range(epochs):
        for x, y in batches:
            pipe.step(x, y)
    found = hashed(pipe.state_dict())
    pipe.detach()
    return [found, pipe.account]


@pytest.mark.parametrize(
    ("strategy", "workers", "epochs"),
    [
        (s.one_f_one_b(2, 2, inner=s.async_sgd(shards=2)), 2, 2),
        (s.ddg(2, lockstep=True, inner=s.async_sgd()), 2, 1),
        (s.gpipe(2, 2, inner=s.ssp(bound=0)), 4, 1),
    ],
    ids=["one replica", "late", "two replicas"],
)
def test_a_loop_of_one_s_own_ends_with_the_bits_of_the_job(strategy: Strategy, workers: int, epochs: int) -> None:
    found = together(workers, partial(trained, strategy, epochs))
    (row,) = found[0][1]["ledger"]
    assert (row["once"], row["twice"], row["never"]) == (SAMPLES, 0, 0)
    assert len({each[0] for each in found}) == 1
    if workers == 2:
        expected = pt.run(job(), strategy, workers, epochs=epochs, threads=1, seed=SEED)
        assert found[0][0] == expected.parameters_sha256


def test_a_stage_may_end_while_its_first_stage_still_fetches_the_last_weights() -> None:
    strategy = s.gpipe(2, 2, inner=s.ssp(bound=0))

    def work(world: ProcessWorld) -> list[Any]:
        second = os.pidfd_open(world.drive(gather_json(world.port, os.getpid()))[2])
        pipe, batches = piped(strategy)
        for x, y in batches:
            pipe.step(x, y)
        joined, seen, others = pipe._epochs.joined, list[bool](), deque[Any]()
        assert joined is not None
        loop, mail = joined.loop, joined.link.mail
        refresh, take = loop.replica.refresh, mail.take

        async def late(clock: int, *, last: bool = False) -> None:
            if last:
                assert select.select([second], [], [], WAIT_S)[0]
                for _ in range(2):  # the server shows its view, and then looks for ended ranks
                    mail.post(loop._client.coordinator, Beat(0, 1, 0))
                    while not isinstance((taken := take(WAIT_S) or pytest.fail("no view"))[1], View):
                        others.append(taken)
                    seen.append(taken[1].finished)
                mail.take = lambda wait_s=None: others.popleft() if others else take(wait_s)  # type: ignore[method-assign]
            await refresh(clock, last=last)

        if world.rank == 0:
            loop.replica.refresh = late  # type: ignore[method-assign]
        pipe.detach()
        os.close(second)
        return seen

    assert together(4, work)[0] == [False, False]


def halves(strategy: Strategy, first: int, state: Any, world: ProcessWorld) -> list[Any]:
    """(model, training state, position) after an epoch; `state`: of all ranks, to go on from."""
    pipe, batches = piped(strategy)
    if state is not None:
        pipe.load_training_state(torch.load(io.BytesIO(bytes.fromhex(state[world.rank])), weights_only=False))
        batches.load_state_dict(torch.load(io.BytesIO(bytes.fromhex(state[-1]))))
    for x, y in batches:
        pipe.step(x, y)
    found, written, place = hashed(pipe.state_dict()), io.BytesIO(), io.BytesIO()
    torch.save(pipe.training_state(), written)
    torch.save(batches.state_dict(), place)
    pipe.detach()
    return [found, written.getvalue().hex(), place.getvalue().hex()]


def test_a_loop_goes_on_from_its_training_state_to_the_same_bits() -> None:
    strategy = s.one_f_one_b(2, 2, inner=s.async_sgd(shards=2))
    before = together(2, partial(halves, strategy, 0, None))
    state = [*(each[1] for each in before), before[0][2]]
    after = together(2, partial(halves, strategy, 1, state))
    undisturbed = together(2, partial(trained, strategy, 2))
    assert after[0][0] == after[1][0] == undisturbed[0][0]


def test_a_stage_that_dies_takes_its_replica_along_and_others_get_its_batches() -> None:
    strategy = s.one_f_one_b(2, 2, inner=s.async_sgd())

    def work(world: ProcessWorld) -> Any:
        pipe, batches = piped(strategy)
        try:
            for x, y in batches:
                if world.rank == 3:  # in the first batch: the other replica may be faster, and take most of them
                    raise ValueError("the stage's own mistake")
                pipe.step(x, y)
        except ValueError:
            pipe._epochs.joined.link.mail.close(0.0)  # type: ignore[union-attr]
            return "died"
        except pt.errors.PolytempoError as error:
            return str(error)
        finally:
            if world.rank in (1, 3):
                pipe._start = None  # type: ignore[assignment]
        pipe.detach()
        return pipe.account

    found = together(4, work)
    assert "rank 3, which held stage 1 of the model that ranks 1, 3 held together, has ended" in found[1]
    (row,) = found[0]["ledger"]
    assert (row["once"], row["twice"], row["never"]) == (SAMPLES, 0, 0)


def test_what_a_loop_with_stage_servers_cannot_have_is_refused() -> None:
    def refused(call: Any) -> str:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        return str(caught.value)

    def work(world: ProcessWorld) -> list[str]:
        strategy = s.one_f_one_b(2, 2, inner=s.async_sgd())
        found = [refused(lambda: piped(strategy, max_norm=1.0)), refused(lambda: piped(s.gpipe(3, inner=s.downpour())))]
        pipe, batches = piped(strategy)
        x, y = points(8, 0).tensors
        found += [refused(lambda: pipe.step(x, y)), refused(pipe.training_state)]
        found += [refused(lambda: [pipe.state_dict() for _ in batches])]
        pipe._epochs.leave()
        return found

    for found in together(2, work):
        for each, expected in zip(
            found,
            [
                "PT1110",
                "start 3",
                "0 were dealt since the last step",
                "before the first epoch",
                "within an",
            ],
            strict=True,
        ):
            assert expected in each
