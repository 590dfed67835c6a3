"""Metrics of a job and of a loop: one process's numbers, for any number of ranks and any remainder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import polytempo as pt
from helpers import CLUSTER
from polytempo.core import Port
from polytempo.training.job.evaluate import Evaluation, Score, evaluate, tensors_of
from polytempo.training.observe.loop_score import scored
from polytempo.worlds import VirtualWorld

NUM_CLASSES = 3


def whole_numbers(num_samples: int) -> TensorDataset:
    """Inputs and targets with exact products, so that no order of additions matters."""
    draw = torch.Generator().manual_seed(num_samples)
    inputs = torch.randint(-3, 4, (num_samples, 4), generator=draw).float()
    return TensorDataset(inputs, torch.arange(num_samples) % NUM_CLASSES)


def net() -> nn.Linear:
    made = nn.Linear(4, NUM_CLASSES)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 - 2.0)
    return made


def macro_f1(output: Tensor, target: Tensor) -> Tensor:
    """A mean over classes, which no mean over parts gives."""
    found, scores = output.argmax(-1), []
    for label in range(NUM_CLASSES):
        right = ((found == label) & (target == label)).sum()
        scores.append(2 * right / ((found == label).sum() + (target == label).sum()).clamp(min=1))
    return torch.stack(scores).mean()


def first_ten(output: Tensor, target: Tensor) -> float:
    """A sum that depends on the order of the samples."""
    return float((output[:10, 0] * target[:10]).sum())


class Longest:
    """An object with the three calls."""

    def reset(self) -> None:
        self.largest = float("-inf")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest = max(self.largest, float(output.max()))

    def compute(self) -> dict[str, float]:
        return {"largest": self.largest}


METRICS: dict[str, Any] = {
    "f1": macro_f1,
    "first_ten": first_ten,
    "own": Longest(),
    "sums": torchmetrics.F1Score("multiclass", num_classes=NUM_CLASSES, average="macro"),
    "each": torchmetrics.Recall("multiclass", num_classes=NUM_CLASSES, average="none"),
    "joined": torchmetrics.AUROC("multiclass", num_classes=NUM_CLASSES),
    "wrapped": torchmetrics.MinMaxMetric(torchmetrics.Accuracy("multiclass", num_classes=NUM_CLASSES)),
    "all": torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.Accuracy("multiclass", num_classes=NUM_CLASSES, average="micro"),
            "matrix": torchmetrics.ConfusionMatrix("multiclass", num_classes=NUM_CLASSES),
        }
    ),
}


def own_job(num_samples: int = 21, **more: Any) -> pt.Job:
    data = pt.Data(whole_numbers(64), whole_numbers(num_samples))
    return pt.Job(
        model=net,
        data=lambda path: data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(-1) == target,
        epochs=1,
        batch_size=8,
        **more,
    )


def score_with(ranks: int, num_samples: int) -> list[Score]:
    job, model = own_job(num_samples, metrics=METRICS), net()
    evaluations = [Evaluation(job, model, job.data(None)) for _ in range(ranks)]

    async def program(port: Port) -> Score:
        return await evaluate(port, evaluations[port.rank], tensors_of(model))

    outcome = VirtualWorld(CLUSTER, ranks).run(program)
    assert outcome.unreceived == 0
    return [result for result in outcome.results if result is not None]


@pytest.mark.parametrize("num_samples", [4, 21, 64, 65])
def test_any_number_of_ranks_gives_the_numbers_of_one_process(num_samples: int) -> None:
    model = net()
    test = whole_numbers(num_samples)
    one = score_with(1, num_samples)[0].metrics
    output, target = model(test.tensors[0]).detach(), test.tensors[1]
    assert one["f1"] == float(macro_f1(output, target))
    assert one["first_ten"] == first_ten(output, target)
    assert one["own/largest"] == float(output.max())
    assert one["all/accuracy"] == pytest.approx(float((output.argmax(-1) == target).double().mean()))
    assert len([name for name in one if name.startswith("each/")]) == NUM_CLASSES
    for ranks in range(2, 9):
        assert [score.metrics for score in score_with(ranks, num_samples)] == [one] * ranks, ranks


def test_metrics_that_were_given_are_not_changed() -> None:
    score_with(2, 21)
    assert METRICS["sums"].update_called is False
    assert not hasattr(METRICS["own"], "largest")


def test_states_travel_where_they_are_enough_and_predictions_where_they_are_not() -> None:
    async def sent(port: Port, metrics: dict[str, Any]) -> dict[str, float]:
        function = lambda batch: (net()(batch[0]), batch[1])  # noqa: E731
        return await scored(port, function, whole_numbers(4096), metrics)

    def bytes_of(metric: Any) -> int:
        outcome = VirtualWorld(CLUSTER, 2).run(lambda port: sent(port, {"it": metric}))
        return outcome.trace.bytes_sent[1]

    assert bytes_of(METRICS["sums"]) < 2_000 < 2_048 * (NUM_CLASSES * 4 + 8) < bytes_of(macro_f1)


LOGITS = torch.cat([torch.linspace(0.01, 0.99, 40), torch.linspace(-4, 6, 24)])
"""Two thirds of them look like probabilities, and all are logits."""
OF_LOGITS: dict[str, Any] = {
    "auroc": torchmetrics.AUROC("binary"),
    "binned": torchmetrics.AUROC("binary", thresholds=20),
    "accuracy": torchmetrics.Accuracy("binary"),
    "f1": torchmetrics.F1Score("multilabel", num_labels=2),
    "calibration": torchmetrics.CalibrationError("multiclass", num_classes=2),
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_logits_have_the_numbers_of_the_whole_set_at_once(name: str) -> None:
    """torchmetrics decides for each batch that it sees whether it has logits."""
    metric = OF_LOGITS[name]
    target = (torch.arange(64) * 7 % 5 < 2).long()
    columns = torch.stack([LOGITS, 1 - LOGITS], 1)
    output = {"f1": columns, "calibration": columns}.get(name, LOGITS)
    data = TensorDataset(output, torch.stack([target, 1 - target], 1) if name == "f1" else target)
    expected = float(metric(*data.tensors))
    for ranks in range(1, 9):
        found = VirtualWorld(CLUSTER, ranks).run(lambda port: scored(port, tuple, data, {name: metric})).results
        assert found == [{name: expected}] * ranks, ranks


LOOP = {
    "mean": lambda batch: {
        "accuracy": (net()(batch[0]).argmax(-1) == batch[1]),
        "size": (batch[0].sum(), len(batch[1])),
    },
    "gathered": lambda batch: (net()(batch[0]).argmax(-1), {"target": batch[1], "text": [str(t) for t in batch[1]]}),
}


def share_of_twos(predictions: Tensor, targets: dict[str, Any]) -> float:
    assert [str(target) for target in targets["target"]] == targets["text"]
    return targets["text"].count("tensor(2)") / len(predictions)


@pytest.mark.parametrize("kind", LOOP)
def test_a_loop_scores_21_samples_as_one_process_does(kind: str) -> None:
    metrics = {"mean": None, "gathered": {"twos": share_of_twos}}[kind]
    data = DataLoader(whole_numbers(21), batch_size=4, shuffle=True)

    def found(ranks: int) -> list[dict[str, float] | None]:
        return VirtualWorld(CLUSTER, ranks).run(lambda port: scored(port, LOOP[kind], data, metrics)).results

    one = found(1)[0]
    assert one is not None
    for ranks in range(2, 9):
        assert found(ranks) == [one] * ranks


def test_a_loops_score_of_one_process() -> None:
    test = whole_numbers(21)
    right = net()(test.tensors[0]).argmax(-1) == test.tensors[1]
    assert pt.score(LOOP["mean"], test)["accuracy"] == pytest.approx(float(right.double().mean()))
    with pytest.raises(ValueError, match="returns a dict"):
        pt.score(lambda batch: 1.0, test)
    with pytest.raises(ValueError, match=r"returns \(predictions, targets\)"):
        pt.score(lambda batch: 1.0, test, {"f1": macro_f1})
    with pytest.raises(ValueError, match="needs a length"):
        pt.score(lambda batch: {}, iter([1]))


@pytest.mark.parametrize("strategy", ["sync_sgd", "local_sgd(period=2)", "async_sgd"])
def test_metrics_change_no_bit_and_no_virtual_time(strategy: str) -> None:
    plain = pt.simulate(own_job(), strategy, 3, threads=1)
    measured = pt.simulate(own_job(metrics=METRICS), strategy, 3, threads=1)
    assert plain.metrics is None
    assert measured.metrics is not None
    assert {"f1", "own/largest", "each/0", "all/accuracy"} <= set(measured.metrics)
    assert replace(measured, metrics=None) == plain


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no dict": ({"metrics": [macro_f1]}, "expected a dict"),
    "a name of a row": ({"metrics": {"loss": macro_f1}}, "an entry loss already"),
    "no function": ({"metrics": {"f1": 0.5}}, "expected a function"),
    "a batch of any form": (
        {"metrics": {"f1": macro_f1}, "loss": pt.of_batch(lambda model, batch: model(batch))},
        "of_batch",
    ),
    "no function of predictions": ({"predictions": 3}, "predictions(output, target)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_metrics_are_named(mistake: str) -> None:
    wrong, named = MISTAKES[mistake]
    given: dict[str, Any] = {"name": "own", "model": net, "data": lambda path: None, "optimizer": torch.optim.SGD}
    with pytest.raises(ValueError, match="job own") as caught:
        pt.Job(**({"loss": nn.functional.cross_entropy} | given | wrong))
    assert named in str(caught.value)
