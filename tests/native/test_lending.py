"""Tensors that a neighbour reads in place: whole, never overwritten while they are used, and used again afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from polytempo.core.errors import Mismatch, PeerLost
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.native import lending
from polytempo.native.group import Group
from polytempo.native.lending import borrowed, empty_note, lendable, lent

pytestmark = pytest.mark.process

COUNT = lending.LEAST_BYTES // 4
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def _meet(rank_info: RankInfo) -> Group:
    store = FileStore(str(rank_info.rendezvous / "store"), -1)
    return Group(store, rank_info.rank, rank_info.size, timeout_s=20)


def _lend(group: Group, tensor: Tensor) -> None:
    group.send(lent(group, tensor, 1), 1).wait()


def _borrow(group: Group, like: Tensor) -> Tensor:
    note = empty_note()
    group.receive(note, 0).wait()
    return borrowed(group, note, like, 0)


def _values(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(COUNT / 64, 64)."""
    return (torch.arange(COUNT) % 251 + number).reshape(-1, 64).to(dtype)


def _num_slots() -> int:
    return len(lending._own_slots().slots)


def test_what_is_borrowed_has_the_senders_bits_in_the_senders_memory() -> None:
    def work(rank_info: RankInfo) -> bool:
        group = _meet(rank_info)
        for number, dtype in enumerate(DTYPES):
            sent = _values(number, dtype).repeat(8 // dtype.itemsize + 1, 1).t()  # not contiguous
            if group.rank == 0:
                expected = sent.clone()
                _lend(group, sent)
                sent.zero_()  # it is the sender's again
                group.barrier()
            else:
                got = _borrow(group, sent)
                group.barrier()
                expected = sent
                window = group.windows[0]
                assert window is not None
                assert window.base <= got.data_ptr() < window.base + window.num_bytes
                assert torch.equal(got, expected)
                assert got.data_ptr() % 64 == 0
            group.barrier()
        return True

    assert launch(work, 2, threads=1) == [True, True]


def test_a_slot_is_written_again_only_after_the_last_use() -> None:
    def work(rank_info: RankInfo) -> list[int]:
        group = _meet(rank_info)
        counts = []
        held: list[Tensor] = []
        for number in range(12):
            if group.rank == 0:
                _lend(group, _values(number))
                counts.append(_num_slots())
            else:
                held.append(_borrow(group, _values(0)).view(-1)[1:])  # a view holds it, too
                if number >= 3:
                    held.pop(0)
                for age, tensor in enumerate(reversed(held)):
                    assert torch.equal(tensor, _values(number - age).view(-1)[1:])
            group.barrier()
        return counts

    counts, _ = launch(work, 2, threads=1)
    assert counts == [1, 2, 3, 4, *[4] * 8]


def test_a_borrowed_tensor_may_be_written_to_and_outlives_the_group() -> None:
    def work(rank_info: RankInfo) -> bool:
        group = _meet(rank_info)
        if group.rank == 0:
            _lend(group, _values(1))
            _lend(group, _values(2))
            group.barrier()
            return True
        first, second = _borrow(group, _values(0)), _borrow(group, _values(0))
        first.add_(second)
        group.barrier()
        group.leave()
        del group
        return torch.equal(first, _values(1) + _values(2))

    assert launch(work, 2, threads=1) == [True, True]


def test_other_bytes_than_expected_are_told_and_the_slot_comes_back() -> None:
    def work(rank_info: RankInfo) -> str:
        group = _meet(rank_info)
        text = ""
        if group.rank == 0:
            _lend(group, _values(1))
            group.barrier()
            _lend(group, _values(2))
            assert _num_slots() == 1
        else:
            with pytest.raises(Mismatch) as raised:
                _borrow(group, _values(0).double())
            text = str(raised.value)
            group.barrier()
            assert torch.equal(_borrow(group, _values(0)), _values(2))
        group.barrier()
        return text

    _, text = launch(work, 2, threads=1)
    assert text == f"rank 1: recv expects {8 * COUNT} bytes of float64, and rank 0 sent {4 * COUNT} bytes of float32"


def test_slots_of_a_process_that_was_killed_are_used_again(tmp_path: Path) -> None:
    def work(rank_info: RankInfo) -> None:
        group = _meet(rank_info)
        if group.rank == 1:
            held = [_borrow(group, _values(0)) for _ in range(3)]
            group.send(torch.zeros(len(held)), 0).wait()
            group.receive(torch.empty(1), 0).wait()  # for ever
        for number in range(3):
            _lend(group, _values(number))
        group.receive(torch.empty(3), 1).wait()
        window, slots = group.windows[1], lending._own_slots()
        assert window is not None
        assert not any(slot.is_free for slot in slots.slots)
        os.kill(window.address.pid, signal.SIGKILL)
        with pytest.raises(PeerLost):
            group.receive(torch.empty(1), 1).wait()
        slots._give_back_unused()
        free = sum(slot.is_free for slot in slots.slots)
        slots._turn += lending._UNUSED_TURNS
        slots._give_back_unused()
        (tmp_path / "found").write_text(f"{free} free, {len(slots.slots)} kept")

    with pytest.raises(RuntimeError, match=r"SIGKILL|signal 9"):
        launch(work, 2, threads=1)
    assert (tmp_path / "found").read_text() == "3 free, 0 kept"


def test_small_tensors_and_those_of_other_devices_are_not_lent() -> None:
    assert lendable(torch.empty(COUNT))
    assert lendable(torch.empty(()).expand(COUNT))
    assert not lendable(torch.empty(COUNT - 1))
    assert not lendable(torch.empty(COUNT, device="meta"))
