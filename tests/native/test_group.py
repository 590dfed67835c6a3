"""Groups of real processes in shared memory: every collective against its twin, bit by bit, and every breach told."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from native import twin
from polytempo.core.errors import Mismatch, PeerLost, PolytempoError, TimedOut
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.native.arena import Arena, own_arena
from polytempo.native.call import DTYPES, OPS
from polytempo.native.group import Group
from polytempo.native.meeting import Unreachable

pytestmark = pytest.mark.process

SEED = 20261120
NUM_CASES = 40
BLOCK_BYTES = 4 << 10
"""Small, so that a few thousand elements take several blocks."""
COUNTS = (0, 1, 2, 3, 7, 63, 64, 65, 1000, 1023, 4097, 9000)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
PLAN = settings(
    max_examples=2, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
"""Each example starts processes once and makes many calls in them."""


class Case(NamedTuple):
    """A call that all members of a group make; `places[r]` is true if rank r's tensors are in its arena."""

    kind: str
    members: tuple[int, ...]
    dtype: torch.dtype
    op: str
    order: twin.Order
    count: int
    places: tuple[bool, ...]
    root: int
    sizes: tuple[int, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str], teams: Sequence[tuple[int, ...]]) -> Case:
    """A call of one of the `kinds` in one of the `teams`."""
    members = draw(st.sampled_from(teams))
    size = len(members)
    dtype = draw(st.sampled_from(list(DTYPES)))
    return Case(
        draw(st.sampled_from(kinds)),
        members,
        dtype,
        draw(st.sampled_from([op for op in OPS if twin.supports(dtype, op)])),
        draw(st.sampled_from(("linear", "tree"))),
        draw(st.sampled_from(COUNTS)),
        tuple(draw(st.sampled_from(([False] * size, [True] * size, [rank % 2 == 0 for rank in range(size)])))),
        draw(st.integers(0, size - 1)),
        tuple(draw(st.lists(st.sampled_from(COUNTS[:9]), min_size=size * size, max_size=size * size))),
        draw(st.integers(0, 1 << 30)),
    )


@st.composite
def plans(draw: st.DrawFn, kinds: Sequence[str], size: int) -> list[Case]:
    """Calls in the group of all ranks, in one of them in another order, and in a part of them."""
    ranks = list(range(size))
    some = draw(st.permutations(ranks))[: draw(st.integers(1, size))]
    teams = [tuple(ranks), tuple(draw(st.permutations(ranks))), tuple(some)]
    return draw(st.lists(cases(kinds, teams), min_size=NUM_CASES, max_size=NUM_CASES))


def meet(
    rank_info: RankInfo, name: str, members: Sequence[int] | None = None, timeout_s: float = 20, **sizes: int
) -> Group:
    """A group of `members`, by default of all."""
    ranks = list(range(rank_info.size)) if members is None else list(members)
    store = PrefixStore(name, FileStore(str(rank_info.rendezvous / "store"), -1))
    return Group(store, ranks.index(rank_info.rank), len(ranks), timeout_s=timeout_s, names=ranks, **sizes)


def run(num_ranks: int, work: Callable[[RankInfo], Result], timeout_s: float = 60) -> list[Any]:
    """The value of `work` on each rank."""
    return launch(work, num_ranks, threads=1, timeout_s=timeout_s)


def numbers(case: Case, rank: int, count: int | None = None, column: int = 0) -> Tensor:
    """A rank's numbers: known to all ranks, so that each can compute the expected result."""
    random = torch.Generator().manual_seed(case.seed + 1009 * rank + 9176 * column)
    length = case.count if count is None else count
    if case.dtype.is_floating_point:
        return torch.randn(length, generator=random, dtype=torch.float64).to(case.dtype)
    return torch.randint(0, 2 if case.dtype == torch.bool else 100, (length,), generator=random).to(case.dtype)


def placed(group: Group, case: Case, value: Tensor) -> Tensor:
    """`value`, in the arena where the case says so."""
    if not case.places[group.rank]:
        return value.clone()
    tensor = group.arena.empty(tuple(value.shape), value.dtype)
    return tensor.copy_(value)


