"""Four processes as data=2 x model=2: each half of a model trains as if it were alone on two processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import polytempo as pt
from halves import MESH, STRATEGIES, half, half_job, loss, samples
from polytempo.core import Mesh, Strategy
from polytempo.engines.join.init import init
from polytempo.errors import WorkerDied
from polytempo.training.checkpoint.checkpoint_files import read_manifest, read_part
from polytempo.training.checkpoint.checkpoint_folders import latest
from polytempo.training.checkpoint.manifest import encoded
from polytempo.worlds import ProcessWorld
from process.crew import close, flat, together

pytestmark = pytest.mark.process

s = pt.strategies


def in_mesh(num_ranks: int, work: Callable[[ProcessWorld], Any], **mesh: int) -> list[Any]:
    """The value of `work(world)` on each of `num_ranks` processes in this layout."""
    return together(num_ranks, lambda world: work(init(mesh=mesh or MESH, quiet=True)))


def model_of(world: ProcessWorld) -> int:
    """This rank's half."""
    return world.port.coordinates["model"]


def trained(world: ProcessWorld, number: int, strategy: Strategy) -> list[float]:
    """The parameters of a half after two epochs of an ordinary loop."""
    net = half(number)
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
    pt.attach(net, optimizer, strategy, bucket_bytes=64)
    shard = pt.shard(samples(), batch_size=6)
    for _ in range(2):
        for inputs, targets in shard:
            optimizer.zero_grad()
            loss(net(inputs), targets).backward()
            optimizer.step()
    return flat(net)


