"""Combinations of features that cover every pair: strategy × layout × precision × norm × optimizer × loop × …

A row takes one value of each factor. `covering` chooses rows until each pair of values that can stand together is in
one of them. A new feature is a new value here, and so it meets all others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

from polytempo import strategies as s
from polytempo.core import Strategy
from polytempo.partition.tensor import places
from polytempo.server.rules.staleness import power

SEED = 31
"""Another seed chooses other rows, which cover the pairs as well."""


class Combination(NamedTuple):
    """One value of each factor."""

    family: str
    layout: str
    precision: str
    norm: str
    optimizer: str
    loop: str
    replicas: int
    saving: str
    world: str
    scored: str = "weights"
    start: str = "own"
    shown: str = "unseen"

    def __str__(self) -> str:
        return "-".join(str(value) for value in self if value != "unseen")


FAMILIES: dict[str, Callable[[], Strategy]] = {
    "sync": s.sync_sgd,
    "local": lambda: s.local_sgd(period=3),
    "post_local": lambda: s.post_local_sgd(switch_step=2, period=2),
    "diloco": lambda: s.diloco(period=3, outer_lr=0.7, outer_momentum=0.9),
    "islands": lambda: s.islands(outer=s.diloco(period=3, outer_lr=0.7, outer_momentum=0.9), number=1),
    "slowmo": lambda: s.slowmo(period=3),
    "adasum": s.adasum,
    "gossip": s.gossip,
    "delayed": lambda: s.delayed_sgd(delay=1),
    "top_k": lambda: s.top_k_sgd(0.3, exact_below=0),
    "one_bit": lambda: s.one_bit_sgd(exact_below=0),
    "power": lambda: s.power_sgd(1, exact_below=0),
    "acco": s.acco,
    "backup": lambda: s.backup_workers(backups=0),
    "downpour": lambda: s.downpour(2, 2, scale=power(2)),
}
"""The exchanges of replicas of a model, or of a part of it."""

LAYOUTS: dict[str, Callable[[Strategy], Strategy]] = {
    "whole": lambda inner: inner,
    "one_copy": lambda inner: s.shared_memory(),
    "hogwild": lambda inner: s.hogwild("atomic"),
    "gpipe": lambda inner: s.gpipe(2, 2, inner=inner),
    "one_f_one_b": lambda inner: s.one_f_one_b(2, 2, inner=inner),
    "interleaved": lambda inner: s.interleaved(2, 2, parts=2, inner=inner),
    "zero_bubble": lambda inner: s.zero_bubble(2, 2, inner=inner),
    "ddg": lambda inner: s.ddg(2, inner=inner),
    "features_replay": lambda inner: s.features_replay(2, inner=inner),
    "pipelined_backprop": lambda inner: s.pipelined_backprop(2, inner=inner),
    "pipedream": lambda inner: s.pipedream(2, inner=inner),
    "pipedream_2bw": lambda inner: s.pipedream_2bw(2, 2, inner=inner),
    "split": lambda inner: s.split({"up": "column", "down": "row"}, parts=2, inner=inner),
    "places": lambda inner: s.split({"up.layer": places(rows=2), "down.layer": places(rows=2)}, parts=2, inner=inner),
    "hybrid": lambda inner: s.hybrid("up, down", inner=inner),
}
"""The layout of a model on ranks."""

QUANTISED = ("int8", "ternary")
"""Precisions of a few levels; `bf16` and these keep float32 masters."""

FACTORS: dict[str, Sequence[str | int]] = {
    "family": list(FAMILIES),
    "layout": [layout for layout in LAYOUTS if layout != "hogwild"],  # see `IN_ANY_ORDER`
    "precision": ["float64", "float32", "bf16", *QUANTISED],
    "norm": ["none", "batch", "instance", "layer", "group"],
    "optimizer": ["sgd", "momentum", "adamw"],
    "loop": [
        *("job", "micro_batches", "clip_norm", "clipped", "frozen", "unused", "own", "accumulated", "watched"),
        *("adapters", "streamed"),
    ],
    "replicas": [1, 2],
    "saving": ["saved", "resumed"],
    "world": ["virtual", "processes"],
    "scored": ["weights", "average"],
    "start": ["own", "other"],  # the job's own first weights, or another run's model
}
FACTOR_NAMES = tuple(FACTORS)
SHOWN = ["page", "compared", "logged", "profiled"]
"""Ways to look at a run: the live page, a comparison of ranks after each step, a user's own numbers, a profile. Chosen
rows get one of them, so they cost no rows."""
IDLE_LAYERS = [
    Combination(family, "whole", "float64", norm, optimizer, loop, replicas, saving, world)
    for family, norm, optimizer, loop, replicas, saving, world in [
        ("backup", "layer", "adamw", "sometimes", 2, "saved", "virtual"),
        ("backup", "group", "momentum", "sometimes", 2, "resumed", "processes"),
        ("backup", "batch", "sgd", "sometimes", 1, "saved", "virtual"),
        ("backup", "none", "adamw", "unused", 2, "saved", "processes"),
        ("backup", "batch", "momentum", "unused", 1, "saved", "virtual"),
        ("downpour", "none", "momentum", "sometimes", 1, "saved", "virtual"),
        ("sync", "none", "adamw", "sometimes", 2, "saved", "virtual"),
        ("sync", "group", "momentum", "sometimes", 2, "resumed", "processes"),
    ]
]
"""Rows with a layer that no batch uses, or only some batches: optimizers leave it alone, at a server too."""
IN_ANY_ORDER = [
    Combination("sync", "hogwild", precision, norm, optimizer, loop, replicas, saving, world)
    for precision, norm, optimizer, loop, replicas, saving, world in [
        ("float64", "none", "sgd", "job", 1, "saved", "virtual"),
        ("float32", "layer", "momentum", "unused", 2, "saved", "virtual"),
        ("float64", "group", "adamw", "frozen", 2, "saved", "virtual"),
        ("bf16", "none", "sgd", "job", 2, "saved", "virtual"),
        ("float64", "none", "momentum", "job", 1, "resumed", "processes"),
        ("float32", "instance", "adamw", "frozen", 1, "saved", "processes"),
        ("float32", "layer", "sgd", "job", 2, "resumed", "processes"),
        ("float64", "batch", "adamw", "unused", 2, "saved", "processes"),
    ]
]
"""Rows of Hogwild!: two workers write to one copy in any order, so only one worker can be compared with plain torch."""
AUTOCAST = [
    Combination(family, layout, "autocast", norm, optimizer, loop, replicas, saving, world)
    for family, layout, norm, optimizer, loop, replicas, saving, world in [
        ("sync", "whole", "batch", "adamw", "job", 2, "saved", "virtual"),
        ("sync", "whole", "group", "momentum", "clip_norm", 2, "saved", "virtual"),
        ("local", "whole", "layer", "momentum", "micro_batches", 2, "saved", "virtual"),
        ("downpour", "whole", "none", "sgd", "job", 1, "saved", "virtual"),
        ("sync", "gpipe", "none", "sgd", "job", 1, "saved", "virtual"),
        ("sync", "split", "none", "momentum", "job", 1, "saved", "virtual"),
        ("sync", "one_copy", "none", "sgd", "job", 2, "saved", "virtual"),
        ("sync", "whole", "layer", "adamw", "job", 2, "resumed", "processes"),
    ]
]
"""Rows of float32 parameters with 16 bits in forward alone."""
STAGED = tuple(
    layout for layout in LAYOUTS if layout not in ("whole", "one_copy", "hogwild", "split", "places", "hybrid")
)
WAITING = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")
"""Stages that compute the same as one process."""
LATE = tuple(layout for layout in STAGED if layout not in WAITING)
"""Stages that update by gradients of earlier parameters."""
OWN = ("own", "accumulated", "clipped")
"""Loops that a user writes."""
SERVED = ("backup", "downpour")
MEET_BY_PARAMETERS = ("local", "post_local", "diloco", "islands", "slowmo", "gossip")
PLAIN = ("sync", "backup", "local", "diloco", "islands")
"""Families that `combination_runs.plain` computes."""

Pair = tuple[tuple[str, str | int], tuple[str, str | int]]


Values = Mapping[str, Sequence[str | int]]
"""Some values of each named factor."""

IMPOSSIBLE: list[Values] = [
    {"layout": ["one_copy"], "family": [family for family in FAMILIES if family != "sync"]},
    {"layout": ["hybrid"], "replicas": [1]},  # its ranks are the replicas
    {"loop": OWN, "world": ["virtual"]},  # a user's loop runs on processes
    {"saving": ["resumed"], "world": ["virtual"]},  # the same arguments give the same simulation
    {"loop": ["accumulated"], "layout": STAGED},  # micro-batches are accumulation
    {"loop": OWN, "layout": STAGED, "precision": ["bf16", "autocast", *QUANTISED]},  # an option of jobs
    {"loop": OWN, "layout": ["split", "places", "hybrid"], "precision": QUANTISED},  # refused in jobs alone
    {"loop": OWN, "scored": ["average"]},  # an option of jobs
    {"loop": OWN, "start": ["other"]},  # an option of jobs
    {"loop": OWN, "family": SERVED},  # starts a server in each row: `process/test_attach_served` and its neighbours
]
"""Rows without a meaning, as opposed to refused ones."""
UNSHOWN: list[Values] = [
    {"shown": SHOWN, "loop": ["watched"]},  # its rows have trackers, callbacks, numbers and a profile together
    {"shown": ["page", "logged", "profiled"], "loop": OWN, "layout": STAGED},  # `pt.pipeline` has no folder
    {"shown": ["logged"], "layout": STAGED},  # rank 0 writes, and the last stage has the loss
    {"shown": ["profiled"], "world": ["virtual"]},  # torch.profiler measures real seconds
    {"shown": ["profiled"], "family": SERVED},  # refused: workers count no common steps
]
"""Rows that cannot be looked at in these ways."""

REFUSED: list[tuple[str, Values]] = [
    ("drops gradients", {"family": ["backup"], "layout": LATE}),
    ("PT1724", {"family": ["acco"], "layout": ["hybrid"]}),
    ("PT1723", {"family": MEET_BY_PARAMETERS, "layout": ["hybrid"]}),
    ("PT1701|PT1723", {"family": SERVED, "layout": ["split", "places", "hybrid"]}),
    ("PT1411", {"layout": ["one_copy", "hogwild"], "precision": ["autocast"]}),
    ("PT1401", {"layout": ["one_copy", "hogwild"], "precision": ["bf16", *QUANTISED]}),
    ("PT1408", {"layout": STAGED, "precision": QUANTISED}),
    ("PT1409", {"layout": ["split", "places", "hybrid"], "precision": QUANTISED}),
    ("PT1412", {"family": SERVED, "layout": STAGED, "precision": ["autocast"]}),
    ("PT1403", {"family": SERVED, "layout": STAGED, "precision": ["bf16"]}),
    ("PT1526", {"layout": STAGED, "loop": ["micro_batches"]}),
    ("PT1536", {"family": SERVED, "layout": STAGED, "loop": ["clip_norm"]}),
    ("PT1538", {"family": ["backup"], "loop": ["clip_norm"]}),
    ("PT1602", {"layout": STAGED, "scored": ["average"]}),
    ("PT1603", {"layout": ["hogwild"], "scored": ["average"]}),
    ("PT1606", {"layout": ["split", "places", "hybrid"], "scored": ["average"]}),
    ("decays weights", {"family": ["downpour"], "optimizer": ["adamw"]}),
    ("clips by the norm of the whole", {"layout": LATE, "loop": ["clipped", "clip_norm"]}),
]
"""Codes or patterns of refused rows, in the order of the checks."""


def fits(chosen: Mapping[str, str | int], values: Values) -> bool:
    """True if all these factors are chosen, with one of these values."""
    return all(chosen.get(name) in allowed for name, allowed in values.items())


def possible(chosen: Mapping[str, str | int]) -> bool:
    return not any(fits(chosen, values) for values in IMPOSSIBLE)


def refusal(chosen: Mapping[str, str | int]) -> str | None:
    return next((words for words, values in REFUSED if fits(chosen, values)), None)


def accepted(chosen: Mapping[str, str | int]) -> bool:
    return possible(chosen) and refusal(chosen) is None


def comparable(chosen: Mapping[str, str | int]) -> bool:
    """True if plain torch computes the row: no gradient is late, and `combination_runs.plain` knows the family."""
    if fits(chosen, {"layout": ["hogwild"], "replicas": [2]}) or fits(chosen, {"loop": ["streamed"], "family": SERVED}):
        return False  # a server's tickets are other places of a stream's order
    plain = chosen.get("family", "sync") in PLAIN and chosen.get("layout") not in LATE
    return plain and accepted(chosen)


def _pairs() -> Iterator[Pair]:
    """Every pair of values of two factors."""
    for (first, some), (second, others) in combinations(FACTORS.items(), 2):
        yield from (((first, a), (second, b)) for a, b in product(some, others))


def pairs_of(row: Sequence[str | int]) -> Iterator[Pair]:
    """Every pair of values in a row of `FACTORS`."""
    return combinations(zip(FACTOR_NAMES, row, strict=False), 2)


NEWER: list[Sequence[str]] = [
    ("watched", "adapters", "streamed", "acco"),
    ("adapters", "streamed", "acco"),
    ("streamed", "acco"),
    ("acco",),
    (),
]
"""Newer values. Rows of older ones come first, so a newer one leaves them alone."""


def covering(seed: int = SEED) -> list[Combination]:
    """Rows with every possible pair of values; rows that plain torch computes have all of their pairs alone, and so do
    those that nothing refuses."""
    draw = random.Random(seed)
    rows = list[Combination]()
    for newer in NEWER:
        for allowed in (comparable, accepted, possible):
            rows += _covering(
                lambda chosen, allowed=allowed, newer=newer: older(chosen, newer) and allowed(chosen), rows, draw
            )
    newest = NEWER[-2]
    number = sum(older(row._asdict(), newest) for row in rows)
    first = _shown(rows[:number], [pair for pair in shown_pairs() if pair[1][1] not in newest])
    return _shown([*first, *rows[number:]], shown_pairs())


def shown_pairs() -> Iterator[Pair]:
    """Every pair of a way to look at a run and another value, in rows that are accepted."""
    for way, (name, some) in product(SHOWN, FACTORS.items()):
        for value in some:
            chosen = {"shown": way, name: value}
            if accepted(chosen) and not any(fits(chosen, values) for values in UNSHOWN):
                yield ("shown", way), (name, value)


def pairs_shown(row: Combination) -> set[Pair]:
    """The pairs of a row's way to be looked at."""
    return {(("shown", row.shown), pair) for pair in zip(FACTOR_NAMES, row, strict=False)}


