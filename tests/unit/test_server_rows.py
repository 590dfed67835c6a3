"""Tables by rows: their places, their messages, and a shard's use of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from plain_rules import in_pairs, on_arrival
from polytempo.core.rule import (
    Action,
    Add,
    Answer,
    Arrival,
    Mix,
    Modified,
    Rule,
    Service,
    Situation,
    Update,
    UpdateRule,
)
from polytempo.server.layout import Parameter, Span, shard_map
from polytempo.server.message import COORDINATOR, Members, Message, Pull, Pulled, Push, Pushed, Replicate, Reply, Rows
from polytempo.server.pieces import TablePiece, TableSplit, split
from polytempo.server.record import PushEntry, entry_of
from polytempo.server.rules.corrections import clip, compensate
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots import snapshot
from polytempo.server.tensors.tables import summed
from polytempo.server.worker.client import Client, VectorFormat
from polytempo.server.worker.touched_rows import TableRows
from polytempo.wire.frames import FrameLimits, decode, encode

MODEL = (
    Parameter("a", 6),
    Parameter("words.weight", 40, group=1, row_width=4),
    Parameter("b", 4),
    Parameter("tags.weight", 6, row_width=2),
)
NUMEL = 56
SGD = UpdateRule("sgd")

R = TypeVar("R", bound=Reply)


def together(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    """A gradient of each of two workers makes an update; until then both wait."""
    if arrival.kind != "push":
        return state, [Answer(arrival.worker)] if arrival.kind == "pull" else []
    if state != [1 - arrival.worker]:
        return [arrival.worker], []
    return [], [Add(0), Add(1), Update(2.0), Answer(0), Answer(1)]


def mixes(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    return state, [Mix(arrival.worker, 0.5)] if arrival.kind == "push" else []


RULES = {
    "on_arrival": Rule("on_arrival()", int, on_arrival),
    "in_pairs": Rule("in_pairs()", int, in_pairs),
    "together": Rule("together()", list, together),
    "mixes": Rule("mixes()", int, mixes),
}


def shard(rule: str = "on_arrival", optimizer: UpdateRule = SGD, *modifiers: Modified) -> Shard:
    """One shard with everything, its members the workers 0 and 1."""
    service = Service(RULES[rule], optimizer, modifiers)
    found = Shard(0, MODEL, shard_map(MODEL, 1)[0], torch.arange(float(NUMEL)), service, native=False)
    found.apply(Members(COORDINATOR, 1, 1, ((0, 1), (1, 1))))
    return found


def rows(piece: int, values: dict[int, Sequence[float]]) -> Rows:
    return Rows(piece, torch.tensor(list(values), dtype=torch.int64), torch.tensor(list(values.values())))


def words(*numbers: int, value: float = 1.0) -> Rows:
    """The same gradient for each of these rows of the first table."""
    return rows(0, {number: [value] * 4 for number in numbers})


def push(worker: int, sequence: int, *touched: Rows, dense: float = 0.0, lrs: tuple[float, ...] = (1.0, 0.5)) -> Push:
    return Push(worker, 1, sequence, sequence, 0, 1, lrs, (), torch.full((10,), dense), touched)


def pull(worker: int, sequence: int, basis: int = -1) -> Pull:
    return Pull(worker, 1, sequence, 0, basis)


def only(replies: list[Reply], kind: type[R]) -> R:
    (reply,) = replies
    assert isinstance(reply, kind), reply
    return reply


def pulled(server: Shard, worker: int, sequence: int, basis: int = -1) -> dict[int, dict[int, list[float]]]:
    """The answer's rows: piece -> row -> values."""
    answer = only(server.apply(pull(worker, sequence, basis)), Pulled)
    return {one.piece: dict(zip(one.rows.tolist(), one.values.tolist(), strict=True)) for one in answer.rows}


# ---------------------------------------------------------------------------------------------------- places


