"""The step on one copy of the weights: its results, bit by bit, and the memory after a killed rank."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from native import twin
from polytempo.core import Mismatch, PeerLost
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.fork import fork
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.native.group import Group
from polytempo.native.kernels.step import RULES, Hyper, Item, StepPlan

pytestmark = pytest.mark.process

SEED = 20261120
TIMEOUT_S = 20.0
NUM_KILLS = 50
SHAPES = ((90, 101), (7,), (), (0, 3), (20_000,))

HYPERS = {
    "sgd": twin.TwinHyper(lr=0.1, weight_decay=0.01),
    "momentum": twin.TwinHyper(lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01, maximize=True),
    "nesterov": twin.TwinHyper(lr=0.05, momentum=0.9, nesterov=True),
    "adam": twin.TwinHyper(rule="adam", lr=0.003, weight_decay=0.01),
    "adamw": twin.TwinHyper(rule="adamw", lr=0.003, weight_decay=0.01),
    "adagrad": twin.TwinHyper(rule="adagrad", lr=0.05, eps=1e-10, lr_decay=0.01),
}


def moments(hyper: twin.TwinHyper) -> tuple[bool, bool]:
    return hyper.rule in ("adam", "adamw") or hyper.momentum != 0, hyper.rule != "sgd"


def structure(hyper: twin.TwinHyper) -> ctypes.Array[Hyper]:
    values = dataclasses.asdict(hyper) | {"rule": RULES[hyper.rule], "step": 0, "first": 0}
    return (Hyper * 1)(Hyper(**values))


def tensors(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def gradients(rank: int, step: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def in_group(size: int, folder: Path, work: Callable[[Group], Result]) -> list[Any]:
    """The value of `work(group)` on each of `size` processes."""

    def serve(rank_info: RankInfo) -> Result:
        return work(Group(FileStore(str(folder / "store"), size), rank_info.rank, size, timeout_s=TIMEOUT_S))

    return launch(serve, size, threads=1, timeout_s=60)


class Reference:
    """The same steps by the twin, with a copy of everything, each tensor flat."""

    def __init__(self, hyper: twin.TwinHyper, start: Sequence[Tensor]) -> None:
        self.hyper, self.p = hyper, [t.reshape(-1).clone() for t in start]
        has_first, has_second = moments(hyper)
        self.m = [torch.zeros_like(t) if has_first else None for t in self.p]
        self.v = [torch.zeros_like(t) if has_second else None for t in self.p]
        self.steps = [0] * len(start)

    def step(self, given: Sequence[Sequence[Tensor | None]], weights: Sequence[float]) -> None:
        """One step on `given[rank][tensor]`."""
        for i, p in enumerate(self.p):
            mine = [None if g is None else g.reshape(-1) for g in (rank[i] for rank in given)]
            if all(g is None for g in mine):
                continue
            self.steps[i] += 1
            hyper = dataclasses.replace(self.hyper, step=self.steps[i], first=self.steps[i] == 1)
            factors = torch.tensor(weights, dtype=p.dtype)
            self.p[i], self.m[i], self.v[i] = twin.update(hyper, mine, factors, p, self.m[i], self.v[i])

    def digest(self) -> str:
        return digest(self.p, self.m, self.v)


def digest(*groups: Sequence[Tensor | None]) -> str:
    """One hash of all the bits."""
    whole = hashlib.sha256()
    for group in groups:
        for tensor in group:
            if tensor is not None and tensor.numel():
                whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", HYPERS)
def test_a_step_has_the_twins_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Three ranks of uneven weight; tensor 1 has no gradient on rank 1, and on no rank in step 1."""
    hyper, weights, num_steps = HYPERS[name], [0.5, 0.3, 0.2], 4

    def given(rank: int, step: int) -> list[Tensor | None]:
        drawn: list[Tensor | None] = list(gradients(rank, step, dtype))
        if rank == 1 or step == 1:
            drawn[1] = None
        return drawn

    def work(group: Group) -> Result:
        plan = StepPlan(group, [Item(t) for t in tensors(dtype)], moments(hyper))
        for step in range(num_steps):
            for i, gradient in enumerate(given(group.rank, step)):
                plan.used[i] = gradient is not None
                place = plan.gradients[i]
                if gradient is not None and place is not None:
                    place.copy_(gradient)
            plan.step(structure(hyper), weights[group.rank])
        group.barrier()
        return [digest(plan.parameters, plan.first, plan.second), plan.steps.tolist()]

    reference = Reference(hyper, tensors(dtype))
    for step in range(num_steps):
        reference.step([given(rank, step) for rank in range(3)], weights)
    assert in_group(3, tmp_path, work) == [[reference.digest(), [4.0, 3.0, 4.0, 4.0, 4.0]]] * 3


