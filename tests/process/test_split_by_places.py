"""Pictures in places on real processes: a virtual world's bits, attached loops, whole runs, and stages with places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import polytempo as pt
from parted_job import far, job
from polytempo.core import Strategy
from polytempo.engines.join.init import init
from polytempo.partition.tensor import LocallyConnected2d, Rules, column, places
from polytempo.worlds import ProcessWorld
from process.crew import together
from split_models import made, on_ranks, split_pass

pytestmark = pytest.mark.process

s = pt.strategies
STEPS, SAVED = 7, 3


def net(dropout: float = 0.3) -> nn.Sequential:
    """Sizes are odd; both convolutions have halos, and statistics of the batch are of all places."""
    features = [nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(3, 4, 3), nn.Dropout(dropout), nn.Tanh()]
    return nn.Sequential(*features, *more, nn.Flatten(), nn.Linear(4 * 2 * 2, 5)).double()


def local_net(dropout: float = 0.3) -> nn.Sequential:
    """The same, with weights of each place's own."""
    features = [LocallyConnected2d(1, 3, (9, 8), 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)]
    more = [LocallyConnected2d(3, 4, 4, 3), nn.Dropout(dropout), nn.Tanh()]
    return nn.Sequential(*features, *more, nn.Flatten(), nn.Linear(4 * 2 * 2, 5)).double()


NETS = pytest.mark.parametrize("model", [net, local_net])


def pictures(num_samples: int, seed: int) -> TensorDataset:
    """Pictures of 9 x 8 places, and which of five classes they are of."""
    x = torch.randn(num_samples, 1, 9, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, (x[:, 0, :4, :4].sum((1, 2)).abs() * 2).long() % 5)


def picture_job(dropout: float = 0.3, model: Callable[[float], nn.Module] = net) -> pt.Job:
    data = lambda folder: pt.Data(pictures(72, 0), pictures(16, 1))  # noqa: E731
    return job(model=lambda: model(dropout), data=data, name="pictures")


def by_places(parts: int = 2, inner: Strategy | None = None) -> Strategy:
    return s.split({"0": "places", "4": "places"}, parts=parts, inner=inner)


@NETS
@pytest.mark.parametrize("grid", [(2, 2), (3, 1)], ids=str)
def test_both_worlds_compute_the_same_bits(grid: tuple[int, int], model: Callable[[], nn.Module]) -> None:
    rules: Rules = {name: places(rows=grid[0], columns=grid[1]) for name in ("0", "4")}

    def numbers(**place: Any) -> list[Any]:
        found = split_pass(model, rules, pictures(4, 2).tensors[0].float(), torch.float32, **place)
        return [found.loss.item(), found.output.tolist(), {n: g.tolist() for n, g in found.gradients.items()}]

    ranks = grid[0] * grid[1]
    virtual = on_ranks(ranks, lambda port: numbers(port=port))
    real = together(ranks, lambda world: numbers(world=init(mesh={"model": ranks}, quiet=True)))
    assert real == virtual


