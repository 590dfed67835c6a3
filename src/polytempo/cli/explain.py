"""`polytempo explain`: what a strategy sends, on which way, and why; nothing is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.cli.plan import found_job
from polytempo.cli.show import show_json, size
from polytempo.cluster import ethernet
from polytempo.compression.packing import Packing, whole
from polytempo.core import Bundle, Codec, Port, Program, Strategy, Task, Transform, interpreted, is_idle, world_port
from polytempo.core.op import Op, Pull, Push, Send, SendReceive, Start, Work
from polytempo.core.rule import Service
from polytempo.core.state import settled
from polytempo.core.transform import Part, parts_of
from polytempo.spec.catalogue import parse_strategy
from polytempo.spec.job_calls import model_of
from polytempo.worlds import Trace, VirtualWorld

MOST_WORKERS = 4096
_WATCHED_STEPS = 64
"""How far ahead a strategy that does not explain itself is watched."""
_MOST_SENDERS = 256
"""Workers whose single messages are counted: a ring's are 131,000 among so many, and take some seconds."""
_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9}
_INPUTS, _OUTPUTS = 784, 10


class Section(NamedTuple):
    """A heading, and lines below it."""

    title: str
    lines: list[str]


def explain(strategy: str, workers: int | None, job: str | None, parameters: str | None, *, as_json: bool) -> None:
    """Print what each step of `strategy` sends, for a job's model or a perceptron of so many parameters."""
    workers = 8 if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"--workers {workers}: must be from 1 to {MOST_WORKERS}")
    if job is not None and parameters is not None:
        raise ValueError(f"--job {job} has parameters of its own; leave out --parameters {parameters}")
    if not strategy.strip():
        raise ValueError(f"STRATEGY {strategy!r}: names nothing; write a strategy, such as 'top_k_sgd(0.01)'")
    made = parse_strategy(strategy)
    with torch.device("meta"):
        model = perceptron(count(parameters)) if parameters is not None else model_of(found_job(job or "digits"))
    tensors = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not tensors:
        raise ValueError(f"--job {job}: its model has no parameters that are trained, so nothing is sent")
    given = Bundle(tensors)
    sections = list(explained(made, given, workers))
    numel, num_bytes = given.flat.numel(), given.flat.numel() * given.flat.element_size()
    if as_json:
        said = {section.title: section.lines for section in sections}
        facts = {"strategy": made.name, "workers": workers, "model": parameters or job or "digits"}
        show_json({**facts, "tensors": len(tensors), "parameters": numel, "bytes": num_bytes, "sends": said})
        return
    model_name = f"a perceptron of {numel:,}" if parameters else f"{job or 'digits'}: {numel:,}"
    who = "1 worker" if workers == 1 else f"{workers} workers"
    print(f"{made.name}, {who}")
    print(f"{model_name} parameters in {len(tensors)} tensors, {size(num_bytes)}")
    for section in sections:
        print(f"\n{section.title}")
        print(*(f"  {line}" for line in section.lines), sep="\n")


def explained(strategy: Strategy, parameters: Bundle, workers: int) -> Iterator[Section]:
    """What happens at each of the places where workers meet. `parameters` may lie on the meta device."""
    if strategy.server is not None:
        yield Section("a parameter server", list(_served(strategy, strategy.server, parameters)))
        return
    if strategy.one_copy is not None:
        yield Section("one copy", ["the parameters exist once on a host, and all of its workers write to them"])
    places = (
        ("gradients, before the optimizer's step", strategy.gradients),
        ("parameters, after the optimizer's step", strategy.parameters),
    )
    for title, transform in places:
        if workers == 1 or is_idle(transform, workers):
            yield Section(
                title, ["nothing is sent" if is_idle(transform, 2) else "nothing is sent by one worker alone"]
            )
            continue
        yield Section(title, list(_completed(transform, parameters, workers)))
    if strategy.carries_optimizer:
        yield Section(
            "optimizer", ["tensors of its state, such as momentum, travel with the parameters, as many bytes"]
        )


# ---------------------------------------------------------------------- what strategies do not say themselves


