"""A learning-rate schedule's state as text, to be saved without pickle."""

from __future__ import annotations

import json

from torch.optim.lr_scheduler import LRScheduler

from polytempo.spec.text.plain_values import plain, typed


def schedule_saved(scheduler: LRScheduler) -> str:
    """A schedule's state as JSON. Raises ValueError that names what JSON cannot hold."""
    return json.dumps(
        {key: plain(value, f"{type(scheduler).__name__}: {key!r}") for key, value in scheduler.state_dict().items()}
    )


def schedule_restore(scheduler: LRScheduler, text: str) -> None:
    """Load what `schedule_saved` returned into a schedule that was made alike."""
    scheduler.load_state_dict(typed(json.loads(text), scheduler.state_dict()))