def test_spans_are_taken_apart_into_dense_ranges_and_pieces_of_tables() -> None:
    """a 0-5, words 6-45, b 46-49, tags 50-55; of the dense vector a is 0-5 and b 6-9, side by side."""
    whole = split(MODEL, (Span(0, NUMEL),))
    assert whole.dense == ((0, 10),)
    assert whole.pieces == (TablePiece(0, "words.weight", 1, 0, 10, 4), TablePiece(1, "tags.weight", 0, 0, 3, 2))
    assert split(MODEL, (Span(0, 18),)) == TableSplit((Span(0, 6),), (TablePiece(0, "words.weight", 1, 0, 3, 4),))
    assert split(MODEL, (Span(18, 34),)) == TableSplit((), (TablePiece(0, "words.weight", 1, 3, 4, 4),))
    assert split(MODEL, (Span(2, 6), Span(34, 52))) == TableSplit(
        (Span(2, 10),), (TablePiece(0, "words.weight", 1, 7, 3, 4), TablePiece(1, "tags.weight", 0, 0, 1, 2))
    )


def test_without_tables_nothing_is_taken_apart() -> None:
    spans = (Span(0, 3), Span(5, 9))
    assert split((Parameter("w", 9),), spans) == (spans, ())


def test_sums_by_rows() -> None:
    one, other = rows(0, {1: [1.0, 2.0], 4: [3.0, 4.0]}), rows(0, {0: [10.0, 10.0], 4: [20.0, 20.0]})
    where, values = summed([(one.rows, one.values, 1.0), (other.rows, other.values, 0.5)])
    assert dict(zip(where.tolist(), values.tolist(), strict=True)) == {0: [5.0, 5.0], 1: [1.0, 2.0], 4: [13.0, 14.0]}
    assert summed([(one.rows, one.values, 1.0)])[1] is one.values


# ------------------------------------------------------------------------------------------------------------ a shard


def test_only_touched_rows_change_and_only_changed_rows_are_pulled() -> None:
    server = shard()
    everything = pulled(server, 0, 1)
    assert (len(everything[0]), len(everything[1])) == (10, 3)
    assert everything[0][2] == [14.0, 15.0, 16.0, 17.0]
    assert pulled(server, 0, 2, basis=0) == {}
    server.apply(push(1, 1, words(2, 7), dense=1.0))  # the table's learning rate is 0.5
    server.apply(push(1, 2, rows(1, {0: [2.0, 2.0]})))
    assert pulled(server, 0, 3, basis=0) == {
        0: {2: [13.5, 14.5, 15.5, 16.5], 7: [33.5, 34.5, 35.5, 36.5]},
        1: {0: [48.0, 49.0]},
    }
    assert pulled(server, 0, 4, basis=1) == {1: {0: [48.0, 49.0]}}
    assert pulled(server, 0, 5, basis=2) == {}
    assert server.weights.tolist() == [-1, 0, 1, 2, 3, 4, 45, 46, 47, 48]


def test_what_was_pulled_stays_as_it_is() -> None:
    server = shard()
    answer = only(server.apply(pull(0, 1)), Pulled)
    before = answer.rows[0].values.clone()
    server.apply(push(1, 1, words(0, 1, 2)))
    assert torch.equal(answer.rows[0].values, before)


def test_long_ago_is_known_too() -> None:
    """Pulls from any version on bring the rows that a look at every row's last change brings, also after a restart."""
    server, again = shard(), shard()
    touched = [sorted({step % 10, step * step % 10}) for step in range(150)]
    for step, numbers in enumerate(touched, start=1):
        server.apply(push(1, step, words(*numbers)))
    again.load(*server.dump())
    for sequence, basis in enumerate((0, 3, 80, 86, 87, 120, 148, 149, 150), start=1):
        expected = {number for numbers in touched[basis:] for number in numbers}
        for each in (server, again):
            assert set(pulled(each, 0, sequence, basis).get(0, {})) == expected


def test_adagrad_keeps_its_sum_of_squares_by_rows() -> None:
    server = shard("on_arrival", UpdateRule("adagrad", lr=1.0, eps=0.0, initial=7.0))
    server.apply(push(0, 1, words(0, value=3.0)))  # 3/√(7 + 9)
    server.apply(push(0, 2, words(0, 1, value=3.0)))  # 3/√(7 + 9 + 9)
    found = pulled(server, 0, 3)[0]
    torch.testing.assert_close(found[0][0], 6.0 - 3 / 4 - 3 / 5)
    torch.testing.assert_close(found[1][0], 10.0 - 3 / 4)


