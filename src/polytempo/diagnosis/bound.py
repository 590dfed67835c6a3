"""`bound`: the part of a step that bounds a run, as one sentence, with the first change to try. It does no I/O.

    a step of all ranks   | batch | computing ─────────── | exchange ─── | slower ranks ── |
                            data    computing               least wait     other waits, beyond the least

A part other than computing bounds the run if it takes a quarter of the step; the longest one is named. Otherwise the
run is bound by computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from polytempo.diagnosis.pace import RankTimes

ENOUGH = 0.25
"""A part with so much of a step is worth removing first: without it a run is at least a third faster."""
SMALL_BATCH = 8
"""Samples of a worker's batch that are few, where no noise scale was measured."""
SHORT_STEP_S = 1e-3
"""Real computations of a step that are this short are mostly calls."""
_SERVER_BUSY = 0.7
_PERIOD = 4
_CODED = ("codec", "bf16", "int8", "top_k", "dgc", "qsgd", "sign", "one_bit", "tern", "threshold", "power", "low_rank")
_RARE = (
    *("local_sgd", "diloco", "slowmo", "parameter_averaging", "easgd", "gossip", "streaming_diloco"),
    *("async_diloco", "co2", "decoupled_diloco", "des_loc", "halos", "noloco", "sparse_loco"),
)

_ROUNDS = ("fed_", "scaffold(")
"""Names within a strategy that has rounds of clients: samples of its steps are clients, with batches of their own."""


class UsedLink(NamedTuple):
    """The link between ranks."""

    latency_s: float
    bytes_per_s: float
    assumed: bool = True
    """True if it was not measured or described."""


MEMORY, NETWORK = UsedLink(1e-6, 10e9), UsedLink(50e-6, 1.25e9)
"""One host, and hosts with 10 Gbit/s between them, where nothing is known."""


PARTS = ("compute_s", "read_s", "wait_s", "least_wait_s", "sent_bytes", "messages")
"""Fields of `StepParts` that rows of training have, of a step, while a run goes on."""