class _TooMany(BaseException):
    """More messages than anybody waits for. It ends the whole world, not one rank's program."""


def _completed(transform: Transform, parameters: Bundle, workers: int) -> Iterator[str]:
    """What the parts of `transform` send, each below its headings; a heading that goes on is not said again."""
    parts = parts_of(transform, parameters, workers)
    headed = any(part.under for part in parts)
    found = [seen for part in parts if (seen := _seen(part, workers, headed=headed)).lines]
    if not found:
        yield f"nothing is sent in the first {_WATCHED_STEPS} steps"
    above: tuple[str, ...] = ()
    for part in found:
        if part.under != above:
            yield from (f"{words}:" for words in part.under)
        above = part.under
        yield from part.lines


def _seen(part: Part, workers: int, *, headed: bool) -> Part:
    """With the bytes, where the part leaves them out, as seen on tensors without values. No lines: nothing is sent.

    `headed`: there are parts with headings, so one without needs a heading, too.
    """
    under = part.under or (("every step" if part.lines else "besides",) if headed else ())
    if part.says_bytes:
        return part._replace(under=under)
    assert part.of is not None, "parts_of names what acts"
    (transform, parameters), lines = part.of, list(part.lines)
    try:
        steps = _steps_with_messages(transform, parameters, workers)
        if not steps:
            nothing = f"nothing is sent in the first {_WATCHED_STEPS} steps"
            return part._replace(under=under, lines=[*lines, nothing] if lines else [])
        pattern, among = often(steps), ""
        if headed and not part.under:
            under = (pattern,)
        elif part.under:
            among = "" if pattern == "every step" else f", of these {pattern}"
        else:
            among = f", {pattern}"
        if not lines:
            values = size(parameters.flat.numel() * parameters.flat.element_size())
            lines.append(f"{values} of values, uncompressed{among}")
        busiest = max(_played(transform, parameters, workers, steps[0]).bytes_sent.values())
        lines.append(f"the busiest worker sends {size(busiest)} each time")
    except NotImplementedError:  # of torch, for what has no values
        lines.append("what it sends depends on the values")
    except _TooMany:
        lines.append(
            f"messages from worker to worker are counted for up to {_MOST_SENDERS} workers; try fewer --workers"
        )
    return part._replace(under=under, lines=lines)


def _steps_with_messages(transform: Transform, parameters: Bundle, workers: int) -> list[int]:
    """Of the first steps, those in which anything is sent, among as few workers as it allows."""
    few, alike = 2, transform.init(parameters.copy()) is None  # what remembers nothing cannot count steps
    while True:
        try:
            trace = _played(transform, parameters, few, 1 if alike else _WATCHED_STEPS)
            steps = sorted({event.step for event in trace.events if event.bytes})
            return list(range(1, _WATCHED_STEPS + 1)) if alike and steps else steps
        except ValueError:
            if few == workers:
                raise
            few = min(2 * few, workers)


def _played(transform: Transform, parameters: Bundle, workers: int, num_steps: int) -> Trace:
    """So many steps of all workers. Raises _TooMany."""

    async def program(port: Port) -> None:
        state = transform.init(parameters.copy())
        for step in range(1, num_steps + 1):
            await port.mark(step)
            step_program = transform.apply(port, parameters.copy(), state)
            if workers > _MOST_SENDERS:
                step_program = interpreted(step_program, _few_senders)
            _, state = await step_program
        await settled(state)

    return VirtualWorld(ethernet(), workers).run(program).trace


async def _few_senders(op: Op[Any]) -> Any:
    """Perform an operation, of a coroutine that it starts, too, unless it is a message. Raises _TooMany."""
    match op:
        case Send() | SendReceive() | Start(Send() | SendReceive()):
            raise _TooMany
        case Start(what) if not isinstance(what, Op):
            return await Start(interpreted(what, _few_senders))
        case _:
            return await op