def test_a_sum_over_several_pushes_does_not_hang_on_what_was_lent() -> None:
    """Worker 0 gives rows 1 and 3, worker 1 rows 3 and 4, half each, over 2: row 3 gets 0.5·(0.5·2 + 0.5·4)/2."""
    server, first = shard("in_pairs"), words(1, 3, value=2.0)
    only(server.apply(push(0, 1, first)), Pushed)
    first.values.fill_(1e9)
    first.rows.fill_(9)
    only(server.apply(push(1, 1, words(3, 4, value=4.0))), Pushed)
    found = {row: values[0] for row, values in pulled(server, 0, 2, basis=0)[0].items()}
    assert found == {1: 10 - 0.25, 3: 18 - 0.75, 4: 22 - 0.5}


@pytest.mark.parametrize("rule", ["in_pairs", "together"])
@pytest.mark.parametrize("optimizer", [SGD, UpdateRule("adagrad")], ids=["sgd", "adagrad"])
def test_a_copy_goes_on_in_the_same_bits_from_any_entry(rule: str, optimizer: UpdateRule, tmp_path: Path) -> None:
    """Rows that wait, sums that are not used yet, and answers that may be asked for again are part of the state."""
    generator = torch.Generator().manual_seed(1)
    entries: list[Push | Pull] = []
    for sequence in range(1, 6):
        for worker in (0, 1):
            numbers = torch.randperm(10, generator=generator)[:3].sort().values
            touched = Rows(0, numbers, torch.randn(3, 4, generator=generator))
            entries.append(push(worker, 2 * sequence - 1, touched, rows(1, {worker: [1.0, sequence]}), dense=1.0))
        entries += [pull(worker, 2 * sequence, basis=sequence - 2) for worker in (0, 1)]
    for cut in range(len(entries)):
        server, copy = shard(rule, optimizer), shard(rule, optimizer)
        for entry in entries[:cut]:
            server.apply(entry)
        snapshot.write(tmp_path, cut, 0, *server.dump())
        copy.load(*snapshot.read(tmp_path, cut, 0))
        for entry in entries[max(0, cut - 1) :]:
            given, again = server.apply(entry), copy.apply(entry)
            assert list(map(bits, given)) == list(map(bits, again))


def bits(reply: Reply) -> bytes:
    return b"".join(bytes(frame) for frame in encode(reply))


def test_a_state_of_other_tables_is_refused() -> None:
    """The same number of dense elements, and other rows."""
    small = (Parameter("a", 10), Parameter("words.weight", 36, group=1, row_width=4))
    server = Shard(0, small, shard_map(small, 1)[0], torch.zeros(46), Service(RULES["on_arrival"], SGD), native=False)
    with pytest.raises(ValueError, match="holds 2 pieces of tables, and the state 1"):
        shard().load(*server.dump())
    with pytest.raises(ValueError, match=r"holds \(10, 4\) of words.weight, .* or it is of another optimizer"):
        shard().load(*shard("on_arrival", UpdateRule("adagrad")).dump())


