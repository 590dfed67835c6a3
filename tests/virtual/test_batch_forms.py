"""A job's batch may have any form: the same samples train to the same bits, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import polytempo as pt
from polytempo.core import Strategy

s = pt.strategies
STRATEGIES = [
    s.sync_sgd(),
    s.local_sgd(period=3),
    s.delayed_sgd(),
    s.gossip(),
    s.hogwild(),
    s.shared_memory(),
    s.top_k_sgd(0.2, exact_below=0),
    s.ssp(),
    s.downpour(),
    s.easgd(),
    s.backup_workers(backups=0),
    s.flexrr(),
]
WORDS, CLASSES = 20, 3


class Texts(Dataset[Any]):
    """Text i has 1 to 6 words, as `form` gives it."""

    def __init__(self, count: int, seed: int, form: Callable[[Tensor, int], Any]) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 7, (count,), generator=generator).tolist()
        self._texts = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
        self._form = form

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Any:
        words = self._texts[index]
        return self._form(words, int(words[0]) % CLASSES)


class Bag(nn.Module):
    """The mean of a text's words, as logits of the class; texts one behind the other, or padded with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 5, mode="mean", padding_idx=0)
        self.classes = nn.Linear(5, CLASSES)

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        scores: Tensor = self.classes(self.words(ids, offsets))
        return scores


class Form(NamedTuple):
    """A form of batches: a sample's form, its collation, and the job's loss and accuracy."""

    sample: Callable[[Tensor, int], Any]
    collate: Callable[[list[Any]], Any] | None
    loss: Any
    correct: Any