def often(steps: list[int]) -> str:
    """`every 8 steps`: the pattern of the steps that are given, of the first ones that were watched."""
    first = steps[0]
    if steps == list(range(first, _WATCHED_STEPS + 1, first)):
        return "every step" if first == 1 else f"every {first} steps"
    if steps == list(range(first, _WATCHED_STEPS + 1)):
        return f"every step from step {first} on"
    return f"in {len(steps)} of the first {_WATCHED_STEPS} steps"


# ---------------------------------------------------------------------- strategies with a parameter server


def _served(strategy: Strategy, service: Service, parameters: Bundle) -> Iterator[str]:
    shards = "1 shard" if service.shards == 1 else f"{service.shards} shards"
    copies = f", each with {service.replicas} further copies" if service.replicas else ""
    yield f"the parameters live in {shards}{copies}; each shard is sent, and sends, its part of these bytes"
    when = _asked(strategy, parameters)
    yield f"a push is {_what(parameters, service.codec)}{when['push']}"
    yield f"a pull is {_what(parameters, service.pull_codec)}{when['pull'] or ', before the first step only'}"
    yield "workers do not send to each other"


def _what(parameters: Bundle, codec: Codec | None) -> str:
    plain = parameters.flat.numel() * parameters.flat.element_size()
    if codec is None:
        return f"{size(plain)}, uncompressed"
    packing = Packing(whole(parameters.views, codec), parameters.views)
    most = "" if packing.fixed else "at most "
    factor = plain / max(1, packing.num_bytes)
    return (
        f"{most}{size(packing.num_bytes)} by {codec.facts.name}, uncompressed {size(plain)}, {factor:.3g} times as much"
    )


def _asked(strategy: Strategy, parameters: Bundle) -> dict[str, str]:
    """How often a worker pushes and pulls: `, every 5 steps`, or nothing where that depends on what happens."""
    port = world_port(0, [0, 0])
    states = [transform.init(parameters) for transform in (strategy.gradients, strategy.parameters)]
    steps: dict[str, list[int]] = {"push": [], "pull": []}

    async def step() -> None:
        for i, transform in enumerate((strategy.gradients, strategy.parameters)):
            _, states[i] = await transform.apply(port, parameters.copy(), states[i])

    for number in range(1, _WATCHED_STEPS + 1):
        for op in _ops(step(), parameters.flat):
            steps["push" if isinstance(op, Push) else "pull"].append(number)
    return {name: f", {often(found)}" if found else "" for name, found in steps.items()}


def _ops(program: Program[None], flat: Tensor) -> list[Push | Pull]:
    """The pushes and pulls of a program; all that it asks for is answered at once."""
    found: list[Push | Pull] = []

    def begin(op: Op[Any]) -> Any:
        what = op.what if isinstance(op, Start) else op
        if isinstance(what, Push | Pull):
            found.append(what)
        return op.handle if isinstance(op, Work) else Work(flat) if isinstance(op, Start) else flat

    task = Task(program)
    task.resume(begin)
    task.result()
    return found


# ---------------------------------------------------------------------- models


def perceptron(numel: int) -> nn.Sequential:
    """784 - h - h - 10 with about `numel` parameters."""
    least = _size(1)
    if numel < least:
        raise ValueError(f"--parameters {numel}: a perceptron of 784 inputs has at least {least}")
    ends = _INPUTS + _OUTPUTS + 2
    hidden = round((-ends + (ends**2 + 4 * (numel - _OUTPUTS)) ** 0.5) / 2)
    layers = [nn.Linear(_INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, _OUTPUTS)]
    return nn.Sequential(*layers)


def _size(hidden: int) -> int:
    return hidden * (_INPUTS + hidden + _OUTPUTS + 2) + _OUTPUTS


def count(text: str) -> int:
    """`6e6`, `250k`, `25M` or `1_000_000` as a number of parameters."""
    match = re.fullmatch(r"([\d_]+(?:\.\d+)?(?:e\d{1,2})?)([kmg]?)", text.strip().lower(), re.ASCII)
    number = float(match[1]) * _SCALES.get(match[2], 1) if match else 0.0
    if not 1 <= number <= 1e12:
        raise ValueError(f"--parameters {text}: a number of parameters such as 6e6, 250k or 25M, up to 1e12")
    return round(number)
