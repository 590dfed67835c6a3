"""The catalogue: every strategy with its promises. A strategy without a row here fails the tests."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from polytempo import aggregation, collectives
from polytempo import strategies as s
from polytempo.compression import bf16, chunk_top_k, delta, feedback, qsgd, top_k
from polytempo.core import Strategy
from polytempo.partition.schedules import pipemare, spectrain
from polytempo.server.rules.staleness import gate, power
from polytempo.synchronization import by_time, by_variance, growing

ROUTES = [
    collectives.native,
    collectives.ring,
    collectives.tree,
    collectives.halving_doubling,
    collectives.star,
    collectives.hierarchical(),
    collectives.invariant(slices=64),
]


class Row(NamedTuple):
    """A strategy and its promises."""

    name: str
    """The function in `polytempo.strategies`."""
    make: Callable[[], Strategy]
    alone: str = "torch"
    """One rank equals plain torch, or the definition in `ALONE` of `test_laws.py` (with a parameter server: the
    first test of `test_served_laws.py`)."""
    joined: bool = False
    """N ranks equal one rank on the joined batch."""
    meets: Callable[[int], bool] | None = None
    """The steps (from 1) with equal parameters on all ranks afterwards; None: never promised."""
    pushes_every: int = 1
    """A worker pushes every so many steps to its server."""
    exact: bool = True
    """`alone` holds to the bit, else to rounding."""
    drops: bool = False
    """Some gradients are not used."""
    by_place: bool = False
    """Roundings depend on the place in a bucket: stripes of it are encoded again, or a ring adds 16-bit numbers."""


ROWS = [
    *[
        Row("sync_sgd", lambda route=route: s.sync_sgd(route=route), joined=True, meets=lambda step: True)
        for route in ROUTES[:-1]  # a job's batches of a few samples have no 64 slices: see virtual/test_invariant.py
    ],
    Row("parameter_averaging", lambda: s.parameter_averaging(period=3), meets=lambda step: step % 3 == 0),
    Row(
        "parameter_averaging",
        lambda: s.parameter_averaging(period=4, optimizer_state=False, route=collectives.tree),
        meets=lambda step: step % 4 == 0,
    ),
    Row("local_sgd", lambda: s.local_sgd(period=4), meets=lambda step: step % 4 == 0),
    Row("local_sgd", lambda: s.local_sgd(period=5, route=collectives.ring), meets=lambda step: step % 5 == 0),
    Row(
        "post_local_sgd",
        lambda: s.post_local_sgd(switch_step=6, period=4),
        meets=lambda step: step <= 6 or (step - 6) % 4 == 0,
    ),
    Row("des_loc", lambda: s.des_loc(2, 3, 4), meets=lambda step: step % 2 == 0),
    Row("des_loc", lambda: s.des_loc(3, 2, 6, collectives.ring), meets=lambda step: step % 3 == 0),
    Row("diloco", lambda: s.diloco(period=5), alone="diloco", meets=lambda step: step % 5 == 0),
    Row(
        "diloco",
        lambda: s.diloco(3, outer_optimizer=aggregation.adam(0.1, 0.8, 0.9, 0.01)),
        alone="outer_adam",
        meets=lambda step: step % 3 == 0,
    ),
    Row(
        "diloco",
        lambda: s.diloco(2, outer_optimizer=aggregation.schedule_free(0.8, 0.7)),
        alone="outer_schedule_free",
        meets=lambda step: step % 2 == 0,
    ),
    Row("local_sgd", lambda: s.local_sgd(4, merge=aggregation.median), meets=lambda step: step % 4 == 0),
    Row(
        "diloco",
        lambda: s.diloco(5, merge=aggregation.nearest_to_median(0)),
        alone="diloco",
        meets=lambda step: step % 5 == 0,
    ),
    Row(
        "diloco",
        lambda: s.diloco(5, merge=aggregation.centered_clip(100.0)),
        alone="diloco",
        meets=lambda step: step % 5 == 0,
    ),
    Row(
        "local_sgd",
        lambda: s.local_sgd(growing(1, 4, 2)),
        meets=lambda step: step in {1, 2, 4, 6} or (step >= 10 and step % 4 == 2),
    ),
    Row("local_sgd", lambda: s.local_sgd(by_time(inf, 3, 3), route=collectives.ring), meets=lambda step: step % 3 == 0),
    Row("local_sgd", lambda: s.local_sgd(by_variance(4, slack=inf)), meets=lambda step: step % 4 == 0),
    Row("islands", lambda: s.islands(outer=s.diloco(period=5)), alone="diloco", meets=lambda step: step % 5 == 0),
    Row(
        "islands",
        lambda: s.islands(outer=s.local_sgd(period=4, route=collectives.ring)),
        meets=lambda step: step % 4 == 0,
    ),
    Row("gossip", s.gossip),
    Row("gossip", lambda: s.gossip(aggregation.exponential_graph)),
    Row("gossip", lambda: s.gossip(aggregation.random_pairs(seed=3), period=2)),
    Row("gossip", lambda: s.gossip(aggregation.complete), meets=lambda step: True),
    Row("gossip", lambda: s.gossip(overlap=True)),
    Row("gossip", lambda: s.gossip(aggregation.exponential_graph, period=3, overlap=True)),
    Row("sparta", lambda: s.sparta(0.3)),
    Row("sparta", lambda: s.sparta(1.0, route=collectives.ring), meets=lambda step: True),
    Row(
        "sparta",
        lambda: s.sparta(0.3, outer=s.diloco(5)),
        alone="diloco",
        meets=lambda step: step % 5 == 0,
    ),
    Row("stochastic_gradient_push", s.stochastic_gradient_push),
    Row("stochastic_gradient_push", lambda: s.stochastic_gradient_push(aggregation.ring_graph)),
    Row("co2", lambda: s.co2(3, 0.5, 0.2, route=collectives.ring), alone="co2", meets=lambda step: step % 3 == 0),
    Row("slowmo", lambda: s.slowmo(period=5), alone="slowmo", meets=lambda step: step % 5 == 0),
    Row("slowmo", lambda: s.slowmo(period=4, inner=s.gossip()), alone="slowmo", meets=lambda step: step % 4 == 0),
    Row("delayed_sgd", lambda: s.delayed_sgd(delay=1), alone="delayed", meets=lambda step: True),
    Row(
        "delayed_sgd",
        lambda: s.delayed_sgd(delay=3, route=collectives.ring),
        alone="delayed",
        meets=lambda step: True,
    ),
    Row("acco", s.acco, alone="acco", meets=lambda step: True),
    Row("acco", lambda: s.acco(collectives.ring), alone="acco", meets=lambda step: True),
    Row("shared_memory", s.shared_memory, joined=True, meets=lambda step: True),
    *[Row("hogwild", lambda update=update: s.hogwild(update)) for update in ("free", "atomic", "locked", "in_turn")],
    Row("adasum", s.adasum, meets=lambda step: True),
    Row("adasum", lambda: s.adasum(of="updates"), meets=lambda step: True),
    Row("robust_sgd", s.robust_sgd, meets=lambda step: True),
    Row("robust_sgd", lambda: s.robust_sgd(aggregation.trimmed_mean(1)), meets=lambda step: True),
    Row("robust_sgd", lambda: s.robust_sgd(aggregation.krum(0)), meets=lambda step: True),
    Row("robust_sgd", lambda: s.robust_sgd(aggregation.multi_krum(0)), meets=lambda step: True),
    Row("robust_sgd", lambda: s.robust_sgd(aggregation.nearest_to_median(0)), meets=lambda step: True),
    Row("robust_sgd", lambda: s.robust_sgd(aggregation.bulyan(0)), meets=lambda step: True),
    Row("robust_sgd", lambda: s.robust_sgd(aggregation.centered_clip(0.5, 2)), meets=lambda step: True),
    Row(
        "robust_sgd",
        lambda: s.robust_sgd(aggregation.centered_clip(), momentum=0.9),
        alone="signum",
        meets=lambda step: True,
    ),
    Row(
        "streaming_diloco",
        lambda: s.streaming_diloco(period=5, fragments=1, delay=0, blend=0.0),
        alone="diloco",
        meets=lambda step: step % 5 == 0,
    ),
    Row("streaming_diloco", lambda: s.streaming_diloco(4, 2, 1, 0.5, route=collectives.ring), alone="streaming"),
    Row("streaming_diloco", lambda: s.streaming_diloco(6, 3, 4, "keep", route=collectives.ring), alone="streaming"),
    Row("noloco", lambda: s.noloco(4, 1.0, 0.5), alone="slowmo"),
    Row("quasi_global_momentum", lambda: s.quasi_global_momentum(momentum=0.9), alone="quasi_global"),
    Row(
        "distributed_muon",
        lambda: s.distributed_muon(scale=0.2, route=collectives.ring),
        alone="muon",
        meets=lambda step: True,
    ),
    # ---- strategies that encode, down to the smallest tensors
    Row("bf16_sgd", lambda: s.bf16_sgd(route=collectives.ring), meets=lambda step: True, by_place=True),
    Row(  # the optimizers here have momentum
        "dgc",
        lambda: s.dgc(ratio=0.2, momentum=0.0, clip=1.0, warmup_steps=8, exact_below=10),
        meets=lambda step: True,
    ),
    Row("acco", lambda: s.acco(codec=feedback(bf16())), alone="acco", meets=lambda step: True),
    Row("demo", lambda: s.demo(0.2, exact_below=0), alone="signs", meets=lambda step: True),
    Row(
        "distributed_lion", lambda: s.distributed_lion(scale=0.01, exact_below=0), alone="lion", meets=lambda step: True
    ),
    Row(
        "dion",
        lambda: s.dion(2, scale=0.2, route=collectives.ring, exact_below=0),
        alone="dion",
        meets=lambda step: True,
    ),
    Row("ef21", lambda: s.ef21(top_k(0.2), exact_below=0), meets=lambda step: True),
    Row("ef21", lambda: s.ef21(bf16(), exact_below=0), meets=lambda step: True, by_place=True),
    Row("int8_sgd", lambda: s.int8_sgd(block=8, exact_below=0), meets=lambda step: True, by_place=True),
    Row(
        "one_bit_adam",
        lambda: s.one_bit_adam(warmup_steps=5, scale=0.01, exact_below=0),
        alone="one_bit_adam",
        meets=lambda step: True,
        by_place=True,
    ),
    Row(
        "zero_one_adam",
        lambda: s.zero_one_adam(6, 2, 2, scale=0.01, exact_below=0),
        alone="zero_one_adam",
        meets=lambda step: step <= 8 or step % 2 == 0,
        by_place=True,
    ),
    Row("one_bit_sgd", lambda: s.one_bit_sgd(exact_below=0), meets=lambda step: True, by_place=True),
    Row("power_sgd", lambda: s.power_sgd(1, collectives.ring, exact_below=0), meets=lambda step: True),
    Row("qsgd", lambda: s.qsgd(bucket=8, exact_below=0), meets=lambda step: True, by_place=True),
    Row("sign_sgd", lambda: s.sign_sgd(exact_below=0), meets=lambda step: True),
    Row("sign_sgd", lambda: s.sign_sgd(feedback=True, exact_below=0), meets=lambda step: True, by_place=True),
    Row("sign_sgd", lambda: s.sign_sgd(exact_below=0, momentum=0.9), alone="signum", meets=lambda step: True),
    *[
        Row(
            "sparse_loco",
            lambda codec=codec, mean_of=mean_of: s.sparse_loco(4, codec=codec, mean_of=mean_of, exact_below=0),
            alone="anchored",
            meets=lambda step: step % 4 == 0,
        )
        for codec, mean_of in [(chunk_top_k(0.3), "workers"), (chunk_top_k(0.1, bits=None), "senders")]
    ],
    Row("terngrad", s.terngrad, meets=lambda step: True),
    Row("threshold_sgd", lambda: s.threshold_sgd(0.01, density=0.3, exact_below=0), meets=lambda step: True),
    Row("top_k_sgd", lambda: s.top_k_sgd(0.2, exact_below=0), meets=lambda step: True),
    Row(
        "local_sgd",
        lambda: s.local_sgd(period=4, codec=feedback(bf16())),
        alone="anchored",
        meets=lambda step: step % 4 == 0,
    ),
    Row(
        "diloco",
        lambda: s.diloco(period=5, route=collectives.ring, codec=bf16()),
        alone="diloco",
        meets=lambda step: step % 5 == 0,
    ),
]

SERVED = [
    Row("async_diloco", lambda: s.async_diloco(4), alone="async_diloco", pushes_every=4),
    Row(
        "async_diloco",
        lambda: s.async_diloco(4, 0.9, 0.3, codec=feedback(bf16()), scale=power(0.5)),  # small tensors are exact
        alone="async_diloco",
        pushes_every=4,
    ),
    Row(
        "async_diloco",
        lambda: s.async_diloco(4, 0.9, 0.3, momentum_every=2, delay=2),
        alone="async_diloco",
        pushes_every=4,
    ),
    Row(
        "async_diloco",
        lambda: s.async_diloco(4, scale=gate(0.1, 4), outer_optimizer=aggregation.adam(0.1, 0.8, 0.9, 0.01)),
        alone="async_diloco",
        pushes_every=4,
        drops=True,
    ),
    Row("async_sgd", s.async_sgd),
    Row("async_sgd", lambda: s.async_sgd(shards=2)),
    Row("async_sgd", lambda: s.async_sgd(scale=power(2))),
    Row("async_sgd", lambda: s.async_sgd(codec=feedback(bf16()), pull_codec=delta(bf16()))),  # small tensors are exact
    Row("backup_workers", lambda: s.backup_workers(backups=0), joined=True),
    Row("backup_workers", s.backup_workers, drops=True),
    Row("backup_workers", lambda: s.backup_workers(scale="linear"), drops=True),
    Row("dc_asgd", s.dc_asgd),
    Row("dc_asgd", lambda: s.dc_asgd(scale="inverse")),
    Row("decoupled_diloco", lambda: s.decoupled_diloco(4), alone="async_diloco", pushes_every=4),
    Row(
        "decoupled_diloco",
        lambda: s.decoupled_diloco(4, 2, 0.9, 0.3, delay=2, momentum_every=2),
        alone="async_diloco",
        pushes_every=4,
    ),
    Row("downpour", lambda: s.downpour(1, 1, optimizer="job", overlap=False)),
    Row("downpour", s.downpour, alone="downpour", pushes_every=5),
    Row("downpour", lambda: s.downpour(scale=power(2)), alone="downpour", pushes_every=5),
    Row("downpour", lambda: s.downpour(codec=feedback(bf16())), alone="downpour", pushes_every=5),
    Row("easgd", s.easgd, alone="easgd", pushes_every=4),
    Row("halos", lambda: s.halos(4, region=2, every=1), alone="halos", pushes_every=4),
    Row(
        "halos",
        lambda: s.halos(4, 3, 2, 0.5, 0.9, 0.3, 2, 0.9, 0.3, 1, codec=feedback(bf16()), delay=2),
        alone="halos",
        pushes_every=4,
    ),
    Row("softsync", s.softsync),
    Row("softsync", lambda: s.softsync(n=4, scale="inverse")),
    Row("ssp", s.ssp),
    Row("ssp", lambda: s.ssp(bound=0)),
    Row("ssp", lambda: s.ssp(scale=power(2))),
    Row("staleness_aware", s.staleness_aware),
    Row("staleness_aware", lambda: s.staleness_aware(scale=power(2))),
]
"""Strategies with a parameter server, which the others' harness does not start."""


