"""Jobs with layers in parts, in the virtual world: one worker's training, scores and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from parted_job import classes, classifier, far, job, split, split_text, text_job
from polytempo.core import Strategy
from polytempo.partition.plan import split_plan, volumes
from polytempo.partition.plan.choice import exchange_bytes

s = pt.strategies
STEPS = 7


def trained(
    strategy: Strategy, workers: int, out: Path, the_job: pt.Job, **more: Any
) -> tuple[pt.Result, dict[str, Tensor]]:
    """The result, and the model that the run has saved behind its last step."""
    result = pt.simulate(the_job, strategy, workers, steps=STEPS, threads=1, out=out, checkpoint_every=STEPS, **more)
    return result, pt.training.checkpoint_model(out)


def check(strategy: Strategy, workers: int, plain: Strategy, plain_workers: int, the_job: pt.Job, folder: Path) -> None:
    expected, whole = trained(plain, plain_workers, folder / "plain", the_job)
    found, joined = trained(strategy, workers, folder / "parts", the_job)
    assert far(joined, whole) < 1e-12
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert (found.accuracy, found.steps, found.samples) == (expected.accuracy, expected.steps, expected.samples)
    assert found.ledger == expected.ledger


@pytest.mark.parametrize("parts", [2, 3])
def test_a_split_model_becomes_that_of_one_worker(parts: int, tmp_path: Path) -> None:
    """Dropout, momentum, a schedule, and classes with logits that are never gathered for the loss."""
    check(split(parts), parts, s.sync_sgd(), 1, job(), tmp_path)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_transformer_with_all_splits_on_a_mesh_becomes_that_of_its_replicas(sequence: bool, tmp_path: Path) -> None:
    inner = s.sync_sgd(pt.collectives.ring)
    check(split_text(sequence=sequence, inner=inner), 4, inner, 2, text_job(), tmp_path)


def test_replicas_of_split_models_may_differ_between_meetings(tmp_path: Path) -> None:
    inner = s.local_sgd(period=3)
    check(split(inner=inner), 4, inner, 2, job(), tmp_path)


@pytest.mark.parametrize("exchange", ["joined", "turns"])
def test_a_hybrid_becomes_what_data_parallelism_makes(exchange: Any, tmp_path: Path) -> None:
    check(s.hybrid("0, 3", exchange=exchange), 3, s.sync_sgd(), 3, job(), tmp_path)


def test_a_planned_hybrid_divides_what_the_plan_says(tmp_path: Path) -> None:
    """The last layer has 6 inputs of each of 36 samples, and 35 weights; with one sample each, it is the other way."""
    few = job(batch_size=1)
    check(s.hybrid(), 3, s.sync_sgd(), 3, few, tmp_path)
    names = pt.training.plan_layers(
        classifier(), torch.zeros(2, 4, dtype=torch.float64), workers=3, batch_size=3
    ).model_parallel
    assert names
    found = pt.simulate(few, s.hybrid(), 3, steps=3)
    assert found.bytes_sent_per_rank == pt.simulate(few, s.hybrid(list(names)), 3, steps=3).bytes_sent_per_rank
    assert found.bytes_sent_per_rank != pt.simulate(few, s.sync_sgd(), 3, steps=3).bytes_sent_per_rank


def test_a_plan_that_divides_no_layer_is_data_parallelism() -> None:
    found = [pt.simulate("digits", strategy, 4, steps=3) for strategy in ("hybrid()", "sync_sgd()")]
    assert found[0].layers is not None
    assert not any(layer["sizes"] for layer in found[0].layers)
    assert found[0].parameters_sha256 == found[1].parameters_sha256


def test_a_part_of_the_ranks_counts_its_share_of_the_operations(tmp_path: Path) -> None:
    slow = pt.cluster.ethernet(gbit_per_s=1e9, latency_us=0.0)
    one = pt.simulate(job(), s.sync_sgd(), 1, cluster=slow, steps=3).seconds
    assert pt.simulate(job(), split(2), 2, cluster=slow, steps=3).seconds == pytest.approx(one / 2, rel=0.2)


def test_the_bytes_of_each_layer_are_those_that_its_shapes_say() -> None:
    """A step of twelve samples, or of twelve of each of three workers."""
    sample, the_job = torch.zeros(2, 4, dtype=torch.float64), job()
    plan = split_plan(classifier(), sample, 3)
    found = pt.simulate(the_job, s.split(parts=3), 3, steps=3).layers
    assert found is not None
    assert {each["layer"]: each["forward_bytes"] + each["backward_bytes"] for each in found} == {
        each.volume.name: plan.bytes_of(each, 12) for each in plan.layers
    }
    assert {each["layer"]: sum(each["sizes"]) for each in found} == {"0": 7, "3": 7, "5": 6}
    divided = pt.simulate(the_job, s.hybrid("3"), 3, steps=1).layers
    assert divided is not None
    [volume] = [each for each in volumes(classifier(), sample) if each.name == "3"]
    sent = {each["layer"]: (each["sizes"], each["forward_bytes"] + each["backward_bytes"]) for each in divided}
    assert sent == {"0": ([], 0), "3": ([2, 2, 2], exchange_bytes(volume, [12] * 3, [2] * 3)), "5": ([], 0)}


PRICED = {
    "columns, rows and a vocabulary": (split(2), 2),
    "replicas that send a fourth": (split(2, inner=s.int8_sgd()), 4),
    "activations in 8 bits": (split(2, activations=pt.compression.int8(8), gradients=pt.compression.bf16()), 2),
    "chosen by bytes": (s.split("auto", parts=2), 2),
    "divided layers": (s.hybrid("0, 3"), 3),
    "divided layers in 8 bits": (
        s.hybrid("0, 3", "turns", activations=pt.compression.int8(8), gradients=pt.compression.qsgd(127, 8)),
        3,
    ),
}


@pytest.mark.parametrize("name", PRICED)
def test_without_values_times_and_bytes_are_those_with_values(name: str) -> None:
    """But for the messages of rows of metrics. All batches are full."""
    strategy, workers = PRICED[name]
    untested = job(data=lambda folder: pt.Data(classes(108, 0)))
    cluster = pt.cluster.ethernet(gbit_per_s=1, gflops=0.1)
    computed, priced = (
        pt.simulate(untested, strategy, workers, cluster, steps=3, threads=1, meta=meta) for meta in (False, True)
    )
    assert priced.seconds == pytest.approx(computed.seconds, rel=1e-3)
    assert priced.layers == computed.layers
    assert (priced.steps, priced.loss, priced.parameters_sha256) == (3, None, None)


def test_a_transformer_in_parts_is_priced() -> None:
    """Embeddings, attention heads, sequences and dropout, none of them with a look at a value."""
    cluster = pt.cluster.ethernet(gbit_per_s=1, gflops=0.1)
    for strategy in (split_text(2), split_text(2, sequence=True)):
        computed, priced = (
            pt.simulate(text_job(), strategy, 4, cluster, steps=2, threads=1, meta=meta) for meta in (False, True)
        )
        assert priced.layers == computed.layers
        assert priced.seconds == pytest.approx(computed.seconds, rel=0.01)


def test_many_models_in_parts_take_the_time_of_their_parts_and_the_exchange_between_them() -> None:
    """64 models of four ranks: a step takes longer than one model's, by the replicas' exchange."""
    untested = job(data=lambda folder: pt.Data(classes(96, 0)))
    cluster = pt.cluster.ethernet(gbit_per_s=1, gflops=0.1)
    alone, many = (pt.simulate(untested, split(4), n, cluster, steps=2, meta=True) for n in (4, 256))
    assert many.seconds > alone.seconds
    assert many.layers == alone.layers


def test_what_looks_at_values_cannot_be_priced() -> None:
    def clipped(output: Tensor, target: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(output, target)
        return loss if loss.item() < 10 else loss.log()

    said = r"job classes with hybrid\(.*\) cannot be computed without values \(.* meta tensors.*\); leave out"
    with pytest.raises(ValueError, match=said):
        pt.simulate(job(loss=clipped), s.hybrid("0, 3"), 2, steps=1, meta=True)


def test_a_mistake_in_a_job_is_not_taken_for_that() -> None:
    def mistaken(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(output @ output, target.double())

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pt.simulate(job(loss=mistaken), s.hybrid("0, 3"), 2, steps=1, meta=True)