def same(found: Tensor, expected: Tensor) -> bool:
    """True if all bits are equal."""
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def reduced(group: Group, case: Case) -> bool:
    """Make a case's reduction. True if each rank has the twin's result."""
    everyone = range(group.size)
    if case.kind == "reduce_scatter":
        inputs = [placed(group, case, numbers(case, group.rank, column=to)) for to in everyone]
        output = placed(group, case, torch.zeros(case.count, dtype=case.dtype))
        group.reduce_scatter(inputs, output, case.op, order=case.order)
        sources = [numbers(case, rank, column=group.rank) for rank in everyone]
        return same(output, twin.reduce(sources, case.op, case.order))
    root = case.root if case.kind == "reduce" else -1
    tensor = placed(group, case, numbers(case, group.rank))
    group.all_reduce(tensor, case.op, root=root, order=case.order)
    if root not in (-1, group.rank):
        return True
    return same(tensor, twin.reduce([numbers(case, rank) for rank in everyone], case.op, case.order))


def moved(group: Group, case: Case) -> bool:
    """Make a case's exchange. True if everything came where it belongs."""
    me, size, everyone = group.rank, group.size, range(group.size)
    pairs: dict[tuple[int, int], Tensor] = {}
    for rank in everyone:
        if case.kind == "all_gather":
            pairs |= {(rank, to): numbers(case, rank) for to in everyone}
        elif case.kind == "gather":
            pairs[rank, case.root] = numbers(case, rank)
        elif case.kind == "broadcast" and rank != case.root:
            pairs[case.root, rank] = numbers(case, case.root)
        elif case.kind == "scatter":
            pairs[case.root, rank] = numbers(case, case.root, column=rank)
        elif case.kind == "all_to_all":
            pairs |= {(rank, to): numbers(case, rank, case.sizes[rank * size + to], to) for to in everyone}
    if case.kind in ("all_gather", "gather") or (case.kind == "broadcast" and me == case.root):
        sends = [placed(group, case, numbers(case, me))]
    else:
        sends = [placed(group, case, pairs[me, to]) for to in everyone if (me, to) in pairs]
    receives = [
        placed(group, case, torch.zeros_like(pairs[source, me])) if (source, me) in pairs else None
        for source in everyone
    ]
    group.exchange(case.kind, sends, receives, root=case.root)
    return all(same(found, pairs[source, me]) for source, found in enumerate(receives) if found is not None)


def carry_out(plan: Sequence[Case], num_ranks: int, make: Callable[[Group, Case], bool]) -> None:
    """Make all calls of a plan, and compare."""
    teams = list(dict.fromkeys(case.members for case in plan))

    def work(rank_info: RankInfo) -> Result:
        groups = {
            team: meet(rank_info, f"{i}", team, block_bytes=BLOCK_BYTES)
            for i, team in enumerate(teams)
            if rank_info.rank in team
        }
        return [i for i, case in enumerate(plan) if case.members in groups and not make(groups[case.members], case)]

    wrong = run(num_ranks, work)
    assert wrong == [[]] * num_ranks, [plan[i] for rank in wrong for i in rank]


def hold_for_plans(kinds: Sequence[str], size: int, make: Callable[[Group, Case], bool]) -> None:
    """Carry out many plans of such calls."""

    @seed(SEED + size)
    @PLAN
    @given(plans(kinds, size))
    def law(plan: list[Case]) -> None:
        carry_out(plan, size, make)

    print("seed", SEED + size)
    law()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_reductions_equal_the_twin_bit_by_bit(size: int) -> None:
    hold_for_plans(REDUCTIONS, size, reduced)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_is_moved_comes_whole_and_to_the_right_place(size: int) -> None:
    hold_for_plans(MOVES, size, moved)


def test_every_run_gives_the_same_bits_on_every_rank() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        values = torch.randn(100_003, generator=torch.Generator().manual_seed(rank_info.rank))
        answers = []
        for arena in (False, True):
            tensor = group.arena.empty(100_003) if arena else torch.empty(100_003)
            tensor.copy_(values)
            group.all_reduce(tensor)
            answers.append(tensor.view(torch.int32).sum().item())
        return answers

    answers = [run(3, work) for _ in range(2)]
    assert len({bits for each in answers for rank in each for bits in rank}) == 1


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_tree_over_eight_parts_has_the_same_bits_on_any_number_of_ranks(num_ranks: int) -> None:
    parts = list(torch.randn(8, 5003, generator=torch.Generator().manual_seed(SEED)))
    whole = twin.reduce(parts, "sum", "tree")
    each = 8 // num_ranks

    def work(rank_info: RankInfo) -> Result:
        tensor = twin.reduce(parts[rank_info.rank * each : (rank_info.rank + 1) * each], "sum", "tree")
        meet(rank_info, "group", block_bytes=BLOCK_BYTES).all_reduce(tensor, order="tree")
        return same(tensor, whole)

    assert run(num_ranks, work) == [True] * num_ranks


