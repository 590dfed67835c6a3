"""Strategies of 2023 and later: the simpler ones they reduce to, and the traps that they avoid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import polytempo as pt
from laws.definitions import one_bit_adam
from laws.harness import HOST, OPTIMIZERS, Rank, Setting, flat, plain_torch, run
from polytempo import strategies as s
from polytempo.aggregation import orthogonal_momentum, random_pairs, senders_mean
from polytempo.aggregation.directions import orthogonalised
from polytempo.aggregation.rare_variance import coded_between
from polytempo.compression import bins, chunk_top_k, feedback, top_k
from polytempo.core import Bundle, Port, Strategy
from polytempo.core.cost import ever_rarer
from polytempo.core.state import settled
from polytempo.core.transform import cost_of
from polytempo.synchronization.every import Timed
from polytempo.synchronization.fragments import cut
from polytempo.training.step.parameter_exchange import ParameterExchange
from polytempo.worlds import VirtualWorld

EVERYTHING = chunk_top_k(1.0, bits=None)
NUM_RANKS, LAST = 3, 13


@pytest.fixture
def plain() -> Iterator[Setting]:
    """SGD alone."""
    OPTIMIZERS["plain"] = lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    yield Setting("plain")
    del OPTIMIZERS["plain"]


def same(one: Strategy, other: Strategy, setting: Setting = Setting("adam"), *, bits: bool = True) -> None:
    """Both strategies end with the same weights on all ranks."""
    pairs = zip(run(one, NUM_RANKS, LAST, setting)[0], run(other, NUM_RANKS, LAST, setting)[0], strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a.history[-1], b.history[-1], rtol=0, atol=0 if bits else 1e-12)


# ---------------------------------------------------------------------- streaming DiLoCo


def test_one_fragment_without_delay_is_diloco() -> None:
    same(s.streaming_diloco(5, 1, 0, 0.0, 0.4, 0.9), s.diloco(5, 0.4, 0.9))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_blend_of_1_hears_nothing(delay: int) -> None:
    same(s.streaming_diloco(4, 2, delay, blend=1.0), Strategy("alone", synchronized=False))


def test_every_step_with_a_plain_outer_step_is_synchronous_sgd(plain: Setting) -> None:
    ranks, _ = run(s.streaming_diloco(1, 1, 0, 0.0, 1.0, 0.0), NUM_RANKS, LAST, plain)
    torch.testing.assert_close(ranks[0].history[-1], plain_torch(LAST, plain)[-1], rtol=0, atol=1e-12)


def test_keeping_loses_no_movement_and_sends_none_twice() -> None:
    """φ moves by the mean of all that workers moved, but for the part that is not sent yet: α = 1, μ = 0."""
    calm = s.streaming_diloco(4, 1, 1, "keep", 1.0, 0.0)
    ranks = [Rank(calm, rank, NUM_RANKS, Setting(), uneven=False) for rank in range(NUM_RANKS)]
    start = ranks[0].replica.model.state_dict()["0.bias"].clone()
    moved = torch.zeros(NUM_RANKS, *start.shape, dtype=start.dtype)
    for rank in ranks:
        step, own = rank.optimizer.step, rank

        def counted(*_: object, rank: Rank = own, step: object = step) -> None:
            bias = rank.model.state_dict()["0.bias"]
            before = bias.clone()
            step()  # type: ignore[operator]
            moved[ranks.index(rank)] += rank.model.state_dict()["0.bias"] - before

        rank.optimizer.step = counted  # type: ignore[assignment]

    async def program(port: Port) -> None:
        await ranks[port.rank].steps(port, 0, 9)
        await ranks[port.rank].replica.settle()

    VirtualWorld(HOST, NUM_RANKS).run(program)
    parameters = ranks[0].replica.parameters
    assert parameters is not None
    unsent = []
    for rank in ranks:
        assert rank.replica.parameters is not None
        (state,) = rank.replica.parameters.states
        anchor = state["fragment 0"].inner.anchor.views["0.bias"]
        unsent.append(rank.model.state_dict()["0.bias"] - anchor)
    found = anchor + torch.stack(unsent).mean(0)
    torch.testing.assert_close(found - start, moved.mean(0), rtol=0, atol=1e-12)


def test_fragments_hold_each_tensor_once_and_divide_the_bytes() -> None:
    """Tied weights have one name, and so one fragment. Eight equal tensors: a quarter at a time."""
    model = Bundle({f"w{i}": torch.empty(100, device="meta") for i in range(8)})
    assert cut(model, 4) == {f"fragment {p}": [f"w{2 * p}", f"w{2 * p + 1}"] for p in range(4)}
    for num in (1, 2, 3, 4, 8, 16):
        assert sorted(name for names in cut(model, num).values() for name in names) == model.names
    whole = cost_of(s.diloco(8).parameters, model, 4)
    parts = cost_of(s.streaming_diloco(8, 4).parameters, model, 4)
    sizes = [sum(each.numel for each in exchange.sums) for exchange in parts.exchanges]
    assert sizes == [200] * 4
    assert sum(sizes) == sum(each.numel for exchange in whole.exchanges for each in exchange.sums)
    assert [(each.steps.first, each.steps.period) for each in parts.exchanges] == [(2, 8), (4, 8), (6, 8), (8, 8)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"delay": 4}, "a period of more steps"),
        ({"fragments": 5}, "cannot take turns in 4 steps"),
        ({"blend": 1.5}, "from 0 to 1, or 'keep'"),
    ],
)
def test_impossible_streams_are_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        s.streaming_diloco(period=4, **wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- SparseLoCo


@pytest.mark.parametrize("mean_of", ["workers", "senders"])
def test_sparse_loco_with_everything_sent_is_local_sgd(mean_of: str) -> None:
    sparse = s.sparse_loco(4, 1.0, 0.9, EVERYTHING, mean_of, exact_below=0)  # type: ignore[arg-type]
    same(sparse, s.local_sgd(4, codec=top_k(1.0)), bits=False)


def test_the_outer_rate_acts_once() -> None:
    """Half the rate is half the way."""
    whole, half = (run(s.sparse_loco(4, lr, codec=EVERYTHING), NUM_RANKS, 4)[0][0].history[3] for lr in (1.0, 0.5))
    start = Rank(s.sync_sgd(), 0, NUM_RANKS, Setting(), uneven=False)
    begin = torch.cat([p.detach().reshape(-1) for p in start.model.parameters()])
    torch.testing.assert_close(half - begin, (whole - begin) / 2, rtol=0, atol=1e-12)


def test_a_mean_over_senders_counts_those_who_sent() -> None:
    buffers = [torch.tensor([4.0, 0.0, 0.0]), torch.tensor([2.0, 6.0, 0.0])]
    assert senders_mean(buffers).tolist() == [3.0, 6.0, 0.0]


@pytest.mark.parametrize(("decay", "part"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.2), (0.9, 0.3)])
def test_feedback_conserves_up_to_its_decay(decay: float, part: float) -> None:
    codec, random = feedback(chunk_top_k(0.1), decay, part), torch.Generator().manual_seed(0)
    sent = given = torch.zeros(300, dtype=torch.float64)
    state = codec.init(sent)
    for _ in range(30):
        x = torch.randn(300, generator=random, dtype=torch.float64)
        wire, state = codec.encode(x, state)
        sent, given = decay * sent + codec.decode(wire, x), decay * given + x
    torch.testing.assert_close(sent + state.memory.residual, given, rtol=0, atol=1e-12)


def test_a_part_of_the_residual_is_a_moving_average_of_errors() -> None:
    """LoCo's e with μ = 0.8, written out."""
    inner, codec = bins(4), feedback(bins(4), part=0.2)
    random, state, e = torch.Generator().manual_seed(0), None, torch.zeros(300, dtype=torch.float64)
    for _ in range(30):
        x = torch.randn(300, generator=random, dtype=torch.float64)
        wire, state = codec.encode(x, state)
        sent = inner.decode(inner.encode(x + e)[0], x)
        e = 0.8 * e + 0.2 * (x + e - sent)
        torch.testing.assert_close(codec.decode(wire, x), sent, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("shape", "sent"), [((4099,), 65), ((64, 64), 64), ((61, 67), 64), ((7,), 1)])