def padded(words: Tensor) -> Tensor:
    return nn.functional.pad(words, (0, 6 - len(words)))


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def right(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(-1) == target


def one_behind_the_other(samples: list[Any]) -> tuple[Tensor, Tensor, list[int]]:
    """Ragged: ids of all texts, where each begins, and the labels as plain numbers."""
    lengths = torch.tensor([len(words) for words, _ in samples])
    return torch.cat([words for words, _ in samples]), lengths.cumsum(0) - lengths, [label for _, label in samples]


def of_three(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    ids, offsets, labels = batch
    return model(ids, offsets), torch.tensor(labels)


FORMS = {
    "pairs": Form(lambda words, label: (padded(words), label), None, entropy, right),
    "dicts": Form(
        lambda words, label: {"ids": padded(words), "text": {"label": label, "name": "a text"}},
        None,
        pt.of_batch(lambda model, batch: entropy(model(batch["ids"]), batch["text"]["label"])),
        pt.of_batch(lambda model, batch: right(model(batch["ids"]), batch["text"]["label"])),
    ),
    "three": Form(
        lambda words, label: (padded(words), label, len(words)),
        None,
        pt.of_batch(lambda model, batch: entropy(model(batch[0]), batch[1])),
        pt.of_batch(lambda model, batch: right(model(batch[0]), batch[1])),
    ),
    "one tensor": Form(
        lambda words, label: torch.cat([padded(words), torch.tensor([label])]),
        None,
        pt.of_batch(lambda model, batch: entropy(model(batch[:, :-1]), batch[:, -1])),
        pt.of_batch(lambda model, batch: right(model(batch[:, :-1]), batch[:, -1])),
    ),
    "collated pairs": Form(
        lambda words, label: {"words": words, "label": label},
        lambda samples: (
            torch.stack([padded(sample["words"]) for sample in samples]),
            torch.tensor([sample["label"] for sample in samples]),
        ),
        entropy,
        right,
    ),
    "ragged": Form(
        lambda words, label: (words, label),
        one_behind_the_other,
        pt.of_batch(lambda model, batch: entropy(*of_three(model, batch))),
        pt.of_batch(lambda model, batch: right(*of_three(model, batch))),
    ),
}
"""The same samples. Ragged ones are added up without padding: the same to rounding."""


def job(form: Form) -> pt.Job:
    """46 samples for 3 workers with batches of 4: the last step is uneven."""
    return pt.Job(
        model=Bag,
        data=lambda folder: pt.Data(Texts(46, 0, form.sample), Texts(20, 1, form.sample), form.collate),
        loss=form.loss,
        correct=form.correct,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        lr=0.5,
        batch_size=4,
        epochs=2,
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_same_samples_in_another_form_train_to_the_same_bits(strategy: Strategy) -> None:
    expected = pt.simulate(job(FORMS["pairs"]), strategy, 3)
    for name, form in FORMS.items():
        found = pt.simulate(job(form), strategy, 3)
        assert (found.steps, found.samples, found.accuracy) == (expected.steps, expected.samples, expected.accuracy)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5), name
        if name != "ragged":
            assert found.parameters_sha256 == expected.parameters_sha256, name
            assert found.loss == expected.loss, name


@pytest.mark.parametrize("name", ["dicts", "ragged"])
def test_only_time_is_told_of_any_batch(name: str) -> None:
    assert pt.simulate(job(FORMS[name]), s.sync_sgd(), 4, meta=True, steps=2).seconds > 0


@pytest.mark.process
@pytest.mark.parametrize("strategy", [s.sync_sgd(pt.collectives.ring), s.backup_workers(backups=0)], ids=str)
def test_on_processes_too(strategy: Strategy) -> None:
    found = pt.run(job(FORMS["ragged"]), strategy, workers=3, threads=1)
    virtual = pt.simulate(job(FORMS["ragged"]), strategy, 3)
    assert (found.steps, found.samples) == (virtual.steps, virtual.samples)
    assert found.loss == pytest.approx(virtual.loss, rel=1e-5)
    assert found.accuracy == virtual.accuracy


# ------------------------------------------------------------------------------------------------------- refusals

DICTS, PAIRS = FORMS["dicts"], FORMS["pairs"]


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.ssp()], ids=str)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            DICTS._replace(loss=entropy),
            r"needs batches that are pairs \(input, target\), but this one is a dict with 'ids': int64 \(2, 6\), "
            r"'text': a dict with 'label': int64 \(2,\), 'name': a list of 2; let the job have loss=pt.of_batch",
        ),
        (FORMS["three"]._replace(loss=entropy), r"this one is a list of 3 \(int64 \(2, 6\), int64 \(2,\), int64"),
        (FORMS["one tensor"]._replace(loss=entropy), r"this one is int64 \(2, 7\)"),
        (
            PAIRS._replace(loss=lambda output, target: nn.functional.cross_entropy(output, target, reduction="none")),
            r"loss\(output, target\) returned a tensor of shape \(2,\) .*expected the mean loss, .*; take its mean",
        ),
        (
            DICTS._replace(loss=pt.of_batch(lambda model, batch: {"loss": model(batch["ids"]).sum()})),  # type: ignore[arg-type,return-value]
            r"loss\(model, batch\) returned a dict with 'loss': float32 \(\) .*expected .*model\(\*\*batch\).loss",
        ),
    ],
)
def test_a_form_that_a_job_cannot_have_is_refused_before_the_first_step(
    strategy: Strategy, form: Form, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        pt.simulate(job(form), strategy, 2)


def test_two_collate_functions_are_refused() -> None:
    loader = DataLoader(Texts(8, 0, PAIRS.sample), batch_size=2)
    with pytest.raises(ValueError, match="their DataLoader has one of its own; give the loader's data set"):
        pt.Data(loader, collate=lambda samples: samples).training()  # type: ignore[arg-type]


def test_a_test_set_needs_a_length() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(6, dtype=torch.int64), 0

    endless = job(PAIRS)
    endless = pt.Job(**{**vars(endless), "data": lambda folder: pt.Data(Texts(46, 0, PAIRS.sample), Endless())})
    with pytest.raises(ValueError, match="a test set needs a length, and Endless has none"):
        pt.simulate(endless, s.sync_sgd(), 2)


def test_a_loader_as_the_test_set_keeps_its_collate_function() -> None:
    collated = FORMS["collated pairs"]
    assert collated.collate is not None
    of_loader = pt.Data(
        Texts(46, 0, PAIRS.sample),
        DataLoader(Texts(20, 1, collated.sample), batch_size=3, collate_fn=collated.collate),  # type: ignore[arg-type]
    )
    found = pt.simulate(pt.Job(**{**vars(job(PAIRS)), "data": lambda folder: of_loader}), s.sync_sgd(), 2)
    assert found.loss == pt.simulate(job(PAIRS), s.sync_sgd(), 2).loss


def test_a_model_that_cannot_be_copied_is_named() -> None:
    class Holding(Bag):
        def __init__(self) -> None:
            super().__init__()
            self.generator = (number for number in range(3))

    with pytest.raises(ValueError, match="a model is scored in a copy of its own, and Holding cannot be copied"):
        pt.simulate(pt.Job(**{**vars(job(PAIRS)), "model": Holding}), s.sync_sgd(), 2)
