"""`polytempo export --to onnx`: another runtime gives the outputs of torch, for any number of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import polytempo as pt
from polytempo import jobs
from polytempo.training.observe.trained_model import trained_model


@pytest.mark.parametrize("name", ["digits", "mnist_cnn"])
def test_another_runtime_has_the_outputs_of_torch(name: str, tmp_path: Path, data_root: Path) -> None:
    job = jobs.find(name)
    data = None if name == "digits" else data_root / "mnist"
    pt.simulate(job, pt.strategies.sync_sgd(), workers=2, steps=2, checkpoint_every=2, out=tmp_path, data=data)
    trained = trained_model(job, tmp_path)
    session = onnxruntime.InferenceSession(str(trained.export("onnx", data=data)))
    [entry] = session.get_inputs()
    shape = tuple(entry.shape[1:])
    for samples in (1, 3, 64):
        x = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(samples))
        with torch.no_grad():
            expected = trained.model(x).numpy()
        [found] = session.run(None, {entry.name: x.numpy()})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
