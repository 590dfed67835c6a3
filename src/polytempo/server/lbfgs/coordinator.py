"""`LbfgsCoordinator`: asks shards for operations and replicas for gradients of portions; it has no parameter itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from polytempo.server.lbfgs.messages import Answered, Open, Operate, PortionDone, PortionTask
from polytempo.server.lbfgs.operations import Asked, Asking, Iteration, LossAt, VectorOperation
from polytempo.server.message import Message, Outbox


class LbfgsCoordinator:
    """A machine without I/O (see `server.loop.Machine`) that carries out `asking` on nodes `shards` and `replicas`.

    `bounds`: where the portions of a batch begin, and where the last one ends. Replicas may be `lost` at any time, as
    long as one is left. `on_iteration` hears of each iteration.
    """

    def __init__(
        self,
        asking: Asking,
        shards: Sequence[int],
        replicas: Sequence[int],
        bounds: Sequence[int],
        on_iteration: Callable[[Iteration], None],
    ) -> None:
        self._asking, self._shards, self.replicas = asking, list(shards), list(replicas)
        self._bounds, self._on_iteration = bounds, on_iteration
        self._answers: dict[int, float] = {}
        self._portions: Portions | None = None
        self._point = -1
        self._begun = self._opened = self.finished = False
        self.copies = 0
        """Second copies of portions that were begun."""

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """Take an answer, and go on when it was the last one."""
        match message:
            case Answered(value):
                self._answers[source] = value
                if len(self._answers) < len(self._shards):
                    return []
                total = sum(self._answers[shard] for shard in self._shards)
                self._answers, self._opened = {}, self._portions is not None
                return self._deal() if self._opened else self._ask(total)
            case PortionDone(point, portion, loss) if point == self._point and self._portions is not None:
                self._portions.computed(source, portion, loss)
                return self._deal()
        return []

    def lost(self, replica: int) -> Outbox:
        """A replica is gone. Errors: RuntimeError where it was the last one."""
        self.replicas.remove(replica)
        if not self.replicas:
            raise RuntimeError(f"the last replica, node {replica}, is lost; start the run again")
        if self._portions is not None:
            self._portions.lost(replica)
        return self._deal()

    def tick(self, now_s: float) -> Outbox:
        """Begin."""
        if self._begun:
            return []
        self._begun = True
        return self._go_on(lambda: next(self._asking))

    def wait_s(self, now_s: float) -> float:
        """Until something arrives, once it has begun."""
        return math.inf if self._begun else 0.0

    def flops(self, message: Message) -> float:
        """The coordinator computes with a few numbers."""
        return 0.0

    def _ask(self, answer: float) -> Outbox:
        return self._go_on(lambda: self._asking.send(answer))

    def _go_on(self, step: Callable[[], Asked | Iteration]) -> Outbox:
        """Ask for all that needs no answer, and for the next thing that does."""
        out: Outbox = []
        try:
            while True:
                asked, step = step(), lambda: self._asking.send(0.0)
                if isinstance(asked, Iteration):
                    self._on_iteration(asked)
                    continue
                out += self._to_shards(asked)
                if isinstance(asked, LossAt) or asked.kind == "dot":
                    return out
        except StopIteration:
            self.finished = True
            return out

    def _to_shards(self, asked: VectorOperation | LossAt) -> Outbox:
        if isinstance(asked, VectorOperation):
            return [(shard, Operate(*asked)) for shard in self._shards]
        self._point, self._opened, self._portions = self._point + 1, False, Portions(len(self._bounds) - 1)
        return [(shard, Open(self._point, asked.at, asked.into)) for shard in self._shards]

    def _deal(self) -> Outbox:
        """Portions for replicas without work; or, where all are done, the operations after the evaluation."""
        portions = self._portions
        if portions is None or not self._opened:  # a shard that has not begun the point would not know it
            return []
        if portions.done:
            self._portions, self.copies = None, self.copies + portions.copies
            return self._ask(sum(portions.losses[portion] for portion in range(portions.count)))
        dealt = portions.deal(self.replicas)
        return [(to, PortionTask(self._point, p, self._bounds[p], self._bounds[p + 1])) for to, p in dealt]


_MOST_HOLDERS = 2


class Portions:
    """The portions 0 … count - 1 of one evaluation, each to be computed once.

    A replica has one at a time, so a fast one computes more of them. When none is left, idle replicas compute second
    copies of portions under way: the first result counts.
    """

    def __init__(self, count: int) -> None:
        self._left = deque(range(count))
        self._held: dict[int, list[int]] = {}
        """Replica -> its portions, in the order of their deals."""
        self._of: dict[int, int] = {}
        """The portion of each replica that computes."""
        self.losses: dict[int, float] = {}
        """The losses of finished portions."""
        self.count, self.copies = count, 0
        """The number of portions, and of second copies."""

    @property
    def done(self) -> bool:
        """True if all portions are done."""
        return len(self.losses) == self.count

    def deal(self, replicas: Iterable[int]) -> list[tuple[int, int]]:
        """A portion for each of those replicas that has none, as far as there are some: (replica, portion)."""
        return [(replica, portion) for replica in replicas if (portion := self._next(replica)) is not None]

    def computed(self, replica: int, portion: int, loss: float) -> None:
        """A replica has done its portion."""
        self._of.pop(replica, None)
        if portion not in self.losses:
            self.losses[portion] = loss
            self._held.pop(portion, None)
            with suppress(ValueError):  # of a replica that was lost after it had done it
                self._left.remove(portion)

    def lost(self, replica: int) -> None:
        """A replica is gone; portions that it alone had are dealt again, first of all."""
        portion = self._of.pop(replica, None)
        if portion is None or portion in self.losses:
            return
        self._held[portion].remove(replica)
        if not self._held[portion]:
            del self._held[portion]
            self._left.appendleft(portion)

    def _next(self, replica: int) -> int | None:
        if replica in self._of:
            return None
        if self._left:
            portion = self._left.popleft()
        else:
            again = [each for each, holders in self._held.items() if len(holders) < _MOST_HOLDERS]
            if not again:
                return None
            portion, self.copies = again[0], self.copies + 1
        self._held.setdefault(portion, []).append(replica)
        self._of[replica] = portion
        return portion