class StepParts(NamedTuple):
    """The facts of a run. Seconds are of a step."""

    strategy: str
    workers: int
    compute_s: float
    """The mean over workers, like the next ones."""
    read_s: float = 0.0
    """Getting batches."""
    wait_s: float = 0.0
    """Waiting for others, or for the server."""
    least_wait_s: float = 0.0
    """The wait of the rank that waits least."""
    sent_bytes: float = 0.0
    """The bytes of one rank."""
    messages: float = 0.0
    """Messages and collectives of a rank."""
    link: UsedLink = NETWORK
    batch_size: int = 32
    """Samples of a worker."""
    noise_scale: float | None = None
    """The measured gradient noise scale in samples."""
    serves: bool = False
    """True if a parameter server answers the workers."""
    server_busy: float | None = None
    """Part of its time that the busiest server computes, 0 to 1."""
    stages: int = 1
    slow: str = ""
    """The rank that was found slow, such as "rank 3"."""
    virtual: bool = False
    balances: bool = False
    """True if `balance="speed"` is possible, and was not asked for."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.read_s + self.wait_s


class Bound(NamedTuple):
    """The bound of a run."""

    kind: str
    """"data", "computing", "latency", "bytes", "stragglers", "server", "batch" or "bubble"."""
    share: float
    """The part of a step, 0 to 1."""
    change: str
    gain: float
    """Samples per second over the present ones after the change, at best."""
    text: str
    values: dict[str, float]
    tried: dict[str, str | int]
    """The change as values that a planned run takes in place of its own: strategy, workers, batch_size, balance. Empty
    for a change that no plan tries."""

    def as_json(self) -> dict[str, Any]:
        """Plain values: `Result.bound`."""
        return self._asdict()


class _Change(NamedTuple):
    text: str
    step_s: float
    """A step after the change, at best."""
    samples: float = 1.0
    """Samples of a step over the present ones."""
    asks_loss: bool = False
    """True if the model may learn otherwise."""
    tried: Mapping[str, str | int] = MappingProxyType({})
    """`Bound.tried`."""


def bound(facts: StepParts) -> Bound | None:
    """The bound of a run; None for a run without time."""
    if facts.step_s <= 0:
        return None
    kind, share = _kind(facts)
    change = _CHANGES[kind](facts)
    gain = max(1.0, facts.step_s / max(change.step_s, 1e-12) * change.samples)
    seconds = f"{100 * share:.0f} % of a step of {_time(facts.step_s)}{' of virtual time' if facts.virtual else ''}"
    text = f"{_WORDS[kind]}: {seconds} {_spent(kind, facts)}. Try {change.text} first: {_brought(gain)}"
    text += ", if the loss allows it; `polytempo plan run` prices it with its loss." if change.asks_loss else "."
    values = {
        "step_s": facts.step_s,
        "compute_s": facts.compute_s,
        "read_s": facts.read_s,
        "wait_s": facts.wait_s,
        "least_wait_s": facts.least_wait_s,
        "sent_bytes": facts.sent_bytes,
    }
    return Bound(kind, share, change.text, gain, text, values, dict(change.tried))


def facts_of(
    ranks: Sequence[RankTimes], steps: int, strategy: str, *, trained_s: float | None = None, **more: Any
) -> StepParts | None:
    """The facts from the ranks' totals over `steps` steps; None without a step. `more`: other fields of `StepParts`.

    `trained_s`: the time of training, if the totals hold other time too; computing is the rest of it.
    """
    if not ranks or steps <= 0:
        return None
    count = len(ranks)
    read_s = sum(each.read_s for each in ranks) / count
    wait_s = sum(each.waited_s for each in ranks) / count
    all_s = sum(each.seconds for each in ranks) / count if trained_s is None else trained_s
    return StepParts(
        strategy,
        compute_s=max(0.0, all_s - read_s - wait_s) / steps,
        read_s=read_s / steps,
        wait_s=wait_s / steps,
        least_wait_s=min(each.waited_s for each in ranks) / steps,
        **more,
    )


# ------------------------------------------------------------------------------------------------------------ rules


def _kind(facts: StepParts) -> tuple[str, float]:
    """The rule that applies, and the part of a step."""
    waits = facts.wait_s if facts.serves else facts.least_wait_s
    parts = {"data": facts.read_s, "exchange": waits, "stragglers": facts.wait_s - waits}
    longest = max(parts, key=lambda name: parts[name])
    share = parts[longest] / facts.step_s
    if share < ENOUGH:
        short = not facts.virtual and facts.compute_s < SHORT_STEP_S
        return "batch" if short and _small(facts) else "computing", facts.compute_s / facts.step_s
    return longest if longest != "exchange" else _of_exchange(facts), share


def _of_exchange(facts: StepParts) -> str:
    by_latency, by_bytes = _predicted(facts)
    if facts.stages > 1:
        return "bubble"
    if facts.serves and (
        facts.server_busy > _SERVER_BUSY if facts.server_busy is not None else by_latency + by_bytes < facts.wait_s / 2
    ):
        return "server"
    if not facts.serves and _small(facts):
        return "batch"
    return "latency" if by_latency > by_bytes else "bytes"


def _small(facts: StepParts) -> bool:
    """True if a larger batch would cost hardly more samples."""
    if _in_rounds(facts):
        return False
    if facts.noise_scale is not None:
        return facts.noise_scale >= 2 * facts.batch_size * facts.workers
    return facts.batch_size < SMALL_BATCH


def _in_rounds(facts: StepParts) -> bool:
    return any(name in facts.strategy for name in _ROUNDS)


def _predicted(facts: StepParts) -> tuple[float, float]:
    """Seconds of a step's latencies and of its bytes on the link."""
    return facts.messages * facts.link.latency_s, facts.sent_bytes / facts.link.bytes_per_s


# ---------------------------------------------------------------------------------------------------------- changes


def _background(facts: StepParts) -> _Change:
    rest_s = facts.step_s - facts.read_s
    return _Change("getting batches in the background (num_workers of a DataLoader)", max(rest_s, facts.read_s))


def _more_workers(facts: StepParts) -> _Change:
    workers = 2 * facts.workers
    return _Change(f"{workers} workers on as many processors again", facts.step_s, 2.0, tried={"workers": workers})


def _fewer_bytes(facts: StepParts) -> _Change:
    if any(name in facts.strategy for name in (*_CODED, *_RARE, *_ROUNDS)):
        return _rarer(facts)
    by_latency, by_bytes = _predicted(facts)
    saved_s = facts.least_wait_s / 2 * by_bytes / max(by_bytes + by_latency, 1e-12)
    return _of_strategy("bf16_sgd()", facts.step_s - saved_s)


