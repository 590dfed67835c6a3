"""Facts of the backend "polytempo" for the trackers of other libraries: exchanges, their seconds and bytes, and waits.

dist.init_process_group("polytempo") ── ExchangeMeter ──┬─ Lightning: a callback ──▶ trainer.loggers
                                                        ├─ Accelerate: a tracker around a tracker
                                                        └─ transformers: a callback ──▶ report_to
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch.distributed as dist

from polytempo.interop.backend.process_group import SharedMemoryGroup


class ExchangeMeter:
    """Measures this rank's collectives in process groups with the backend "polytempo", from now on.

        dist.init_process_group("polytempo")
        meter = ExchangeMeter()
        …
        tracker.log(meter.read(), step=step)

    `groups`: the default group if none are given. FSDP on a mesh makes groups of its own: give `mesh.get_group()`.

    Collectives change neither their bits nor their order. Cost: 5 µs a collective (28 instead of 23 µs for 64 bytes in
    a group of one rank).

    Errors: ValueError for groups of other backends, which have no such counts.
    """

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        given: tuple[Any, ...] = groups or ((dist.group.WORLD,) if dist.is_initialized() else ())
        if not given:
            raise ValueError('there is no process group; call dist.init_process_group("polytempo") first')
        for group in given:
            if not isinstance(group, SharedMemoryGroup):
                raise ValueError(
                    f"exchanges are measured in groups of the backend polytempo, not {dist.get_backend(group)}; "
                    'call dist.init_process_group("polytempo")'
                )
        self._tallies = [group.tally() for group in given]
        self._before = self._sums()

    def read(self) -> dict[str, float]:
        """The counts since the last reading, of this rank, by name.

        `polytempo/exchanges`: collectives. `polytempo/exchange_bytes`: bytes of this rank's tensors in them.
        `polytempo/exchange_seconds`: their time, with waiting for ranks that came later. `polytempo/wait_seconds`: the
        time that the program stood still for them; the rest was hidden behind computing. Messages (`dist.send`) and
        collectives that a device's own backend performs (NCCL) are not counted.
        """
        before, self._before = self._before, self._sums()
        return {name: value - before[name] for name, value in self._before.items()}

    def _sums(self) -> dict[str, float]:
        return {
            "polytempo/exchanges": float(sum(each.exchanges for each in self._tallies)),
            "polytempo/exchange_bytes": float(sum(each.num_bytes for each in self._tallies)),
            "polytempo/exchange_seconds": sum(each.exchange_s for each in self._tallies),
            "polytempo/wait_seconds": sum(each.wait_s for each in self._tallies),
        }


def lightning_callback() -> Any:
    """A callback of Lightning that logs rank 0's facts into each logger of the trainer, when it logs metrics.

        Trainer(strategy=DDPStrategy(process_group_backend="polytempo"), callbacks=[lightning_callback()])

    They are of the `log_every_n_steps` steps before. Errors: `ExchangeMeter`'s, when training starts.
    """
    base: Any = import_module("lightning.pytorch.callbacks").Callback

    class ExchangeFacts(base):  # type: ignore[misc]
        """Facts of exchange for the trainer's loggers."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Measure from here on."""
            self.meter, self.logged = ExchangeMeter(), trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """Log the facts, after as many optimizer steps as Lightning leaves between its own rows."""
            step = trainer.global_step
            if step != self.logged and step % trainer.log_every_n_steps == 0 and trainer.is_global_zero:
                self.logged, facts = step, self.meter.read()
                for logger in trainer.loggers:
                    logger.log_metrics(facts, step=step)

    return ExchangeFacts()


def accelerate_tracker(tracker: Any) -> Any:
    """`tracker`, a `GeneralTracker` of Accelerate, with the facts beside the values of each `accelerator.log`.

        dist.init_process_group("polytempo")
        tracker = accelerate_tracker(TensorBoardTracker("run", logging_dir="runs"))
        accelerator = Accelerator(cpu=True, log_with=tracker)

    Errors: `ExchangeMeter`'s, immediately.
    """
    base: Any = import_module("accelerate.tracking").GeneralTracker
    inner = tracker

    class ExchangeTracker(base):  # type: ignore[misc]
        """A tracker around a tracker."""

        name = inner.name
        requires_logging_directory = inner.requires_logging_directory
        main_process_only = inner.main_process_only

        def __init__(self) -> None:
            super().__init__(_blank=True)
            self.meter = ExchangeMeter()

        @property
        def tracker(self) -> Any:
            """The library's own object."""
            return inner.tracker

        def start(self) -> None:
            """Begin the tracked run, where this version of Accelerate begins it late."""
            if hasattr(inner, "start"):
                inner.start()

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Hand the settings on."""
            inner.store_init_configuration(values)

        def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
            """Log the values and the facts since the last call."""
            inner.log({**values, **self.meter.read()}, step=step, **kwargs)

        def finish(self) -> None:
            """End the tracked run."""
            inner.finish()

    return ExchangeTracker()


def add_to_trainer(trainer: Any) -> None:
    """Have `transformers.Trainer` report the facts with all that it logs, to the trackers of `report_to`.

        dist.init_process_group("polytempo")
        trainer = Trainer(…)
        add_to_trainer(trainer)
        trainer.train()

    The callback stands before the trackers' own callbacks, so they see the facts; `state.log_history` does not have
    them. Errors: `ExchangeMeter`'s, immediately.
    """
    base: Any = import_module("transformers").TrainerCallback
    meter = ExchangeMeter()

    class ExchangeFacts(base):  # type: ignore[misc]
        """Facts of exchange among a trainer's logs."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            """Add the facts since the last call."""
            if logs is not None:
                logs.update(meter.read())

    trainer.callback_handler.callbacks.insert(0, ExchangeFacts())
