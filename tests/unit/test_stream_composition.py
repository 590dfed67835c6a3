"""Sources made of sources: mapped, filtered, packed and mixed. Every sample and token once, any part alike."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from polytempo import data
from polytempo.data.streams.sharded_data import InMemoryShards, ShardedData, runs_of
from polytempo.data.streams.sources.mixture import interleaved, phases
from polytempo.data.streams.sources.packed import NO_LABEL, packing

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path_factory.mktemp("cache")))


def numbered(counts: list[int], first: int = 0) -> InMemoryShards:
    numbers = iter(range(first, first + sum(counts)))
    return InMemoryShards(
        [[next(numbers) for _ in range(count)] for count in counts], [f"{first}+{counts}"] * len(counts)
    )


def documents(*shards: list[int]) -> InMemoryShards:
    """Documents of these lengths with tokens that are all different, from 1 on."""
    token, made = 1, []
    for lengths in shards:
        made.append([torch.arange(token := token + length, token + length) - length for length in lengths])
    return InMemoryShards(made, [str(lengths) for lengths in shards])


def parts_are_alike(source: ShardedData, rows: list[set[int]]) -> None:
    """A read of some samples of a shard gives the same samples as a read of all."""
    for shard, count in enumerate(source.counts):
        whole = list(map(source.decode, source.read(shard, [range(count)])))
        assert len(whole) == count
        for chosen in rows:
            wanted = sorted(number for number in chosen if number < count)
            found = list(map(source.decode, source.read(shard, runs_of(wanted))))
            for one, other in zip(found, [whole[number] for number in wanted], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


ROWS = st.lists(st.sets(st.integers(0, 12)), max_size=3)


def _twice(sample: int) -> int:
    return 2 * sample


def _odd(sample: int) -> bool:
    return sample % 2 == 1


@given(counts=COUNTS, rows=ROWS)
def test_mapped(counts: list[int], rows: list[set[int]]) -> None:
    source = data.mapped(numbered(counts), _twice)
    assert list(source) == [2 * number for number in range(sum(counts))]
    assert source.fingerprint != data.mapped(numbered(counts), _odd).fingerprint
    assert source.fingerprint != data.mapped(numbered(counts), _twice, version="2").fingerprint
    parts_are_alike(source, rows)


@given(counts=COUNTS.filter(lambda counts: sum(counts) > 1), rows=ROWS, version=st.sampled_from(["", "1"]))
def test_filtered(counts: list[int], rows: list[set[int]], version: str) -> None:
    source = data.filtered(numbered(counts), _odd, version=version)
    assert list(source) == [number for number in range(sum(counts)) if number % 2]
    assert len(source) == sum(source.counts) == sum(counts) // 2
    parts_are_alike(source, rows)


def test_a_filter_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="PT2606"):
        data.filtered(numbered([3]), lambda sample: False)


# ---------------------------------------------------------------------------------------------------- packed

TABLE = [
    ([5, 2, 3, 4, 1], 8, [[(0, 0, 5), (2, 0, 3)], [(1, 0, 2), (3, 0, 4), (4, 0, 1)]]),
    ([3, 3, 3], 8, [[(0, 0, 3), (1, 0, 3)], [(2, 0, 3)]]),
    ([0, 2, 0], 4, [[(1, 0, 2)]]),
    ([9, 3], 4, [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9), (1, 0, 3)]]),
    ([], 4, []),
]


@pytest.mark.parametrize(("lengths", "length", "expected"), TABLE)
def test_packing(lengths: list[int], length: int, expected: list[Any]) -> None:
    assert [[tuple(piece) for piece in sequence] for sequence in packing(lengths, length)] == expected


LENGTHS = st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=1, max_size=3).filter(lambda s: sum(map(sum, s)))


@given(lengths=LENGTHS, length=st.integers(2, 9), rows=ROWS)
def test_each_token_is_packed_once_with_its_successor(
    lengths: list[list[int]], length: int, rows: list[set[int]]
) -> None:
    source = data.packed(documents(*lengths), length, pad=0)
    found: Counter[tuple[int, int]] = Counter()
    for sample in source:
        assert all(value.shape == (length,) for value in sample.values())
        there = sample["segments"] > 0
        assert torch.equal(there, sample["tokens"] > 0)
        found.update(zip(sample["tokens"][there].tolist(), sample["labels"][there].tolist(), strict=True))
        assert sample["labels"][~there].eq(NO_LABEL).all()
        for segment in sample["segments"].unique().tolist():
            if segment:
                positions = sample["positions"][sample["segments"] == segment]
                assert positions.tolist() == list(range(len(positions)))
    expected = [
        (token, document[place + 1] if place + 1 < len(document) else NO_LABEL)
        for document in map(Tensor.tolist, documents(*lengths))
        for place, token in enumerate(document)
    ]
    assert found == Counter(expected)
    assert source.num_tokens == len(expected)
    parts_are_alike(source, rows)


def test_blocks_of_documents_are_packed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    from polytempo.data.streams.sources import packed

    monkeypatch.setattr(packed, "DOCUMENTS_OF_BLOCK", 3)
    source = data.packed(documents([4, 1, 2, 5, 3, 3, 1], [2, 2]), 6)
    assert source.counts == [2 + 2 + 1, 1]
    tokens = sorted(int(token) for sample in source for token in sample["tokens"] if token)
    assert tokens == list(range(1, 24))
    parts_are_alike(source, [{0}, {4}, {1, 3}, {2, 4}])


class _Attention(nn.Module):
    """A causal language model with positions, small enough for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 8), nn.Embedding(12, 8)
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 40)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        query, key, value = (
            each.unflatten(-1, (2, 4)).transpose(-2, -3) for each in self.project(hidden).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(hidden + attended.transpose(-2, -3).flatten(-2))


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=9).filter(lambda each: max(each) > 1))
def test_the_loss_of_packed_documents_is_that_of_ragged_ones(lengths: list[int]) -> None:
    """The same sum and gradient as of documents that are computed one by one, to 1e-12."""
    torch.manual_seed(0)
    model = _Attention()
    torn = [torch.randint(0, 40, (length,)) for length in lengths]
    ragged = torch.zeros((), dtype=torch.float64)
    for document in torn:
        size = len(document)
        mask = torch.ones(size, size, dtype=torch.bool).tril()[None]
        logits = model(document, torch.arange(size), mask)
        ragged = ragged + functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
    expected = torch.autograd.grad(ragged, list(model.parameters()))

    batch = torch.utils.data.default_collate(list(data.packed(InMemoryShards([torn], [str(torn)]), 8)))
    logits = model(batch["tokens"], batch["positions"], data.document_mask(batch["segments"]))
    packed = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(packed, ragged.detach() + 0 * packed, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(packed, list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["memory", "files"])
def test_lengths_are_kept_for_the_same_documents_alone(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources with equal names, counts and bytes per document, and other lengths."""
    from polytempo.data.streams.sources import mapped, packed

    for module in (mapped, packed):
        monkeypatch.setattr(module, "KEPT_FROM_SAMPLES", 1)
    file, plans = tmp_path / "documents.jsonl", []
    plan = packed.Packed._plan
    monkeypatch.setattr(packed.Packed, "_plan", lambda self, shard: plans.append(shard) or plan(self, shard))
    for number, rows in enumerate([["[1, 2 ]", "[3,4,5]"], ["[1,2,3]", "[4, 5 ]"]]):
        file.write_text("".join(f'{{"t": {row}}}\n' for row in rows))
        os.utime(file, (number, number))
        documents = [{"t": json.loads(row)} for row in rows]
        for _ in range(2):
            found = data.json_lines(str(file)) if form == "files" else InMemoryShards([documents])
            assert [sample["tokens"].tolist() for sample in data.packed(found, 3, column="t")] == [
                (document["t"] + [0])[:3] for document in documents
            ]
            kept = data.filtered(found, _is_short, version="1")
            assert [len(sample["t"]) for sample in kept] == [2]
    assert len(plans) == {"files": 2, "memory": 4}[form]


def _is_short(sample: Any) -> bool:
    return len(sample["t"]) == 2


def test_document_mask() -> None:
    mask = data.document_mask(torch.tensor([[1, 1, 2, 0]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_documents_of_another_length_are_refused() -> None:
    growing = iter([2, 2, 3])
    source = data.packed(data.mapped(numbered([2]), lambda sample: [1] * next(growing)), 4)
    with pytest.raises(ValueError, match="PT2610"):
        next(iter(source))


@pytest.mark.parametrize(
    ("sample", "column", "text"),
    [("text", None, "str"), ([0.5], None, "row of whole numbers"), ([[1]], None, "row"), ({"a": [1]}, "b", "PT2605")],
)
def test_documents_that_are_not_tokens_are_refused(sample: Any, column: str | None, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        data.packed(InMemoryShards([[sample]], [str(sample)]), 4, column=column)


# --------------------------------------------------------------------------------------------------- mixture


def test_a_mixture_as_a_table() -> None:
    source = data.mixture([(numbered([4, 2]), 2), (numbered([9], first=100), 1)])
    assert source.counts == [4, 5]
    assert [list(source.of_epoch(epoch)) for epoch in range(3)] == [
        [0, 1, 100, 2, 3, 101, 4, 102, 5],
        [0, 1, 103, 2, 3, 104, 4, 105, 5],
        [0, 1, 106, 2, 3, 107, 4, 108, 5],
    ]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_that_are_dealt_take_turns(size: int, shuffle: bool) -> None:
    """A source with more samples than an epoch needs goes on where the epoch before has stopped, after a resume too."""
    mixed = data.mixture([(numbered([6]), 2), (numbered([9], first=100), 1)])
    epochs: list[list[int]] = [[], [], []]
    for rank in range(size):
        shard = data.DataShard(mixed, rank=rank, size=size, batch_size=2, shuffle=shuffle)
        for epoch in range(3):
            again = data.DataShard(mixed, rank=rank, size=size, batch_size=2, shuffle=shuffle)
            again.load_state_dict(shard.state_dict())
            samples = [int(number) for batch in shard for number in batch]
            assert samples == [int(number) for batch in again for number in batch]
            epochs[epoch] += samples
    firsts = [100, 103, 106]
    assert [sorted(each) for each in epochs] == [[*range(6), *range(first, first + 3)] for first in firsts]


@given(
    counts=st.lists(COUNTS, min_size=2, max_size=3),
    weights=st.lists(st.sampled_from([1, 2, 0.3, 0.5]), min_size=3, max_size=3),
    stop=st.sampled_from(["first", "all"]),
    rows=ROWS,
)
def test_mixtures(counts: list[list[int]], weights: list[float], stop: Any, rows: list[set[int]]) -> None:
    sources = [numbered(each, first=100 * place) for place, each in enumerate(counts)]
    mixed = data.mixture(list(zip(sources, weights, strict=False)), stop=stop)
    sizes = [sum(each) for each in counts]
    uses: Counter[int] = Counter()
    num_epochs = 5
    for epoch in range(num_epochs):
        source = mixed.of_epoch(epoch)
        samples = list(source)
        assert len(samples) == len(source) == len(mixed)
        assert len(set(samples)) == len(samples), "a sample is there twice in an epoch"
        per_source = Counter(sample // 100 for sample in samples)
        if stop == "all":
            assert per_source == Counter(dict(enumerate(sizes)))
        else:
            time = min(size / weight for size, weight in zip(sizes, weights, strict=False))
            for place in range(len(sizes)):
                assert abs(per_source[place] - weights[place] * time) < 1 + 1e-9
            assert any(per_source[place] == size for place, size in enumerate(sizes))
        uses.update(samples)
        parts_are_alike(source, rows)
    for place, size in enumerate(sizes):
        times = [uses[100 * place + number] for number in range(size)]
        assert max(times) - min(times) <= 1, "over epochs a source gives all samples equally often"


@given(counts=st.lists(st.integers(0, 30), min_size=2, max_size=4).filter(sum))
def test_places_of_a_shard_are_in_proportion(counts: list[int]) -> None:
    order, ranks = interleaved(tuple(counts))
    whole = sum(counts)
    for place, count in enumerate(counts):
        assert ranks[order == place].tolist() == list(range(count))
        for end in range(whole + 1):
            assert abs((order[:end] == place).sum() - count * end / whole) <= (1 + len(counts)) / 2


def test_phases_are_exact() -> None:
    assert list(phases([70, 1000], ["0.7", "0.3"], "first")) == [([70, 30], [0, 0])]
    assert list(phases([3, 3], ["0.1", "0.1"], "all")) == [([3, 3], [0, 0])]
    assert list(phases([0, 3], ["1", "1"], "all")) == [([0, 3], [0, 0])]


@pytest.mark.parametrize("weights", [(1, 0), (1, -1), (1, float("inf")), (1, float("nan")), (True, 1), (1,)])
def test_wrong_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"weight|two sources"):
        data.mixture([(numbered([3], first=place), weight) for place, weight in enumerate(weights)])


def test_a_stack_of_sources_repeats() -> None:
    """A mixture of packed, filtered and mapped sources is a source like any other."""

    def stack() -> ShardedData:
        short = data.packed(data.filtered(documents([3, 1, 5, 2], [4]), lambda each: len(each) > 1), 6)
        return data.mixture([(short, 1), (data.packed(documents([9, 9]), 6), 1)], stop="all")

    one, other = list(stack()), list(stack())
    assert len(one) == len(stack())
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    batches = torch.utils.data.DataLoader(stack(), batch_size=2)
    assert sum(len(batch["tokens"]) for batch in batches) == len(one)