@pytest.mark.parametrize("strategy", [*STRATEGIES, s.sync_sgd()], ids=str)
def test_each_half_trains_as_if_it_were_alone(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> list[float]:
        return trained(world, model_of(world), strategy)

    both = in_mesh(4, work)
    alone = [
        together(2, lambda world, number=number: trained(world, number, strategy))  # type: ignore[misc]
        for number in (0, 1)
    ]
    assert both == [alone[number][data] for data in (0, 1) for number in (0, 1)]


def test_in_a_mesh_every_rank_keeps_its_own_copy() -> None:
    def work(world: ProcessWorld) -> list[list[float]]:
        return [trained(world, model_of(world), strategy) for strategy in (s.shared_memory(), s.sync_sgd())]

    for shared, own in in_mesh(4, work):
        assert shared == own


# ---- clipping ----


class Both(nn.Module):
    """The whole model: both halves, with losses that add up."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([half(0), half(1)])


def test_clipping_over_both_halves_is_clipping_of_the_whole_model() -> None:
    inputs, targets = samples(24).tensors
    inputs, targets = inputs.double(), targets.double()

    def steps(world: ProcessWorld, net: nn.Module, data: int, of_loss: Callable[[Any, Any], Any]) -> Any:
        net.double()
        optimizer = SGD(net.parameters(), lr=0.5)
        handle = pt.attach(net, optimizer, world=world)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            of_loss(inputs.chunk(2)[data], targets.chunk(2)[data]).backward()
            norms.append(float(handle.clip_grad_norm_(0.3)))
            norms.append(float(handle.clip_grad_norm_(1e9)))  # its new value
            optimizer.step()
        return [norms, flat(net)]

    def part(world: ProcessWorld) -> Any:
        net = half(model_of(world))
        return steps(world, net, world.port.coordinates["data"], lambda x, y: loss(net(x), y))

    def whole(world: ProcessWorld) -> Any:
        net = Both()
        return steps(world, net, world.rank, lambda x, y: sum(loss(one(x), y) for one in net.halves))

    parts, (expected, _) = in_mesh(4, part), together(2, whole)
    assert all(norms == parts[0][0] for norms, _ in parts), "all ranks have the same norm"
    assert close(parts[0][0], expected[0], 1e-12)
    assert expected[0][1] == pytest.approx(0.3, rel=1e-4)
    assert close(parts[0][1] + parts[1][1], expected[1], 1e-12)


# ---- checkpoints ----


def fitted(num_ranks: int, strategy: Strategy, mesh: dict[str, int], out: Path, **options: Any) -> list[Any]:
    def work(world: ProcessWorld) -> Any:
        found = pt.Trainer(half_job(model_of(world)), strategy, world=world, out=out, **options).fit()
        return [found.parameters_sha256, found.steps, found.samples, found.loss]

    return in_mesh(num_ranks, work, **mesh)


def alone(number: int, strategy: Strategy, **options: Any) -> list[Any]:
    """The same half on two processes without a mesh."""

    def work(world: ProcessWorld) -> Any:
        found = pt.Trainer(half_job(number), strategy, world=world, **options).fit()
        return [found.parameters_sha256, found.steps, found.samples, found.loss]

    return together(2, work)


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=str)
def test_stopping_and_resuming_equals_going_straight_on(strategy: Strategy, tmp_path: Path) -> None:
    straight = [alone(number, strategy, steps=14) for number in (0, 1)]
    fitted(4, strategy, MESH, tmp_path, steps=8, checkpoint_every=4)
    resumed = fitted(4, strategy, MESH, tmp_path, steps=14, resume=True)
    for rank, found in enumerate(resumed):
        assert found[:3] == straight[rank % 2][rank // 2][:3]
        assert found[3] == straight[0][0][3], "all ranks have the score of the first half"


def test_each_distinct_part_is_written_once(tmp_path: Path) -> None:
    for strategy in (s.sync_sgd(), s.local_sgd(period=3)):
        out = tmp_path / str(strategy)
        fitted(4, strategy, MESH, out, steps=4)
        folder = latest(out / "checkpoint")
        assert folder is not None
        assert read_manifest(folder).mesh == Mesh((("data", 2), ("model", 2)))
        writes_model = [any(name.startswith("model/") for name in read_part(folder, r).tensors) for r in range(4)]
        assert writes_model == ([True, True, False, False] if strategy.synchronized else [True] * 4)
        widths = [read_part(folder, rank).tensors["model/0.weight"].shape[0] for rank in (0, 1)]
        assert widths == [5, 7], "the first of each half's ranks writes it"


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        (s.sync_sgd(pt.collectives.ring), ("model", "data")),
        (s.local_sgd(period=4), ("data", "model")),
        (s.top_k_sgd(0.2, exact_below=4), ("data", "model")),
    ],
    ids=str,
)
def test_the_number_of_data_ranks_may_change(strategy: Strategy, order: tuple[str, str], tmp_path: Path) -> None:
    fitted(4, strategy, MESH, tmp_path, steps=4)
    mesh = {axis: {"data": 1, "model": 2}[axis] for axis in order}
    resumed = fitted(2, strategy, mesh, tmp_path, steps=6, resume=True)

    def of_half(number: int) -> list[Any]:
        out = tmp_path / "alone" / str(number)
        alone(number, strategy, steps=4, out=out)

        def work(world: ProcessWorld) -> Any:
            found = pt.Trainer(half_job(number), strategy, world=world, out=out, steps=6, resume=True).fit()
            return [found.parameters_sha256, found.steps, found.samples]

        return list(together(1, work)[0])

    assert [found[:3] for found in resumed] == [of_half(0), of_half(1)]


def test_another_mesh_is_refused_by_name(tmp_path: Path) -> None:
    fitted(4, s.sync_sgd(), MESH, tmp_path, steps=4)

    def without(world: ProcessWorld) -> Any:
        pt.Trainer(half_job(0), s.sync_sgd(), world=world, out=tmp_path, steps=6, resume=True).fit()

    with pytest.raises(
        WorkerDied, match=r"saved by ranks in a mesh\(data=2, model=2\), and this run's are in a mesh\(data=4\)"
    ):
        together(4, without)
    with pytest.raises(
        WorkerDied, match=r"mesh\(data=2, model=2\), and this run's are in a mesh\(data=2, stage=2\); only the"
    ):
        together(4, lambda world: without(init(mesh={"data": 2, "stage": 2}, quiet=True)))


def test_a_checkpoint_of_version_1_goes_on(tmp_path: Path) -> None:
    strategy = s.local_sgd(period=3)
    straight = alone(0, strategy, steps=10)
    alone(0, strategy, steps=5, out=tmp_path)
    folder = latest(tmp_path / "checkpoint")
    assert folder is not None
    (folder / "manifest.json").write_bytes(encoded(read_manifest(folder), version=1))
    assert [found[:3] for found in alone(0, strategy, steps=10, out=tmp_path, resume=True)] == [f[:3] for f in straight]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_flipped_bit_in_any_part_is_refused(rank: int, tmp_path: Path) -> None:
    fitted(4, s.local_sgd(period=3), MESH, tmp_path, steps=4)
    folder = latest(tmp_path / "checkpoint")
    assert folder is not None
    file = folder / f"rank-{rank}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WorkerDied, match=rf"rank-{rank}.safetensors is damaged"):
        fitted(4, s.local_sgd(period=3), MESH, tmp_path, steps=6, resume=True)


# ---- exchanges among the ranks along data alone ----


def test_ranks_may_leave_a_loop_together_with_their_other_half() -> None:
    """Data rank 0 has 2 batches, data rank 1 has 4."""
    inputs, targets = samples(24).tensors

    def left(world: ProcessWorld, number: int, data: int) -> list[float]:
        net = half(number)
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, s.sync_sgd(pt.collectives.ring), world=world)
        with handle.join():
            for x, y in list(zip(inputs.split(6), targets.split(6), strict=True))[: 2 + 2 * data]:
                optimizer.zero_grad()
                loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    both = in_mesh(4, lambda world: left(world, model_of(world), world.port.coordinates["data"]))
    for number in (0, 1):
        expected = together(2, lambda world, number=number: left(world, number, world.rank))  # type: ignore[misc]
        assert [both[number], both[2 + number]] == expected


def test_what_drifts_is_compared_along_data_and_named_by_its_rank() -> None:
    def work(world: ProcessWorld) -> str:
        net = half(model_of(world))
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, world=world)
        if world.rank == 3:
            with torch.no_grad():
                net[0].weight[0, 0] += 1
        try:
            handle.state_dict()
        except pt.core.Drifted as error:
            return str(error)
        return ""

    first, second, third, fourth = in_mesh(4, work)
    assert first == third == ""
    assert second == fourth
    assert "ranks 1, 3 have drifted apart" in second


@pytest.mark.parametrize("data", [1, 2])
def test_a_step_that_one_half_skips_is_skipped_by_all(data: int) -> None:
    def work(world: ProcessWorld) -> list[float]:
        net = half(model_of(world))
        optimizer = SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        pt.attach(net, optimizer, world=world, scaler=scaler)
        before = flat(net)
        for bad in (False, True, False):
            optimizer.zero_grad()
            factor = float("inf") if bad and world.rank == 1 else 1.0
            scaler.scale(loss(net(torch.ones(6, 4)), torch.ones(6, 3)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return [scaler.get_scale(), float(flat(net) != before)]

    assert in_mesh(2 * data, work, data=data, model=2) == [[4.0, 1.0]] * (2 * data)


# ---- refusals ----


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 3}, r"a mesh\(data=3\) is for 3 ranks, and this world has 4; start 3 ranks, or"),
        ({"data": 2, "model": 0}, "axis 'model' of a mesh has length 0"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: dict[str, int], message: str) -> None:
    with pytest.raises(WorkerDied, match=message):
        together(4, lambda world: str(init(mesh=mesh, quiet=True)))


def test_a_world_has_one_mesh() -> None:
    with pytest.raises(WorkerDied, match=r"is a mesh\(data=2, model=2\) already, and cannot become a mesh\(data=4\)"):
        in_mesh(4, lambda world: str(init(mesh={"data": 4}, quiet=True)))


def test_a_world_of_one_has_a_mesh_of_one() -> None:
    with pytest.raises(ValueError, match=r"a mesh\(data=2\) is for 2 ranks, and this world has 1"):
        init(mesh={"data": 2}, quiet=True)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("strategy", r"ranks disagree about strategy: rank 0 has 'sync_sgd.*', rank 1 has 'local_sgd"),
        ("option", "ranks disagree about buffers: rank 0 has 'average', rank 1 has 'leave'"),
        ("model", "ranks disagree about model.*: rank 1 has .*, rank 3 has"),
    ],
)
def test_ranks_that_disagree_are_named(differs: str, message: str) -> None:
    def work(world: ProcessWorld) -> None:
        net = half(0 if differs == "model" and world.rank == 3 else model_of(world))
        strategy = s.local_sgd(period=8) if differs == "strategy" and world.rank == 1 else s.sync_sgd()
        buffers: Any = "leave" if differs == "option" and world.rank == 1 else "average"
        pt.attach(net, SGD(net.parameters(), lr=0.1), strategy, buffers=buffers, world=world)

    with pytest.raises(WorkerDied, match=message):
        in_mesh(4, work)


def test_meshes_that_differ_are_named() -> None:
    def work(world: ProcessWorld) -> None:
        world = init(mesh=MESH if world.rank else {"data": 4}, quiet=True)
        net = half(0)
        pt.attach(net, SGD(net.parameters(), lr=0.1), world=world)

    with pytest.raises(
        WorkerDied, match=r"disagree about mesh: rank 0 has 'mesh\(data=4\)', rank 1 has 'mesh\(data=2, mo"
    ):
        together(4, work)


def test_one_copy_of_the_weights_needs_one_copy_of_the_model() -> None:
    def work(world: ProcessWorld) -> None:
        net = half(model_of(world))
        pt.attach(net, SGD(net.parameters(), lr=0.1), s.hogwild(), world=world)

    with pytest.raises(
        WorkerDied, match="needs ranks that share memory: the mesh has 2 ranks for the parts of one model"
    ):
        in_mesh(4, work)


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    fitted(4, s.sync_sgd(), MESH, tmp_path, steps=2)
    folder = latest(tmp_path / "checkpoint")
    assert folder is not None
    document = json.loads((folder / "manifest.json").read_text())
    assert (document["version"], document["mesh"]) == (2, MESH)
    assert document["parts"][1]["coordinates"] == {"data": 0, "model": 1}