def _shown(rows: Sequence[Combination], pairs: Iterable[Pair]) -> list[Combination]:
    """The rows, further ones of them with a way to be looked at, until each of `pairs` is in one."""
    found, left = list(rows), set(pairs).difference(*(pairs_shown(row) for row in rows))
    free = [place for place, row in enumerate(rows) if row.shown == "unseen" and accepted(row._asdict())]
    while left and free:
        tried = [(place, found[place]._replace(shown=way)) for place in free for way in SHOWN]
        possible_ones = [
            (place, row) for place, row in tried if not any(fits(row._asdict(), values) for values in UNSHOWN)
        ]
        place, row = max(possible_ones, key=lambda each: len(left & pairs_shown(each[1])))
        if not left & pairs_shown(row):
            break
        found[place], left = row, left - pairs_shown(row)
        free.remove(place)
    return found


def older(chosen: Mapping[str, str | int], newer: Sequence[str]) -> bool:
    """True without the values `newer`."""
    return not any(value in newer for value in chosen.values())


Allowed = Callable[[Mapping[str, str | int]], bool]


def _covering(allowed: Allowed, given: Sequence[Combination], draw: random.Random) -> list[Combination]:
    """Rows that cover the pairs that `given` lacks; each is the best of some completions of an uncovered pair."""
    covered = {pair for row in given for pair in pairs_of(row)}
    left, rows = {pair: None for pair in _pairs() if allowed(dict(pair)) and pair not in covered}, list[Combination]()
    while left:
        starts = draw.choices(list(left), k=20)
        found = [row for start in starts if (row := _completed(dict(start), left, allowed, draw)) is not None]
        rows.append(max(found, key=lambda row: sum(pair in left for pair in pairs_of(row))))
        for pair in pairs_of(rows[-1]):
            left.pop(pair, None)
    return rows


def _completed(
    chosen: dict[str, str | int], left: Mapping[Pair, None], allowed: Allowed, draw: random.Random
) -> Combination | None:
    """A row with the values `chosen`, and for each other factor the value that covers most; None where none is
    allowed."""
    for name in draw.sample(FACTOR_NAMES, len(FACTOR_NAMES)):
        if name not in chosen:
            fitting = [value for value in FACTORS[name] if allowed({**chosen, name: value})]
            if not fitting:
                return None
            draw.shuffle(fitting)
            chosen[name] = max(fitting, key=lambda value, name=name: _gain(name, value, chosen, left))
    return Combination(**{name: chosen[name] for name in FACTOR_NAMES})  # type: ignore[arg-type]


def _gain(name: str, value: str | int, chosen: Mapping[str, str | int], left: Mapping[Pair, None]) -> int:
    mine, place = (name, value), FACTOR_NAMES.index(name)
    return sum(
        ((mine, other) if place < FACTOR_NAMES.index(other[0]) else (other, mine)) in left for other in chosen.items()
    )
