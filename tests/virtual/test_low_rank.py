"""PowerSGD: its algorithm step by step, its residual, and when it is the exact mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import CLUSTER
from polytempo.aggregation import low_rank, mean
from polytempo.collectives import native, ring, tree
from polytempo.core import Bundle, NotFinite, Port, Transform
from polytempo.core.state import Saved, restored, saved
from polytempo.worlds import Outcome, VirtualWorld

SHAPES = {"w": (9, 7), "b": (9,), "kernel": (4, 3, 2, 2), "thin": (30, 2)}

Tensors = Mapping[str, Tensor]


def gradients(step: int, rank: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(*shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def stepped(
    transform: Transform,
    steps: Sequence[Sequence[Tensors]],
    shares: Sequence[float] | None = None,
    begin: Any = None,
) -> tuple[list[list[dict[str, Tensor]]], list[Any], Outcome[Any]]:
    """The answers [step][rank], each rank's last state, and the run; `steps[t][i]` is rank i's input of step t."""
    num_ranks = len(steps[0])

    async def program(port: Port) -> tuple[list[dict[str, Tensor]], Any]:
        state = transform.init(Bundle(steps[0][port.rank])) if begin is None else begin
        answers = []
        for given in steps:
            share = None if shares is None else shares[port.rank]
            brought = Bundle({name: tensor.clone() for name, tensor in given[port.rank].items()}, share)
            answer, state = await transform.apply(port, brought, state)
            assert answer is not None
            answers.append({name: view.clone() for name, view in answer.views.items()})
        return answers, state

    outcome = VirtualWorld(CLUSTER, num_ranks).run(program)
    found = [result for result in outcome.results if result is not None]
    return [list(row) for row in zip(*(answers for answers, _ in found), strict=True)], [s for _, s in found], outcome


def residual_of(state: Any, name: str) -> Tensor:
    residual: Tensor = state.matrices[name].memory.residual
    return residual


# --------------------------------------------------------------------------------------------------- the public code


def gram_schmidt(left: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in left.t():
        rest = column - sum((c * (c @ column) for c in columns), torch.zeros_like(column))
        columns.append(rest / rest.norm())
    return torch.stack(columns, dim=1)


def as_published(steps: Sequence[Sequence[Tensor]], right: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The result of the authors' `RankKReducer` with `reuse_query`, and error feedback around it, for one tensor.

    Every rank keeps `memory`, adds it to its gradient, and keeps the error of the *mean's* approximation.
    """
    memories = [torch.zeros_like(gradient) for gradient in steps[0]]
    answers = []
    for given in steps:
        matrices = [(g + memory).view(len(g), -1) for g, memory in zip(given, memories, strict=True)]
        left = gram_schmidt(sum((m @ right for m in matrices), torch.zeros(1)))  # type: ignore[arg-type]
        right = sum((m.t() @ left for m in matrices), torch.zeros(1)) / len(matrices)
        answers.append((left @ right.t()).view_as(given[0]))
        memories = [m.view_as(answers[-1]) - answers[-1] for m in matrices]
    return answers, memories


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_it_is_the_published_algorithm(rank: int) -> None:
    """Six steps on three ranks; our residual is the published one's part in the mean."""
    steps = [[gradients(t, i) for i in range(3)] for t in range(6)]
    transform = low_rank(rank, exact_below=0)
    begin = transform.init(Bundle(steps[0][0]))
    answers, states, _ = stepped(transform, steps)
    for name in begin.matrices:
        query = begin.matrices[name].right
        assert query is not None
        expected, memories = as_published([[g[name] for g in row] for row in steps], query.t())
        for row, reference in zip(answers, expected, strict=True):
            torch.testing.assert_close(row[0][name], reference, rtol=1e-10, atol=1e-12)
        for state, memory in zip(states, memories, strict=True):
            torch.testing.assert_close(3 * residual_of(state, name), memory, rtol=1e-10, atol=1e-12)


