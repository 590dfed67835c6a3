"""`elastic`: a loop of one's own that goes on when workers are lost, leave and join.

commit ── steps ── commit ── steps ─╳ a worker is lost
  │                  ╰── workers before the next commit point go back to this one ── on, in a new group
  ╰── newcomers get the state of a living worker as it was committed
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from polytempo.engines.engine import Launch
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.local_engine import Local
from polytempo.membership.member import ElasticMember
from polytempo.membership.message import GroupView
from polytempo.membership.run_membership import RunMembership
from polytempo.runs.elastic.generation_group import take_part
from polytempo.runs.elastic.member_board import Formed, LauncherBoard, MemberBoard
from polytempo.runs.elastic.run_elastic import Available, ElasticLauncher
from polytempo.runs.frame.run_frame import torch_threads
from polytempo.training.elastic.commit_point import commit_point
from polytempo.training.elastic.elastic_training import Stopped
from polytempo.training.elastic.local_round import check_alike
from polytempo.training.elastic.loop_state import ElasticState
from polytempo.training.hooks.attached_models import detach_from, handle_of
from polytempo.training.hooks.handle import Handle
from polytempo.training.hooks.loop_callbacks import LoopCallbacks
from polytempo.worlds import ProcessWorld

TrainFunction = Callable[[ElasticState], Any]
"""The loop. It begins where the state is, and is called again for each group of workers."""


def elastic(
    train: TrainFunction,
    state: ElasticState,
    *,
    workers: int = 2,
    min_workers: int = 1,
    max_workers: int | None = None,
    available: Available | None = None,
    restarts: int = 20,
    timeout_s: float = 300.0,
    logs: Path | None = None,
    watch: Callable[[ElasticLauncher], object] = lambda launcher: None,
) -> Any:
    """Call `train(state)` in each of `workers` processes forked from this one, again whenever their group changes.

        def train(state):
            pt.attach(state.model, state.optimizer)                     # hooks for this group of workers
            batches = pt.shard(data, batch_size=32)
            if state.position is not None:
                batches.load_state_dict(state.position)
            while batches.epoch < 3:
                for x, y in batches:
                    state.optimizer.zero_grad()
                    loss_fn(state.model(x), y).backward()
                    state.optimizer.step()
                    state.position = batches.state_dict()
                    state.commit()
            return evaluate(state.model)

        score = pt.elastic(train, pt.training.ElasticState(model, optimizer, position=None), workers=3, min_workers=2)

    Returns the result of `train` on the first worker; JSON must be able to hold it. With a commit after each step, and
    the position of the data in the state, each sample of an epoch counts once. `logs`: the folder of workers' output.
    Hooks that `pt.attach` has set on the state's model are removed between two groups.

    Errors: `WorkerDied` if `train` raises on a worker, `WorkersLost` if fewer than `min_workers` are left.
    """
    most = workers if max_workers is None else max_workers
    machine = RunMembership(min_workers, most, workers, restarts=restarts, answer_s=timeout_s)
    import_module("torch._dynamo")  # optimizers need it: a second here instead of in each worker
    meetings: list[Rendezvous] = []
    launch = Launch(
        work=lambda role: _LoopWorker(train, state, role.life, meetings[0].url, timeout_s).work(),
        spec=None,
        setting=dict,
        workers=most,
        most=most + restarts,
        logs=logs,
    )
    with torch_threads(), Local().open(launch) as engine:
        meetings.append(Rendezvous.held(engine.address.host))
        with closing(meetings[0]):
            return ElasticLauncher(machine, engine, LauncherBoard(meetings[0]), available).conduct(watch)


class _LoopWorker:
    """One process of the loop."""

    def __init__(self, train: TrainFunction, state: ElasticState, life: int, url: str, timeout_s: float) -> None:
        self._train, self._state, self._timeout_s = train, state, timeout_s
        self._rendezvous = Rendezvous.joined(url)
        self._board, self._member = MemberBoard(self._rendezvous, life), ElasticMember(life)
        self._formed, self._finished = True, False
        signal.signal(signal.SIGTERM, self._board.leave)

    def work(self) -> Any:
        """Take part until the end."""
        given = self._rendezvous, self._board, self._member, self._timeout_s, self._enter, self._train_once
        try:
            result = take_part(*given)
        except BaseException as error:
            if (callbacks := self._callbacks()) is not None:
                callbacks.fail(error)
            raise
        if (callbacks := self._callbacks()) is not None:
            callbacks.finish() if self._finished else callbacks.leave()
        return result

    def _callbacks(self) -> LoopCallbacks | None:
        """The callbacks of the attached loop."""
        handle = handle_of(self._state.model)
        return handle.callbacks if isinstance(handle, Handle) else None

    def _enter(self, view: GroupView) -> None:
        if (callbacks := self._callbacks()) is not None:
            callbacks.leave()
        detach_from(self._state.model)
        verdict = self._member.enter(view)
        if verdict == "finish":
            self._state.keep()
            self._member.stepped()
        elif verdict == "undo":
            self._state.restore()

    def _train_once(self, world: ProcessWorld, view: GroupView) -> Any:
        newcomers = frozenset(range(max(1, view.stateful), world.size))
        if newcomers:
            world.drive(self._state.hand_over(world.port, newcomers))
        if not self._member.stateful:
            self._member.taken_over(view.step)
        self._formed = world.rank != 0
        self._state.goes_on, world.committed = view.stateful > 0, self._state
        self._state.arrive = lambda: self._arrive(world, view)
        self._finished = False
        result = self._train(self._state)
        self._finished = True
        return result

    def _arrive(self, world: ProcessWorld, view: GroupView) -> None:
        handle = handle_of(self._state.model)
        if isinstance(handle, Handle) and not handle.replica.strategy.synchronized and world.size > 1:
            world.drive(check_alike(world.port, handle.replica))
        self._member.exchanged()
        callbacks, wishes = self._callbacks(), self._board.wishes()
        if callbacks is not None and world.rank == 0:
            wishes = wishes._replace(asked=callbacks.take())
        committed = world.drive(commit_point(world.port, wishes, {}))
        if callbacks is not None:
            self._state.callbacks = callbacks.commit(committed.asked)
        self._state.keep()
        self._member.stepped()
        if not self._formed:
            self._formed = True
            self._board.say(Formed(self._board.life, view.generation))
        if committed.stop:
            raise Stopped(f"rank {world.rank} stops after commit {self._member.applied}: the group is to change")
