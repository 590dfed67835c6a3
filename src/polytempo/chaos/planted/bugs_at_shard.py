"""Bugs of the shard: its answers, tickets, tensors, rules, snapshots, and pushes of whole hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from polytempo.chaos.draws import RULES
from polytempo.core.arithmetic.ranges import Ranges
from polytempo.core.rule import Arrival, RegionAction, Rule, RuleState, Situation
from polytempo.server.message import Push, Reply, Request
from polytempo.server.shard import shard as shard_module
from polytempo.server.shard.deduplication import AnswerTable, RequestStatus, status_of_all
from polytempo.server.shard.replies import Queues
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots import snapshot
from polytempo.server.tensors.holder import HeldElements
from polytempo.server.tensors.regions import Regions
from polytempo.server.tensors.weights import Weights

Patches = list[tuple[Any, str, Any]]


def table_not_installed() -> Patches:
    """The table of answers is not in the state that a new copy gets."""
    load = Shard.load

    def wrong(self: Shard, data: bytes, tensors: Sequence[Tensor]) -> None:
        load(self, data, tensors)
        self._answers = AnswerTable(self.number)
        for worker, incarnation in self._roster.members.items():
            self._answers.admit(worker, incarnation)

    return [(Shard, "load", wrong)]


def waiting_not_installed() -> Patches:
    """Gradients that wait are not in the state that a new copy gets."""
    load = Shard.load

    def wrong(self: Shard, data: bytes, tensors: Sequence[Tensor]) -> None:
        load(self, data, tensors)
        self._queues = Queues(self.service.rule.name)

    return [(Shard, "load", wrong)]


def sum_not_installed() -> Patches:
    """The sum that no update has used yet is not in the state that a new copy gets."""
    load = Shard.load

    def wrong(self: Shard, data: bytes, tensors: Sequence[Tensor]) -> None:
        load(self, data, tensors)
        self._weights.summed = False

    return [(Shard, "load", wrong)]


def movement_counted_again() -> Patches:
    """A region that has moved the shard's weights moves them by the same once more."""
    perform = Regions.perform

    def wrong(self: Regions, action: RegionAction, center: Weights) -> bool:
        begun = [(region.begun, region.begun.clone()) for region in self]
        moved = perform(self, action, center)
        for present, before in begun:
            present.copy_(before)
        return moved

    return [(Regions, "perform", wrong)]


def tickets_not_kept() -> Patches:
    """A shard does not look whether it has applied a ticket already."""
    push = Shard._push

    def wrong(self: Shard, request: Push, replies: list[Reply]) -> None:
        kept, self.decisions.applied = self.decisions.applied, Ranges()
        push(self, request, replies)
        self.decisions.applied = Ranges((*kept.tuples, *self.decisions.applied.tuples))

    return [(Shard, "_push", wrong)]


def gap_accepted() -> Patches:
    """A request is taken although the one before it is still on its way."""
    status_of = AnswerTable.status_of

    def wrong(self: AnswerTable, request: Request) -> RequestStatus:
        found = status_of(self, request)
        return RequestStatus("new") if found.kind == "ahead" else found

    return [(AnswerTable, "status_of", wrong)]


def repeat_taken_for_new() -> Patches:
    """A request that comes again is taken again."""
    status_of = AnswerTable.status_of

    def wrong(self: AnswerTable, request: Request) -> RequestStatus:
        found = status_of(self, request)
        return RequestStatus("new") if found.kind == "repeated" else found

    return [(AnswerTable, "status_of", wrong)]


def dead_life_accepted() -> Patches:
    """A request of an earlier life of its worker is taken for the next one of the present life."""
    look, take = AnswerTable.status_of, AnswerTable.take

    def as_present(self: AnswerTable, request: Request) -> Request:
        known = self.known.get(request.worker)
        return request if known is None else replace(request, incarnation=known.incarnation)

    def looks(self: AnswerTable, request: Request) -> RequestStatus:
        present = as_present(self, request)
        return look(self, request) if present.incarnation == request.incarnation else RequestStatus("new")

    def takes(self: AnswerTable, request: Request) -> None:
        take(self, as_present(self, request))

    return [(AnswerTable, "status_of", looks), (AnswerTable, "take", takes)]


def answer_not_kept() -> Patches:
    """The answer to a push is not kept, so a repeated request gets no answer."""

    def wrong(self: AnswerTable, reply: Reply) -> None:
        pass

    return [(AnswerTable, "answer", wrong)]


