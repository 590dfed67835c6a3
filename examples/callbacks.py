"""A rate by a range test, early stopping on a metric of the job, the best checkpoints, and a callback of one's own."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch
from torch import Tensor

import polytempo as pt
from polytempo.callbacks import Callback, CallbackFacts, early_stop, keep


def macro_f1(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean over the ten digits of each one's F1 score."""
    scores = []
    for digit in range(10):
        right = ((predicted == digit) & (target == digit)).sum()
        scores.append(2 * right / ((predicted == digit).sum() + (target == digit).sum()))
    return torch.stack(scores).mean()


class Told(Callback):
    """Prints each evaluation."""

    def on_evaluation(self, facts: CallbackFacts) -> None:
        """A line for each."""
        print(f"step {facts.step}: f1 {facts.values['f1']:.3f}")


def main() -> None:
    """Train until the F1 score has not grown by 0.002 in three epochs."""
    job = replace(
        pt.jobs.find("digits"), metrics={"f1": macro_f1}, predictions=lambda output, target: (output.argmax(1), target)
    )
    print(pt.find_rate(job, "local_sgd(period=8)", workers=2))
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [Told(), early_stop("f1", patience=3, min_change=0.002), keep(best=1, metric="f1")]
        result = pt.run(job, "local_sgd(period=8)", workers=2, epochs=60, out=f"{folder}/run", callbacks=callbacks)
        best = pt.training.checkpoint_model(f"{folder}/run/kept")
        assert result.metrics is not None
        print(
            f"ended after {result.steps} steps at f1 {result.metrics['f1']:.3f}; the best model has {len(best)} tensors"
        )


if __name__ == "__main__":
    main()
