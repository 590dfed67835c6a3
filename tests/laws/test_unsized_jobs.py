"""Jobs on streams without a length: each sample once an epoch, plain torch's steps, resumed to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import polytempo as pt
from laws.catalogue import GROUPED, PARTED, ROWS, SERVED, STAGED, Row, label
from polytempo.data.shard import DataShard
from polytempo.data.streams.stream_pieces import RowsHeard

LENGTHS = (9, 0, 23, 1, 11, 9)
SAMPLES, BATCH = sum(LENGTHS), 4
X = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples (input, number), which no one has counted."""

    def __init__(self, *pieces: range) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in (each for piece in self.pieces for each in piece):
            yield X[number], torch.tensor(float(number), dtype=torch.float64)


class InParts(Stream):
    """The same with shards, which ranks read in parts."""

    @property
    def num_shards(self) -> int:
        return len(self.pieces)

    def shard(self, num_shards: int, index: int) -> Stream:
        assert num_shards == len(self.pieces)
        return Stream(self.pieces[index])


def pieces() -> list[range]:
    begins = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    return [range(begin, begin + length) for begin, length in zip(begins, LENGTHS, strict=True)]


def job(kind: type[Stream], seen: list[int] | None = None, **more: Any) -> pt.Job:
    """A regression. `seen` collects the numbers of the samples that are trained on."""

    def loss(output: Tensor, number: Tensor) -> Tensor:
        if seen is not None and output.requires_grad:
            seen.extend(int(each) for each in number)
        return ((output.squeeze(1) - number.sin()) ** 2).mean()

    return pt.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1)).double(),
        data=lambda path: pt.Data(kind(*pieces()), torch.utils.data.TensorDataset(X, torch.arange(SAMPLES).double())),
        loss=loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.5),
        lr=0.05,
        batch_size=BATCH,
        **more,
    )


@pytest.mark.parametrize("kind", [Stream, InParts])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("sync_sgd", {}),
        ("sync_sgd", {"accumulate": 2}),
        ("local_sgd(period=3)", {}),
        ("top_k_sgd(ratio=0.1)", {}),
        ("gossip", {}),
        ("diloco(period=4)", {}),
        ("gpipe(stages=2)", {"workers": 4}),
    ],
)
def test_each_sample_is_trained_on_once_an_epoch(kind: type[Stream], strategy: str, options: dict[str, Any]) -> None:
    seen: list[int] = []
    made = job(kind, seen)
    result = pt.simulate(made, strategy, **{"workers": 3, "epochs": 2, "seed": 1, **options})
    counts = Counter(seen)
    assert set(counts) == {*range(SAMPLES)}
    assert min(counts.values()) == 2
    assert (result.epochs, result.samples, result.ledger) == (2.0, 2 * SAMPLES, None)


