"""Horovod's callbacks for `model.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polytempo.horovod.keras.library import keras
from polytempo.horovod.keras.values import allreduce, broadcast_variables
from polytempo.horovod.torch.basics import rank, size


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Starts all ranks from the weights and the optimizer's variables of rank `root_rank`.

    The broadcast is before the first step. (Horovod's is after it: there the optimizer has no variables before.) States
    of random numbers stay each rank's own, so ranks drop different units. `device` has no effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Overwrite the variables, in the first `fit` alone."""
        if self.broadcast_done:
            return
        model = self.model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_variables([*model.weights, *model.optimizer.variables], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks, for the callbacks after it. `device` has no effect.

    All ranks have the same metrics: with validation data on some ranks only, the shapes of the exchange differ, which
    is a `HorovodInternalError`.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Overwrite the numbers in `logs`."""
        if not logs:
            return
        names = sorted(logs)
        mine = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        logs.update(zip(names, allreduce(mine, "MetricAverageCallback").tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to initial_lr · multiplier(epoch), in the epochs from `start_epoch` to before `end_epoch`.

    `multiplier`: a function, or a number m for mᵉᵖᵒᶜʰ. With `staircase` it is called at the first batch of an epoch,
    else at each batch with a fraction of an epoch; `steps_per_epoch` is by default the steps that `fit` knows.

    `momentum_correction`: while the rate changes from η to η′ in a step, the momentum of that step is m·η′/η (P. Goyal
    and others, Accurate, Large Minibatch SGD, 2017, section 2.3). The rate is in the epoch's metrics as `lr`.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the rate that `multiplier` multiplies")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier**epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: float | None = None

    @property
    def _optimizer(self) -> Any:
        """The optimizer with a rate and a momentum, inside a LossScaleOptimizer, too."""
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Look for the number of steps of an epoch. Raises ValueError where `fit` does not know it."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"fit does not know the steps of an epoch; give {type(self).__name__}(steps_per_epoch=...)"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of this step, where it is to change."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self.initial_lr * self.multiplier(epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set_rate(self.initial_lr * self.multiplier(epoch))

    def _set_rate(self, rate: float) -> None:
        optimizer = self._optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        if self.momentum_correction and before and getattr(optimizer, "momentum", None):
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * rate / before

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Give the optimizer its own momentum back."""
        if self._momentum is not None:
            self._optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the rate into the metrics."""
        if logs is not None:
            logs["lr"] = float(self._optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr, by the same amount each step, in `warmup_epochs`.

    At the step that ends e epochs (e is a fraction inside an epoch), size being the number of ranks:

        rate = initial_lr / size · (1 + e · (size - 1) / warmup_epochs)

    `verbose`: rank 0 prints a line when the rate is reached. Source: as of `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.warmup_epochs, self.verbose = warmup_epochs, verbose
        super().__init__(initial_lr, self._factor, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)

    def _factor(self, epoch: float) -> float:
        assert self.steps_per_epoch is not None
        passed = epoch + 1.0 / self.steps_per_epoch
        return (1.0 + passed * (size() - 1) / self.warmup_epochs) / size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the rate into the metrics, and say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1 and rank() == 0:
            print(f"\nepoch {epoch + 1}: the learning rate has been raised to {float(self._optimizer.learning_rate):g}")