def test_more_than_two_to_the_31_bytes() -> None:
    num_bytes = (1 << 31) + 3
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    assert int(available.split()[1]) << 10 > 3 * num_bytes, f"this test needs {3 * num_bytes} bytes of memory"

    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group", timeout_s=90)
        tensor = group.arena.empty(num_bytes, torch.uint8)
        tensor[-5:] = torch.arange(5, dtype=torch.uint8) * (1 - rank_info.rank)
        tensor[1 << 31] += 3 * rank_info.rank
        group.all_reduce(tensor, "max")
        return [*tensor[-5:].tolist(), int(tensor[0])]

    assert run(2, work, timeout_s=100) == [[0, 1, 3, 3, 4, 0]] * 2


def test_several_groups_are_used_at_once() -> None:
    teams = [(0, 1, 2, 3), (0, 2), (1, 3), (3, 0), (2, 1, 0)]

    def work(rank_info: RankInfo) -> Result:
        groups = [meet(rank_info, f"{i}", team) for i, team in enumerate(teams) if rank_info.rank in team]
        sums = []
        for turn in range(20):
            for group in groups:
                tensor = torch.full((3000,), float(rank_info.rank + turn))
                group.all_reduce(tensor)
                sums.append(bool((tensor == sum(group.names) + turn * group.size).all()))
        return all(sums)

    assert run(4, work) == [True] * 4


# ---------------------------------------------------------------------------------------------------- point to point


def test_messages_of_one_tag_keep_their_order_and_tags_overtake() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group", ring_bytes=1 << 10)
        if rank_info.rank == 0:
            sent = [group.send(torch.full((n,), float(i)), 1, tag) for i, (n, tag) in enumerate(table)]
            for transfer in sent:
                transfer.wait()
            return []
        wanted = [table.index(entry) for entry in sorted(table, key=lambda entry: -entry[1])]
        answers = []
        for i in wanted:
            tensor = torch.empty(table[i][0])
            group.receive(tensor, 0, table[i][1]).wait()
            answers.append(bool((tensor == i).all()))
        return answers

    table = [(1, 5), (5000, 6), (0, 5), (70_000, 7), (3, 6)]
    assert run(2, work)[1] == [True] * 5


def test_a_message_of_some_megabytes_is_sent_before_it_is_asked_for() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        tensor = torch.full((1 << 20,), float(rank_info.rank))
        sent = group.send(tensor, 1).done() if rank_info.rank == 0 else None
        group.barrier()
        if rank_info.rank == 1:
            group.receive(tensor, 0).wait()
        return [sent, float(tensor.mean())]

    assert run(2, work) == [[True, 0.0], [None, 0.0]]


def test_anyone_may_be_received_from() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        if rank_info.rank:
            group.send(torch.tensor([rank_info.rank]), 0, 3).wait()
            return []
        found = []
        for _ in range(3):
            tensor = torch.zeros(1, dtype=torch.int64)
            transfer = group.receive(tensor, -1, 3)
            transfer.wait()
            found.append([transfer.peer, int(tensor)])
        return sorted(found)

    assert run(4, work)[0] == [[1, 1], [2, 2], [3, 3]]


# -------------------------------------------------------------------------------------------------- broken contracts


def told(work: Callable[[], object]) -> Result:
    """The error of `work`: its kind and its text."""
    try:
        work()
    except PolytempoError as error:
        return [type(error).__name__, str(error)]
    return None