def runs_alone(row: Row) -> bool:
    """True if one worker is enough."""
    service = row.make().server
    return service is None or service.least_workers == 1


ONE_WORKER = [row for row in SERVED if runs_alone(row)]
"""The rows of `SERVED` that one worker can run."""

HELPED = [
    Row("flexrr", lambda: s.flexrr(grain=1.0, first_offer=1.0, later_offers=1.0), joined=True),
    Row("flexrr", lambda: s.flexrr(shards=2), joined=True, exact=False),
    Row("flexrr", lambda: s.flexrr(bound=2, shards=2), exact=False),
]
"""Strategies with workers that do parts of each other's batches: their laws are in `virtual/test_flexrr_training`."""

STAGED = [
    Row("gpipe", s.gpipe),
    Row("gpipe", lambda: s.gpipe(3, 2, recompute=False)),
    Row("one_f_one_b", lambda: s.one_f_one_b(3, 2)),
    Row("interleaved", lambda: s.interleaved(2, 2)),
    Row("zero_bubble", s.zero_bubble),
    Row("ddg", lambda: s.ddg(3)),
    Row("ddg", lambda: s.ddg(3, weights="current")),
    Row("ddg", lambda: s.ddg(lockstep=True, inner=s.local_sgd(period=3))),
    Row("ddg", lambda: s.ddg(inner=s.top_k_sgd(0.2, exact_below=0))),
    Row("features_replay", lambda: s.features_replay(3)),
    Row("pipelined_backprop", lambda: s.pipelined_backprop(3)),
    Row(
        "pipelined_backprop", lambda: s.pipelined_backprop(3, activations=qsgd(levels=127), gradients=qsgd(levels=127))
    ),
    Row("pipedream", lambda: s.pipedream(3)),
    Row("pipedream", lambda: s.pipedream(3, vertical_sync=True)),
    Row("pipedream_2bw", lambda: s.pipedream_2bw(3, 3)),
    Row("pipelined_backprop", lambda: s.pipelined_backprop(correction=pipemare(anneal_steps=9, decay=0.2))),
    Row("pipelined_backprop", lambda: s.pipelined_backprop(correction=spectrain())),
    Row("synthetic_gradients", lambda: s.synthetic_gradients(3, hidden_layers=1, width=5, lr=0.01)),
]
"""Strategies that cut a model into stages (`strategy.schedule`); no rank holds the whole model: their laws are in
`test_pipeline_laws`."""


PARTED = [Row("split", s.split), Row("hybrid", s.hybrid)]
"""Strategies that have layers in parts on several workers (`strategy.parted`): their laws are in
`virtual/test_parted_jobs`."""


GROUPED = [Row("codistillation", s.codistillation)]
"""Strategies that train several models, by groups of workers: their laws are in `virtual/test_codistillation`."""


def label(row: Row) -> str:
    """The row's name in a test."""
    return str(row.make())
