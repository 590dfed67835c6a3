"""The backend "polytempo": every collective of torch.distributed, with gloo's values in the same processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.interop.backend.work import Lane, Queued
from process.backend_group import run
from process.collective_calls import SIZE, TABLE, WITHOUT_GLOO, attempted

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, str]]:
    """Each rank's errors in each call of the tables."""

    def work(rank_info: RankInfo) -> Result:
        gloo = dist.new_group(backend="gloo")
        mirrored = {
            name: attempted(call, dist.group.WORLD, rank_info.rank, call(gloo, rank_info.rank))
            for name, call in TABLE.items()
        }
        return mirrored | {
            name: attempted(call, dist.group.WORLD, rank_info.rank, expected(rank_info.rank))
            for name, (call, expected) in WITHOUT_GLOO.items()
        }

    return run(SIZE, work)


@pytest.mark.parametrize("name", [*TABLE, *WITHOUT_GLOO])
def test_a_collective_has_gloos_values(name: str, wrong: list[dict[str, str]]) -> None:
    assert [rank[name] for rank in wrong] == [""] * SIZE


def test_what_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    def work(rank_info: RankInfo) -> Result:
        refused = []
        for tensor, op in (
            (torch.zeros(2), ReduceOp.BAND),
            (torch.zeros(2, dtype=torch.bool), ReduceOp.AVG),
            (torch.zeros(2, dtype=torch.float8_e4m3fn), ReduceOp.SUM),
        ):
            try:
                dist.all_reduce(tensor, op)
            except ValueError as error:
                refused.append(str(error))
        dist.barrier()
        return refused

    band, average, small = run(2, work)[0]
    assert band == "band is for integers and bool, and this tensor is torch.float32"
    assert average == "average is for numbers, and this tensor is torch.bool; convert it to a float first"
    assert "cannot compute sum of torch.float8_e4m3fn" in small


def test_sub_groups_count_their_own_ranks() -> None:
    def work(rank_info: RankInfo) -> Result:
        groups = {members: dist.new_group(list(members)) for members in ((0, 2), (2, 1), (1,))}
        found: list[Any] = []
        for members, group in groups.items():
            if rank_info.rank not in members:
                continue
            tensor = torch.tensor([float(rank_info.rank)])
            dist.all_reduce(tensor, group=group)
            spread = torch.tensor([rank_info.rank])
            dist.broadcast(spread, src=members[-1], group=group)
            gathered: list[Any] = [None] * len(members)
            dist.all_gather_object(gathered, rank_info.rank, group=group)
            if len(members) == 2:
                passed = torch.tensor([rank_info.rank])
                if rank_info.rank == members[0]:
                    dist.send(passed, members[1], group=group)
                else:
                    dist.recv(passed, members[0], group=group)
                gathered.append(int(passed))
            found.append([float(tensor), int(spread), gathered])
        return found

    assert run(3, work) == [
        [[2.0, 2, [0, 2, 0]]],
        [[3.0, 1, [1, 2, 2]], [1.0, 1, [1]]],
        [[2.0, 2, [0, 2, 0]], [3.0, 1, [1, 2, 2]]],
    ]


# ---------------------------------------------------------------------------------------------------- several together


def test_async_collectives_run_in_the_order_of_issue_whatever_is_waited_for_first() -> None:
    def work(rank_info: RankInfo) -> Result:
        sums = [torch.full((1 + 700 * i,), float(rank_info.rank + i)) for i in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
        spread = torch.full((5,), float(rank_info.rank))
        last = dist.broadcast(spread, src=1, async_op=True)
        doubled = works[3].get_future().then(lambda future: future.value()[0] * 2).wait()
        last.wait()
        for each in reversed(works):
            each.wait()
        right = all(bool((tensor == 3 + 3 * i).all()) for i, tensor in enumerate(sums))
        done = all(each.is_completed() and each.is_success() for each in works)
        return [right, done, bool((spread == 1).all()), bool((doubled == 24).all()), works[5].result()[0] is sums[5]]

    assert run(3, work) == [[True] * 5] * 3


def test_groups_may_be_used_in_opposite_orders_when_something_is_in_flight() -> None:
    def work(rank_info: RankInfo) -> Result:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        first, second = groups if rank_info.rank == 0 else groups[::-1]
        tensors = [torch.ones(50_000) for _ in range(4)]
        for _ in range(30):
            works = [
                dist.all_reduce(tensor.fill_(1), group=group, async_op=True)
                for tensor, group in zip(tensors, (first, second) * 2, strict=True)
            ]
            for each in reversed(works):
                each.wait()
            waiting = dist.all_reduce(tensors[0], group=first, async_op=True)
            dist.all_reduce(tensors[1], group=second)
            waiting.wait()
        return [float(tensor.mean()) for tensor in tensors]

    assert run(2, work) == [[4, 4, 2, 2]] * 2


def test_a_lanes_thread_leaves_the_number_of_threads_as_it_is() -> None:
    def work(rank_info: RankInfo) -> Result:
        torch.set_num_threads(3)
        lane, served = Lane(lambda: False), threading.Event()
        lane.issue(served.set, None, blocking=False)
        served.wait()
        lane.close()
        later: list[int] = []
        asking = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        asking.start()
        asking.join()
        return later

    assert launch(work, 1, threads=1, timeout_s=40) == [[3]]


def test_a_call_that_control_c_interrupts_counts_as_made() -> None:
    made: list[str] = []

    def interrupted() -> None:
        made.append("first")
        raise KeyboardInterrupt

    lane = Lane(lambda: False)
    first = Queued(lane, interrupted, None)
    second = Queued(lane, lambda: made.append("second"), None)
    lane._queue.extend([first, second])  # not issued: the lane's thread would take them
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            first.wait()
    assert first.is_completed()
    assert not first.is_success()
    assert second.wait()
    assert first.get_future().done()
    assert (made, list(lane._queue)) == (["first", "second"], [])


# ---------------------------------------------------------------------------------------------------------- messages


def test_a_large_message_goes_out_while_its_sender_waits_for_something_else() -> None:
    def work(rank_info: RankInfo) -> Result:
        tensor = torch.full((2 << 20,), float(rank_info.rank + 1))
        if rank_info.rank == 0:
            sent = dist.isend(tensor, 1)
            dist.barrier()
            sent.wait()
            return sent.is_completed()
        dist.recv(tensor, 0)
        dist.barrier()
        return bool((tensor == 1).all())

    assert run(2, work) == [True, True]


def test_a_large_message_waits_for_a_receiver_that_is_busy_elsewhere() -> None:
    def work(rank_info: RankInfo) -> Result:
        tensor, total = torch.full((2 << 20,), float(rank_info.rank + 1)), torch.ones(3)
        if rank_info.rank == 0:
            sent = dist.isend(tensor, 1)
            dist.all_reduce(total)
            sent.wait()
        else:
            dist.all_reduce(total)
            received = dist.irecv(tensor, 0)
            received.wait()
        return [float(tensor.mean()), float(total.mean())]

    assert run(2, work) == [[1, 2], [1, 2]]


def test_both_may_send_before_either_receives() -> None:
    def work(rank_info: RankInfo) -> Result:
        mine, theirs = torch.full((1 << 20,), float(rank_info.rank)), torch.zeros(1 << 20)
        received = dist.irecv(theirs, 1 - rank_info.rank)
        sent = dist.isend(mine, 1 - rank_info.rank)
        sent.wait()
        received.wait()
        return [float(theirs.mean()), received._source_rank()]

    assert run(2, work) == [[1, 1], [0, 0]]