def test_rows_are_added_up_and_others_left_alone(tmp_path: Path) -> None:
    """Rank 0 names row 2 twice, both name row 5. By hand: θ -= 0.5 (½ Σ), in exact numbers."""
    rows = {0: ([2, 5, 2], [1.0, 2.0, 4.0]), 1: ([5], [8.0])}

    def work(group: Group) -> Result:
        plan = StepPlan(group, [Item(torch.zeros(40, 3), by_rows=True)], (False, False))
        plan.used[0] = 1
        numbers, values = rows[group.rank]
        plan.set_rows(0, torch.tensor(numbers), torch.tensor(values)[:, None].repeat(1, 3))
        norm = plan.norm(0.5)
        plan.step(structure(twin.TwinHyper(lr=0.5)), 0.5)
        table = plan.parameters[0]
        assert table is not None
        changed = {int(row): table[row].tolist() for row in table.any(dim=1).nonzero().flatten()}
        return [norm, sorted(changed.items())]

    expected = [(3 * (2.5**2 + 5.0**2)) ** 0.5, [[2, [-1.25] * 3], [5, [-2.5] * 3]]]
    assert json.loads(json.dumps(in_group(2, tmp_path, work))) == [expected] * 2


def test_the_norm_is_that_of_the_weighted_sum(tmp_path: Path) -> None:
    weights = [0.7, 0.3]

    def work(group: Group) -> Result:
        plan = StepPlan(group, [Item(t) for t in tensors(torch.float32)], (False, False))
        for i, gradient in enumerate(gradients(group.rank, 0, torch.float32)):
            place = plan.gradients[i]
            assert place is not None
            place.copy_(gradient)
            plan.used[i] = 1
        return plan.norm(weights[group.rank])

    drawn = [gradients(rank, 0, torch.float32) for rank in range(2)]
    total = sum(float((0.7 * a.double() + 0.3 * b.double()).square().sum()) for a, b in zip(*drawn, strict=True))
    first, second = in_group(2, tmp_path, work)
    assert first == second
    assert abs(first - total**0.5) < 1e-6 * total**0.5


def test_ranks_that_disagree_are_told_before_anything_changes(tmp_path: Path) -> None:
    def work(group: Group) -> Result:
        plan = StepPlan(group, [Item(torch.ones(100))], (False, False))
        plan.used[0] = 1
        with pytest.raises(Mismatch, match="ranks do different things"):
            plan.step(structure(twin.TwinHyper(lr=0.1 + group.rank)), 0.5)
        table = plan.parameters[0]
        assert table is not None
        return table.tolist()

    assert in_group(2, tmp_path, work) == [[1.0] * 100] * 2


# ------------------------------------------------------------------------------------------------------ killed ranks

KILLED = {"adam": ((40_000,), (33,), (60, 50), (600, 16)), "adagrad": ((30_000,), (33,), (60, 50), (600, 16))}
"""The last tensor is a table with gradients by rows, under adagrad."""
SIZE = 3
CYCLE = 4
"""Gradients come again after so many steps."""


def killed_gradients(rule: str, rank: int, step: int) -> list[Tensor]:
    """Only some rows of the table have a gradient under adagrad."""
    drawn = gradients(rank, step % CYCLE, torch.float32, KILLED[rule])
    if rule == "adagrad":
        drawn[-1][torch.arange(600) % 3 == rank] = 0
    return drawn


