"""Branches on threads: the tasks of a model, their simultaneous runs, and refusals."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from branch_models import Towers, trained
from polytempo.bench.thread_grid import GridSetting, grid
from polytempo.partition.branches import ThreadedModel, Threads
from polytempo.partition.branches.pool import Pool, PoolWork
from polytempo.spec.run_options import RunOptions

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
PATIENCE_S = 20


def threaded(model: nn.Module, inter: int = 2) -> ThreadedModel:
    return pt.partition.threads(inter=inter, least_operations=0).apply(model)


def named(handle: ThreadedModel) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tasks of each region: first and last operation, and the tasks before it."""
    assert handle.parts is not None
    return [[(task.name, task.needs) for task in region.tasks] for region in handle.parts.regions]


def test_the_tasks_of_two_towers() -> None:
    """A tower is one task; operations before or behind all towers are none."""
    model = Towers()
    handle = threaded(model)
    model(X)
    assert named(handle) == [[("towers.0.0 … towers.0.3", ()), ("towers.1.0 … towers.1.3", ())]]


def test_dropouts_draw_in_the_order_of_the_program() -> None:
    """So the second tower's dropout waits for the first one's, but the operations before it do not. In evaluation
    none draws."""
    model = Towers(dropout=0.5)
    handle = threaded(model)
    model(X)
    assert named(handle) == [
        [
            *(("towers.0.0 … towers.0.2", ()), ("towers.0.3", (0,))),
            *(("towers.1.0 … towers.1.1", ()), ("towers.1.2 … towers.1.3", (0, 2))),
        ]
    ]
    model.eval()(X)
    assert named(handle) == [[("towers.0.0 … towers.0.3", ()), ("towers.1.0 … towers.1.3", ())]]


def test_a_region_must_be_worth_its_threads() -> None:
    model = Towers()
    handle = pt.partition.threads(inter=2).apply(model)
    with pytest.warns(UserWarning, match=r"Towers has no branches that are worth .*inter=2 is the same as inter=1"):
        model(X)
    assert named(handle) == []


def test_branches_run_at_the_same_time() -> None:
    """Forward and backward: each tower waits in its own thread until the other one has come as far."""
    model = Towers()
    meeting = threading.Barrier(2)
    idents: dict[str, set[int]] = {"forward": set(), "backward": set()}

    def met(where: str) -> Any:
        def hook(*_: Any) -> None:
            meeting.wait(PATIENCE_S)
            idents[where].add(threading.get_ident())

        return hook

    for tower in model.towers:
        tower[1].register_forward_hook(met("forward"))
        tower[1].register_full_backward_hook(met("backward"))
    threaded(model)
    model(X).sum().backward()
    assert [len(each) for each in idents.values()] == [2, 2]


class Failing(nn.Module):
    """Fails once, forward or backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (samples, features)."""
        raise LookupError("a layer of the user's")


def test_an_error_names_its_branch() -> None:
    model = Towers()
    threaded(model)
    model(X)
    model.towers[1][1].register_forward_hook(lambda *_: Failing()(X))
    with pytest.raises(LookupError, match="a layer of the user's") as raised:
        model(X)
    assert raised.value.__notes__ == [
        "raised in the branch towers.1.0 … towers.1.3 of a model with branches on threads"
    ]
    model.towers[1][1]._forward_hooks.clear()
    model(X).sum().backward()


def test_a_failing_backward_names_its_branch() -> None:
    model = Towers()

    def fail(*_: Any) -> None:
        raise LookupError("a hook of the user's")

    model.towers[0][3].register_full_backward_hook(fail)
    threaded(model)
    with pytest.raises(LookupError, match="a hook of the user's") as raised:
        model(X).sum().backward()
    assert "towers.0.0 … towers.0.3" in raised.value.__notes__[0]