def test_a_step_by_hand() -> None:
    """Rank 1 on a mean of rank 1, with any Q: [1, 2, 3]ᵀ [4, 0, 4] comes back whole, without a residual."""
    column, row = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([4.0, 0.0, 4.0], dtype=torch.float64)
    product, other = torch.outer(column, row), torch.diag(torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))
    given = [{"w": product + other}, {"w": product - other}]
    answers, states, _ = stepped(low_rank(1, exact_below=0), [given])
    torch.testing.assert_close(answers[0][0]["w"], product, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(residual_of(states[0], "w"), other / 2, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(residual_of(states[1], "w"), -other / 2, rtol=1e-13, atol=1e-14)


# ------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("shares", [None, (0.5, 0.3, 0.2), (0.6, 0.0, 0.4)], ids=str)
@pytest.mark.parametrize("warm_start", [True, False])
def test_nothing_is_lost_over_the_steps(shares: tuple[float, ...] | None, warm_start: bool) -> None:
    steps = [[gradients(t, i) for i in range(3)] for t in range(20)]
    answers, states, _ = stepped(low_rank(1, exact_below=0, warm_start=warm_start), steps, shares)
    weights = shares or [1 / 3] * 3
    for name in ["w", "kernel"]:
        brought = sum(w * g[name] for row in steps for w, g in zip(weights, row, strict=True))
        given = sum(row[0][name] for row in answers)
        left = sum(residual_of(state, name) for state in states)
        torch.testing.assert_close(given + left, brought, rtol=1e-12, atol=1e-12)
        assert left.norm() > 0.1  # type: ignore[union-attr]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_what_is_finite_in_16_bits_stays_finite(num_ranks: int) -> None:
    """Three thirds of 65504 come to more than float16 has, for they are rounded up: the answer is its largest number.

    The rest is residual. It holds for matrices and for unencoded tensors.
    """
    most = {name: torch.full(shape, 65504.0, dtype=torch.float16) for name, shape in SHAPES.items()}
    answers, states, _ = stepped(low_rank(1, exact_below=0), [[most] * num_ranks] * 2)
    for name, expected in most.items():
        for row in answers:
            torch.testing.assert_close(row[0][name], expected, rtol=0.002, atol=0)
    assert all(residual_of(state, "w").abs().max() < 65504 * 0.002 for state in states)


def test_16_bits_lose_nothing_over_the_steps_nor_when_ranks_go() -> None:
    """The residual is of float32, so only its own rounding is lost; in 16 bits it would be 0.8 % after 60 steps."""
    shapes, random, transform = (32, 32), torch.Generator().manual_seed(0), low_rank(2, exact_below=0)
    steps = [[{"w": torch.randn(shapes, generator=random).bfloat16()} for _ in range(2)] for _ in range(60)]
    answers, states, _ = stepped(transform, steps)
    brought = sum(given["w"].double() / 2 for row in steps for given in row)
    arrived = sum(row[0]["w"].double() for row in answers)
    left = sum(residual_of(state, "w").double() for state in states)
    torch.testing.assert_close(arrived + left, brought, rtol=0, atol=1e-4)
    layout, sources = Bundle(steps[0][0]), [saved(state, "gradients") for state in states]
    heir = restored(transform.init(layout), sources[0], "gradients", layout, sources)
    assert residual_of(heir, "w").dtype is torch.float32
    torch.testing.assert_close(residual_of(heir, "w").double(), left, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", [native, ring, tree])
def test_all_ranks_end_with_the_same_bits(dtype: torch.dtype, route: Any) -> None:
    steps = [[{n: t.to(dtype) for n, t in gradients(s, i).items()} for i in range(4)] for s in range(5)]
    answers, states, _ = stepped(low_rank(2, route, exact_below=0), steps)
    for row in answers:
        assert all(torch.equal(row[0][name], other[name]) for other in row for name in SHAPES)
        assert row[0]["w"].dtype is dtype
    assert all(torch.equal(states[0].matrices["w"].right, state.matrices["w"].right) for state in states)


@pytest.mark.parametrize("rank", [7, 50])
def test_with_the_full_rank_it_is_the_mean_without_a_residual(rank: int) -> None:
    steps = [[gradients(t, i) for i in range(3)] for t in range(3)]
    answers, states, _ = stepped(low_rank(rank, exact_below=0), steps)
    expected, *_ = stepped(mean(), steps)
    for row, reference in zip(answers, expected, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(row[0][name], reference[0][name], rtol=1e-12, atol=1e-12)
    assert states[0].matrices == {}


@pytest.mark.parametrize("directions", [1, 2, 3])
def test_a_mean_of_few_directions_arrives_whole(directions: int) -> None:
    """The ranks may have any matrices; also where P's columns depend on each other."""
    random = torch.Generator().manual_seed(directions)
    steps = []
    for t in range(4):
        thin = [torch.randn(n, directions, generator=random, dtype=torch.float64) for n in (12, 10)]
        noise = torch.randn(12, 10, generator=random, dtype=torch.float64)
        steps.append([{"w": thin[0] @ thin[1].t() + noise}, {"w": thin[0] @ thin[1].t() - noise}])
        if not t:
            expected = thin[0] @ thin[1].t()
    answers, *_ = stepped(low_rank(3, exact_below=0), steps)
    torch.testing.assert_close(answers[0][0]["w"], expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_zeros_are_zeros_and_end_nothing() -> None:
    """Q is zero after them, and a power iteration from zero would stay there."""
    matrix = gradients(0, 0)["w"]
    zeros, given = [{"w": torch.zeros_like(matrix)}] * 2, [{"w": matrix}] * 2
    answers, states, _ = stepped(low_rank(2, exact_below=0), [zeros, given, given])
    assert torch.equal(answers[0][0]["w"], zeros[0]["w"])
    assert not states[0].matrices["w"].right.isnan().any()
    best = float(torch.linalg.svdvals(matrix)[2:].norm())
    assert float((answers[2][0]["w"] - 2 * matrix + answers[1][0]["w"]).norm()) < 3 * best


def test_warm_steps_approach_the_best_approximation() -> None:
    """A constant gradient: each step's subspace is the last one's, turned by ΣM ΣMᵀ."""
    matrix = torch.diag(torch.tensor([8.0, 4.0, 1.0, 0.5, 0.25, 0.125], dtype=torch.float64))
    best = matrix.clone()
    best[2:] = 0

    def last(warm: bool) -> float:
        transform = low_rank(2, exact_below=0, warm_start=warm)
        state = transform.init(Bundle({"w": matrix}))
        distance = 0.0
        for _ in range(8):
            answers, states, _ = stepped(transform, [[{"w": matrix}] * 2], begin=state)
            right = states[0].matrices["w"].right
            state = transform.init(Bundle({"w": matrix}))._replace(step=states[0].step)  # without a residual
            if warm:
                state.matrices["w"] = state.matrices["w"]._replace(right=right)
            distance = float((answers[0][0]["w"] - best).norm())
        return distance

    assert last(warm=True) < 1e-3 < 0.1 < last(warm=False)


@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_any_scale_are_approximated_alike(dtype: torch.dtype, scale: float) -> None:
    """Q is as large as they are, and their product with it would be as their square: beyond float32, or nothing."""
    random = torch.Generator().manual_seed(0)
    matrix = torch.outer(torch.randn(60, generator=random), torch.randn(50, generator=random))
    matrix += 0.05 * torch.randn(60, 50, generator=random)
    given = [{"w": (matrix * scale).to(dtype)}] * 2
    answers, *_ = stepped(low_rank(1, exact_below=0), [given] * 6)
    errors = [float((row[0]["w"].double() / scale - matrix).norm() / matrix.norm()) for row in answers]
    assert errors == pytest.approx([0.096, 0.096, 0.064, 0.064, 0.064, 0.064], abs=0.003)


# ------------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("exact_below", "expected"),
    [
        (0, [8 * (2 * 9 + 2 * 4 + 9 + 60), 8 * (2 * 7 + 2 * 12)]),  # P of w and kernel, b, thin; then their Q
        (60, [8 * (2 * 9 + 9 + 48 + 60), 8 * 2 * 7]),  # thin (30, 2) would be no smaller by rank 2
        (1024, [8 * (63 + 9 + 48 + 60)]),  # small tensors alone need one message
    ],
)
def test_two_all_reduces_a_step_and_what_they_carry(exact_below: int, expected: list[int]) -> None:
    sent: list[int] = []

    async def noting(port: Port, buffer: Tensor) -> Tensor:
        if port.rank == 0:
            sent.append(buffer.numel() * buffer.element_size())
        return await native(port, buffer)

    stepped(low_rank(2, noting, exact_below=exact_below), [[gradients(0, i) for i in range(2)]])
    assert sent == expected


def test_the_cost_is_that_of_two_thin_sums() -> None:
    """P and small tensors, then Q; M stays here, with Q."""
    parameters = Bundle({"w": torch.zeros(1000, 1000), "b": torch.zeros(1000)})
    cost = low_rank(4).cost
    assert cost is not None
    (exchange,), memory = cost(parameters, 8)
    assert [each.numel for each in exchange.sums] == [4 * 1000 + 1000, 4 * 1000]
    assert exchange.flops == 6 * 4 * 1000 * 1000
    assert memory == 4 * (1000 * 1000 + 4 * 1000)


# ----------------------------------------------------------------------------------------------------------- state


def test_the_first_q_depends_on_the_seed_and_the_name_alone() -> None:
    alone = low_rank().init(Bundle({"w": torch.zeros(64, 64)}))
    among = low_rank().init(Bundle({"a": torch.zeros(64, 64), "w": torch.zeros(64, 64)}))
    other = low_rank(seed=1).init(Bundle({"w": torch.zeros(64, 64)}))
    assert torch.equal(alone.matrices["w"].right, among.matrices["w"].right)
    assert not torch.equal(alone.matrices["w"].right, among.matrices["a"].right)
    assert not torch.equal(alone.matrices["w"].right, other.matrices["w"].right)


def test_residuals_go_to_ranks_that_go_on_and_alone_they_are_given() -> None:
    """Four ranks become two, and then one: sums stay, and the one begins with the rest."""
    transform = low_rank(1, exact_below=0)
    steps = [[gradients(t, i) for i in range(4)] for t in range(3)]
    _, states, _ = stepped(transform, steps)
    layout = Bundle(steps[0][0])
    sources = [saved(state, "gradients") for state in states]
    total = sum(residual_of(state, "w") for state in states)

    def heir(sources: Sequence[Saved]) -> Any:
        return restored(transform.init(layout), sources[0], "gradients", layout, sources)

    halves = [heir(sources[:2]), heir(sources[2:])]
    torch.testing.assert_close(residual_of(halves[0], "w") + residual_of(halves[1], "w"), total, rtol=1e-14, atol=1e-14)
    answers, after, _ = stepped(transform, [[gradients(9, 0)]], begin=heir(sources))
    torch.testing.assert_close(answers[0][0]["w"], gradients(9, 0)["w"] + total, rtol=1e-14, atol=1e-14)
    assert after[0].matrices["w"].memory.residual is None
    assert torch.equal(after[0].matrices["w"].right, states[0].matrices["w"].right)


def test_one_rank_without_a_residual_gets_its_own_gradient_back() -> None:
    answers, *_ = stepped(low_rank(1, exact_below=0), [[gradients(0, 0)]])
    assert all(torch.equal(answers[0][0][name], tensor) for name, tensor in gradients(0, 0).items())


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_stops_every_rank_before_anything_is_remembered(wrong: float) -> None:
    transform = low_rank(2, exact_below=0)
    _, states, _ = stepped(transform, [[gradients(0, i) for i in range(2)]])
    before = [residual_of(state, "w").clone() for state in states]
    messages: dict[int, str] = {}

    async def program(port: Port) -> None:
        given = gradients(1, port.rank)
        if port.rank == 1:
            given["w"][3, 2] = wrong
        try:
            await transform.apply(port, Bundle(given), states[port.rank])
        except NotFinite as error:
            messages[port.rank] = str(error)

    VirtualWorld(CLUSTER, 2).run(program)
    assert messages[1].startswith(f"element {3 * 7 + 2} of w on rank 1 is {wrong}, which low_rank(rank=2) cannot")
    assert messages[0].startswith("element 21 of w (or of its row) in the sum over all ranks is ")
    assert all(torch.equal(residual_of(state, "w"), residual) for state, residual in zip(states, before, strict=True))


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="low_rank needs a rank of at least 1, got 0"):
        low_rank(0)
    with pytest.raises(ValueError, match="exact_below must be a number of elements >= 0, got -1"):
        low_rank(exact_below=-1)


def test_it_can_be_priced_without_values() -> None:
    meta = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    transform = low_rank(2, exact_below=0)

    async def program(port: Port) -> None:
        state = transform.init(Bundle(meta))
        for _ in range(2):
            answer, state = await transform.apply(port, Bundle(dict(meta)), state)
            assert answer is not None
            assert answer.views["w"].is_meta

    assert VirtualWorld(CLUSTER, 4).run(program).seconds > 0
