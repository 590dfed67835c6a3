"""Laws of Horovod's negotiation, under chaos: random orders, delays, fusions, caches, process sets, joins, lost ranks.

A world of machines with messages in FIFO links with random delays; every choice comes from one seed.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import msgspec
import pytest

from polytempo.horovod.negotiation.coordinator import NegotiationCoordinator, StallLimits
from polytempo.horovod.negotiation.member import NegotiationMember, ToEnd, ToFail, ToPerform, ToTune
from polytempo.horovod.negotiation.message import Farewell, TensorRequest, Verdicts, Word

Key = tuple[int, str]
WORDS = msgspec.msgpack.Decoder(Word)
VERDICTS = msgspec.msgpack.Decoder(Verdicts)


class Cluster:
    """`size` members and a coordinator; `step` lets one random thing happen."""

    def __init__(self, random: Random, size: int, sets: dict[int, tuple[int, ...]], **options: object) -> None:
        self.random, self.size = random, size
        self.coordinator = NegotiationCoordinator(size, sets, **options)  # type: ignore[arg-type]
        self.members = [NegotiationMember(rank, size, sets) for rank in range(size)]
        self.up: list[deque[bytes]] = [deque() for _ in range(size)]
        self.down: list[deque[bytes]] = [deque() for _ in range(size)]
        self.performed: list[list[tuple[Key, ...]]] = [[] for _ in range(size)]
        self.own: list[list[Key]] = [[] for _ in range(size)]
        self.failed: list[dict[Key, str]] = [{} for _ in range(size)]
        self.ended = [""] * size
        self.dead: set[int] = set()
        self.bytes_up: list[int] = []
        self.sizes: dict[Key, tuple[tuple[int, ...], ...]] = {}

    def broadcast(self, told: Verdicts | None) -> None:
        if told is not None:
            for link in self.down:
                link.append(msgspec.msgpack.encode(told))

    def flush(self, rank: int) -> None:
        if (word := self.members[rank].flush()) is not None:
            self.up[rank].append(msgspec.msgpack.encode(word))
            self.bytes_up.append(len(self.up[rank][-1]))

    def step(self) -> bool:
        """Deliver one message; whether there was one."""
        links = [(True, r) for r in range(self.size) if self.up[r]]
        links += [(False, r) for r in range(self.size) if self.down[r] and r not in self.dead]
        if not links:
            return False
        upward, rank = self.random.choice(links)
        if upward:
            self.broadcast(self.coordinator.receive(rank, WORDS.decode(self.up[rank].popleft())))
        else:
            self.told(rank, VERDICTS.decode(self.down[rank].popleft()))
        return True

    def told(self, rank: int, verdicts: Verdicts) -> None:
        member = self.members[rank]
        for todo in member.receive(verdicts):
            match todo:
                case ToPerform(agreements):
                    self.performed[rank].append(tuple(agreed.request.key for agreed in agreements))
                    for agreed in agreements:
                        key = agreed.request.key
                        assert self.sizes.setdefault(key, agreed.sizes) == agreed.sizes or agreed.sizes
                        if key in member.waiting:
                            self.own[rank].append(key)
                            member.finish([key])
                case ToFail(key, reason):
                    self.failed[rank][key] = reason
                    member.finish([key])
                case ToTune(cycle_s):
                    self.performed[rank].append(((-1, str(cycle_s)),))
                case ToEnd(reason):
                    self.ended[rank] = reason

    def settle(self) -> None:
        for rank in range(self.size):
            if rank not in self.dead:
                self.flush(rank)
        while self.step():
            for rank in range(self.size):
                if rank not in self.dead:
                    self.flush(rank)


def request(key: Key, **changes: object) -> TensorRequest:
    """A small all-reduce; its dtype follows from the name, so that some can be fused and some cannot."""
    number, name = key
    dtype = ("float32", "float64")[len(name) % 2]
    base = TensorRequest(name, "allreduce", (dtype,), ((3, 2),), op="sum", process_set=number)
    return msgspec.structs.replace(base, **changes)


def world(seed: int) -> tuple[Random, Cluster]:
    random = Random(seed)
    size = random.choice([1, 2, 3, 4, 5])
    sets = {1: tuple(sorted(random.sample(range(size), random.randint(1, size - 1))))} if size > 2 else {}
    capacity = random.choice([0, 1, 3, 1024])
    options = {"fusion_bytes": random.choice([0, 30, 64, 1 << 20]), "cache_capacity": capacity}
    return random, Cluster(random, size, sets, **options)


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_perform_everything_once_and_in_one_order(seed: int) -> None:
    """Ranks submit in any order, with any delays; several rounds of the same names."""
    random, cluster = world(seed)
    names = [f"t{'x' * (i % 2)}{i}" for i in range(random.randint(1, 12))]
    rounds = random.randint(1, 4)
    todo: list[list[Key]] = []
    for rank in range(cluster.size):
        keys = [(n, name) for n, ranks in cluster.coordinator.sets.items() if rank in ranks for name in names]
        todo.append([key for _ in range(rounds) for key in random.sample(keys, len(keys))])
    expected = [Counter(each) for each in todo]
    while any(todo) or any(m.waiting for m in cluster.members):
        rank = random.randrange(cluster.size)
        choice = random.random()
        if todo[rank] and choice < 0.5 and todo[rank][0] not in cluster.members[rank].waiting:
            cluster.members[rank].submit(request(todo[rank].pop(0)))
        elif choice < 0.7 or not cluster.step():
            for each in range(cluster.size):
                cluster.flush(each)
        assert not cluster.coordinator.closed
    cluster.settle()
    assert all(performed == cluster.performed[0] for performed in cluster.performed)
    assert [Counter(own) for own in cluster.own] == expected
    for entries in cluster.performed[0]:
        assert len({request(key).dtypes for key in entries}) == 1
        assert len({number for number, _ in entries}) == 1
    assert not cluster.coordinator._pending
    assert not any(cluster.coordinator._asked)


@pytest.mark.parametrize("seed", range(30))
def test_a_lost_rank_ends_every_other_one(seed: int) -> None:
    random, cluster = world(1000 + seed)
    victim = random.randrange(cluster.size)
    for name in ("a", "b", "c", "d"):
        for rank in range(cluster.size):
            cluster.members[rank].submit(request((0, name)))
            if random.random() < 0.5:
                cluster.flush(rank)
            cluster.step()
        if name == "b":
            cluster.dead.add(victim)
            if random.random() < 0.5:
                cluster.up[victim].clear()
                cluster.broadcast(cluster.coordinator.lost(victim, "killed"))
            else:
                cluster.up[victim].append(msgspec.msgpack.encode(Farewell("")))
    cluster.settle()
    for rank in set(range(cluster.size)) - cluster.dead:
        assert f"rank {victim}" in cluster.ended[rank]
        assert cluster.members[rank].closed
        assert cluster.performed[rank] == cluster.performed[min(set(range(cluster.size)) - cluster.dead)]


@pytest.mark.parametrize("seed", range(30))
def test_what_does_not_go_together_is_refused_on_every_rank(seed: int) -> None:
    """And only that: other names go on, also the same name afterwards."""
    random, cluster = world(2000 + seed)
    if cluster.size == 1:
        return
    odd = random.randrange(cluster.size)
    wrong, word = random.choice(
        [
            ({"shapes": ((2, 3),)}, "shapes"),
            ({"dtypes": ("int8",)}, "data types"),
            ({"op": "max"}, "reduction operations"),
            ({"prescale": 2.0}, "prescale"),
            ({"kind": "broadcast", "root": 0}, "operations"),
        ]
    )
    warmed = random.random() < 0.5
    for turn in range(3):
        for name in random.sample(["good", "bad", "fine"], 3):
            for rank in random.sample(range(cluster.size), cluster.size):
                given = wrong if (rank, name, turn) == (odd, "bad", 1) else {}
                if turn or warmed:
                    cluster.members[rank].submit(request((0, name), **given))
        cluster.settle()
    for rank in range(cluster.size):
        assert list(cluster.failed[rank]) == [(0, "bad")], cluster.failed
        reason = cluster.failed[rank][0, "bad"]
        assert word in reason
        assert "'bad'" in reason
        assert f"rank {odd}" in reason
        assert Counter(cluster.own[rank]) == {
            (0, "good"): 2 + warmed,
            (0, "fine"): 2 + warmed,
            (0, "bad"): 1 + warmed,
        }


@pytest.mark.parametrize("seed", range(30))
def test_ranks_that_have_joined_hold_no_other_up(seed: int) -> None:
    random, cluster = world(3000 + seed)
    steps = [random.randint(0, 4) for _ in range(cluster.size)]
    todo = [[("work", i) for i in range(n)] + [("join", 0)] for n in steps]
    while any(todo) or any(m.waiting for m in cluster.members):
        rank = random.randrange(cluster.size)
        member = cluster.members[rank]
        if todo[rank] and not member.waiting and random.random() < 0.6:
            kind, _ = todo[rank].pop(0)
            asked = TensorRequest("join", "join", lasting=False) if kind == "join" else request((0, "w"))
            member.submit(asked)
        cluster.flush(rank)
        cluster.step()
    cluster.settle()
    assert [Counter(own)[0, "w"] for own in cluster.own] == steps
    assert len({tuple(performed) for performed in cluster.performed}) == 1
    assert steps[cluster.sizes[0, "join"][0][0]] == max(steps)


def test_an_adasum_cannot_wait_for_a_rank_that_has_joined() -> None:
    cluster = Cluster(Random(0), 2, {})
    cluster.members[0].submit(TensorRequest("join", "join", lasting=False))
    cluster.members[1].submit(request((0, "a"), op="adasum"))
    cluster.settle()
    assert "join" in cluster.failed[1][0, "a"]


@pytest.mark.parametrize("seed", range(20))
def test_process_sets_come_and_go(seed: int) -> None:
    random, cluster = world(4000 + seed)
    ranks = tuple(random.sample(range(cluster.size), random.randint(1, cluster.size)))
    known = tuple(sorted(ranks)) in cluster.coordinator.sets.values()
    for member in cluster.members:
        member.submit(TensorRequest("add", "add_set", numbers=ranks, lasting=False))
    cluster.settle()
    if known:
        assert all("already" in failed[0, "add"] for failed in cluster.failed)
        return
    ((number,),) = cluster.sizes[0, "add"]
    for _ in range(2):
        for rank in ranks:
            cluster.members[rank].submit(request((number, "x")))
        cluster.settle()
    assert all(Counter(cluster.own[rank])[number, "x"] == 2 for rank in ranks)
    if len(ranks) > 1:
        cluster.members[ranks[0]].submit(request((number, "x")))
        cluster.settle()
    for member in cluster.members:
        member.submit(TensorRequest("remove", "remove_set", numbers=(number,), lasting=False))
    cluster.settle()
    if len(ranks) > 1:
        assert "removed" in cluster.failed[ranks[0]][number, "x"]
    assert all(number not in member.sets for member in cluster.members)
    with pytest.raises(ValueError, match="does not exist"):
        cluster.members[ranks[0]].submit(request((number, "y")))


def test_the_second_time_a_rank_says_one_bit_for_each_name() -> None:
    cluster = Cluster(Random(1), 4, {})
    names = [f"layer.{i}.weight" for i in range(100)]
    for _ in range(2):
        for member in cluster.members:
            for name in names:
                member.submit(request((0, name)))
        before = len(cluster.bytes_up)
        cluster.settle()
    assert max(cluster.bytes_up[before:]) <= 100 // 8 + 10
    assert min(cluster.bytes_up[:before]) > 1000


def test_a_name_is_not_submitted_twice_at_a_time() -> None:
    cluster = Cluster(Random(2), 2, {})
    cluster.members[0].submit(request((0, "a")))
    with pytest.raises(ValueError, match=r"'a': rank 0 has submitted this name"):
        cluster.members[0].submit(request((0, "a")))


def test_a_name_that_some_ranks_never_submit_is_warned_of_and_then_ends_everything() -> None:
    stalls = StallLimits(warn_s=10, end_s=30)
    cluster = Cluster(Random(3), 3, {1: (0, 2)}, stalls=stalls)
    for _ in range(2):  # by name, then by bit
        for rank in (0, 1, 2):
            cluster.members[rank].submit(request((0, "late")))
        if not cluster.own[0]:
            cluster.settle()
    cluster.members[1].flush()  # and never says it
    cluster.members[0].submit(request((1, "late")))
    cluster.settle()
    for now_s, warnings in ((0.0, 0), (9.0, 0), (10.0, 2), (29.0, 2)):
        assert cluster.coordinator.tick(now_s) is None
        assert len(cluster.coordinator.warnings) == warnings
    first = next(line for line in cluster.coordinator.warnings if "ranks [0, 2] and not by ranks [1]" in line)
    assert "'late'" in first
    assert "process sets [1]" in first
    cluster.broadcast(cluster.coordinator.tick(30.0))
    cluster.settle()
    assert all("'late'" in ended for ended in cluster.ended)


def test_splits_and_first_dimensions_reach_every_rank() -> None:
    cluster = Cluster(Random(4), 2, {})
    for rows in ((2, 3), (0, 5)):
        for rank, member in enumerate(cluster.members):
            gather = request((0, "g"), kind="allgather", op="", shapes=((rows[rank], 4),))
            splits = (1, rows[rank] - 1) if rows[rank] else (0, 0)
            member.submit(gather)
            member.submit(request((0, "a"), kind="alltoall", op="", shapes=((rows[rank], 4),), numbers=splits))
        cluster.sizes.clear()
        cluster.settle()
        assert cluster.sizes[0, "g"] == ((rows[0],), (rows[1],))
        assert cluster.sizes[0, "a"][1] == (1, rows[1] - 1)
    cluster.members[0].submit(request((0, "b"), kind="alltoall", op="", numbers=(3, 1)))
    cluster.members[1].submit(request((0, "b"), kind="alltoall", op="", numbers=(1, 2)))
    cluster.settle()
    assert all("rank 0 splits 3 rows into [3, 1]" in failed[0, "b"] for failed in cluster.failed)


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_change_settings_at_the_same_place_in_the_order(seed: int) -> None:
    """The place is between two operations, the same two on every rank; fusion follows from the next decision on."""
    random, cluster = world(4000 + seed)
    names = [f"t{i}" for i in range(8)]
    for turn in range(4):
        for rank in range(cluster.size):
            for name in random.sample(names, len(names)):
                cluster.members[rank].submit(request((0, name)))
                if random.random() < 0.3:
                    cluster.flush(rank)
                cluster.step()
        cluster.broadcast(cluster.coordinator.retune(0 if turn % 2 else 1 << 20, 0.001 * turn))
        cluster.settle()
    assert all(performed == cluster.performed[0] for performed in cluster.performed)
    changes = [place for place, entries in enumerate(cluster.performed[0]) if entries[0][0] == -1]
    assert [cluster.performed[0][place][0][1] for place in changes] == ["0.0", "0.001", "0.002", "0.003"]
    assert all(len(entries) == 1 for entries in cluster.performed[0][changes[1] : changes[2]])