def lent_weights_written() -> Patches:
    """An update writes to the weights in place, even while workers read them."""

    def wrong(self: Weights) -> int:
        return self.current

    return [(Weights, "_writable", wrong)]


def sum_begun_anew() -> Patches:
    """The sum is lost when the next gradient is added to it."""
    keep_sum = Weights.keep_sum

    def wrong(self: Weights) -> None:
        if self._terms:
            self.summed = False
        keep_sum(self)

    return [(Weights, "keep_sum", wrong)]


def gradient_of_the_dead_kept() -> Patches:
    """The gradient of a worker that has left goes on waiting, and is used for its next life."""
    leave = Shard._leave

    def wrong(self: Shard, worker: int) -> None:
        waiting = self._queues.waiting.get(worker, [])
        leave(self, worker)
        if waiting:
            self._queues.waiting[worker] = waiting

    return [(Shard, "_leave", wrong)]


def scored_weights_written() -> Patches:
    """The shard does not hold the weights that it shows to the evaluator, so the next updates write into them."""

    def wrong(self: Shard) -> HeldElements:
        return HeldElements(self._all_spans, self.weights, None, lambda: None)

    return [(Shard, "hold", wrong)]


def bound_off_by_one() -> Patches:
    """Bounded staleness lets workers be one step further ahead than it promises."""
    right = RULES.within
    return [(RULES, "within", lambda bound: right(bound + 1))]


def bound_over_the_fastest() -> Patches:
    """Bounded staleness compares a reader with the fastest worker, not with the slowest."""
    right = RULES.within

    def wrong(bound: int) -> Rule:
        rule = right(bound)

        def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, Any]:
            if arrival.kind != "pull":
                return rule.receive(state, arrival, situation)
            clocks = state["clocks"]
            fastest = dict.fromkeys(clocks, max(clocks.values(), default=0))
            after, actions = rule.receive({**state, "clocks": fastest}, arrival, situation)
            return {**after, "clocks": clocks}, actions

        return rule._replace(receive=receive)

    return [(RULES, "within", wrong)]


def late_gradient_used() -> Patches:
    """A gradient that comes too late for backup workers is used in the next step."""
    right = RULES.first

    def wrong(n: int) -> Rule:
        rule = right(n)

        def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, Any]:
            return rule.receive(state, arrival._replace(basis=situation.version), situation)

        return rule._replace(receive=receive)

    return [(RULES, "first", wrong)]


def snapshot_named_too_early() -> Patches:
    """A snapshot gets its name before it is written, and is read all the same."""

    def unchecked(disk: Any, path: Any, number: int, shard: int) -> tuple[int, str]:
        file = path.with_suffix(".safetensors")
        content = disk.read(file, disk.size(file))
        return len(content), hashlib.sha256(content).hexdigest()

    def early(path: Any) -> Any:
        return path

    return [(snapshot, "_read_manifest", unchecked), (snapshot, "_partial", early)]


def flipped_bit_believed() -> Patches:
    """A snapshot's content is not compared with its hash."""
    read_manifest = snapshot._read_manifest

    def wrong(disk: Any, path: Any, number: int, shard: int) -> tuple[int, str]:
        num_bytes, _ = read_manifest(disk, path, number, shard)
        file = path.with_suffix(".safetensors")
        return num_bytes, hashlib.sha256(disk.read(file, num_bytes)).hexdigest()

    return [(snapshot, "_read_manifest", wrong)]


def rest_of_split_push_admitted() -> Patches:
    """A shard takes the sum of a host although it has one of its parts, or its ticket, already."""

    def wrong(number: int, push: Push, *tables: Any) -> RequestStatus:
        found = status_of_all(number, push, *tables)
        return RequestStatus("new") if found.kind == "split" else found

    return [(shard_module, "status_of_all", wrong)]


def parts_not_remembered() -> Patches:
    """A host's push notes the sender's request only; another worker's counts as new when it comes separately."""

    def wrong(request: Request) -> Iterator[Request]:
        yield request

    return [(shard_module, "requests_in", wrong)]


def tickets_of_parts_not_kept() -> Patches:
    """A shard does not note the tickets of the other workers' gradients in a host's push."""
    right = Shard._push_of_host

    def wrong(self: Shard, push: Push, replies: list[Reply]) -> None:
        right(self, replace(push, parts=tuple(replace(part, tickets=()) for part in push.parts)), replies)

    return [(Shard, "_push_of_host", wrong)]