def test_clipping_has_the_norm_of_all() -> None:
    """The norm of a shard's dense part is √(10·1²), of the rows √(8·2²), of both √42."""
    server = shard("on_arrival", UpdateRule("sgd", lr=1.0), clip(1.0))
    server.apply(push(0, 1, words(1, 2, value=2.0), dense=1.0))
    assert server.weights[0].item() == pytest.approx(0.0 - 1.0 / math.sqrt(42))
    assert pulled(server, 0, 2, basis=0)[0][1][0] == pytest.approx(10.0 - 2.0 / math.sqrt(42))


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("touched", "reason"),
    [
        ((words(3, 8, value=math.nan),), "worker 0, clock 1: the gradient of words.weight[3, 0] is nan"),
        ((rows(1, {2: [1.0, -math.inf]}),), "worker 0, clock 1: the gradient of tags.weight[2, 1] is -inf"),
        ((words(10),), "ascending, each once, from 0 to 9; they are from 10 to 10"),
        ((words(-1, 3),), "from 0 to 9; they are from -1 to 3"),
        ((Rows(0, torch.tensor([3, 3]), torch.ones(2, 4)),), "rows of words.weight must be ascending"),
        ((Rows(0, torch.tensor([4, 3]), torch.ones(2, 4)),), "rows of words.weight must be ascending"),
        ((Rows(0, torch.tensor([3]), torch.ones(1, 5)),), "values (1, 5) are none of words.weight, 4 wide"),
        ((Rows(0, torch.tensor([3]), torch.ones(2, 4)),), "rows (1,) and values (2, 4)"),
        ((Rows(0, torch.tensor([3.0]), torch.ones(1, 4)),), "rows (1,)"),
        ((Rows(0, torch.tensor([3]), torch.ones(1, 4, dtype=torch.float64)),), "are torch.float64, but the shard"),
        ((words(1), words(2)), "rows of the pieces [0, 0], but the shard holds 0 to 1"),
        ((rows(2, {0: [1.0]}),), "rows of the pieces [2], but the shard holds 0 to 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_change_nothing(touched: tuple[Rows, ...], reason: str) -> None:
    server = shard()
    answer = only(server.apply(push(0, 1, *touched, dense=1.0)), Pushed)
    assert answer.verdict == "refused"
    assert reason in answer.reason
    assert (server.version, pulled(server, 0, 2, basis=0)) == (0, {})
    assert server.weights[0] == 0.0


def test_rows_need_their_groups_learning_rate() -> None:
    answer = only(shard().apply(push(0, 1, lrs=(0.1,))), Pushed)
    assert (answer.verdict, answer.reason) == (
        "refused",
        "worker 0: no learning rate for parameter group 1: lrs are (0.1,)",
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: shard("on_arrival", UpdateRule("sgd", momentum=0.9)), "sgd with momentum 0.9"),
        (
            lambda: shard("on_arrival", UpdateRule("adagrad", weight_decay=0.1)),
            "adagrad with momentum 0 and weight",
        ),
        (lambda: shard("on_arrival", UpdateRule("adam")), "sparse gradients go with SGD"),
        (lambda: shard("on_arrival", SGD, compensate(0.1)), "compensate.* needs the weights that each gradient"),
    ],
)
def test_what_cannot_go_by_rows_is_refused(made: Callable[[], Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_elastic_averaging_has_no_rows() -> None:
    with pytest.raises(RuntimeError, match=r"mixes\(\) averages parameters"):
        shard("mixes").apply(push(0, 1))


# ----------------------------------------------------------------------------------------------------------- a client


class Line:
    """A client and its shards, each alone in its chain."""

    def __init__(self, model: tuple[Parameter, ...], num_shards: int) -> None:
        spans = shard_map(model, num_shards)
        flat = torch.arange(float(sum(parameter.numel for parameter in model)))
        service = Service(RULES["on_arrival"], UpdateRule("sgd", lr=1.0))
        self.shards = [
            Shard(i, model, each, flat[each[0].begin : each[0].end], service, native=False)
            for i, each in enumerate(spans)
        ]
        for server in self.shards:
            server.apply(Members(COORDINATOR, 1, 1, ((0, 1),)))
        self.client = Client(0, 1, spans, [(1 + i,) for i in range(num_shards)], 9, form=VectorFormat(parameters=model))

    def run(self) -> list[Message]:
        """Deliver everything; return the messages of both directions."""
        sent: list[Message] = []
        out = self.client.outbox(0.0)
        while out:
            to, request = out.pop(0)
            assert isinstance(request, Push | Pull)
            sent.append(request)
            for reply in self.shards[to - 1].apply(request):
                sent.append(reply)
                out += self.client.receive(0.0, to, reply)
        return sent


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_rows_reach_the_shards_that_hold_them_and_come_back(num_shards: int) -> None:
    line = Line(MODEL, num_shards)
    client = line.client
    client.pull(0)
    line.run()
    tables = [torch.full((10, 4), -1.0), torch.full((3, 2), -1.0)]

    def place() -> list[tuple[int, list[int]]]:
        found = client.pulled_rows()
        for number, where, values in found:
            tables[number][where] = values
        return [(number, where.tolist()) for number, where, _ in found]

    place()
    assert tables[0].flatten().tolist() == list(range(6, 46))
    assert tables[1].flatten().tolist() == list(range(50, 56))
    client.begin((), (), 1)
    client.accrue(TableRows(0, torch.tensor([2, 9]), torch.ones(2, 4)))
    client.accrue(TableRows(0, torch.tensor([0, 2]), torch.ones(2, 4)))
    client.accrue(TableRows(1, torch.tensor([1]), torch.ones(1, 2)))
    client.push(torch.ones(10), 1)
    pulled = client.pull(1)
    line.run()
    assert pulled.value is not None
    assert pulled.value.tolist() == [-1, 0, 1, 2, 3, 4, 45, 46, 47, 48]
    touched = place()
    assert sorted(row for number, where in touched for row in where if number == 0) == [0, 2, 9]
    assert (tables[0][:, 0] - torch.arange(6.0, 46.0, 4.0)).tolist() == [-1, 0, -2, 0, 0, 0, 0, 0, 0, -1]
    assert tables[1].flatten().tolist() == [50, 51, 51, 52, 54, 55]
    client.push(torch.zeros(10), 2)
    assert not any(message.rows for message in line.run() if isinstance(message, Push)), "accrued rows go once"


def test_touched_rows_cost_what_they_are() -> None:
    """50 of 100,000 rows of 16 numbers: 50 · (8 + 64) bytes each way, where the table has 6.4 MB."""
    line = Line((Parameter("w", 100), Parameter("table", 1_600_000, row_width=16)), 1)
    line.client.pull(0)
    line.run()
    line.client.accrue(TableRows(0, torch.arange(0, 100_000, 2_000), torch.ones(50, 16)))
    line.client.push(torch.zeros(100), 1)
    line.client.pull(1)
    push, _, pull, answer = line.run()
    assert [type(message) for message in (push, pull, answer)] == [Push, Pull, Pulled]
    assert push.num_bytes == answer.num_bytes == 64 + 400 + 50 * (8 + 64) < 10_000
    assert pull.num_bytes == 64
    assert sum(len(frame) for frame in encode(push)) < 10_000
    assert Replicate(0, 1, 1, push).num_bytes == push.num_bytes  # type: ignore[arg-type]


def test_a_node_charges_for_rows() -> None:
    node = Node(1, shard(), 9)
    assert node.flops(push(0, 1, words(1, 2))) == 4.0 * (10 + 8)


def test_a_record_has_a_check_of_rows() -> None:
    one, other = (entry_of(push(0, 1, words(1, value=value))) for value in (1.0, 1.0 + 1e-6))
    assert isinstance(one, PushEntry)
    assert isinstance(other, PushEntry)
    assert one.check != other.check


def test_rows_pass_the_wire() -> None:
    touched = words(1, 2), rows(1, {0: [5.0, 6.0]})
    sent = Replicate(0, 1, 7, push(0, 1, *touched))
    received = decode([memoryview(bytearray(frame)) for frame in encode(sent)], FrameLimits())
    assert isinstance(received, Replicate)
    assert isinstance(received.entry, Push)
    for one, other in zip(received.entry.rows, touched, strict=True):
        assert one.piece == other.piece
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(one.values, other.values)


def test_without_tables_a_client_takes_no_rows() -> None:
    client = Client(0, 1, ((Span(0, 4),),), ((1,),), 9)
    assert client.pulled_rows() == []
    with pytest.raises(ValueError, match="there are no tables, so no shard takes the rows of table 0"):
        client.accrue(TableRows(0, torch.tensor([0]), torch.ones(1, 2)))


def test_many_steps_are_summed_before_they_are_pushed() -> None:
    line = Line(MODEL, 2)
    for step in range(100):
        line.client.accrue(TableRows(0, torch.tensor([step % 10]), torch.ones(1, 4)))
    line.client.push(torch.zeros(10), 100)
    sums = torch.cat([one.values for message in line.run() if isinstance(message, Push) for one in message.rows])
    assert sums.tolist() == [[10.0] * 4] * 10