class Deciding(Towers):
    """Decides by values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_what_cannot_be_traced_is_refused_with_its_line() -> None:
    model = Deciding()
    threaded(model)
    with pytest.raises(ValueError, match=r"test_branches\.py:\d+: .*x\.sum\(\) > 0.* or leave out inter"):
        model(X)


def test_numbers_and_models_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="inter is a number of threads, at least 1, got 0"):
        pt.partition.threads(inter=0)
    with pytest.raises(ValueError, match="intra is a number of threads"):
        pt.partition.threads(intra=-1)
    model = Towers()
    threaded(model)
    with pytest.raises(ValueError, match="the forward of this Towers has been replaced already"):
        threaded(model)


def test_a_second_backward_and_second_derivatives() -> None:
    model = Towers()
    plain = copy.deepcopy(model)
    threaded(model)
    for each in (model, plain):
        loss = each(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    answer = model(X)
    answer.backward(torch.ones_like(answer), inputs=[model.towers[0][0].weight])
    with pytest.raises(RuntimeError, match="second time"):
        answer.backward(torch.ones_like(answer), inputs=[model.towers[0][0].weight])
    with pytest.raises(RuntimeError, match="second derivative of a model with branches on threads"):
        torch.autograd.grad(model(X).sum(), model.embed.weight, create_graph=True)


def test_hooks_that_a_graph_does_not_have_are_called() -> None:
    """Hooks of containers and of gradients; such a call runs without the graph."""
    model = Towers()
    seen: list[str] = []
    threaded(model)
    model(X)
    model.towers[0].register_forward_hook(lambda *_: seen.append("tower"))
    model.embed.weight.register_hook(lambda _: seen.append("gradient"))
    model(X).sum().backward()
    assert seen == ["tower", "gradient"]


def test_copies_and_files() -> None:
    """A copy has branches of its own tensors; a file has a plain model; `remove` makes one."""
    model = Towers()
    handle = threaded(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.scores.weight.zero_()
    assert not torch.equal(model(X), twin(X))
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert torch.equal(loaded(X), model(X))
    assert type(loaded.forward.__func__) is type(Towers.forward)
    handle.remove()
    assert "forward" not in vars(model)


def test_attached_models_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are themselves again after `detach`."""
    found = []
    monkeypatch.setattr(Threads, "least_operations", 0)
    monkeypatch.setattr(Threads.__init__, "__defaults__", (None, 1, 0))
    for inter in (1, 2):
        torch.manual_seed(3)
        model = Towers(dropout=0.2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = pt.attach(model, optimizer, pt.strategies.local_sgd(period=2), inter_threads=inter)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
        assert ("forward" in vars(model)) == (inter > 1)
        handle.detach()
        assert "forward" not in vars(model)
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*found)


def test_options_of_a_run() -> None:
    assert RunOptions(inter_threads=2).threads == 1
    with pytest.raises(ValueError, match="inter_threads=0: must be a whole number >= 1"):
        RunOptions(inter_threads=0)
    with pytest.raises(ValueError, match=r"cuts the model into stages.*leave out inter_threads=2"):
        pt.run(pt.jobs.find("digits"), pt.parse_strategy("gpipe(stages=2)"), 2, steps=1, inter_threads=2)


def test_the_grid_of_four_cores() -> None:
    rows = [tuple(each) for each in grid(4, 2)]
    assert rows == [
        *((1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (1, 4, 1)),
        *((2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)),
    ]
    assert [tuple(each) for each in grid(3, 1)] == [(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 1), (3, 1, 1)]
    assert GridSetting(2, 1, 2).arguments == "--workers 2 --threads 1 --inter-threads 2"


def test_a_pool_begins_the_longest_way_first_and_nothing_after_an_error() -> None:
    done: list[str] = []

    def call(name: str) -> Any:
        def work() -> None:
            done.append(name)
            if name == "bad":
                raise LookupError(name)

        return work

    pool = Pool(1)
    pool.perform(
        [
            PoolWork(call("a"), (), 1),
            PoolWork(call("b"), (), 3),
            PoolWork(call("c"), (0,), 2),
            PoolWork(call("d"), (), 2),
        ]
    )
    assert done == ["b", "d", "a", "c"]
    done.clear()
    with pytest.raises(LookupError, match="bad"):
        pool.perform([PoolWork(call("bad"), (), 2), PoolWork(call("never"), (), 1), PoolWork(call("after"), (0,), 9)])
    assert done == ["bad"]


def test_a_busy_pool_leaves_the_caller_to_itself() -> None:
    """A call from another thread, or from within a task, waits for none."""
    pool, done = Pool(2), []
    inner = [PoolWork(lambda: done.append(threading.get_ident()), (), 1)] * 2
    pool.perform([PoolWork(lambda: pool.perform(inner), (), 1)])
    assert len(done) == 2
    assert len(set(done)) == 1


def test_the_first_call_leaves_the_model_as_it_was() -> None:
    """Modes, buffers and the generator: tracing leaves them as they are."""
    model = nn.Sequential(nn.BatchNorm1d(8), Towers(dropout=0.5))
    model[1].eval()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        threaded(model)
        torch.manual_seed(0)
        one = trained(model, X)
        torch.manual_seed(0)
        other = trained(plain, X)
    assert [each.training for each in model.modules()] == [each.training for each in plain.modules()]
    assert all(torch.equal(one[name], other[name]) for name in ("random", "0.running_mean", "0.num_batches_tracked"))