def trained(world: ProcessWorld, *, split: bool) -> Mapping[str, Any]:
    """An ordinary loop: the whole model's parameters and running statistics, and norms of gradients."""
    data = world.port.coordinates["data"] if split else world.rank
    model: Any = made(net)
    if split:
        model = pt.split(model, {"0": "places"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = pt.attach(model, optimizer, s.sync_sgd(pt.collectives.ring))
    shard, norms = pt.shard(pictures(24, 0), batch_size=4), []
    for epoch in range(2):
        torch.manual_seed(10 * epoch + data)
        for x, y in shard:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            norms.append(float(handle.clip_grad_norm_(0.5)))
            optimizer.step()
    whole = model.full_parameters() if split else dict(model.named_parameters())
    found = {name: tensor.tolist() for name, tensor in {**dict(model.named_buffers()), **whole}.items()}
    return {"norms": norms, **found}


def test_an_attached_loop_over_data_and_places_trains_as_replicas_do() -> None:
    expected = together(2, lambda world: trained(world, split=False))[0]

    def work(world: ProcessWorld) -> Mapping[str, Any]:
        return trained(init(mesh={"data": 2, "model": 2}, quiet=True), split=True)

    for found in together(4, work):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(values), rtol=1e-10, atol=1e-10), name


@NETS
@pytest.mark.parametrize(("workers", "parts", "inner"), [(4, 2, s.local_sgd(period=3)), (4, 4, None)], ids=str)
def test_a_run_goes_on_in_the_other_world_to_the_same_bits(
    workers: int, parts: int, inner: Strategy | None, model: Callable[[float], nn.Module], tmp_path: Path
) -> None:
    strategy, the_job = by_places(parts, inner), picture_job(model=model)
    expected = pt.simulate(the_job, strategy, workers, steps=STEPS, threads=1)
    pt.simulate(the_job, strategy, workers, steps=SAVED, threads=1, out=tmp_path, checkpoint_every=SAVED)
    found = pt.run(the_job, strategy, workers, steps=STEPS, threads=1, out=tmp_path, resume=True)
    assert found.parameters_sha256 == expected.parameters_sha256
    assert (found.loss, found.accuracy) == (expected.loss, expected.accuracy)


@pytest.mark.parametrize(
    ("model", "last"),
    [(net, {"0": column(gather=True), "8": "row"}), (local_net, {"0": places(rows=1), "8": "row"})],
    ids=["net", "local_net"],
)
def test_a_checkpoint_loads_into_a_plain_module_and_goes_on_in_other_parts(
    model: Callable[[], nn.Module], last: Rules, tmp_path: Path
) -> None:
    """Two rows become four areas, then parts by channels, or two columns and a whole layer."""
    the_job = picture_job(model=model)
    options: dict[str, Any] = {"threads": 1, "checkpoint_every": 1, "global_batch_size": 12}
    expected = pt.simulate(the_job, s.sync_sgd(), 1, steps=STEPS + 2, out=tmp_path / "one", **options)
    pt.run(the_job, by_places(2), 2, steps=SAVED, out=tmp_path / "parts", **options)
    model().load_state_dict(pt.training.checkpoint_model(tmp_path / "parts"))
    pt.run(the_job, by_places(4), 4, steps=STEPS, out=tmp_path / "parts", resume=True, **options)
    other = s.split(last, parts=2)
    found = pt.run(the_job, other, 2, steps=STEPS + 2, out=tmp_path / "parts", resume=True, **options)
    assert far(pt.training.checkpoint_model(tmp_path / "parts"), pt.training.checkpoint_model(tmp_path / "one")) < 1e-10
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)


def test_stages_of_a_pipeline_with_places_train_as_stages_alone() -> None:
    the_job = picture_job(dropout=0.0)
    options: dict[str, Any] = {"steps": STEPS, "threads": 1, "global_batch_size": 12}
    found = pt.run(the_job, s.one_f_one_b(2, 2, inner=by_places(2)), 4, **options)
    expected = pt.simulate(the_job, s.one_f_one_b(2, 2), 2, **options)
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    assert found.train_loss == pytest.approx(expected.train_loss, rel=1e-10)


@NETS
def test_a_run_without_values_sends_the_same_bytes(model: Callable[[float], nn.Module]) -> None:
    """`simulate(meta=True)`: each layer's bytes."""
    options: dict[str, Any] = {"steps": 2, "threads": 1, "global_batch_size": 12}
    ours = pt.simulate(picture_job(0.0, model), by_places(4), 4, **options)
    priced = pt.simulate(picture_job(0.0, model), by_places(4), 4, meta=True, **options)
    assert ours.layers == priced.layers
    assert ours.layers


def test_one_rank_prints_a_part_alone() -> None:
    seen: list[str] = []

    class Printed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(repr(x))
            return x

    def work(port: Any) -> None:
        pt.split(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), Printed()), {"0": "places"}, port=port)(
            torch.ones(1, 1, 5, 4)
        )

    on_ranks(2, work)
    assert sorted(seen)[0] == "SpatialTensor(rank 0's ((0, 3), (0, 4)) of (5, 4))"
