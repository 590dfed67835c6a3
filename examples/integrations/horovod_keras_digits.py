"""A Keras script for Horovod, as its documentation teaches them: only the import is another, and Keras 3 is on torch.

KERAS_BACKEND=torch python examples/integrations/horovod_keras_digits.py
KERAS_BACKEND=torch torchrun --standalone --nproc-per-node 2 examples/integrations/horovod_keras_digits.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

import polytempo as pt
import polytempo.horovod.keras as hvd  # was: import horovod.keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
digits = pt.data.digits()
(x_train, y_train), (x_test, y_test) = (
    [part.numpy() for part in split.tensors] for split in (digits.train, digits.test)
)
mine = slice(hvd.rank(), None, hvd.size())

model = keras.Sequential(
    [
        keras.layers.Reshape((8, 8, 1)),
        keras.layers.Conv2D(16, (3, 3), activation="relu"),
        keras.layers.MaxPooling2D((2, 2)),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = 0.05 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

with tempfile.TemporaryDirectory() as folder:
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(Path(folder, "digits.keras"))))
    model.fit(x_train[mine], y_train[mine], batch_size=32, epochs=6, verbose=0, callbacks=callbacks)

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"{accuracy:.1%} of the test digits, {hvd.size()} worker(s)")
