"""A shard with regions against plain numbers: pushes, members, state, and the weights that workers hold."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plain_rules import Nesterov, PlainHalos
from polytempo import strategies
from polytempo.compression import bf16, delta
from polytempo.core.rule import Service, UpdateRule
from polytempo.native.library import available
from polytempo.server.layout import Parameter, shard_map
from polytempo.server.message import COORDINATOR, Members, Pull, Pulled, Push, Pushed
from polytempo.server.rules.corrections import clip
from polytempo.server.rules.regional import regional
from polytempo.server.service import check_service
from polytempo.server.shard.shard import Shard

MODEL = (Parameter("w", 4), Parameter("b", 3))
NUMEL = 7
SIZE, EVERY, SHARE = 2, 3, 0.25
LOWER = UpdateRule("sgd", 0.5, momentum=0.75, nesterov=True, momentum_every=2)
UPPER = UpdateRule("sgd", 0.6, momentum=0.5, nesterov=True, momentum_every=2)
both_ways = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="no native core here"))],
    ids=["torch ops", "kernel"],
)


class RegionCrew:
    """Workers of a shard with regions, and the same server in plain numbers."""

    def __init__(self, service: Service | None = None, *, native: bool = False) -> None:
        rule = regional(SIZE, EVERY, SHARE)
        self.service = service or Service(rule, LOWER, outer=UPPER)
        self.native = native
        self.shard = self.made()
        self.plain = PlainHalos(
            np.ones(NUMEL), SIZE, EVERY, SHARE, lambda: Nesterov(0.5, 0.75, 2), Nesterov(0.6, 0.5, 2)
        )
        self.sequences: dict[tuple[int, int], int] = {}
        self.lives: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.tickets = self.changes = 0

    def made(self) -> Shard:
        start = torch.ones(NUMEL, dtype=torch.float64)
        return Shard(0, MODEL, shard_map(MODEL, 1)[0], start, self.service, native=self.native)

    def set_members(self, lives: dict[int, int]) -> None:
        """worker -> its life."""
        self.lives, self.changes = lives, self.changes + 1
        self.shard.apply(Members(COORDINATOR, 1, self.changes, tuple(sorted(lives.items()))))
        self.plain.set_members(lives)

    def asked(self, worker: int) -> tuple[int, int, int]:
        """The sender of the worker's next request."""
        life = self.lives[worker]
        self.sequences[worker, life] = self.sequences.get((worker, life), 0) + 1
        return worker, life, self.sequences[worker, life]

    def push(self, worker: int, movement: np.ndarray) -> Pushed:
        values = torch.from_numpy(movement.copy())
        version, self.tickets = self.versions.get(worker, 0), self.tickets + 1
        push = Push(*self.asked(worker), 1, version, 1, (0.1,), (self.tickets - 1,), values)
        (reply,) = self.shard.apply(push)
        assert isinstance(reply, Pushed)
        assert reply.verdict == "applied"
        self.plain.push(worker, movement, self.lives)
        return reply

    def pull(self, worker: int, *, resulting: bool = False, last: bool = False, basis: int = -1) -> Pulled:
        (reply,) = self.shard.apply(Pull(*self.asked(worker), 1, basis, resulting, last))
        assert isinstance(reply, Pulled)
        if not resulting:
            self.versions[worker] = reply.version
        return reply

    def check(self) -> None:
        """θ and each region's weights are as in plain numbers."""
        torch.testing.assert_close(self.shard.weights, torch.from_numpy(self.plain.theta), rtol=1e-12, atol=1e-12)
        for worker in self.lives:
            expected = torch.from_numpy(np.asarray(self.plain.regions[worker // SIZE].phi))
            torch.testing.assert_close(self.pull(worker).values, expected, rtol=1e-12, atol=1e-12)


def movements(seed: int) -> tuple[Random, np.random.Generator]:
    return Random(seed), np.random.default_rng(seed)


@both_ways
def test_pushes_and_movements_are_those_of_the_formula(native: bool) -> None:
    crew, (random, values) = RegionCrew(native=native), movements(0)
    crew.set_members(dict.fromkeys(range(5), 1))  # the last region has one worker
    for _ in range(60):
        crew.push(random.randrange(5), values.normal(size=NUMEL))
        crew.check()
    assert crew.shard.version == crew.plain.outer.steps > 5


@pytest.mark.parametrize(
    "given",
    [
        {
            "region": 4,
            "outer_lr": 0.7,
            "outer_momentum": 0.3,
            "momentum_every": 2,
            "global_lr": 1,
            "global_momentum": 0,
        },
        {
            "region": 1,
            "outer_lr": 1,
            "outer_momentum": 0,
            "global_lr": 0.7,
            "global_momentum": 0.3,
            "global_momentum_every": 2,
        },
    ],
    ids=["one region", "regions of one worker"],
)
def test_one_level_that_takes_all_is_asynchronous_diloco_to_rounding(given: dict[str, Any]) -> None:
    plain = strategies.async_diloco(8, 0.7, 0.3, momentum_every=2)
    servers = [strategy.server for strategy in (strategies.halos(every=1, share=1, **given), plain)]
    crews, (random, values) = [RegionCrew(server) for server in servers], movements(3)
    for crew in crews:
        crew.set_members(dict.fromkeys(range(4), 1))
    for _ in range(24):
        worker, movement = random.randrange(4), values.normal(size=NUMEL)
        for crew in crews:
            crew.push(worker, movement)
        pulled = [crew.pull(worker).values for crew in crews]
        torch.testing.assert_close(*pulled, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*[crew.shard.weights for crew in crews], rtol=1e-12, atol=1e-12)
    assert not torch.equal(pulled[0], torch.ones(NUMEL, dtype=torch.float64))


def test_regions_begin_and_end_with_their_workers() -> None:
    """A region that has lost its last worker leaves its movement to θ; a worker that comes again begins as θ is."""
    crew, (random, values) = RegionCrew(), movements(1)
    every_region, one = dict.fromkeys(range(8), 1), {7: 1}
    changes = [
        every_region,
        one,
        {0: 1, 1: 1, 2: 1},
        {0: 1, 1: 1},
        {0: 1, 1: 1, 2: 2, 3: 1},
        {2: 2},
        {0: 2, 2: 2},
        {0: 3, 2: 2},
    ]
    for lives in changes:
        crew.set_members(lives)
        crew.check()
        for _ in range(7):
            crew.push(random.choice(sorted(lives)), values.normal(size=NUMEL))
            crew.check()


def test_a_worker_that_comes_again_in_the_same_change_finds_its_region() -> None:
    crew = RegionCrew()
    crew.set_members({0: 1, 2: 1})
    crew.push(2, np.ones(NUMEL))
    before = crew.pull(2).values.clone()
    crew.set_members({0: 1, 2: 2})
    assert crew.shard.version == 0
    assert torch.equal(crew.pull(2).values, before)


def test_movements_stay_where_the_run_is_over() -> None:
    """Workers leave one after the other at the end, and all must have pulled the same weights."""
    crew = RegionCrew()
    crew.set_members({0: 1, 2: 1})
    crew.push(2, np.ones(NUMEL))
    first = crew.pull(2, resulting=True, last=True).values.clone()
    assert torch.equal(first, torch.ones(NUMEL, dtype=torch.float64))
    crew.lives = {0: 1}
    crew.shard.apply(Members(COORDINATOR, 1, 2, ((0, 1),)))
    assert torch.equal(crew.pull(0, resulting=True, last=True).values, first)


def test_a_look_at_the_resulting_weights_ends_no_run() -> None:
    """An evaluation in the middle of a loop is one. A region that loses its workers then leaves its movement to θ."""
    crew = RegionCrew()
    crew.set_members({0: 1, 2: 1})
    crew.push(2, np.ones(NUMEL))
    crew.pull(2, resulting=True)
    crew.set_members({0: 1})
    crew.check()
    assert crew.shard.version == 1


@pytest.mark.parametrize("unfit", [{"waits": True}, {"deals": "evenly"}, {"modifiers": (clip(1.0),)}])
def test_regions_go_with_no_workers_that_rest_and_no_corrections(unfit: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has regions of workers, .* which do not go with"):
        check_service(Service(regional(2), UpdateRule("sgd", 1.0), **unfit))


def test_a_region_that_gives_nothing_on_is_asynchronous_diloco_of_its_workers_to_the_bit() -> None:
    servers = [
        strategies.halos(8, 4, 99, outer_lr=0.7, outer_momentum=0.3, momentum_every=2).server,
        strategies.async_diloco(8, 0.7, 0.3, momentum_every=2).server,
    ]
    crews, (random, values) = [RegionCrew(server) for server in servers], movements(4)
    for crew in crews:
        crew.set_members(dict.fromkeys(range(4), 1))
    for _ in range(24):
        worker, movement = random.randrange(4), values.normal(size=NUMEL)
        for crew in crews:
            crew.push(worker, movement)
        assert torch.equal(*[crew.pull(worker).values for crew in crews])


@pytest.mark.parametrize("at", range(1, 9))
def test_a_loaded_state_goes_on_to_the_bit(at: int) -> None:
    crew, (random, values) = RegionCrew(), movements(at)
    crew.set_members(dict.fromkeys(range(4), 1))
    other = None
    for step in range(20):
        if step == at:
            other = crew.made()
            other.load(*crew.shard.dump())
        worker, movement = random.randrange(4), values.normal(size=NUMEL)
        push = Push(
            *crew.asked(worker), 1, crew.versions.get(worker, 0), 1, (0.1,), (step,), torch.from_numpy(movement)
        )
        pull = Pull(*crew.asked(worker), 1, -1)
        replies = [each for entry in (push, pull) for each in crew.shard.apply(entry)]
        crew.versions[worker] = replies[1].version  # type: ignore[attr-defined]
        if other is not None:
            again = [each for entry in (push, pull) for each in other.apply(entry)]
            assert torch.equal(again[1].values, replies[1].values)  # type: ignore[attr-defined]
            assert torch.equal(other.weights, crew.shard.weights)
    assert other is not None
    assert all(torch.equal(*both) for both in zip(other.dump()[1], crew.shard.dump()[1], strict=True))


def test_what_a_worker_holds_stays_as_it_is() -> None:
    crew, (_, values) = RegionCrew(), movements(2)
    crew.set_members({0: 1, 1: 1})
    held = crew.pull(0).values
    copy = held.clone()
    for _ in range(7):
        crew.push(1, values.normal(size=NUMEL))
    assert torch.equal(held, copy)
    assert not torch.equal(crew.pull(0).values, copy)


def test_ages_are_counted_in_the_region_s_own_versions() -> None:
    crew = RegionCrew(replace(RegionCrew().service, rule=regional(SIZE, 99)))
    crew.set_members(dict.fromkeys(range(4), 1))
    for worker in (0, 1, 2):
        crew.pull(worker)
    assert [crew.push(worker, np.ones(NUMEL)).staleness for worker in (0, 1, 2)] == [0, 1, 0]


def test_changed_words_are_counted_from_what_the_worker_has_pulled_last() -> None:
    """The resulting weights and a region's have versions of their own: a message names no weights of the other."""
    crew = RegionCrew(replace(RegionCrew().service, pull_codec=delta(bf16())))
    crew.set_members({0: 1, 1: 1})
    messages: list[Tensor] = []
    for resulting, basis in ((False, -1), (True, 0), (False, 0), (False, 0)):
        messages.append(crew.pull(0, resulting=resulting, basis=basis).values.clone())
    whole, result, again, changed = (len(message) for message in messages)
    assert whole == result == again > changed


def test_running_statistics_of_norms_are_of_all_regions() -> None:
    """b ← b + (b of the push - b)/λ in each push of any region; a region's end and a movement leave b as it is."""
    service, numel = RegionCrew().service, 3
    start = torch.ones(NUMEL, dtype=torch.float64)
    given = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    shard = Shard(0, MODEL, shard_map(MODEL, 1)[0], start, service, native=False, running=given)
    expected, values, sequences = given.clone(), torch.Generator().manual_seed(5), dict.fromkeys(range(4), 0)
    for change, members in enumerate([(0, 1, 2, 3), (0, 1, 2), (0, 2)], 1):
        shard.apply(Members(COORDINATOR, 1, change, tuple((worker, 1) for worker in members)))
        for step in range(4 * len(members)):
            worker = members[step % len(members)]
            own = torch.randn(numel, generator=values, dtype=torch.float64)
            sequences[worker] += 2
            ticket = 100 * change + step
            asked = worker, 1, sequences[worker] - 1
            (answer,) = shard.apply(Push(*asked, 1, 0, 1, (0.1,), (ticket,), torch.ones_like(start), running=own))
            assert isinstance(answer, Pushed)
            assert answer.verdict == "applied"
            expected += (own - expected) / len(members)
            (pulled,) = shard.apply(Pull(worker, 1, sequences[worker], 1, -1))
            assert isinstance(pulled, Pulled)
            assert pulled.running is not None
            torch.testing.assert_close(pulled.running, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "a region has at least 1 worker, got 0"),
        ({"size": 2, "every": 0}, "at least 1, got 0"),
        ({"size": 2, "share": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_numbers_that_no_region_has(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regional(**given)  # type: ignore[arg-type]
