"""The model of a run that is over: scored, asked for its outputs, and written for programs without Polytempo.

checkpoint ──▶ trained_model ──┬──▶ score     loss and accuracy on the test set
                               ├──▶ outputs   of the model, sample by sample
                               └──▶ export    safetensors, torch, onnx, hf
"""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from io import BytesIO, StringIO
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath, place, without_secrets
from polytempo.device import HOST
from polytempo.report.status.stream import ends_of
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, described, model_of, move_model, who
from polytempo.spec.objective import output_of, pair_of
from polytempo.spec.precision import Precision
from polytempo.spec.run_options import RunOptions, data_path
from polytempo.strategies import sync_sgd
from polytempo.training.job.evaluate import Evaluation, Score, StandardizedTarget, tensors_of
from polytempo.training.job.sample_batches import SampleBatches
from polytempo.training.model.run_device import beside, run_device, with_loss_on
from polytempo.training.observe.saved_model import run_of
from polytempo.training.observe.whole_checkpoint import RunModel, load_run_model

_FILES = {"safetensors": "model.safetensors", "torch": "model.pt", "onnx": "model.onnx", "hf": "hf"}


class TrainedModel(NamedTuple):
    """A run's model, in evaluation mode, and its job."""

    job: Job
    model: nn.Module
    saved: RunModel
    trained_on: str | Path | None = None
    """The run's own --data, if it had one."""

    def score(self, data: str | Path | None = None, precision: Precision | None = None) -> Score:
        """Loss and accuracy on the test set of the job's data at `data`, in this precision. ValueError without one.

        Where the job's `data` has a function `unseen`, as in a job file with a table or a folder of pictures, the test
        set at `data` is all samples there, prepared as the training samples were; of the training data it is the part
        that was set aside.
        """
        tested = self._tested(data)
        if data is not None and self._unseen is not None and _is_unknown(tested):
            raise ValueError(f"{data} has no targets, so there is nothing to measure; `predict` writes the outputs")
        score = Evaluation(self.job, self.model, tested, precision).score(tensors_of(self.model))
        return score._replace(target=_target(tested.test))

    def outputs(self, data: str | Path | None = None) -> Tensor:
        """The model's outputs (samples, …) for the test set of `score`, in its order, on the host.

        A predicted number is in the unit of its table (`csv_regression`), in float64; `model` answers less its mean,
        over its deviation.

        ValueError without a test set, and for outputs other than one tensor with a row for each sample.
        """
        return self._outputs(self._tested(data))

    def predict(self, file: Place, data: str | Path | None = None) -> Tensor:
        """Write `outputs(data)` as a table, and return them; see `write_outputs`."""
        tested = self._tested(data)
        outputs = self._outputs(tested)
        write_outputs(outputs, file, tested.test)
        return outputs

    def export(self, form: str, out: Place | None = None, data: str | Path | None = None) -> Place:
        """Write the model as `form`, and return its file.

        safetensors   tensors by name, for `safetensors.torch.load_file`; job, strategy and step as metadata
        torch         tensors by name, for `torch.load(file, weights_only=True)`
        onnx          the graph and its weights, for any number of samples; it needs the packages onnx and onnxscript
        hf            a folder that `from_pretrained` of the model's own class reads; of a model of peft the adapter's

        Of a model of peft the first three have the base model, under its own names, with the adapter added to its
        weights (`merge_and_unload`).

        `out`: the file or the folder; by default model.safetensors, model.pt, model.onnx or hf in the run's folder.
        `data`: of the job; ONNX takes its first samples as an example. ValueError where the model has no such form.
        """
        out = run_of(self.saved.folder) / _FILES[form] if out is None else out
        if form == "hf":
            _save_pretrained(self.model, out)
            return out
        if out.is_dir():
            raise ValueError(f"{out} is a folder; name a file, such as {out / _FILES[form]}")
        whole = self._replace(model=_merged(self.model))
        if form == "onnx":
            content = _onnx(whole, data)
        else:
            content = _safetensors(whole) if form == "safetensors" else _torch(whole.model)
        files.replace(out, content)
        return out

    def _outputs(self, data: Data) -> Tensor:
        outputs = torch.cat(list(self._batches(data)))
        target = _target(data.test)
        if target is None or outputs[:1].numel() != 1:
            return outputs
        return outputs.double() * target.deviation + target.mean

    def _batches(self, data: Data) -> Iterator[Tensor]:
        test = SampleBatches(data.test, data.collate, "a test set")
        with torch.no_grad():
            for batch, samples in test.between(0, test.length):
                output = output_of(self.job, self.model, beside(self.model, pair_of(self.job, batch)[0]))
                if not (isinstance(output, Tensor) and output.dim() and len(output) == samples):
                    raise ValueError(
                        f"{who(self.job)}: its model answers {samples} samples with {described(output)}, and a table "
                        "has a row of one tensor for each sample; load pt.training.checkpoint_model(run) instead"
                    )
                yield output.to(HOST)

    @property
    def _unseen(self) -> Callable[[str | Path, str | Path | None], Data] | None:
        return getattr(self.job.data, "unseen", None)

    def _tested(self, path: str | Path | None) -> Data:
        read = self._unseen
        data: Data = data_of(self.job, path) if path is None or read is None else read(path, self._like(path))
        if data.test is None:
            raise ValueError(f"{who(self.job)} has no test set; let its data(path) return pt.Data(train, test)")
        return data

    def _like(self, path: str | Path) -> str | Path | None:
        """The training data; they are `path` where it is their URL with the login or signature that no run records."""
        known = self.trained_on
        if known is None or str(known) == without_secrets(str(path)):
            return known if known is None else path
        if place(known).exists():
            return known
        remedy = (
            "a run keeps no login or signature of a URL; if it had one, give the URL whole by --data"
            if "://" in str(known)
            else "begin in the folder where the run began"
        )
        raise ValueError(
            f"the run was trained on {known}, which is not there, and {path} is prepared in the same way; {remedy}"
        )