def test_prime_dimensions_are_as_sparse_as_others(shape: tuple[int, ...], sent: int) -> None:
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    codec = chunk_top_k(1 / 64)
    decoded = codec.decode(codec.encode(x)[0], x)
    assert 0 <= int((decoded != 0).sum()) - sent <= 1


def test_a_cosine_transform_keeps_what_is_sent_and_is_orthonormal() -> None:
    x = torch.randn(4096 + 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = chunk_top_k(1.0, bits=None, rotated=True)
    torch.testing.assert_close(whole.decode(whole.encode(x)[0], x), x, rtol=0, atol=1e-12)
    part = chunk_top_k(0.1, bits=None, rotated=True)
    found = part.decode(part.encode(x)[0], x)
    assert float(found @ (x - found)) == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------------- DES-LOC, block momentum


def test_des_loc_with_equal_periods_is_parameter_averaging() -> None:
    same(s.des_loc(4, 4, 4), s.parameter_averaging(4), bits=False)


def test_des_loc_whose_moments_never_meet_is_local_sgd() -> None:
    same(s.des_loc(4, 99, 99), s.local_sgd(4))


def test_moments_meet_at_times_of_their_own() -> None:
    """A worker's own second moment bounds its momentum, so some elements differ from the others'."""

    def alike(step: int, key: str) -> bool:
        ranks, _ = run(s.des_loc(5, 2, 3), NUM_RANKS, step, Setting("adam"))
        found = [
            torch.cat([rank.optimizer.state[p][key].reshape(-1) for p in rank.model.parameters()]) for rank in ranks
        ]
        same_everywhere = torch.stack([each == found[0] for each in found]).all(0)
        return float(same_everywhere.double().mean()) > (0.1 if key == "exp_avg" else 0.999)

    for step in (2, 3, 4):
        assert (alike(step, "exp_avg"), alike(step, "exp_avg_sq")) == (step % 2 == 0, step % 3 == 0)


@pytest.mark.parametrize("quiet", [0.0, 1e-12])
def test_a_momentum_of_others_makes_no_step_without_bound(quiet: float) -> None:
    """Rank 0 sees hardly a gradient of an element, so its own second moment is about 0 when momenta meet."""

    async def program(port: Port) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.Adam([weight], lr=0.01)
        exchange = ParameterExchange(s.des_loc(4, 2, 100), optimizer, {"w": weight})
        for _ in range(6):
            weight.grad = torch.tensor([1.0, 1.0 if port.rank else quiet], dtype=torch.float64)
            optimizer.step()
            await exchange.exchange(port, None)
        return weight.detach()

    for found in VirtualWorld(HOST, 3).run(program).results:
        assert float(found.abs().max()) < 6 * 0.01 * 8


def test_block_momentum_is_slowmo() -> None:
    """K. Chen and Q. Huo, 2016: v ← μ v + ζ (mean - φ); φ ← φ + v, with μ = 1 - 1/N. All workers have all data."""
    block_momentum, rate, period = 1 - 1 / NUM_RANKS, 0.8, 4
    found = final(s.slowmo(period, rate, block_momentum), NUM_RANKS, Setting("adam"))[0]
    ranks = [Rank(s.local_sgd(period), rank, NUM_RANKS, Setting("adam"), uneven=False) for rank in range(NUM_RANKS)]
    anchor = flat(ranks[0].model)
    velocity = torch.zeros_like(anchor)

    async def program(port: Port, first: int, last: int) -> None:
        await ranks[port.rank].steps(port, first, last)

    for step in range(LAST):
        VirtualWorld(HOST, NUM_RANKS).run(lambda port, step=step: program(port, step, step + 1))  # type: ignore[misc]
        if (step + 1) % period == 0:
            velocity = block_momentum * velocity + rate * (flat(ranks[0].model) - anchor)
            anchor = anchor + velocity
            for rank in ranks:
                torch.nn.utils.vector_to_parameters(anchor.clone(), rank.model.parameters())
    torch.testing.assert_close(flat(ranks[0].model), found, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- CO2


def test_co2_in_each_step_is_delayed_sgd(plain: Setting) -> None:
    late, delayed = s.co2(1, 1.0, 0.0), s.delayed_sgd(1)
    torch.testing.assert_close(final(late, 3, plain), final(delayed, 3, plain), rtol=0, atol=1e-12)


async def constantly_moved(port: Port, strategy: Strategy, num_steps: int) -> torch.Tensor:
    """Rank r moves by 0.1 (r + 1) in each step."""
    bundle = Bundle({"w": torch.full((3,), 2.0, dtype=torch.float64)})
    state = strategy.parameters.init(bundle.copy())
    for _ in range(num_steps):
        moved = bundle.with_flat(bundle.flat - 0.1 * (port.rank + 1))
        answer, state = await strategy.parameters.apply(port, moved, state)
        bundle = moved if answer is None else answer.copy()
    await settled(state)
    return bundle.flat


def test_co2_is_slowmo_a_round_late_where_gradients_are_constant() -> None:
    """A movement that counted in the round after it, too, would go further."""
    late = VirtualWorld(HOST, 3).run(lambda port: constantly_moved(port, s.co2(4, 0.5, 0.2), 16)).results
    slow = VirtualWorld(HOST, 3).run(lambda port: constantly_moved(port, s.slowmo(4, 0.5, 0.2), 12)).results
    for a, b in zip(late, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_clip_of_co2_clips() -> None:
    clipped = VirtualWorld(HOST, 3).run(lambda port: constantly_moved(port, s.co2(4, 0.5, 0.2, clip=0.01), 8)).results
    assert torch.allclose(clipped[0], torch.full((3,), 2.0 - 0.5 * 0.01, dtype=torch.float64))
    with pytest.raises(ValueError, match="clip is the largest size"):
        s.co2(clip=0.0)


# ---------------------------------------------------------------------- updates themselves


def test_demo_with_everything_sent_is_the_sign_of_the_mean(plain: Setting) -> None:
    whole = s.demo(1.0, decay=0.5, rotated=False, exact_below=0)
    ranks, _ = run(whole, NUM_RANKS, LAST, plain)
    exact = s.demo(exact_below=10**6)
    others, _ = run(exact, NUM_RANKS, LAST, plain)
    alone, _ = run(exact, 1, LAST, plain)
    for one, other in zip(ranks, others, strict=True):
        assert torch.equal(one.history[-1], other.history[-1])
    torch.testing.assert_close(ranks[0].history[-1], alone[0].history[-1], rtol=0, atol=1e-12)


def test_lion_without_memory_is_the_majority_s_sign(plain: Setting) -> None:
    same(s.distributed_lion(0.0, 0.0, 0.01, exact_below=0), s.sign_sgd(exact_below=0), plain)


# ---------------------------------------------------------------------- Muon, 1-bit Adam


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_muon_has_the_same_bits_for_any_number_of_ranks(num_ranks: int) -> None:
    transform, random = orthogonal_momentum(but=("head",)), torch.Generator().manual_seed(0)
    shapes = {"a": (5, 7), "b": (9, 4), "bias": (3,), "c": (2, 3, 3), "head": (4, 4)}
    given = Bundle({name: torch.randn(shape, generator=random) for name, shape in shapes.items()})

    async def program(port: Port) -> torch.Tensor:
        state = transform.init(given)
        for _ in range(2):
            answer, state = await transform.apply(port, given.copy(), state)
        assert answer is not None
        return answer.flat

    (alone,) = VirtualWorld(HOST, 1).run(program).results
    assert all(torch.equal(found, alone) for found in VirtualWorld(HOST, num_ranks).run(program).results)
    views = given.with_flat(alone).views
    assert all(torch.equal(views[name], given.tensors[name]) for name in ("bias", "head"))
    values = torch.linalg.svdvals(orthogonalised(given.tensors["a"]))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_one_bit_adam_that_stays_warm_is_adam(plain: Setting) -> None:
    ranks, _ = run(s.one_bit_adam(LAST, 0.9, scale=0.2, exact_below=0), NUM_RANKS, LAST, plain)
    torch.testing.assert_close(ranks[0].history[-1], plain_torch(LAST, Setting("adam"))[-1], rtol=0, atol=1e-10)


def test_one_bit_adam_with_the_first_moment_of_its_own_is_its_definition(plain: Setting) -> None:
    (rank,), _ = run(s.one_bit_adam(5, 0.9, scale=0.01), 1, 12, plain)
    assert rank.history[-1].equal(one_bit_adam(12, 5, plain, 0.9)[-1])


def test_zero_one_adam_of_exact_steps_alone_is_adam(plain: Setting) -> None:
    ranks, _ = run(s.zero_one_adam(LAST, LAST, beta1=0.9, scale=0.2, exact_below=0), NUM_RANKS, LAST, plain)
    torch.testing.assert_close(ranks[0].history[-1], plain_torch(LAST, Setting("adam"))[-1], rtol=0, atol=1e-12)


def test_zero_one_adam_with_exact_codes_in_each_step_makes_the_steps_of_one_worker(plain: Setting) -> None:
    """A worker's own momentum changes nothing, because all is linear in it while the second moment stays."""
    strategy = s.zero_one_adam(6, 2, 1, beta1=0.9, exact_below=10**6)
    (alone,), together = (final(strategy, num_ranks, plain) for num_ranks in (1, 3))
    torch.testing.assert_close(together, alone.expand_as(together), rtol=0, atol=1e-12)


def test_exact_steps_come_ever_more_rarely() -> None:
    found = ever_rarer(3, last=100)
    exact = [step for step in range(1, 101) if any(each.has(step) for each in found)]
    assert exact == [1, 2, 3, 5, 7, 9, 13, 17, 21, 29, 37, 45, 61, 77, 93]
    between = coded_between(found)
    assert sorted(exact + [step for step in range(1, 101) for each in between if each.has(step)]) == [*range(1, 101)]
    assert str(between[1]) == "every step but one in 4, from step 10 on, up to step 21"


def test_meetings_after_the_switch_come_ever_more_rarely_up_to_the_longest_interval() -> None:
    timed = s.zero_one_adam(10, 2, 4).parameters.apply
    assert isinstance(timed, Timed)
    assert [step for step in range(1, 33) if timed.has_turn(step)] == [11, 12, 14, 16, 20, 24, 28, 32]


@pytest.mark.parametrize("name", ["one_bit_adam", "zero_one_adam"])
def test_two_momenta_at_once_are_refused(name: str) -> None:
    """Each alone learns; together steps of a size that no gradient sets swing on, and digits stay near 0.9."""
    job = pt.jobs.find("digits")
    with pytest.raises(ValueError, match=rf"PT1001: {name}.* once more; use {name}\(beta1=0\)"):
        pt.simulate(job, getattr(s, name)(beta1=0.9), workers=2, steps=1)


def test_local_steps_begin_at_the_parameters_of_the_switch(plain: Setting) -> None:
    """An anchor from before would send the movement of all steps again."""
    ranks, _ = run(s.zero_one_adam(5, 1, 4, exact_below=10**6), NUM_RANKS, 12, plain)
    apart = torch.stack([rank.history[10] for rank in ranks])
    assert not torch.equal(apart[0], apart[1])
    moved = (ranks[0].history[11] - ranks[0].history[4]).norm()
    assert 0 < moved < 2 * (apart[0] - ranks[0].history[4]).norm()


@pytest.mark.parametrize("name", ["one_bit_adam", "zero_one_adam"])
def test_an_element_without_a_gradient_stays_where_a_sign_has_no_zero(name: str) -> None:
    """Row 0 of a table has none while Adam is warm, and then codes of its row's others would be divided by ε."""
    make = {
        "one_bit_adam": lambda: s.one_bit_adam(2, exact_below=0),
        "zero_one_adam": lambda: s.zero_one_adam(9, 1, exact_below=0),
    }
    transform = make[name]().gradients
    gradient = torch.tensor([[0.0, 1.0, -2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])

    async def program(port: Port) -> torch.Tensor:
        state, answer = transform.init(Bundle({"w": gradient})), None
        for _ in range(6):
            answer, state = await transform.apply(port, Bundle({"w": gradient.clone()}), state)
        assert answer is not None
        return answer.views["w"]

    for found in VirtualWorld(HOST, 2).run(program).results:
        assert found[0, 0] == 0
        assert float(found.abs().max()) < 0.05


# ---------------------------------------------------------------------- NoLoCo, quasi-global momentum


def final(strategy: Strategy, num_ranks: int, setting: Setting) -> torch.Tensor:
    """All ranks' weights, shape (N, numel)."""
    return torch.stack([rank.history[-1] for rank in run(strategy, num_ranks, LAST, setting)[0]])


def test_two_workers_of_noloco_are_slowmo(plain: Setting) -> None:
    pair, all_of_them = final(s.noloco(4, 0.8, 0.6), 2, plain), final(s.slowmo(4, 0.8, 0.6), 2, plain)
    torch.testing.assert_close(pair, all_of_them, rtol=0, atol=1e-12)


def test_noloco_with_a_plain_outer_step_is_gossip() -> None:
    graph = random_pairs(seed=3)
    plain_step = final(s.noloco(4, 1.0, 0.0, seed=3), 5, Setting("adam"))
    torch.testing.assert_close(plain_step, final(s.gossip(graph, 4), 5, Setting("adam")), rtol=0, atol=1e-12)


def test_the_mean_of_noloco_moves_as_slowmo_where_gradients_are_constant() -> None:
    async def program(port: Port, strategy: Strategy) -> torch.Tensor:
        bundle = Bundle({"w": torch.full((3,), float(port.rank), dtype=torch.float64)})
        state = strategy.parameters.init(bundle.copy())
        for _ in range(12):
            moved = bundle.with_flat(bundle.flat - 0.1 * (port.rank + 1))
            answer, state = await strategy.parameters.apply(port, moved, state)
            bundle = moved if answer is None else answer.copy()
        return bundle.flat

    strategy = s.noloco(3, 0.7, 0.5)
    found = torch.stack(VirtualWorld(HOST, 5).run(lambda port: program(port, strategy)).results).mean()
    position, velocity = 2.0, 0.0
    for _ in range(4):
        velocity = 0.5 * velocity + 0.9
        position -= 0.7 * velocity
    assert float(found) == pytest.approx(position, abs=1e-12)


def test_quasi_global_momentum_without_momentum_is_gossip() -> None:
    without = final(s.quasi_global_momentum(momentum=0.0), 4, Setting("adam"))
    torch.testing.assert_close(without, final(s.gossip(), 4, Setting("adam")), rtol=0, atol=0)


def test_dion_makes_the_steps_of_one_worker_with_the_joined_batch(plain: Setting) -> None:
    (alone,), together = (final(s.dion(2, exact_below=0), num_ranks, plain) for num_ranks in (1, 3))
    torch.testing.assert_close(together, alone.expand_as(together), rtol=0, atol=1e-9)