def train_until_somebody_dies(rule: str, group: Group, ready: int, answer: Path) -> None:
    """Steps without end; the others' death ends them. Returns this rank's view after that."""
    items = [Item(t) for t in tensors(torch.float32, KILLED[rule])]
    if rule == "adagrad":
        items[-1] = items[-1]._replace(by_rows=True)
    plan = StepPlan(group, items, moments(HYPERS[rule]))
    drawn = [killed_gradients(rule, group.rank, step) for step in range(CYCLE)]
    touched = (torch.arange(600) % 3 != group.rank).nonzero().flatten()
    plan.used[:] = bytes([1] * len(items))
    os.write(ready, b"!")
    step = 0
    try:
        while True:
            for place, gradient in zip(plan.gradients, drawn[step % CYCLE], strict=True):
                if place is not None:
                    place.copy_(gradient)
            if rule == "adagrad":
                plan.set_rows(len(items) - 1, touched, drawn[step % CYCLE][-1][touched])
            plan.step(structure(HYPERS[rule]), 1 / SIZE)
            step += 1
    except PeerLost:
        completed = int(plan.steps[0])
        digests = digest(plan.parameters, plan.first, plan.second)
        answer.write_text(json.dumps([completed, completed > step, digests]))
    os._exit(0)


def killed_run(rule: str, chance: random.Random, folder: Path) -> list[tuple[int, bool, str]]:
    """The survivors' weights after a run with one or two of three ranks killed, somewhere in their steps."""
    folder.mkdir()
    reader, writer = os.pipe()

    def child(rank: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(1)
            group = Group(FileStore(str(folder / "store"), SIZE), rank, SIZE, timeout_s=TIMEOUT_S)
            train_until_somebody_dies(rule, group, writer, folder / str(rank))

        return run

    children = [fork(child(rank)) for rank in range(SIZE)]
    os.close(writer)
    ready = 0
    while ready < SIZE:
        ready += len(os.read(reader, 1)) or SIZE  # the pipe's end: some rank failed, and says so below
    os.close(reader)
    victims = chance.sample(range(SIZE), chance.choice([1, 1, 2]))
    for victim in victims:
        until_s = time.perf_counter() + chance.uniform(0, 0.004)
        while time.perf_counter() < until_s:  # the moment of the kill is the case: it is drawn, nothing is awaited
            pass
        os.kill(children[victim], signal.SIGKILL)
    ends = [os.waitpid(process, 0)[1] for process in children]
    survivors = [rank for rank in range(SIZE) if rank not in victims]
    assert all(ends[rank] == 0 for rank in survivors), ends
    return [tuple(json.loads((folder / str(rank)).read_text())) for rank in survivors]


@pytest.mark.parametrize("rule", KILLED)
def test_who_survives_a_kill_has_the_weights_after_a_whole_number_of_steps(rule: str, tmp_path: Path) -> None:
    """The bits equal a run without kills. The seed decides who is killed, and how long after the start."""
    reference = Reference(HYPERS[rule], tensors(torch.float32, KILLED[rule]))
    digests = [reference.digest()]
    recovered = 0
    for number in range(NUM_KILLS):
        print(f"seed {SEED + number}")
        outcomes = killed_run(rule, random.Random(SEED + number), tmp_path / str(number))
        steps = outcomes[0][0]
        while len(digests) <= steps:
            step = len(digests) - 1
            reference.step([killed_gradients(rule, rank, step) for rank in range(SIZE)], [1 / SIZE] * SIZE)
            digests.append(reference.digest())
        assert [(made, found) for made, _, found in outcomes] == [(steps, digests[steps])] * len(outcomes)
        recovered += outcomes[0][1]
    print(f"{recovered} of {NUM_KILLS} kills hit a step that the others completed")
    assert 0 < recovered < NUM_KILLS


# -------------------------------------------------------------------------------------- a death in the middle of a copy

TORN = [(block, page) for block in ("parameters", "first", "second") for page in (0, 1, 5)]
"""The place of rank 1's death: it copies a record of `block` into place and comes to this page of its slice. Random
kills seldom hit that moment: the copy shows a part of a record, which only the log can mend."""
PAGE_BYTES = 4096
WHOLE_STEPS = 2


def die_at(tensor: Tensor, page: int) -> None:
    """Let this process, and only this one, end when it writes to a page of the tensor's last third."""
    first = -(-(tensor.data_ptr() + tensor.nbytes * 2 // 3) // PAGE_BYTES) * PAGE_BYTES
    read_only = ctypes.c_int(1)
    faulthandler.disable()
    protected = ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + page * PAGE_BYTES), ctypes.c_size_t(1), read_only)
    assert protected == 0


@pytest.mark.parametrize(("block", "page"), TORN)
def test_a_record_that_was_copied_in_part_is_copied_again(block: str, page: int, tmp_path: Path) -> None:
    shapes = KILLED["adam"]
    hyper = HYPERS["adam"]

    def child(rank: int) -> Callable[[], None]:
        def run() -> None:
            group = Group(FileStore(str(tmp_path / "store"), 2), rank, 2, timeout_s=TIMEOUT_S)
            plan = StepPlan(group, [Item(t) for t in tensors(torch.float32, shapes)], moments(hyper))
            plan.used[:] = bytes([1] * len(shapes))
            for step in range(WHOLE_STEPS + 1):
                for place, gradient in zip(plan.gradients, killed_gradients("adam", rank, step), strict=True):
                    assert place is not None
                    place.copy_(gradient)
                if step == WHOLE_STEPS and rank == 1:
                    die_at(getattr(plan, block)[0], page)
                if step == WHOLE_STEPS and rank == 0:
                    with pytest.raises(PeerLost):
                        plan.step(structure(hyper), 0.5)
                else:
                    plan.step(structure(hyper), 0.5)
            found = digest(plan.parameters, plan.first, plan.second)
            (tmp_path / "found").write_text(json.dumps([plan.steps[0].item(), found]))
            os._exit(0)

        return run

    survivor, victim = (fork(child(rank)) for rank in range(2))
    assert os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == -signal.SIGSEGV
    assert os.waitpid(survivor, 0)[1] == 0
    reference = Reference(hyper, tensors(torch.float32, shapes))
    for step in range(WHOLE_STEPS + 1):
        reference.step([killed_gradients("adam", rank, step) for rank in range(2)], [0.5, 0.5])
    assert json.loads((tmp_path / "found").read_text()) == [WHOLE_STEPS + 1, reference.digest()]


# -------------------------------------------------------------------------------- a rank that leaves, and yet goes on


def call_at(tensor: Tensor, call: Callable[[], None]) -> object:
    """Let this process run `call` when it first writes to the tensor's second page. Keep the answer."""
    libc = ctypes.CDLL(None)
    page = ctypes.c_void_p(-(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES)

    def handler(_: int) -> None:
        call()
        libc.mprotect(page, ctypes.c_size_t(PAGE_BYTES), ctypes.c_int(3))  # the write is tried again

    kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    faulthandler.disable()
    libc.signal.restype = ctypes.c_void_p
    libc.signal(ctypes.c_int(signal.SIGSEGV), kept)
    assert libc.mprotect(page, ctypes.c_size_t(PAGE_BYTES), ctypes.c_int(1)) == 0
    return kept


def test_nobody_takes_the_place_of_a_rank_that_left_but_lives(tmp_path: Path) -> None:
    """Two writers of one part would be worse than none. Rank 0 leaves in mid-step; rank 1 waits for it until late."""
    reader, writer = os.pipe()
    size = 40_000

    def child(rank: int) -> Callable[[], None]:
        def run() -> None:
            group = Group(FileStore(str(tmp_path / "store"), 2), rank, 2, timeout_s=TIMEOUT_S)
            plan = StepPlan(group, [Item(torch.zeros(size))], (False, False))
            plan.used[:] = b"\1"
            gradient, parameter = plan.gradients[0], plan.parameters[0]
            assert gradient is not None
            assert parameter is not None
            gradient.fill_(1)
            hypers = structure(twin.TwinHyper(lr=1.0))

            def leave() -> None:
                group._library.pt_group_leave(group._handle)
                os.read(reader, 1)

            if rank == 0:
                os.close(writer)  # so that the end of rank 1 ends the wait for it
                kept = call_at(parameter, leave)
                plan.step(hypers, 1.0)
                assert kept
                assert plan.steps.tolist() == [1]
                assert bool((parameter[: size // 2] == -2).all())
            else:
                with pytest.raises(PeerLost):
                    plan.step(hypers, 1.0, timeout_s=1.0)
                assert plan.steps.tolist() == [0]
                os.write(writer, b"!")
            os._exit(0)

        return run

    children = [fork(child(rank)) for rank in range(2)]
    os.close(reader)
    os.close(writer)
    assert [os.waitpid(process, 0)[1] for process in children] == [0, 0]
