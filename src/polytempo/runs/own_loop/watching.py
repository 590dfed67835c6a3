"""`Watching`: the options that show a loop of one's own or follow it: its folder, trackers, a profile, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple, Protocol
from weakref import ref

from torch import nn

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.system.url_path import Place, place
from polytempo.report.status.records import RunStarted
from polytempo.report.status.row_exchanges import RankTotals, TracedRank, totals_of
from polytempo.spec.callbacks.reading import Callbacks
from polytempo.spec.text.profiled_steps import ProfiledSteps, profiled_steps
from polytempo.spec.tracker_call import trackers_of
from polytempo.trackers.table import check_libraries
from polytempo.training.hooks.loop_callbacks import loop_callbacks
from polytempo.training.job.run_settings import versions
from polytempo.training.observe.loop_folder import LoopFolder, LoopLog
from polytempo.training.observe.user_log import UserLog
from polytempo.training.step.step_profiler import StepProfiler
from polytempo.worlds import ProcessWorld


class WatchedLoop(Protocol):
    """A loop that can be shown."""

    loop_log: LoopLog
    profiler: StepProfiler | None
    traced: Callable[[], TracedRank | None]


class Watching(NamedTuple):
    """The options as values, checked."""

    out: Place | None
    trackers: tuple[object, ...]
    callbacks: Callbacks
    profile: ProfiledSteps | None

    @property
    def folder(self) -> str | None:
        """The loop's folder as text."""
        return None if self.out is None else str(self.out)

    def begin(
        self,
        loop: WatchedLoop,
        world: ProcessWorld,
        model: nn.Module,
        strategy: Strategy,
        *,
        writes: bool,
        step: Callable[[], int],
    ) -> None:
        """Open the loop's folder, and begin the profile. `writes`: this rank writes the folder; one rank does.
        `step()`: steps so far."""
        if self.out is None:
            return
        folder, job, here = None, type(model).__name__, ref(loop)

        def exchanged() -> tuple[int, RankTotals]:
            return step(), totals_of(None if (found := here()) is None else found.traced())

        if writes:
            start = RunStarted(
                job=job, strategy=str(strategy), world="process", workers=world.size, environment=versions()
            )
            folder = LoopFolder(self.out, start, self.trackers, exchanged)
            if world.deaths is not None:
                world.deaths.on_death(folder.died)
        loop.loop_log.begin(UserLog(None if folder is None else folder.record, self.out, step), folder)
        if self.profile is not None:
            loop.profiler = StepProfiler(world, self.profile, self.out)
            loop.profiler.begins(0)


def watching(
    strategy: Strategy,
    out: Place | str | None,
    trackers: object,
    callbacks: object,
    profile: ProfiledSteps | str | None,
    *,
    features: Set[str] = frozenset({"own loop"}),
) -> Watching:
    """The options as values. `features`: of the loop, beside the strategy's own.

    Errors: ValueError for a tracker or a profile without a folder; `Incompatible`; see `loop_callbacks`.
    """
    called, found = loop_callbacks(callbacks, strategy), trackers_of(trackers)
    if found and out is None:
        raise ValueError("trackers read the loop's folder; give out=… as well, and log with handle.log")
    check_libraries(found)
    if profile is not None:
        if out is None:
            raise ValueError(f"profile={profile} needs a folder; give out=… as well")
        refuse(strategy.features | features | {"profile"}, strategy=strategy)
        profile = profiled_steps(profile)
    return Watching(None if out is None else place(out), found, called, profile)
