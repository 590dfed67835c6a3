"""Topic models (latent Dirichlet allocation) by collapsed Gibbs sampling, with a vocabulary that rotates.

round t     worker p samples its documents' words of block (p + t) mod N, and hands the block on to worker p - 1

             block 0   block 1   block 2
documents 0     t=0       t=1       t=2        no word is at two workers in a round, no document ever;
documents 1     t=2       t=0       t=1        only the topics' totals are as they were before the round
documents 2     t=1       t=2       t=0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polytempo.core import Port
from polytempo.core.calls.call_name import call_name
from polytempo.partition.scheduled.program import Measure, added, borders, check_kinds, check_places


def lda(topics: int = 20, alpha: float = 0.1, beta: float = 0.01, seed: int = 0) -> TopicModel:
    """Draw a topic zᵢ for each word wᵢ of the documents dᵢ from its distribution given all others,

        P(zᵢ = k) ∝ (n_dk + α) (n_wk + β) / (n_k + V β)

        pt.schedule(pt.partition.scheduled.lda(topics=20), documents, workers=2, sweeps=50)

    schedule: worker p gets block (p + t) mod N of the V words, with all their counts n_wk. push: it draws topics for
    those words of its documents, and pushes the changes of n_k. pull: n_k gets all changes, and the block goes to
    worker p - 1. N rounds are a sweep over all words.

    Within a block words are drawn together if they differ in document and word; so here, too, they share only n_k. The
    objective is -log P(w, z) a word; there is no error, so a run ends after `sweeps`. Cost of a round: about 6 K
    operations a word, shared by the workers; each sends a block, 4 K V / N bytes, and 8 K bytes to each other one.

    Source: STRADS (see `program.py`); T. L. Griffiths and M. Steyvers, "Finding scientific topics", 2004.
    """
    if topics < 1 or not min(alpha, beta) > 0:
        raise ValueError(
            f"lda needs a topic, and alpha and beta above 0; got topics={topics}, alpha={alpha:g}, beta={beta:g}"
        )
    return TopicModel(call_name(lda, locals()), topics, alpha, beta, seed)


@dataclass(frozen=True)
class TopicModel:
    """The job of `lda`. See `ScheduledJob`."""

    name: str
    topics: int
    alpha: float
    beta: float
    seed: int

    def __str__(self) -> str:
        return self.name

    def check(self, data: tuple[Any, ...]) -> None:
        """See `ScheduledJob`."""
        _checked(data)

    async def begin(self, port: Port, data: tuple[Any, ...]) -> _TopicSampler:
        """`data`: document (m,) and word (m,) of each token, and the numbers of documents and words."""
        return _TopicSampler(port, self, *_checked(data))


class _TopicSampler:
    """One worker's state. See `ScheduledProgram`."""

    divided = frozenset({"document_topics", "word_topics"})

    def __init__(
        self, port: Port, job: TopicModel, documents: Tensor, words: Tensor, num_documents: int, num_words: int
    ) -> None:
        if num_words < port.size:
            raise ValueError(f"{num_words} words cannot be {port.size} blocks; use at most {num_words} workers")
        self._port, self._job, self.rounds, self._round = port, job, port.size, 0
        self._words = borders(torch.bincount(words, minlength=num_words), port.size)
        ends = borders(torch.bincount(documents, minlength=num_documents), port.size)
        first, end = ends[port.rank], ends[port.rank + 1]
        topics = torch.randint(job.topics, words.shape, generator=torch.Generator().manual_seed(job.seed))
        counts = pairs(words, topics, num_words, job.topics)
        self._totals = counts.sum(0)
        """n_k, as all workers have pushed them before this round."""
        self._block = counts[self._words[port.rank] : self._words[port.rank + 1]].clone()
        """n_wk of the words that are here."""
        mine = (first <= documents) & (documents < end)
        self._documents, self._tokens, self._topics = documents[mine] - first, words[mine], topics[mine]
        self._counts = pairs(self._documents, self._topics, end - first, job.topics)
        """n_dk of this worker's documents."""
        self._groups = [self._grouped(*each) for each in zip(self._words, self._words[1:], strict=False)]
        self._random = torch.Generator().manual_seed(job.seed * 1_000_003 + port.rank)
        self._num_tokens, self._num_words = len(words), num_words

    def _grouped(self, first: int, end: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The tokens of a block in groups without repeated documents or words, with their rows in both counts."""
        here = ((first <= self._tokens) & (self._tokens < end)).nonzero().flatten()
        groups = [here[group] for group in apart(self._documents[here].tolist(), self._tokens[here].tolist())]
        return [(group, self._documents[group], self._tokens[group] - first) for group in groups]

    async def schedule(self) -> Tensor:
        """The block of each worker."""
        return (torch.arange(self._port.size) + self._round) % self._port.size

    async def push(self, chosen: Tensor) -> Tensor:
        block = int(chosen[self._port.rank])
        flops = 6.0 * self._job.topics * sum(len(group) for group, _, _ in self._groups[block])
        return await self._port.compute(lambda: self._drawn(block), flops, "push")

    def _drawn(self, block: int) -> Tensor:
        totals, alpha, beta = self._totals.clone(), self._job.alpha, self._job.beta
        for group, d, w in self._groups[block]:
            k = self._topics[group]
            totals -= torch.bincount(k, minlength=len(totals))
            self._counts[d, k] -= 1
            self._block[w, k] -= 1
            chances = (self._counts[d] + alpha) * (self._block[w] + beta) / (totals + self._num_words * beta)
            k = torch.multinomial(chances, 1, generator=self._random).flatten()
            totals += torch.bincount(k, minlength=len(totals))
            self._counts[d, k] += 1
            self._block[w, k] += 1
            self._topics[group] = k
        return totals - self._totals

    async def pull(self, chosen: Tensor, pushed: Tensor) -> None:
        self._totals, self._round = self._totals + pushed, self._round + 1
        here, size = self._port.rank, self._port.size
        if size > 1:
            coming = int(chosen[(here + 1) % size])
            like = self._block.new_empty(self._words[coming + 1] - self._words[coming], self._job.topics)
            self._block = await self._port.send_receive(
                self._block, (here - 1) % size, like=like, source=(here + 1) % size
            )

    async def measure(self) -> Measure:
        """-log P(w, z) a word, from the counts of all workers."""
        alpha, beta, num_topics = self._job.alpha, self._job.beta, self._job.topics
        words = dirichlet(self._block, beta).sum()
        documents = (dirichlet(self._counts, alpha) - rising(self._counts.sum(1), num_topics * alpha)).sum()
        totals = rising(self._totals, self._num_words * beta).sum()
        log_likelihood = await added(self._port, (words + documents).reshape(1)) - totals
        return Measure(-float(log_likelihood) / self._num_tokens, None)

    def parameters(self) -> Mapping[str, Tensor]:
        """Counts: n_dk of this worker's documents, n_wk of its words, and n_k."""
        return {"document_topics": self._counts, "word_topics": self._block, "topics": self._totals}


def rising(counts: Tensor, start: float) -> Tensor:
    """log Γ(start + n) - log Γ(start): the logarithm of start · (start + 1) ··· (start + n - 1)."""
    return torch.lgamma(counts.double() + start) - torch.lgamma(torch.tensor(start, dtype=torch.float64))


def dirichlet(counts: Tensor, prior: float) -> Tensor:
    """Each row's part of the logarithm of its counts' probability."""
    return rising(counts, prior).sum(1)


def pairs(left: Tensor, right: Tensor, num_left: int, num_right: int) -> Tensor:
    """The count of each pair, int32 (num_left, num_right)."""
    return torch.bincount(left * num_right + right, minlength=num_left * num_right).view(num_left, num_right).int()


def apart(left: list[int], right: list[int]) -> list[Tensor]:
    """The pairs' places in groups without a repeated left or right one: each in the first that is free for it."""
    taken: dict[tuple[str, int], int] = {}
    numbers = []
    for a, b in zip(left, right, strict=True):
        both = taken.get(("left", a), 0) | taken.get(("right", b), 0)  # the groups that have either, as bits
        first_free = ~both & (both + 1)
        for key in (("left", a), ("right", b)):
            taken[key] = taken.get(key, 0) | first_free
        numbers.append(first_free.bit_length() - 1)
    groups = torch.tensor(numbers, dtype=torch.long)
    return list(torch.split(torch.argsort(groups, stable=True), torch.bincount(groups).tolist()))


def _checked(data: tuple[Any, ...]) -> tuple[Tensor, Tensor, int, int]:
    """The tokens. ValueError where they are none."""
    expected = "lda learns from tensors documents and words, a number a token, and the numbers of documents and words"
    check_kinds(data, (Tensor, Tensor, int, int), expected)
    documents, words, num_documents, num_words = data
    if documents.shape != words.shape or documents.dim() != 1 or not len(words):
        raise ValueError(f"each token has a document and a word, got {len(documents)} and {len(words)} of them")
    check_places("documents", documents, num_documents)
    check_places("words", words, num_words)
    return documents, words, num_documents, num_words
