"""`polytempo.horovod.keras` on two ranks: laws against plain Keras in one process, callbacks, saved models, errors.

Run by `make test-integrations`, in a venv that has Keras.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import polytempo.horovod.keras as hvd
from polytempo.horovod import run

ROOT = Path(__file__).parents[2]
SIZE, BATCH, STEPS = 2, 8, 6

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3.15's, under NumPy 2
]


def samples(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Batches of all ranks together: BATCH samples of rank 0, BATCH of rank 1, and so on."""
    random, count = np.random.default_rng(0), STEPS * SIZE * BATCH
    return random.normal(size=(count, 5)).astype(dtype), random.normal(size=(count, 3)).astype(dtype)


def of_rank(rank: int, dtype: str) -> list[np.ndarray]:
    """The samples of a rank, in its order."""
    return [part.reshape(STEPS, SIZE, BATCH, -1)[:, rank].reshape(STEPS * BATCH, -1) for part in samples(dtype)]


def dense(units: int, activation: str) -> Any:
    """A dense layer. Keras's own `Dense` multiplies float64 matrices in float32."""
    return keras.layers.EinsumDense("ab,bc->ac", units, activation, bias_axes="c")


def model(dtype: str, seed: int = 1) -> Any:
    keras.config.set_floatx(dtype)
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((5,)), dense(7, "tanh"), dense(3, "linear")])


def weights(trained: Any) -> list[np.ndarray]:
    return [weight.value.detach().numpy() for weight in trained.weights]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(2.0),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "averaging": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
}


def in_one_process(optimizer: str, dtype: str) -> list[np.ndarray]:
    trained = model(dtype)
    trained.compile(OPTIMIZERS[optimizer](), "mse")
    trained.fit(*samples(dtype), batch_size=SIZE * BATCH, epochs=2, shuffle=False, verbose=0)
    return weights(trained)


def on_ranks(optimizers: list[str], dtype: str) -> dict[str, list[np.ndarray]]:
    """Rank 0 begins with the weights of `in_one_process`, and rank 1 with others."""
    hvd.init()
    found = {}
    for name in optimizers:
        trained = model(dtype, seed=1 + hvd.rank())
        trained.compile(hvd.DistributedOptimizer(OPTIMIZERS[name]()), "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        data = of_rank(hvd.rank(), dtype)
        trained.fit(*data, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        found[name] = weights(trained)
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_two_ranks_train_as_one_process_with_batches_of_twice_the_size(dtype: str, tolerance: float) -> None:
    (expected,) = run(lambda: {name: in_one_process(name, dtype) for name in OPTIMIZERS}, np=1)
    for found in run(on_ranks, args=(list(OPTIMIZERS), dtype), np=SIZE):
        for name in OPTIMIZERS:
            for mine, plain in zip(found[name], expected[name], strict=True):
                assert mine.dtype == dtype
                np.testing.assert_allclose(mine, plain, rtol=0, atol=tolerance, err_msg=name)


def two_ranks(work: Callable[..., Any], *args: Any) -> Any:
    """The answer of both ranks, which is the same."""

    def begun() -> Any:
        hvd.init()
        return work(*args)

    first, second = run(begun, np=SIZE)
    assert first == second
    return first


def moved(**options: Any) -> list[list[float]]:
    """The movements of two variables at rate 1 by gradients rank + step + 1; the third has no gradient."""
    keras.config.set_floatx("float64")
    variables = [keras.Variable(np.zeros(2)), keras.Variable(np.zeros(3000)), keras.Variable(np.zeros(1))]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    moves = []
    for step in range(2):
        grads = [torch.full(variable.shape, hvd.rank() + step + 1.0, dtype=torch.float64) for variable in variables[:2]]
        optimizer.apply_gradients(zip([*grads, None], variables, strict=True))
        assert [grad.unique().tolist() for grad in grads] == [[hvd.rank() + step + 1.0]] * 2, "they stay the caller's"
        moves.append([round(float(variable.value.detach().mean()), 2) for variable in variables])
    return moves


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[-1.5, -1.5, 0.0], [-4.0, -4.0, 0.0]]),
        ({"op": hvd.Sum}, [[-3.0, -3.0, 0.0], [-8.0, -8.0, 0.0]]),
        ({"gradient_predivide_factor": 4.0, "name": "mine"}, [[-1.5, -1.5, 0.0], [-4.0, -4.0, 0.0]]),
        ({"compression": hvd.Compression.fp16}, [[-1.5, -1.5, 0.0], [-4.0, -4.0, 0.0]]),
        ({"backward_passes_per_step": 2}, [[0.0, 0.0, 0.0], [-4.0, -4.0, 0.0]]),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, [[0.0] * 3, [-2.0, -2.0, 0.0]]),
        ({"compression": hvd.Compression.top_k(0.5)}, [[-1.5, -0.75, 0.0], [-4.0, -2.75, 0.0]]),
    ],
    ids=["mean", "sum", "predivided", "fp16", "two passes", "mean of passes", "codec"],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_gradients_are_reduced_as_the_arguments_say(options: dict[str, Any], expected: list[list[float]]) -> None:
    """top_k first sends half of the large gradient, 1.5 / 2, and then the larger half of the sums: (1.5 + 2.5) / 2."""
    assert two_ranks(lambda: moved(**options)) == expected


