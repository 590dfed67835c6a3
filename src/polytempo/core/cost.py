"""`Cost`: a transform's messages, computations and memory, as numbers from shapes; nothing is sent.

Every number is of one exchange of the whole model. Numbers "of all ranks" add up over exchanges; a rank is busiest in
an exchange where it sends the most bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from polytempo.core.bundle import Bundle
from polytempo.core.route import Route

Reason = Literal["", "asked", "sum", "stripes", "merge", "sparse", "memory", "wires"]


class Steps(NamedTuple):
    """Steps `first`, `first` + `period`, … up to `last`, counted from 1. `last` None: without end.

    `but`: one in so many of them, the last, is left out, where it is not 0. `rule`: decides on later periods, where
    there is one.
    """

    first: int = 1
    period: int = 1
    last: int | None = None
    but: int = 0
    rule: str = ""

    def has(self, step: int) -> bool:
        """True if `step` is one of them."""
        number, rest = divmod(step - self.first, self.period)
        if number < 0 or rest or (self.last is not None and step > self.last):
            return False
        return not self.but or (number + 1) % self.but != 0

    def every(self, period: int) -> Steps:
        """The last of `period` steps for each of these."""
        last = None if self.last is None else self.last * period
        return Steps(self.first * period, self.period * period, last, self.but, self.rule)

    def until(self, step: int) -> Steps:
        """The part of them up to `step`."""
        return self._replace(last=step if self.last is None else min(step, self.last))

    def after(self, step: int) -> Steps:
        """Steps counted from `step` on."""
        return self._replace(first=self.first + step, last=None if self.last is None else self.last + step)

    def __str__(self) -> str:
        often = "every step" if self.period == 1 else f"every {self.period} steps"
        begin = "" if self.first == self.period else f", from step {self.first} on"
        but = f" but one in {self.but}" if self.but else ""
        rule = f" at first, and then as {self.rule} decides" if self.rule else ""
        return f"{often}{but}{begin}{'' if self.last is None else f', up to step {self.last}'}{rule}"


def ever_rarer(repeats: int, *, longest: int | None = None, last: int | None = None) -> list[Steps]:
    """Steps 1, 2, 4, … apart, `repeats` times each: up to `longest` apart, then always, or up to step `last`.

    >>> [steps.period for steps in ever_rarer(16, last=100)], [str(steps) for steps in ever_rarer(3, longest=2)]
    ([1, 2, 4], ['every step, up to step 3', 'every 2 steps, from step 5 on'])
    """
    found: list[Steps] = []
    begin, interval = 0, 1
    while last is None or begin < last:
        end = begin + repeats * interval
        found.append(Steps(begin + interval, interval, end if last is None else min(end, last)))
        if interval == longest:
            found[-1] = found[-1]._replace(last=None)
            break
        begin, interval = end, 2 * interval if longest is None else min(2 * interval, longest)
    return found


class Sent(NamedTuple):
    """Messages and bytes."""

    messages: int = 0
    """Sends of all ranks; a rank's part in a collective that the world performs counts as one."""
    payload_bytes: int = 0
    """Gradients or parameters of all ranks, encoded where there is a codec."""
    metadata_bytes: int = 0
    """Codecs' agreements, lengths of wires and scales, of all ranks."""
    busiest_bytes: int = 0
    """All bytes of the busiest rank."""
    rounds: int = 0
    """Messages that follow each other, each after the one before has arrived."""

    def plus(self, other: Sent) -> Sent:
        """One after the other."""
        return Sent(*(a + b for a, b in zip(self, other, strict=True)))


def at_once(groups: Sequence[Sent]) -> Sent:
    """The messages of groups that talk at the same time."""
    return Sent(
        sum(each.messages for each in groups),
        sum(each.payload_bytes for each in groups),
        sum(each.metadata_bytes for each in groups),
        max((each.busiest_bytes for each in groups), default=0),
        max((each.rounds for each in groups), default=0),
    )


class Sum(NamedTuple):
    """A plain sum of `numel` numbers over all ranks. The route decides on messages."""

    route: Route
    numel: int
    itemsize: int


class Exchange(NamedTuple):
    """Messages of some steps: `sent`, and also the `sums`."""

    by: str
    """The merge or carrier: a route, `all_gather`, `mix`, `push`."""
    sent: Sent = Sent()
    sums: tuple[Sum, ...] = ()
    flops: float = 0.0
    """Encoding, decoding and merging on the busiest rank; not the sum itself."""
    steps: Steps = Steps()
    exact: bool = True
    """False: values decide, and this is the most."""
    codec: str | None = None
    reason: Reason = ""
    """Why the codec's wires travel that way; see `compression.through`."""
    server: Literal["", "push", "pull"] = ""
    """Direction, with a parameter server; its codecs then give the bytes."""
    tensors: str = ""
    """Names of some tensors, where `split` has parts."""


class Cost(NamedTuple):
    """A transform's declaration."""

    exchanges: tuple[Exchange, ...] = ()
    memory_bytes: int = 0
    """A rank's state from step to step."""

    def at(self, change: Callable[[Steps], Steps]) -> Cost:
        """The same on other steps."""
        return self._replace(exchanges=tuple(each._replace(steps=change(each.steps)) for each in self.exchanges))

    def at_each(self, turns: Sequence[Steps]) -> Cost:
        """The same on each of `turns`, where it is of every step; its memory once."""
        return self._replace(exchanges=tuple(each._replace(steps=steps) for steps in turns for each in self.exchanges))

    def plus(self, other: Cost) -> Cost:
        """Both."""
        return Cost(self.exchanges + other.exchanges, self.memory_bytes + other.memory_bytes)

    def because(self, reason: Reason) -> Cost:
        """The same, with that reason for the route of wires."""
        return self._replace(exchanges=tuple(each._replace(reason=reason) for each in self.exchanges))

    def remembering(self, num_bytes: int) -> Cost:
        """The same, with `num_bytes` more of state."""
        return self._replace(memory_bytes=self.memory_bytes + num_bytes)


CostOf = Callable[[Bundle, int], Cost]
"""`cost(parameters, num_ranks)`. `parameters` gives names, shapes and dtypes; tensors of the meta device will do."""


def num_bytes(bundle: Bundle) -> int:
    """Bytes of all its values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in bundle.tensors.values())


def summed(bundle: Bundle, route: Route) -> Exchange:
    """The sum of all its values by `route`, in every step."""
    first = next(iter(bundle.tensors.values()), None)
    itemsize = 4 if first is None else first.element_size()
    return Exchange(route_name(route), sums=(Sum(route, num_bytes(bundle) // itemsize, itemsize),))


def route_name(route: object) -> str:
    """The route's name in calls, as in `route=ring`."""
    return str(getattr(route, "__name__", route))


def gathered(each: int, num_ranks: int) -> Sent:
    """An all-gather of so many bytes from each rank, as a world performs it."""
    others = num_ranks - 1
    return Sent(num_ranks, num_ranks * others * each, busiest_bytes=others * each, rounds=others)


def told(num_bytes: int, num_ranks: int) -> Sent:
    """A broadcast of so many bytes, as a world performs it: a binomial tree."""
    levels = (num_ranks - 1).bit_length()
    return Sent(num_ranks, (num_ranks - 1) * num_bytes, busiest_bytes=levels * num_bytes, rounds=levels)