def vector(count: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


BREACHES: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str, str]] = {
    "shape": (
        lambda group: group.all_reduce(vector(4)),
        lambda group: group.all_reduce(vector(5)),
        "call 1: all_reduce(sum, 4 elements of float32)",
        "call 1: all_reduce(sum, 5 elements of float32)",
    ),
    "dtype": (
        lambda group: group.all_reduce(vector(4)),
        lambda group: group.all_reduce(vector(4, torch.int32)),
        "all_reduce(sum, 4 elements of float32)",
        "all_reduce(sum, 4 elements of int32)",
    ),
    "operation": (
        lambda group: group.all_reduce(vector(4), "max"),
        lambda group: group.all_reduce(vector(4), "min"),
        "all_reduce(max, 4 elements of float32)",
        "all_reduce(min, 4 elements of float32)",
    ),
    "order of calls": (
        lambda group: (group.barrier(), group.all_reduce(vector())),
        lambda group: (group.all_reduce(vector()), group.barrier()),
        "call 1: barrier()",
        "call 1: all_reduce(sum, 4 elements of float32)",
    ),
    "root": (
        lambda group: group.all_reduce(vector(), root=0),
        lambda group: group.all_reduce(vector(), root=1),
        "reduce(sum, 4 elements of float32, root 0)",
        "reduce(sum, 4 elements of float32, root 1)",
    ),
    "large, in the arena": (
        lambda group: group.all_reduce(group.arena.empty(100_000)),
        lambda group: group.all_reduce(group.arena.empty(100_001)),
        "100000 elements",
        "100001 elements",
    ),
    "reduce-scatter": (
        lambda group: group.reduce_scatter([vector()] * 3, vector()),
        lambda group: group.reduce_scatter([vector(8)] * 3, vector(8)),
        "reduce_scatter(sum, 4 elements",
        "reduce_scatter(sum, 8 elements",
    ),
    "gathered shapes": (
        lambda group: group.exchange("all_gather", [vector()], [vector()] * 3),
        lambda group: group.exchange("all_gather", [vector(9)], [vector(9)] * 3),
        "all_gather(4 elements of float32)",
        "all_gather(9 elements of float32)",
    ),
    "kinds of eight bits": (
        lambda group: group.exchange(
            "broadcast", [vector(4, torch.uint8)] * (group.rank == 1), [None, vector(4, torch.uint8), None], root=1
        ),
        lambda group: group.exchange("broadcast", [], [None, vector(4, torch.float8_e5m2), None], root=1),
        "broadcast(4 elements of uint8, root 1)",
        "broadcast(4 elements of float8_e5m2, root 1)",
    ),
    "sizes for one another": (
        lambda group: group.exchange("all_to_all", [vector()] * 3, [vector()] * 3),
        lambda group: group.exchange("all_to_all", [vector(9)] * 3, [vector(9)] * 3),
        "all_to_all",
        "bytes to rank",
    ),
}


@pytest.fixture(scope="module")
def breaches() -> list[dict[str, list[str]]]:
    """The errors of three ranks when rank 2 differs from the other two."""

    def work(rank_info: RankInfo) -> Result:
        return {
            name: told(lambda group=meet(rank_info, name), call=(usual, other)[rank_info.rank == 2]: call(group))  # type: ignore[misc]
            for name, (usual, other, _, _) in BREACHES.items()
        }

    return run(3, work)


@pytest.mark.parametrize("name", BREACHES)
def test_who_breaks_the_contract_is_told_and_so_are_all_others(name: str, breaches: list[dict[str, list[str]]]) -> None:
    _, _, usual, other = BREACHES[name]
    for rank, answers in enumerate(breaches):
        kind, text = answers[name]
        assert kind == Mismatch.__name__
        if name == "sizes for one another":  # the same pair on every rank
            assert "rank 0 sends 16 bytes to rank 2, which expects 36;" in text
            continue
        assert f"rank {rank} is in" in text
        assert "rank 2" in text
        assert usual in text
        assert other in text


def test_a_broken_group_stays_broken() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        first = told(lambda: group.all_reduce(vector(4 + rank_info.rank)))
        second = told(group.barrier)
        return [first, second]

    for first, second in run(2, work):
        assert first[0] == "Mismatch"
        assert second[0] == "Mismatch"
        assert "broke in an earlier call" in second[1]