def scaled() -> list[float]:
    """Rank 1's first gradient is infinite. Answers the variable, and the loss scale, after each of two steps."""
    keras.config.set_floatx("float64")
    variable = keras.Variable(np.zeros(()))
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer = hvd.DistributedOptimizer(inner)
    found = []
    for gradient in (np.inf if hvd.rank() else 1.0, 4.0 + 8.0 * hvd.rank()):
        optimizer.apply([torch.tensor(gradient, dtype=torch.float64)], [variable])
        found += [float(variable.value.detach()), float(optimizer.dynamic_scale.value)]
    return found


def test_all_ranks_leave_out_the_step_of_a_gradient_that_is_not_finite_on_one() -> None:
    assert two_ranks(scaled) == [0.0, 4.0, -2.0, 4.0]


def rates(warmup: int, momentum: float) -> dict[str, Any]:
    seen: list[tuple[float, float]] = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            seen.append((round(float(optimizer.learning_rate), 6), round(optimizer.momentum, 6)))

    trained = model("float64")
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=momentum)), "mse")
    callbacks = [
        Seen(),  # ends a batch before the others do
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.4, warmup, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=warmup + 1),
        hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch, start_epoch=99, end_epoch=100),
    ]
    x, y = (part[:16] for part in samples("float64"))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        history = trained.fit(x, y, batch_size=8, epochs=warmup + 3, verbose=0, callbacks=callbacks)
    assert "epoch 2: the learning rate has been raised to 0.4" in said.getvalue() or hvd.rank()
    assert not (said.getvalue() and hvd.rank())
    return {"seen": seen, "lr": history.history["lr"], "momentum": trained.optimizer.momentum}


def test_the_rate_is_raised_step_by_step_and_the_momentum_corrected() -> None:
    """The rate rises from 0.4 / 2 to 0.4 in two epochs of two steps; another schedule begins in epoch 3 of 0 to 4."""
    found = two_ranks(rates, 2, 0.5)
    steps = [0.25, 0.3, 0.35, 0.4, 0.4, 0.4, 0.05, 0.05, 0.025, 0.025]
    before = [0.4, *steps[:3]]
    corrected = [round(0.5 * rate / old, 6) for rate, old in zip(steps, before, strict=False)]
    assert found["seen"] == list(zip(steps, [*corrected, 0.5, 0.5, 0.0625, 0.5, 0.25, 0.5], strict=True))
    assert found["lr"] == pytest.approx([0.3, 0.4, 0.4, 0.05, 0.025])
    assert found["momentum"] == 0.5


def averaged() -> list[Any]:
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": 0.25 * hvd.rank()}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    values = [
        hvd.allreduce(float(hvd.rank())),
        hvd.allreduce([1.0, hvd.rank()], average=False, name="two"),
        hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum, postscale_factor=3.0),
        hvd.allgather(keras.Variable([[1.0 + hvd.rank()]])),
        hvd.broadcast(np.full(2, hvd.rank()), 1),
    ]
    part = hvd.reducescatter(np.arange(4.0) * (hvd.rank() + 1), op=hvd.Sum).tolist()
    assert part == ([0.0, 3.0], [6.0, 9.0])[hvd.rank()]
    return [logs, *(value.tolist() for value in values)]


def test_values_of_all_ranks_become_one() -> None:
    expected = [{"loss": 1.5, "accuracy": 0.125}, 0.5, [2.0, 1.0], [3], [[1.0], [2.0]], [1, 1]]
    assert two_ranks(averaged) == expected


def gone_on(folder: str) -> list[int]:
    """Two epochs equal one, a saved model, and another. Answers the optimizers' iterations: the saved and the last."""
    data, callbacks = of_rank(hvd.rank(), "float32"), [hvd.callbacks.MetricAverageCallback()]
    trained = model("float32")
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), keras.losses.MeanSquaredError())
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    trained.fit(*data, **options)
    path = f"{folder}/{hvd.rank()}.keras"
    trained.save(path)
    trained.fit(*data, **options)
    loaded = hvd.load_model(path)
    loaded.fit(*data, **options)
    for mine, expected in zip(weights(loaded), weights(trained), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-7)
    plain = keras.saving.load_model(path)
    assert type(plain.optimizer) is type(keras.optimizers.Adam())
    return [int(plain.optimizer.iterations), int(loaded.optimizer.iterations)]


def test_a_saved_model_goes_on_and_loads_without_this_library(tmp_path: Path) -> None:
    assert two_ranks(gone_on, str(tmp_path)) == [STEPS, 2 * STEPS]


def test_wrong_arguments_are_refused() -> None:
    plain = keras.optimizers.SGD(0.1)
    for options, message in (
        ({"op": 2}, "use Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "for op=Average alone"),
        ({"backward_passes_per_step": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(plain, **options)
    with pytest.raises(ValueError, match="one of keras"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain))
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.modules['keras'] = None", "pip install 'polytempo[keras]'"),
        ("import keras; keras.__version__ = '2.15.0'", "and this is Keras 2.15.0"),
        ("import keras; keras.config.backend = lambda: 'jax'", "Keras computes with jax here; set the variable"),
    ],
)
def test_without_keras_on_torch_the_import_names_the_remedy(program: str, message: str) -> None:
    program += "; import polytempo.horovod.keras"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_the_example_learns(size: int, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "examples" / "integrations" / "horovod_keras_digits.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    found = re.fullmatch(rf"(\d+\.\d)% of the test digits, {size} worker\(s\)", last)
    assert found, done.stdout
    assert float(found[1]) > 90
    assert [path.name for path in tmp_path.iterdir()] == []