def deep_model() -> nn.Module:
    """Layers for four stages."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 1)).double()


REFUSED = {"served": "need a length", "slices": "has no slices", "groups": "numbered samples"}


@pytest.mark.parametrize("row", [*ROWS, *SERVED, *STAGED, *PARTED, *GROUPED], ids=label)
def test_every_strategy_takes_a_stream_or_names_the_length_that_it_needs(row: Row) -> None:
    """Ranks run out of samples 5 to 8 steps before the last one."""
    seen: list[int] = []
    strategy = row.make()
    workers = 3 if row in (*ROWS, *SERVED) else 2 * strategy.stages if row in STAGED else 4
    deep = replace(job(InParts, seen), model=deep_model)
    needs = {"served": strategy.server is not None, "slices": strategy.slices is not None, "groups": row in GROUPED}
    refused = next((REFUSED[name] for name, needed in needs.items() if needed), None)
    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            pt.simulate(deep, strategy, workers=workers, epochs=1)
        return
    result = pt.simulate(deep, strategy, workers=workers, epochs=1, seed=1)
    assert set(seen) == {*range(SAMPLES)}
    assert (result.epochs, result.samples) == (1.0, SAMPLES)


@pytest.mark.parametrize("kind", [Stream, InParts])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_step_is_the_joined_batchs_of_plain_torch(kind: type[Stream], workers: int) -> None:
    made = replace(job(kind), model=lambda: nn.Linear(4, 1).double())
    found = pt.simulate(made, "sync_sgd", workers=workers, epochs=2, seed=7)
    torch.manual_seed(7)
    model, heard = made.model(), RowsHeard()
    optimizer = made.optimizer(model.parameters(), made.lr)
    ranks = [
        DataShard(kind(*pieces()), rank=rank, size=workers, batch_size=BATCH, seed=7, agree=heard)
        for rank in range(workers)
    ]
    for _ in range(2):
        readers = [iter(rank) for rank in ranks]
        while True:
            if kind is InParts:
                heard.rows = [rank.pieces.row(rank.epoch) for rank in ranks]  # type: ignore[union-attr]
            batches = [(next(reader, None), rank) for reader, rank in zip(readers, ranks, strict=True)]
            if batches[0][0] is None:
                break
            counting = [batch for batch, rank in batches if rank.local_samples]
            inputs, numbers = (torch.cat([batch[place] for batch in counting]) for place in (0, 1))
            optimizer.zero_grad()
            made.loss(model(inputs), numbers).backward()
            optimizer.step()
    expected = made.loss(model(X), torch.arange(SAMPLES).double()).item()
    assert found.loss == pytest.approx(expected, abs=1e-12)


def test_a_rank_without_samples_does_not_train_on_its_stand_in() -> None:
    """Rank 1 has pieces 1, 3 and 5, which end 8 steps before rank 0's: it moves by its momentum alone."""
    made = replace(job(InParts), model=lambda: nn.Linear(4, 1).double())
    found = pt.simulate(made, "local_sgd(period=100)", workers=2, epochs=1, seed=7)
    ends, parts = pieces(), [(0, 2, 4), (1, 3, 5)]
    means = []
    for own in parts:
        torch.manual_seed(7)
        model = made.model()
        optimizer = made.optimizer(model.parameters(), made.lr)
        numbers = torch.tensor([number for piece in own for number in ends[piece]])
        for step in range(-(-sum(LENGTHS[piece] for piece in parts[0]) // BATCH)):
            batch = numbers[step * BATCH : (step + 1) * BATCH]
            model.zero_grad(set_to_none=False)
            if len(batch):
                made.loss(model(X[batch]), batch.double()).backward()
            optimizer.step()
        means.append([parameter.detach() for parameter in model.parameters()])
    mean = nn.Linear(4, 1).double()
    for parameter, *each in zip(mean.parameters(), *means, strict=True):
        parameter.data = sum(each) / 2
    assert found.loss == pytest.approx(made.loss(mean(X), torch.arange(SAMPLES).double()).item(), abs=1e-12)


@pytest.mark.process
@pytest.mark.parametrize(("kind", "stop"), [(Stream, 7), (InParts, 10)])
def test_a_run_resumes_to_the_bit(kind: type[Stream], stop: int, tmp_path: Path) -> None:
    """Runs stop at the end of an epoch and within one, with a plateau; then other workers go on."""
    more: dict[str, Any] = {"seed": 2, "schedule": "plateau(patience=0)", "threads": 1}
    whole = pt.run(job(kind), "local_sgd(period=3)", 2, steps=17, **more)
    more |= {"out": tmp_path / "run"}
    first = pt.run(job(kind), "local_sgd(period=3)", 2, steps=stop, **more)
    second = pt.run(job(kind), "local_sgd(period=3)", 2, steps=17, resume=True, **more)
    assert (first.steps, second.resumed_at) == (stop, stop)
    assert second.parameters_sha256 == whole.parameters_sha256
    assert (second.samples, second.epochs) == (whole.samples, whole.epochs)
    third = pt.run(job(kind), "local_sgd(period=3)", 3, epochs=4, resume=True, **more)
    assert (third.samples, third.epochs) == (4 * SAMPLES, 4)


def test_scores_come_at_the_ends_of_epochs() -> None:
    for options, each in (({}, 1), ({"eval_every": "2 epochs"}, 2)):
        rows: list[dict[str, Any]] = []
        pt.Trainer(job(Stream), "sync_sgd", epochs=4, **options).fit(on_row=rows.append)
        scored = [(row["step"], row["epoch"]) for row in rows if row["kind"] == "test"]
        steps = -(-SAMPLES // BATCH)
        assert scored == [(steps * epoch, epoch) for epoch in range(each, 5, each)]


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        ("sync_sgd", {"balance": "speed"}, "PT1546"),
        ("sync_sgd", {"batch_growth": {1: 2.0}}, "PT1548"),
        ("sync_sgd", {"min_workers": 1}, "PT1549"),
        ("sync_sgd(route=invariant(slices=4))", {}, "has no slices"),
        ("async_sgd", {}, "need a length"),
        ("sync_sgd", {"schedule": "CosineAnnealingLR(T_max=9)", "epochs": 2}, "give the run steps="),
    ],
)
def test_the_length_is_asked_for_where_it_is_needed(strategy: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pt.run(job(Stream), strategy, 2, **options)
