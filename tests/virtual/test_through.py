"""`through`: every codec on every way that takes it, in worlds of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from laws.codecs import ROWS, Row
from polytempo import compression as c
from polytempo.aggregation import krum, median, merged, trimmed_mean, vote
from polytempo.collectives import ring, tree
from polytempo.compression.exchange.packing import Packing, stripes, whole
from polytempo.compression.exchange.through import through
from polytempo.core import Bundle, Codec, NotFinite, Port, State, Strategy, Transform
from polytempo.core.state import restored, saved
from polytempo.spec.explanation import explain
from polytempo.worlds import VirtualWorld
from process.crew import together
from virtual.ways import (
    EXACT_BELOW,
    SHAPES,
    SIZES,
    STEPS,
    WAYS,
    Way,
    label,
    left,
    ran,
    residuals,
    shares,
    tolerance,
    values,
    weighted,
)

# ---------------------------------------------------------------------- all ranks, all steps


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [(way, num_ranks) for way in WAYS for num_ranks in (SIZES if way.fed or way.row.feeds_itself else (3,))],
    ids=lambda each: label(each) if isinstance(each, Way) else str(each),
)
def test_all_ranks_end_with_the_same_bits_and_nothing_is_lost(way: Way, num_ranks: int) -> None:
    """Σ answers + Σ residuals of all ranks = Σ of the weighted inputs, where there is feedback."""
    dtype = torch.float64 if num_ranks % 2 == 0 else torch.float32
    outcome = ran(way.make(), num_ranks, dtype)
    ranks = [rank for rank in outcome.results if rank is not None]
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0].answers, rank.answers, strict=True))
    assert all(answer.isfinite().all() and answer.dtype is dtype for answer in ranks[0].answers)
    if num_ranks == 1:
        assert outcome.trace.bytes_sent[0] == 0
        assert all(
            torch.equal(answer, Bundle(values(step, 0, dtype)).flat)
            for step, answer in enumerate(ranks[0].answers, start=1)
        )
    if way.fed or way.row.feeds_itself or way.row.law == "lossless":
        arrived = torch.stack(ranks[0].answers).double().sum(0)
        total = arrived + torch.stack([left(rank.state, dtype) for rank in ranks]).sum(0)
        error = (total - weighted(num_ranks, dtype, STEPS)).abs().max()
        assert float(error) <= tolerance(way, num_ranks, dtype)


@pytest.mark.parametrize("codec", [c.top_k(0.1), c.threshold(density=0.1)], ids=str)
def test_virtual_ranks_decode_gathered_wires_once(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """N wires for all ranks in place of N for each, in memory of each rank's own; with the bits of real ranks, as
    `agreement` holds."""
    decoded, add_ = [], Packing.add_

    def counted(self: Packing, message: Tensor, outs: Mapping[str, Tensor], step: int, rank: int) -> None:
        decoded.append((step, rank))
        add_(self, message, outs, step, rank)

    monkeypatch.setattr(Packing, "add_", counted)

    async def program(port: Port) -> list[Tensor]:
        transform, answers = through(codec, exact_below=EXACT_BELOW), list[Tensor]()
        state = transform.init(Bundle(values(0, port.rank, torch.float32)))
        for step in (1, 2):
            answer, state = await transform.apply(port, Bundle(values(step, port.rank, torch.float32), 0.2), state)
            assert answer is not None
            answers.append(answer.flat.clone())
            answer.flat.zero_()  # a bundle belongs to the function that gets it
        return answers

    first, *others = VirtualWorld(CLUSTER, 5).run(program).results
    assert decoded == [(step, rank) for step in (1, 2) for rank in range(5)]
    assert all(torch.equal(torch.stack(first or []), torch.stack(other or [])) for other in others)
    assert (torch.stack(first or []) != 0).any(1).all()


@pytest.mark.parametrize("way", [way for way in WAYS if way.fed or way.row.feeds_itself], ids=label)
def test_a_rank_that_goes_on_alone_gives_all_residuals(way: Way) -> None:
    """3 ranks become 1: their sources are added, given with the next answer, and none is left."""
    transform, dtype = way.make(), torch.float64
    ranks = [rank for rank in ran(transform, 3, dtype).results if rank is not None]
    layout = Bundle(values(0, 0, dtype))
    sources = [saved(rank.state, "s") for rank in ranks]
    state = restored(transform.init(layout), sources[0], "s", layout, sources)
    total = torch.stack([left(rank.state, dtype) for rank in ranks]).sum(0)
    torch.testing.assert_close(left(state, dtype), total, rtol=1e-12, atol=1e-12)

    async def alone(port: Port) -> tuple[Tensor, State]:
        answer, after = await transform.apply(port, Bundle(values(9, 0, dtype)), state)
        assert answer is not None
        return answer.flat, after

    (result,) = VirtualWorld(CLUSTER, 1).run(alone).results
    assert result is not None
    torch.testing.assert_close(result[0], Bundle(values(9, 0, dtype)).flat + total, rtol=1e-12, atol=1e-12)
    assert residuals(result[1]) == []
    assert result[1].step == STEPS


def test_small_tensors_arrive_exactly() -> None:
    """Tensors of fewer than `exact_below` elements: here the bias, the scalar, and an empty one."""
    transform = through(c.fp16(), route=c.all_gather, exact_below=EXACT_BELOW)
    outcome = ran(transform, 2, torch.float64, steps=1)
    assert outcome.results[0] is not None
    answer = Bundle(values(0, 0, torch.float64)).with_flat(outcome.results[0].answers[0])
    for name, shape in SHAPES.items():
        exact = sum(share * values(1, rank, torch.float64)[name] for rank, share in enumerate(shares(2)))
        assert torch.equal(answer.views[name], exact) == (torch.empty(shape).numel() < EXACT_BELOW), name


@pytest.mark.parametrize("path", [None, c.all_gather, c.reduce_scatter])
def test_a_bundle_of_nothing(path: Any) -> None:
    transform = through(c.fp16(), route=path)

    async def program(port: Port) -> int:
        nothing = Bundle({"a": torch.zeros(0, 4), "b": torch.zeros(0)})
        answer, _ = await transform.apply(port, nothing, transform.init(nothing))
        assert answer is not None
        return answer.flat.numel()

    assert VirtualWorld(CLUSTER, 2).run(program).results == [0, 0]


@pytest.mark.parametrize("path", [None, c.all_gather, c.reduce_scatter])
def test_what_is_not_finite_is_refused_by_name_before_any_residual_has_changed(path: Any) -> None:
    """The parameter, the element, and the rank; the residuals of the tensors before it are as they were."""
    transform = through(c.feedback(c.fp16()), route=path, exact_below=0)
    states: dict[int, Any] = {}

    async def program(port: Port) -> None:
        given = Bundle(values(1, port.rank, torch.float32))
        _, states[port.rank] = await transform.apply(port, given, transform.init(given))
        found = {n: fed.memory.residual for n, fed in states[port.rank].codecs.items() if SHAPES[n] != (0, 3)}
        kept = {name: residual.clone() for name, residual in found.items()}
        tensors = values(2, port.rank, torch.float32)
        last = list(tensors)[-1]
        if port.rank == 1:
            tensors[last].view(-1)[0] = float("nan")
            with pytest.raises(NotFinite, match=rf"element 0 of {last} on rank 1 is nan, which feedback\(fp16\(\)\)"):
                await transform.apply(port, Bundle(tensors), states[1])
            assert all(torch.equal(kept[name], residual) for name, residual in found.items())

    VirtualWorld(CLUSTER, 2).run(program)


@pytest.mark.parametrize("path", [None, c.all_gather])
def test_what_a_codec_without_a_memory_refuses_has_a_name_too(path: Any) -> None:
    """TernGrad looks at the values before anything is encoded, to agree on their scale."""
    transform = through(c.terngrad(), route=path, exact_below=0)

    async def program(port: Port) -> None:
        given = Bundle(values(1, port.rank, torch.float32))
        given.tensors["w"][1, 0] = float("nan")
        if port.rank == 1:
            with pytest.raises(NotFinite, match=r"element 7 of w .*on rank 1 is nan, which terngrad\("):
                await transform.apply(port, given, transform.init(given))

    VirtualWorld(CLUSTER, 2).run(program)


@pytest.mark.parametrize("codec", [c.fp16(), c.feedback(c.top_k(0.1)), c.feedback(c.int8()), c.terngrad()], ids=str)
def test_a_world_that_only_prices_counts_the_same_bytes(codec: Any) -> None:
    """Tensors without values: `polytempo simulate --meta`."""
    transform = through(codec, exact_below=0)

    def sent(device: str) -> dict[int, int]:
        async def program(port: Port) -> None:
            given = Bundle({name: t.to(device) for name, t in values(1, port.rank, torch.float32).items()})
            await transform.apply(port, given, transform.init(given))

        return dict(VirtualWorld(CLUSTER, 3).run(program).trace.bytes_sent)

    assert sent("meta") == sent("cpu")


# ---------------------------------------------------------------------- merges


def merged_by(transform: Transform, num_ranks: int) -> list[Tensor]:
    """Every rank's answer; shares do not count in a merge."""
    return [rank.answers[0] for rank in ran(transform, num_ranks, torch.float64, 1).results if rank is not None]