@pytest.mark.parametrize(
    ("sent", "wanted", "says"),
    [
        (vector(8), vector(4), ("expects 16 bytes of float32", "rank 0 sent 32 bytes of float32")),
        (vector(4, torch.float8_e4m3fn), vector(4, torch.float8_e5m2), ("of float8_e5m2", "4 bytes of float8_e4m3fn")),
        (vector(4, torch.int32), vector(4), ("expects 16 bytes of float32", "rank 0 sent 16 bytes of int32")),
        (vector(400_000), vector(0), ("expects 0 bytes", "rank 0 sent 1600000 bytes")),
    ],
)
def test_a_message_that_does_not_fit_is_told_and_the_next_one_comes(
    sent: Tensor, wanted: Tensor, says: Sequence[str]
) -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        if rank_info.rank == 0:
            first, second = group.send(sent, 1), group.send(torch.ones(3), 1)
            first.wait()
            second.wait()
            return None
        answer = told(group.receive(wanted.clone(), 0).wait)
        behind = torch.zeros(3)
        group.receive(behind, 0).wait()
        return [answer, behind.tolist()]

    (kind, text), behind = run(2, work)[1]
    assert kind == "Mismatch"
    assert all(part in text for part in says)
    assert behind == [1, 1, 1]


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    def work(rank_info: RankInfo) -> Result:
        group, end = meet(rank_info, "group"), meet(rank_info, "end")
        group.timeout_s = 1.0  # all have met, which may take longer than this
        answers = [told(group.barrier)] if rank_info.rank != 1 else []
        if rank_info.rank == 0:
            lonely = meet(rank_info, "pair", (0, 1))
            lonely.timeout_s = 0.3
            answers.append(told(lonely.receive(vector(), 1).wait))
        elif rank_info.rank == 1:
            lonely = meet(rank_info, "pair", (0, 1))
        end.barrier()
        return answers

    first, _, third = run(3, work)
    assert [kind for kind, _ in (*first, *third)] == [TimedOut.__name__] * 3
    assert first[0][1] == "rank 0: timed out: barrier did not finish within 1 s (rank 1 did not come)"
    assert "rank 1 did not come" in third[0][1]
    assert "recv(source=1, tag=0)" in first[1][1]


@pytest.mark.parametrize("how", ["leaves", "ends"])
def test_who_waits_for_a_rank_that_is_gone_is_told_which(how: str) -> None:
    def work(rank_info: RankInfo) -> Result:
        group, other = meet(rank_info, "group"), meet(rank_info, "other")
        if rank_info.rank == 1:
            if how == "leaves":
                group.leave()
                other.leave()
            return None
        return [told(lambda: group.all_reduce(vector())), told(other.receive(vector(), 1).wait)]

    for rank, answers in enumerate(run(3, work)):
        for kind, text in answers or []:
            assert kind == PeerLost.__name__
            assert text.startswith(f"rank {rank}: ")
            assert "rank 1 is lost" in text


def test_a_message_sent_before_its_sender_ended_still_comes() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        if rank_info.rank == 0:
            group.send(torch.ones(1000), 1).wait()
            group.leave()
            return None
        tensor = torch.zeros(1000)
        group.receive(tensor, 0).wait()
        return float(tensor.sum())

    assert run(2, work)[1] == 1000


# ------------------------------------------------------------------------------------------ members that are none


def test_memory_goes_back_once_all_have_closed() -> None:
    def work(rank_info: RankInfo) -> Result:
        used = []
        for i in range(12):
            group = meet(rank_info, f"{i}", block_bytes=64 << 10)
            group.all_reduce(vector(100_000))
            used.append(group.arena.used_bytes)
            del group
        return used

    for first, *later in run(3, work):
        assert max(later) <= 3 * first  # a rank that makes its third group has closed its first


@pytest.mark.parametrize("error", [OSError(12, "no room for the arena"), MemoryError("no room for the arena")])
def test_where_one_rank_has_no_memory_all_are_told(error: Exception) -> None:
    def refuse(*_: Any) -> None:
        raise error

    def work(rank_info: RankInfo) -> Result:
        kept = Arena.allocate
        if rank_info.rank == 1:
            Arena.allocate = refuse  # type: ignore[method-assign, assignment]
        with pytest.raises(Unreachable) as told_by:
            meet(rank_info, "group")
        Arena.allocate = kept  # type: ignore[method-assign]
        used = own_arena().used_bytes
        meet(rank_info, "again").barrier()
        return [str(told_by.value), used]

    for text, used in run(3, work):
        assert text.startswith("rank 1: ")
        assert "no room for the arena" in text
        assert used == 0


def test_a_forked_child_is_no_member() -> None:
    def work(rank_info: RankInfo) -> Result:
        group = meet(rank_info, "group")
        quick = group.quick()
        acts: list[Callable[[], object]] = [
            group.barrier,
            group.issue,
            lambda: group.send(vector(), 1 - group.rank),
            lambda: quick.barrier(1.0),
            lambda: quick.all_reduce(0, 0, vector().data_ptr(), 4, 0, 1.0),
        ]
        pid = os.fork()
        if not pid:
            refused = 0
            for act in acts:
                try:
                    act()
                except RuntimeError as error:
                    refused += f"this is a forked child of rank {rank_info.rank}: it is not a member" in str(error)
            os._exit(refused)
        refused = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        return [refused, tensor.tolist()]

    assert run(2, work) == [[5, [2, 2, 2]]] * 2
