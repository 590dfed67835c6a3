"""Pipelines on processes: the bits of the virtual world, replicas of stages, models that are not chains, refusals."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from pipelines import DELAYED, WAITING, WIDTH, Trained, batches, perceptron, trained, two_versions
from polytempo.core import Port
from polytempo.native import lending
from polytempo.partition import cut, schedules, striped, unstriped
from polytempo.partition.schedules import ddg, one_f_one_b, pipedream
from polytempo.partition.schedules.facts import facts
from polytempo.partition.wires import Wires
from polytempo.training.pipeline.stage_program import MicroBatch, StageProgram
from polytempo.worlds import ProcessWorld, VirtualWorld
from process.crew import together

pytestmark = pytest.mark.process

EVERY = WAITING | DELAYED | {"pipedream_2bw": two_versions}
SAMPLE = torch.zeros(1, WIDTH, dtype=torch.float64)
mse = nn.functional.mse_loss


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def plain(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in state.items()}


@pytest.fixture
def _lends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages lend each other tensors of any size."""
    monkeypatch.setattr(lending, "LEAST_BYTES", 1)


@cache
def virtually(name: str) -> Trained:
    """The virtual world's training by that schedule."""
    return trained(EVERY[name](2))


@pytest.mark.parametrize("least_bytes", [1, lending.LEAST_BYTES])
def test_every_schedule_computes_the_bits_of_the_virtual_world(
    least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages may lend each other their tensors or send them."""
    monkeypatch.setattr(lending, "LEAST_BYTES", least_bytes)

    def work(world: ProcessWorld) -> Any:
        found = {}
        for name, make in EVERY.items():
            pipe = pt.pipeline(perceptron(), sgd, mse, make(2), sample=SAMPLE)
            losses = [pipe.step(x, y) for x, y in batches(6)]
            found[name] = [[float(loss) for loss in losses if loss is not None], plain(pipe.state_dict())]
            pipe.finish()
        num_slots = len(lending._own_slots().slots)
        assert 0 < num_slots <= 16 if least_bytes == 1 else not num_slots
        return found

    first, last = together(2, work)
    for name in EVERY:
        virtual = virtually(name)
        assert first[name][0] == []
        assert last[name][0] == virtual.losses
        for parameter, tensor in virtual.model.named_parameters():
            assert torch.equal(torch.tensor(last[name][1][parameter], dtype=torch.float64), tensor), (name, parameter)
        assert first[name][1] == last[name][1]


def test_a_pipeline_never_receives_what_another_one_has_sent() -> None:
    """Also behind a pipeline with messages under way, and in a resumed one."""

    def work(world: ProcessWorld) -> Any:
        found = {}
        for name, make in EVERY.items():
            left, fresh, again = (pt.pipeline(perceptron(), sgd, mse, make(2), sample=SAMPLE) for _ in range(3))
            for x, y in batches(3):
                left.step(x, y)
            again.load_training_state(left.training_state())
            for step, (x, y) in enumerate(batches(6)):  # in turns
                fresh.step(x, y)
                if step >= 3:
                    again.step(x, y)
            found[name] = [plain(fresh.state_dict()), plain(again.state_dict())]
        return found

    for found in together(2, work):
        for name in EVERY:
            expected = plain(dict(virtually(name).model.named_parameters()))
            assert found[name] == [expected, expected], name


def test_new_processes_go_on_from_the_state_that_others_have_saved(tmp_path: Path) -> None:
    """With messages under way, under schedules that carry them past a step."""

    def saved(world: ProcessWorld) -> Any:
        for name, make in EVERY.items():
            pipe = pt.pipeline(perceptron(), sgd, mse, make(2), sample=SAMPLE)
            for x, y in batches(3):
                pipe.step(x, y)
            torch.save(pipe.training_state(), tmp_path / f"{name} {world.rank}")

    def gone_on(world: ProcessWorld) -> Any:
        found = {}
        for name, make in EVERY.items():
            pipe = pt.pipeline(perceptron(), sgd, mse, make(2), sample=SAMPLE)
            pipe.load_training_state(torch.load(tmp_path / f"{name} {world.rank}"))
            for x, y in batches(6)[3:]:
                pipe.step(x, y)
            found[name] = plain(pipe.state_dict())
        return found

    together(2, saved)
    for found in together(2, gone_on):
        for name in EVERY:
            assert found[name] == plain(dict(virtually(name).model.named_parameters())), name


def test_codecs_compute_the_bits_of_the_virtual_world_and_send_the_bytes_that_they_claim() -> None:
    both = {
        "int8, bf16": (pt.compression.int8(block=WIDTH), pt.compression.bf16()),
        "qsgd": (pt.compression.qsgd(levels=127), pt.compression.qsgd(levels=127)),
    }

    def work(world: ProcessWorld) -> Any:
        found = {}
        for name, (activations, gradients) in both.items():
            codecs = {"activations": activations, "gradients": gradients}
            pipe = pt.pipeline(perceptron(), sgd, mse, one_f_one_b(2, 4), sample=SAMPLE, **codecs)
            before = world.trace.bytes_sent[world.rank]
            losses = [pipe.step(x, y) for x, y in batches(6)]
            pipe.finish()  # a send is counted when it is over
            sent = world.trace.bytes_sent[world.rank] - before
            claimed = 6 * pipe.sent_bytes(*batches(1)[0])[world.rank]
            found[name] = [
                [float(loss) for loss in losses if loss is not None],
                plain(pipe.state_dict()),
                sent,
                claimed,
            ]
        return found

    first, last = together(2, work)
    for name, codecs in both.items():
        virtual = trained(one_f_one_b(2, 4), wires=Wires(*codecs))
        assert last[name][0] == virtual.losses
        assert first[name][1] == last[name][1]
        for parameter, tensor in virtual.model.named_parameters():
            assert torch.equal(torch.tensor(last[name][1][parameter], dtype=torch.float64), tensor), (name, parameter)
        for rank, (*_, sent, claimed) in enumerate((first[name], last[name])):
            assert sent == claimed == virtual.sent_bytes[rank]


def test_what_is_under_way_is_finished_and_a_pipeline_goes_on_afterwards() -> None:
    """All gradients have made their updates then. Without delay nothing changes."""

    def work(world: ProcessWorld) -> Any:
        found = []
        for make in (ddg, pipedream, lambda stages: pipedream(stages, vertical_sync=True), two_versions, one_batch):
            pipe = pt.pipeline(perceptron(), sgd, mse, make(2), sample=SAMPLE)
            for x, y in batches(3):
                pipe.step(x, y)
            pipe.finish()
            finished = plain(pipe.state_dict())
            pipe.finish()
            again = plain(pipe.state_dict()) == finished
            for x, y in batches(3, seed=5):
                pipe.step(x, y)
            pipe.finish()
            steps = [state["momentum_buffer"].abs().sum().item() > 0 for state in pipe.optimizer.state.values()]
            found.append([again, all(steps), pipe.delay, facts(pipe.schedule, pipe.stage).delay])
        return found

    one_batch = partial(one_f_one_b, micro_batches=1)
    for rows in together(2, work):
        assert all(again and stepped and delay == told for again, stepped, delay, told in rows)


@pytest.mark.usefixtures("_lends")
def test_stripes_of_a_top_layer_are_trained_as_in_the_virtual_world() -> None:
    """Three processes: the layers before it, and a stripe of it each; the last one gathers both."""
    by, schedule = ["2.stripes.0", "2.stripes.1"], schedules.pipelined_backprop(3, stripes=2)

    def in_stripes() -> nn.Module:
        layers = perceptron(3)
        return striped(nn.Sequential(*layers[:2], layers[2][0]), "2", 2)

    def work(world: ProcessWorld) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "stage 0 .* times the mean")  # the stripes are half a layer each
            pipe = pt.pipeline(in_stripes(), sgd, mse, schedule, sample=SAMPLE, by=by)
        losses = [pipe.step(x, y) for x, y in batches(6)]
        found = [[float(loss) for loss in losses if loss is not None], plain(unstriped(pipe.state_dict()))]
        pipe.finish()
        return found

    model, expected = in_stripes(), []
    parts = cut(model, sample=SAMPLE, by=by)
    programs = [StageProgram(parts, schedule, k, stepping(sgd(parts.stages[k].module.parameters()))) for k in range(3)]

    async def program(port: Port) -> None:
        for x, y in batches(6):
            batch = MicroBatch((x,), parts.layouts(x), lambda output, y=y: mse(output, y), lambda part: None)
            if (loss := await programs[port.rank].step(port, [batch])) is not None:
                expected.append(float(loss))

    VirtualWorld(pt.cluster.ethernet(gbit_per_s=1), 3).run(program)
    *others, (losses, state) = together(3, work)
    assert losses == expected
    assert state == plain(unstriped(model.state_dict()))
    assert [found[1] for found in others] == [state, state]
    assert state["2.weight"] != plain(perceptron(3).state_dict())["2.0.weight"]


def stepping(optimizer: Optimizer) -> Callable[[], Any]:
    async def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


class Residual(nn.Module):
    """A convolution with batch norm, a skip over the layers between, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.middle = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 3, padding=1))
        self.end = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, 1, 4, 4)."""
        begun = torch.tanh(self.norm(self.begin(x)))
        out: Tensor = self.end((begun + self.middle(begun)).flatten(1))
        return out


class Tied(nn.Module):
    """An embedding that also scores: one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.hidden = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scores = nn.Linear(4, 7, bias=False)
        self.scores.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, places)."""
        out: Tensor = self.scores(self.hidden(self.embed(x))).mean(1)
        return out


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]] = {
    "residual": (Residual, torch.randn(8, 1, 4, 4, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)),
    "tied": (Tied, torch.arange(24).reshape(8, 3) % 7, torch.randn(8, 7, dtype=torch.float64)),
}


@pytest.mark.usefixtures("_lends")
def test_models_that_are_no_chains_are_trained_as_by_one_process() -> None:
    """One micro-batch, because batch norm sees each micro-batch separately."""

    def work(world: ProcessWorld) -> Any:
        found = {}
        for name, (make, x, y) in MODELS.items():
            for schedule in (one_f_one_b(2, 1), schedules.gpipe(2, 1), schedules.zero_bubble(2, 1)):
                by = "time" if schedule.name == "gpipe" else "operations"
                pipe = pt.pipeline(seeded(make), sgd, mse, schedule, sample=x, by=by, max_norm=0.01)
                before = torch.get_rng_state()
                for _ in range(4):
                    pipe.step(x, y)
                assert torch.equal(torch.get_rng_state(), before)  # it is the loop's
                found[f"{name} {schedule}"] = plain(pipe.state_dict())
        return found

    first, last = together(2, work)
    assert first == last
    for name, (make, x, y) in MODELS.items():
        model = seeded(make)
        optimizer = sgd(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
            optimizer.step()
        expected = dict(model.state_dict())
        for schedule in ("one_f_one_b", "gpipe", "zero_bubble"):
            state = {
                key: torch.tensor(value, dtype=expected[key].dtype)
                for key, value in first[f"{name} {schedule}"].items()
            }
            seeded(make).load_state_dict(state)
            for key in state:
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=1e-12)


def test_what_cannot_be_is_refused() -> None:
    def refused(make: Callable[[], object]) -> str:
        try:
            make()
        except ValueError as error:
            return str(error)
        return "accepted"

    data = TensorDataset(SAMPLE.tile(4, 1), SAMPLE.tile(4, 1))

    def work(world: ProcessWorld) -> Any:
        _, x, _ = MODELS["tied"]
        whole = pt.pipeline(perceptron(), sgd, mse, ddg(2), sample=SAMPLE)
        return [
            refused(lambda: pt.pipeline(perceptron(), sgd, mse, ddg(3), sample=SAMPLE)),
            refused(lambda: pt.pipeline(seeded(Tied), sgd, mse, ddg(2), sample=x)),
            refused(lambda: whole.step(torch.zeros(3, WIDTH), torch.zeros(2, WIDTH))),
            *(
                refused(
                    lambda s=s: pt.pipeline(perceptron(), sgd, mse, ddg(2), sample=SAMPLE, inner=pt.parse_strategy(s))
                )
                for s in ("ddg", "shared_memory", "sync_sgd(route=invariant)")
            ),
            refused(lambda: pt.pipeline(perceptron(2), sgd, mse, schedules.interleaved(2, 2, parts=4), sample=SAMPLE)),
            refused(lambda: pt.pipeline(perceptron(), sgd, mse, ddg(2), sample=SAMPLE, on_drift="restore")),
            refused(lambda: [whole.step(*batch) for batch in pt.shard(data, batch_size=1)]),
            refused(lambda: [whole.step(x.tile(2, 1), y.tile(2, 1)) for x, y in pt.shard(data, batch_size=1)]),
        ]

    for ranks, tied, lengths, *inner, layers, restore, dealt, moved in together(2, work):
        assert [text[:6] for text in inner] == ["PT1713", "PT1711", "PT1712"]
        assert "2 ranks cannot be replicas of 3 stages each; start 3" in ranks
        assert "embed.weight is shared by stages (0, 1), and with ddg" in tied
        assert "got the lengths [2, 3]" in lengths
        assert "8" in layers
        assert 'give on_drift="stop" or "ignore"' in restore
        assert "by pt.init(mesh={'data': 1, 'stage': 2})" in dealt
        assert dealt == moved


@pytest.mark.usefixtures("_lends")
def test_a_mistake_in_a_batch_names_stage_layer_and_sizes_on_all_ranks() -> None:
    """All stages know the sizes of a batch before one of them computes, so that none waits for another."""

    def said(make: Callable[[], object]) -> str:
        try:
            make()
        except ValueError as error:
            return str(error)
        return "accepted"

    def work(world: ProcessWorld) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            by_hand = pt.pipeline(perceptron(), sgd, mse, one_f_one_b(2, 2), sample=SAMPLE, by=["7"])
        pipe = pt.pipeline(perceptron(), sgd, mse, one_f_one_b(2, 2), sample=SAMPLE)
        [(x, y)] = batches(1)
        answers = [
            said(lambda: pipe.step(x[:, :5], y)),
            said(lambda: pipe.step(x)),
            said(lambda: pipe.step(x[:0], y[:0])),
            said(lambda: by_hand.step(x, y)),
        ]
        norm = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, WIDTH)).double()
        normed = pt.pipeline(norm, sgd, mse, one_f_one_b(2, 4), sample=torch.cat([SAMPLE, SAMPLE]))
        normed.step(x, y)
        answers.append(said(lambda: normed.step(x[:5], y[:5])))  # micro-batches of 2, 1, 1 and 1
        return [*answers, [str(each.message) for each in caught]]

    first, last = together(2, work)
    assert first[:-1] == last[:-1]
    width, none, empty, works, short, warned = first
    assert re.search(
        r"stage 0 at `.*\(input_1\)` cannot take inputs of these sizes: input \(4, 5\) of torch.float64", width
    )
    assert "step takes the model's inputs and the target, (input, target); got 1 arguments" in none
    assert "got the lengths [0]" in empty
    assert works == "accepted"
    assert re.search(
        r"at `.*` cannot take .* input \(1, 6\) of torch.float64: Expected more than 1 value per channel", short
    )
    [warning] = warned
    assert re.search(
        r"stage 0 \(0, 1, .*\) takes 1.7 times the mean, .*: 2 stages are at most 1.1 times as fast", warning
    )
    assert last[-1] == []


@pytest.mark.usefixtures("_lends")
def test_a_short_last_batch_and_another_shape_are_taken() -> None:
    """Shapes may change from batch to batch; fewer samples than micro-batches leave the others out."""

    def work(world: ProcessWorld) -> Any:
        pipe = pt.pipeline(perceptron(), sgd, mse, one_f_one_b(2, 4), sample=SAMPLE)
        for x, y in batches(2):
            pipe.step(x, y)
            pipe.step(x[:3], y[:3])
            pipe.step(x[:1], y[:1])
        return plain(pipe.state_dict())

    model = perceptron()
    optimizer = sgd(model.parameters())
    for x, y in batches(2):
        for samples in (len(x), 3, 1):
            optimizer.zero_grad()
            mse(model(x[:samples]), y[:samples]).backward()
            optimizer.step()
    for state in together(2, work):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(state[name], dtype=torch.float64), parameter, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_lends")
def test_a_stage_that_dies_ends_the_others_with_its_name() -> None:
    def work(world: ProcessWorld) -> str:
        pipe = pt.pipeline(perceptron(), sgd, mse, one_f_one_b(2, 4), sample=SAMPLE)
        [(x, y)] = batches(1)
        pipe.step(x, y)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.step(x, y)
        return "not reached"

    with pytest.raises(pt.errors.WorkerDied, match=r"rank 1 of 2 was killed by SIGKILL(.|\n)*rank 0 raised PeerLost"):
        together(2, work)
