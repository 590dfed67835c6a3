"""The bound of a run: 30 constructed runs, each with its bound as a person would name it, and the words."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from polytempo.diagnosis.bound import MEMORY, NETWORK, StepParts, UsedLink, bound, facts_of
from polytempo.diagnosis.pace import RankTimes

SLOW_NETWORK, WIDE = UsedLink(500e-6, 12.5e6, False), UsedLink(200e-6, 12.5e9, False)


class Case(NamedTuple):
    name: str
    expected: str
    strategy: str
    workers: int
    ms: tuple[float, float, float, float]
    """Parts of a step: computing, getting batches, waiting, the least wait of a rank."""
    sent_bytes: float = 0
    messages: float = 0
    more: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, which is only read)

    @property
    def facts(self) -> StepParts:
        compute_s, read_s, wait_s, least_s = (each / 1000 for each in self.ms)
        return StepParts(
            *(self.strategy, self.workers, compute_s, read_s, wait_s, least_s, self.sent_bytes, self.messages),
            **self.more,
        )


CASES = [
    Case("images from a disk", "data", "sync_sgd()", 4, (60, 80, 5, 4), 4e6, 2),
    Case("augmentation in the loop", "data", "local_sgd(period=8)", 8, (100, 70, 10, 2), 1e6, 1),
    Case("one worker and a slow loader", "data", "sync_sgd()", 1, (30, 30, 0, 0)),
    Case("a loader slower than a slow network", "data", "sync_sgd()", 4, (50, 90, 60, 55), 4e6, 2),
    Case("a server, and a slow loader", "data", "async_sgd()", 4, (50, 60, 10, 5), 4e6, 2, {"serves": True}),
    Case("one worker", "computing", "sync_sgd()", 1, (200, 1, 0, 0)),
    Case("ResNet on four fast hosts", "computing", "sync_sgd()", 4, (300, 5, 40, 30), 100e6, 6, {"link": WIDE}),
    Case("transformer, overlap hides the exchange", "computing", "sync_sgd()", 16, (900, 3, 60, 20), 400e6, 20),
    Case("a server that keeps up", "computing", "async_sgd()", 8, (100, 1, 20, 10), 4e6, 2, {"serves": True}),
    Case("local SGD that meets rarely", "computing", "local_sgd(period=16)", 8, (100, 2, 12, 4), 2e6, 0.1),
    Case("a large batch beside a slow network", "computing", "sync_sgd()", 4, (800, 9, 180, 170), 4e6, 2),
    Case("small model between hosts", "latency", "sync_sgd()", 16, (5, 0.1, 4, 3.5), 40e3, 30),
    Case("many small messages of a ring", "latency", "sync_sgd(route=ring)", 64, (20, 0.2, 14, 13), 1e6, 126),
    Case("tiny layers, one exchange each", "latency", "gossip()", 8, (2, 0, 3, 2.8), 10e3, 40),
    Case("long distance", "latency", "sync_sgd()", 2, (50, 1, 70, 68), 1e6, 4, {"link": UsedLink(15e-3, 1e9)}),
    Case("large model on Ethernet", "bytes", "sync_sgd()", 8, (300, 4, 400, 380), 400e6, 8),
    Case("VGG between two hosts", "bytes", "sync_sgd()", 2, (400, 4, 300, 290), 500e6, 8, {"link": SLOW_NETWORK}),
    Case("top-k that still sends much", "bytes", "top_k_sgd(0.1)", 8, (90, 2, 60, 50), 40e6, 8, {"link": SLOW_NETWORK}),
    Case("large model in the memory of a host", "bytes", "sync_sgd()", 8, (40, 1, 50, 45), 300e6, 8, {"link": MEMORY}),
    Case("a server with large weights", "bytes", "async_sgd()", 2, (50, 1, 320, 300), 400e6, 2, {"serves": True}),
    Case("one slow rank", "stragglers", "sync_sgd()", 4, (100, 1, 45, 5), 4e6, 2, {"slow": "rank 3"}),
    Case("spells of slowness", "stragglers", "sync_sgd()", 16, (100, 2, 70, 10), 4e6, 2),
    Case("local SGD with a slow rank", "stragglers", "local_sgd(period=8)", 4, (100, 2, 50, 5), 4e6, 1),
    Case("batches of varying length", "stragglers", "sync_sgd()", 8, (60, 2, 40, 8), 8e6, 4),
    Case("a busy server", "server", "async_sgd()", 32, (20, 1, 60, 50), 1e6, 2, {"serves": True, "server_busy": 0.95}),
    Case("a server that computes much", "server", "downpour()", 8, (20, 1, 30, 25), 1e5, 2, {"serves": True}),
    Case("waits at a barrier of the server", "server", "ssp()", 16, (40, 1, 50, 20), 1e6, 2, {"serves": True}),
    Case("batches of 2", "batch", "sync_sgd()", 8, (4, 0.1, 6, 5.5), 4e6, 2, {"batch_size": 2}),
    Case("far below the noise scale", "batch", "sync_sgd()", 4, (30, 1, 40, 38), 50e6, 2, {"noise_scale": 5e3}),
    Case("calls take longer than arithmetic", "batch", "sync_sgd()", 1, (0.4, 0.02, 0, 0), 0, 0, {"batch_size": 4}),
]
"""Not the rules, but runs as people have them. At least 28 of the 30 must be named as expected."""


def found(case: Case) -> str:
    answer = bound(case.facts)
    assert answer is not None
    return answer.kind


def test_28_of_30_constructed_runs_are_named() -> None:
    assert len(CASES) == 30
    wrong = {case.name: (found(case), case.expected) for case in CASES if found(case) != case.expected}
    assert len(wrong) <= 2, wrong


def test_a_pipeline_waits_in_its_bubble() -> None:
    answer = bound(StepParts("gpipe(stages=4)", 4, 0.1, 0.0, 0.08, 0.07, 1e6, 16, stages=4))
    assert answer is not None
    assert (answer.kind, answer.change) == ("bubble", "twice as many micro-batches")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            CASES[0],
            "Data bounds this run: 55 % of a step of 145 ms gets batches. Try getting batches in the background "
            "(num_workers of a DataLoader) first: by its own figures at best 1.8 times the samples per second.",
        ),
        (
            CASES[5],
            "Computing bounds this run: 100 % of a step of 201 ms computes. Try 2 workers on as many processors "
            "again first: by its own figures at best 2.0 times the samples per second.",
        ),
        (
            CASES[15],
            "Exchange bounds this run, by its bytes: 54 % of a step of 704 ms exchanges 400 MB a rank in 8 operations, "
            "by an assumed link. Try bf16_sgd() first: by its own figures at best 1.4 times the samples per second, "
            "if the loss allows it; `polytempo plan run` prices it with its loss.",
        ),
        (
            CASES[20],
            "Stragglers bound this run: 27 % of a step of 146 ms waits for rank 3. Try a run without rank 3 first: by "
            "its own figures at best 3 %.",
        ),
        (
            CASES[24],
            "The parameter server bounds this run: 74 % of a step of 81 ms waits for the server, which computes 95 % "
            "of the time. Try twice as many shards first: by its own figures at best 1.6 times the samples per second.",
        ),
        (
            CASES[28],
            "Too small a batch bounds this run: 54 % of a step of 71 ms exchanges 50 MB a rank in 2 operations, and a "
            "worker's batch has 32 samples, and the noise scale is 5,000. Try batches of 64 samples first: by its own "
            "figures at best 1.4 times the samples per second, if the loss allows it; `polytempo plan run` prices it "
            "with its loss.",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_the_sentence(case: Case, text: str) -> None:
    answer = bound(case.facts)
    assert answer is not None
    assert answer.text == text


def test_a_slow_rank_may_have_smaller_parts() -> None:
    answer = bound(CASES[20].facts._replace(balances=True))
    assert answer is not None
    assert 'Try balance="speed" first' in answer.text
    assert answer.gain > 1.3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_change_is_predicted_from_the_measured_parts(case: Case) -> None:
    answer = bound(case.facts)
    assert answer is not None
    assert 1.0 <= answer.gain <= 5.0
    assert 0.0 < answer.share <= 1.0
    assert answer.change in answer.text


def test_facts_are_means_and_least_over_ranks() -> None:
    ranks = [RankTimes(10.0, 6.0, 4.0, 1.0), RankTimes(10.0, 8.0, 2.0, 3.0)]
    assert facts_of(ranks, 10, "sync_sgd()", workers=2) == StepParts("sync_sgd()", 2, 0.5, 0.2, 0.3, 0.2)
    trained = facts_of(ranks, 10, "sync_sgd()", trained_s=8.0, workers=2)
    assert trained is not None
    assert trained.compute_s == pytest.approx(0.3)
    assert facts_of([], 10, "sync_sgd()", workers=2) is None
    assert facts_of(ranks, 0, "sync_sgd()", workers=2) is None
    assert bound(StepParts("sync_sgd()", 2, 0.0)) is None


def test_assumed_links_are_said_to_be_assumed() -> None:
    run = StepParts("sync_sgd()", 8, 0.1, 0.0, 0.2, 0.19, 400e6, 8, NETWORK)
    for link in (NETWORK, WIDE):
        answer = bound(run._replace(link=link))
        assert answer is not None
        assert ("assumed" in answer.text) == link.assumed


@pytest.mark.parametrize(
    ("ms", "sent_bytes", "expected"),
    [
        ((0.01, 0.0, 0.7, 0.7), 64e3, ("latency", "twice as many epochs in a round")),
        ((10, 0.0, 700, 700), 900e6, ("bytes", "twice as many epochs in a round")),
        ((10, 0.0, 10, 1), 64e3, ("stragglers", "a larger cohort, so that clients even out over workers")),
        ((0.4, 0.0, 0.0, 0.0), 0, ("computing", "4 workers on as many processors again")),
    ],
)
@pytest.mark.parametrize("strategy", ["fed_avg(cohort=6)", "secure(inner=scaffold(cohort=6))"])
def test_rounds_are_told_no_batch_and_no_other_period(
    strategy: str, ms: tuple[float, float, float, float], sent_bytes: float, expected: tuple[str, str]
) -> None:
    """A sample of a step is a client, and the strategy names the batches."""
    answer = bound(Case("clients", "", strategy, 2, ms, sent_bytes, 2, {"batch_size": 1}).facts)
    assert answer is not None
    assert (answer.kind, answer.change) == expected
    assert not {"strategy", "batch_size"} & answer.tried.keys()
