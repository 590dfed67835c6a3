"""`polytempo.horovod.torch` on real processes: its begin and end, and ranks that wait then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polytempo.horovod.torch as hvd
from horovod_checks import equal
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.horovod import run

pytestmark = pytest.mark.process


def test_run_answers_what_each_rank_returns() -> None:
    def work(base: int, *, times: int) -> tuple[int, Tensor]:
        hvd.init()
        return base + hvd.rank(), hvd.allreduce(torch.ones(2), op=hvd.Sum) * times

    found = run(work, (10,), {"times": 3}, np=2)
    assert [number for number, _ in found] == [10, 11]
    equal([tensor for _, tensor in found], [torch.full((2,), 6.0)] * 2)


def test_one_process_alone_is_a_world_of_one() -> None:
    def work() -> list[float]:
        hvd.init(process_sets="dynamic")
        hvd.barrier()
        first = hvd.allreduce(torch.ones(2))
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        return [*first.tolist(), *hvd.allgather(torch.ones(1)).tolist(), float(hvd.join())]

    assert run(work, np=1) == [[1.0, 1.0, 1.0, 0.0]]


def test_ranks_begin_again_after_they_have_shut_down() -> None:
    def work() -> list[float]:
        found = []
        for turn in range(4):
            hvd.init(process_sets=[hvd.ProcessSet([turn % 2])])
            found.append(float(hvd.allreduce(torch.ones(1) * turn, op=hvd.Sum)))
            hvd.barrier()
            hvd.shutdown()
        with pytest.raises(ValueError, match="no two sets have the same"):
            hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
        return found

    assert run(work, np=2) == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_a_communicator_names_all_ranks() -> None:
    def work() -> list[int]:
        for wrong in ([0], [1, 0], [0, 1, 2]):
            with pytest.raises(ValueError, match="is not the list of all 2 ranks"):
                hvd.init(comm=wrong)
        hvd.init(comm=[0, 1])
        return [hvd.rank(), hvd.size()]

    assert run(work, np=2) == [[0, 2], [1, 2]]


def test_before_init_every_function_says_what_to_do() -> None:
    for call in (hvd.rank, hvd.size, hvd.join, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"hvd\.init"):
            call()
    assert not hvd.is_initialized()


def test_a_rank_that_shuts_down_ends_what_waits_for_it() -> None:
    def work() -> str:
        hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
        if hvd.rank() == 1:
            hvd.shutdown()
            return ""
        try:
            hvd.allreduce(torch.ones(2), name="alone")
        except hvd.HorovodInternalError as error:
            return str(error)
        return "no error"

    found = run(work, np=3)
    assert all("rank 1 has shut down" in found[rank] for rank in (0, 2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_process_ends_is_named(victim: int) -> None:
    """The process of a returning rank ends immediately: no thread is left to say farewell."""

    def work(_: RankInfo) -> Result:
        hvd.init()
        hvd.allreduce(torch.ones(2), name="all")
        if hvd.rank() == victim:
            return ""
        try:
            hvd.allreduce(torch.ones(2), name="all")
        except hvd.HorovodInternalError as error:
            return str(error)
        return "no error"

    found = launch(work, 3, threads=1, timeout_s=60)
    assert all(f"rank {victim} is lost" in said for rank, said in enumerate(found) if rank != victim), found


def test_a_name_that_some_ranks_never_submit_ends_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "5")  # also the time that ranks have to begin

    def work() -> str:
        hvd.init()
        mine = "one" if hvd.rank() else "other"
        try:
            hvd.allreduce(torch.ones(2), name=mine)
        except hvd.HorovodInternalError as error:
            return str(error)
        return "no error"

    for said in run(work, np=2):
        assert "was submitted by ranks" in said
        assert "and not by ranks" in said