def trained_model(job: Job, run: str | Path | UrlPath, *, average: bool = False, device: str = "cpu") -> TrainedModel:
    """The model that `pt.training.checkpoint_model(run, average=average)` reads, in the job's own module.

    `device`: its place, as the option of a run says it; "auto": an accelerator if there is one.

    Errors: as there, ForeignCheckpoint where it does not fit the job's model, and ValueError for a device that is not
    there.
    """
    model = model_of(job).eval()
    saved = load_run_model(model, run, average=average)
    there = run_device(RunOptions(device=device), sync_sgd(), local=0)
    move_model(model, there)
    start, _ = ends_of(run_of(saved.folder))
    given = None if start is None else data_path(start.settings.get("data"))
    return TrainedModel(with_loss_on(job, there), model, saved, given)


def _is_unknown(data: Data) -> bool:
    """True if the test set is of a reader that found no targets: they are -100 or NaN."""
    target = torch.as_tensor(data.test[0][1])  # type: ignore[index]  # a table or a folder of pictures
    return target.numel() == 1 and (target.item() == -100 or isnan(target.item()))


def _target(samples: object) -> StandardizedTarget | None:
    """The column of numbers that `csv_regression` has standardised; None for other samples."""
    names, units = getattr(samples, "outputs", None), getattr(samples, "units", None)
    return StandardizedTarget(names[0], *units) if _are(names, str, 1) and _are(units, float, 2) else None


def write_outputs(outputs: Tensor, file: Place, samples: object = None) -> None:
    """Outputs as a table: one row for each sample, *.csv with a header, or *.npy with the outputs' shape and dtype.

    Columns of *.csv are named as the classes of `samples`, or as the number that is predicted, where their reader knows
    these (`csv_classes`, `csv_regression`, `images`).
    """
    if file.name.endswith(".npy"):
        np.save(stream := BytesIO(), outputs.cpu().numpy())
        files.replace(file, stream.getvalue())
        return
    rows = outputs.flatten(1) if outputs.dim() > 1 else outputs[:, None]
    rows, form = (rows.double(), ".9g") if rows.is_floating_point() else (rows.long(), "d")
    names: Any = getattr(samples, "outputs", getattr(samples, "classes", ()))
    if not _are(names, str, rows.shape[1]):
        names = [f"output_{number}" for number in range(rows.shape[1])]
    table = csv.writer(text := StringIO(newline=""), lineterminator="\n")
    table.writerow(["sample", *names])
    table.writerows([number, *(format(value, form) for value in row)] for number, row in enumerate(rows.tolist()))
    files.replace(file, text.getvalue())


def _are(given: Any, kind: type, number: int) -> TypeGuard[Sequence[Any]]:
    """True for a list or tuple of so many of a kind. A data set of a user may have other values by that name."""
    return isinstance(given, list | tuple) and len(given) == number and all(isinstance(each, kind) for each in given)


# ---------------------------------------------------------------------- files for other programs


def _merged(model: nn.Module) -> nn.Module:
    """The base model of a model of peft with its adapter in the weights; another model as it is."""
    if not hasattr(model, "merge_and_unload"):
        return model
    merge: Any = deepcopy(model).merge_and_unload
    merged: nn.Module = merge()
    return merged


def _safetensors(trained: TrainedModel) -> bytes:
    saved = trained.saved
    about = {"format": "pt", "job": trained.job.name, "strategy": saved.strategy, "step": str(saved.step)}
    return safetensors.torch.save(_tensors(trained.model), metadata=about)


def _torch(model: nn.Module) -> bytes:
    torch.save(_tensors(model), stream := BytesIO())
    return stream.getvalue()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, each tensor in memory of its own: names of one tied parameter have a copy each."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }


def _onnx(trained: TrainedModel, data: str | Path | None) -> bytes:
    try:
        import onnx  # noqa: F401  # heavy: onnx export alone needs these
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"export to onnx needs packages ({error}); run: pip install 'polytempo[onnx]'") from error
    given = data_of(trained.job, data)
    samples = SampleBatches(given.train, given.collate, "the training set")
    first, _ = next(samples.between(0, min(2, samples.length)))
    inputs = pair_of(trained.job, first)[0]
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"{who(trained.job)}: onnx takes models of one tensor, and a batch's input is {described(inputs)}"
        )
    many = ({0: torch.export.Dim("samples")},)
    with _quiet():
        try:
            program = torch.onnx.export(trained.model, (inputs,), dynamo=True, dynamic_shapes=many, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            cause = " ".join(str(error.__cause__ or error).split())[:500]
            raise ValueError(f"{who(trained.job)}: torch.onnx.export cannot write this model: {cause}") from error
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch silent about its own calls, and about packages that are not there."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _save_pretrained(model: nn.Module, out: Place) -> None:
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        kind = type(model).__name__
        raise ValueError(f"the model is a {kind}, without save_pretrained; export --to safetensors writes its tensors")
    if isinstance(out, UrlPath):
        raise ValueError(f"{out}: save_pretrained writes folders of this machine; name one as --out")
    save(out)