def _rarer(facts: StepParts) -> _Change:
    waits = facts.wait_s if facts.serves else facts.least_wait_s
    step_s = facts.step_s - waits * (1 - 1 / _PERIOD)
    if facts.serves:
        return _of_strategy(f"downpour(push_every={_PERIOD}, pull_every={_PERIOD})", step_s)
    if _in_rounds(facts):
        return _Change("twice as many epochs in a round", facts.step_s + facts.compute_s, 2.0)
    if any(facts.strategy.startswith(name) for name in _RARE):
        return _Change(f"a period {_PERIOD} times as long", step_s, asks_loss=True)
    return _of_strategy(f"local_sgd(period={_PERIOD})", step_s)


def _of_strategy(strategy: str, step_s: float) -> _Change:
    """Another strategy."""
    return _Change(strategy, step_s, asks_loss=True, tried={"strategy": strategy})


def _without_slow(facts: StepParts) -> _Change:
    step_s = facts.step_s - (facts.wait_s - facts.least_wait_s)
    if facts.slow and facts.balances:
        return _Change('balance="speed"', step_s, tried={"balance": "speed"})
    if facts.slow and facts.workers > 2:
        return _Change(f"a run without {facts.slow}", step_s, 1 - 1 / facts.workers)
    if _in_rounds(facts):
        return _Change("a larger cohort, so that clients even out over workers", step_s)
    if any(facts.strategy.startswith(name) for name in _RARE):
        return _of_strategy("async_sgd()", step_s)
    kept = 1 / _PERIOD**0.5  # delays of several steps add up to less than the longest of each
    rest_s = (facts.wait_s - facts.least_wait_s) * kept
    return _of_strategy(f"local_sgd(period={_PERIOD})", step_s + rest_s - facts.least_wait_s * (1 - 1 / _PERIOD))


def _more_shards(facts: StepParts) -> _Change:
    return _Change("twice as many shards", facts.step_s - facts.wait_s / 2)


def _larger_batch(facts: StepParts) -> _Change:
    own_s = 0.0 if facts.compute_s < SHORT_STEP_S and not facts.virtual else facts.compute_s
    step_s, samples = facts.step_s + own_s + facts.read_s, 2 * facts.batch_size
    return _Change(f"batches of {samples} samples", step_s, 2.0, True, {"batch_size": samples})


def _more_micro_batches(facts: StepParts) -> _Change:
    return _Change("twice as many micro-batches", facts.step_s - facts.least_wait_s / 2)


_CHANGES = {
    "data": _background,
    "computing": _more_workers,
    "latency": _rarer,
    "bytes": _fewer_bytes,
    "stragglers": _without_slow,
    "server": _more_shards,
    "batch": _larger_batch,
    "bubble": _more_micro_batches,
}
_WORDS = {
    "data": "Data bounds this run",
    "computing": "Computing bounds this run",
    "latency": "Exchange bounds this run, by its latency",
    "bytes": "Exchange bounds this run, by its bytes",
    "stragglers": "Stragglers bound this run",
    "server": "The parameter server bounds this run",
    "batch": "Too small a batch bounds this run",
    "bubble": "The pipeline's bubble bounds this run",
}


def _spent(kind: str, facts: StepParts) -> str:
    """The rest of "40 % of a step of 120 ms …"."""
    number = max(1, round(facts.messages))
    sent = f"{_size(facts.sent_bytes)} a rank in {number} operation{'s' * (number > 1)}"
    guess = ", by an assumed link" if facts.link.assumed else ""
    match kind:
        case "data":
            return "gets batches"
        case "computing":
            return "computes"
        case "latency" | "bytes":
            return f"exchanges {sent}{guess}"
        case "stragglers":
            who = facts.slow or "a rank that is slower, in turns"
            return f"waits for {who}"
        case "server":
            busy = "" if facts.server_busy is None else f", which computes {100 * facts.server_busy:.0f} % of the time"
            return f"waits for the server{busy}"
        case "batch":
            part = "computes" if facts.least_wait_s < ENOUGH * facts.step_s else f"exchanges {sent}"
            few = f"a worker's batch has {facts.batch_size} samples"
            noise = "" if facts.noise_scale is None else f", and the noise scale is {facts.noise_scale:,.0f}"
            return f"{part}, and {few}{noise}"
    return "waits for other stages"


def _brought(gain: float) -> str:
    if gain < 1.02:
        return "no gain is predicted"
    more = f"{gain:.1f} times the samples per second" if gain >= 1.1 else f"{100 * (gain - 1):.0f} %"
    return f"by its own figures at best {more}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _size(num_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"