@pytest.mark.parametrize(
    ("merge", "path", "num_ranks"),
    [
        (median, c.reduce_scatter, 2),
        (median, c.reduce_scatter, 5),
        (median, c.all_gather, 4),
        (median, None, 3),
        (trimmed_mean(1), c.reduce_scatter, 4),
        (krum(1), None, 5),
        (krum(1), c.all_gather, 6),
        (vote, None, 3),
        (vote, c.all_gather, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_merge_of_what_is_exact_is_the_plain_merge(merge: Any, path: Any, num_ranks: int) -> None:
    expected = merged_by(merged(merge), num_ranks)[0]
    for answer in merged_by(through(c.exact(), merge, path), num_ranks):
        assert torch.equal(answer, expected)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
def test_every_codec_can_be_merged(row: Row) -> None:
    """The median, on its chosen way, and votes; all ranks get the same bits."""
    for merge in (median, vote):
        answers = merged_by(through(row.make(), merge, exact_below=EXACT_BELOW), 3)
        assert all(torch.equal(answers[0], answer) for answer in answers[1:])
        assert answers[0].isfinite().all()


# ---------------------------------------------------------------------- which way


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
def test_the_codec_chooses_its_way(row: Row) -> None:
    """The table of `through` has the way."""
    cost = through(row.make()).cost
    assert cost is not None
    ((exchange,), _) = cost(Bundle(values(0, 0, torch.float32)), 4)
    if row.summable:
        assert (exchange.by, exchange.reason) == ("native", "sum")
    elif row.sparse or row.feeds_itself or not row.fixed:
        assert exchange.by == "all_gather"
    else:
        assert (exchange.by, exchange.reason) == ("reduce_scatter", "stripes")


# ---------------------------------------------------------------------- its own account of its messages


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
@pytest.mark.parametrize("way", [way for way in WAYS if way.fed or way.row.feeds_itself], ids=label)
def test_the_cost_is_what_a_world_counts(way: Way, num_ranks: int) -> None:
    """Bytes of the busiest rank, and of all; where wires vary, the most."""
    strategy = Strategy("own", gradients=way.make())
    found = explain(strategy, num_ranks, values(0, 0, torch.float32)).at(1)
    outcome = ran(way.make(), num_ranks, torch.float32, steps=1)
    sent = [outcome.trace.bytes_sent[rank] for rank in range(num_ranks)]
    if way.row.fixed:
        assert (max(sent), sum(sent)) == (found.busiest_bytes, found.bytes)
    else:
        assert sum(sent) <= found.bytes


def test_the_cost_for_one_rank_and_for_another_route() -> None:
    parameters = {"w": torch.zeros(1000)}
    assert explain(Strategy("own", gradients=through(c.bf16())), 1, parameters).exchanges == ()
    found = explain(Strategy("own", gradients=through(c.bf16(), route=tree)), 8, parameters).at(1)
    assert (found.bytes, found.busiest_bytes) == (2 * 7 * 2000, 3 * 2000)


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("num_stripes", "expected"),
    [
        (1, [[("w", 0, 6), ("b", 0, 4), ("u", 0, 2)]]),
        (2, [[("w", 0, 5)], [("w", 5, 6), ("b", 0, 4), ("u", 0, 2)]]),
        (3, [[("w", 0, 3)], [("w", 3, 6), ("b", 0, 1)], [("b", 1, 4), ("u", 0, 2)]]),
    ],
)
def test_stripes(num_stripes: int, expected: list[list[tuple[str, int, int]]]) -> None:
    """Rows stay whole; 28 elements."""
    tensors = {"w": torch.zeros(6, 3), "b": torch.zeros(4), "empty": torch.zeros(0, 9), "u": torch.zeros(2, 3)}
    cut = stripes(whole(tensors, c.exact(), 0), tensors, num_stripes)
    assert [[tuple(piece[:3]) for piece in stripe] for stripe in cut] == expected


# ---------------------------------------------------------------------- real processes

REAL: dict[str, Callable[[], Transform]] = {
    "all_reduce": lambda: through(c.terngrad(), route=ring),
    "all_gather": lambda: through(c.feedback(c.top_k(0.1, entropy=True)), exact_below=EXACT_BELOW),
    "reduce_scatter": lambda: through(c.feedback(c.int8()), exact_below=EXACT_BELOW),
}


async def hashes(port: Port) -> list[str]:
    """The hashes of two steps' answers, on each way."""
    found = []
    for make in REAL.values():
        transform = make()
        state = transform.init(Bundle(values(0, port.rank, torch.float32)))
        for step in (1, 2):
            given = Bundle(values(step, port.rank, torch.float32), shares(port.size)[port.rank])
            answer, state = await transform.apply(port, given, state)
            assert answer is not None
            found.append(sha256(answer.flat.numpy().tobytes()).hexdigest())
    return found


@pytest.mark.process
def test_real_processes_reach_the_same_bits() -> None:
    real = together(3, lambda world: world.drive(hashes(world.port)))
    assert real == VirtualWorld(CLUSTER, 3).run(hashes).results
    assert real[0] == real[1] == real[2]
