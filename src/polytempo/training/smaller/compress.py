"""A trained network as a small file: pruned, its weights shared, both fine-tuned, and Huffman coded.

checkpoint ─▶ [ prune ─▶ fine-tune ] × rounds ─▶ k-means of each layer ─▶ fine-tune centroids ─▶ file

Source: S. Han, H. Mao, W. Dally, "Deep compression: compressing deep neural networks with pruning, trained quantization
and Huffman coding", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.compression.network.network_file import KeptElements, TensorSize, to_bytes
from polytempo.compression.network.shared_values import SharedValues, means, shared_values
from polytempo.core.errors import NotFinite
from polytempo.core.system import files
from polytempo.core.system.url_path import place
from polytempo.spec.job import Data, Job
from polytempo.spec.job_calls import data_of, model_of
from polytempo.training.job.evaluate import Evaluation, Score, tensors_of
from polytempo.training.observe.saved_model import run_of
from polytempo.training.observe.whole_checkpoint import checkpoint_model
from polytempo.training.smaller.pruning import Shares, masks_of, of_layer, prunable
from polytempo.training.tuning.trial import Trial

FILE = "network.ptnet"
MOST_BITS = 12
_BITS = 8


class CompressedNetwork(NamedTuple):
    """The file, and the price of each step towards it."""

    file: str
    num_bytes: int
    dense_bytes: int
    """Bytes of all parameters and buffers as they were."""
    tensors: tuple[TensorSize, ...]
    before: Score | None
    """Score of the checkpoint's weights on the test set; None without a test set."""
    pruned: Score | None
    """Score after pruning and its fine-tuning."""
    after: Score | None
    """Score of the weights in the file."""

    @property
    def ratio(self) -> float:
        """`dense_bytes` for each byte of the file, header included."""
        return self.dense_bytes / self.num_bytes


def compress(
    job: Job,
    run: str | Path,
    *,
    keep: Shares = 0.1,
    bits: int | Mapping[str, int] = 5,
    rounds: int = 2,
    epochs: float = 1,
    share_epochs: float = 1,
    lr: float | None = None,
    seed: int = 0,
    data: str | Path | None = None,
    out: str | Path | None = None,
) -> CompressedNetwork:
    """Compress the model that a run of `job` has saved, into a file that `pt.training.compressed_model` reads.

        pt.training.compress(job, "runs/mine", keep=0.08, bits={"0": 8, "3": 8, "7": 5, "9": 5})

    Pruning: in each of `rounds` the largest weights stay, at last a share `keep` of all (see `pruning.masks_of`), and
    the others are 0 while the job trains for `epochs` more. Round r of R keeps keep^(r / R).

    Sharing: in each layer k-means makes at most 2^bits values of the weights that are left. The job trains for
    `share_epochs` more, with one step for each value: the mean of its members' steps.

    Coding: values' numbers, and the zeros between weights, by a Huffman code of each layer.

    `keep` and `bits` are for all layers, or for each by its name (a module's, or a parameter's); layers without one
    keep all of their weights, and have 8 bits. Biases, norms and buffers are stored as they are. Training is in this
    process, with the job's data, loss, optimizer, schedule and batch size; `lr` None: the job's. `run`: a path
    that `checkpoint_model` reads. `out`: the file; by default network.ptnet in the run's folder.

    Deviation: the paper moves a value by the sum of its members' gradients; their mean needs no other learning rate.
    Where a step is not made element by element, it is the mean of the steps.

    Cost: rounds · epochs + share_epochs of training on one process, with two more passes over the weights in a step;
    memory: 9 bytes more for each weight. Errors: ValueError for numbers out of range, names of no layer, a file that
    exists, and a model of other dtypes; NotFinite where fine-tuning diverges.
    """
    shares, widths = _checked(keep, bits, rounds, epochs, share_epochs)
    path = _file_in(run) if out is None else Path(out)
    if path.exists():
        raise ValueError(f"{path} exists; remove it, or name another file with out")
    tuning = _Tuning(job, checkpoint_model(run), data_of(job, data), lr, seed)
    tuning.check_names({"keep": keep, "bits": bits})
    before = tuning.score()
    for number in range(1, rounds + 1):
        tuning.prune(shares(number / rounds), epochs)
    pruned = tuning.score()
    kept = tuning.share(widths, share_epochs)
    state = {name: tensor.detach() for name, tensor in tuning.model.state_dict(keep_vars=True).items()}
    content, sizes = to_bytes(state, kept)
    files.replace(path, content)
    dense = {each.data_ptr(): each.numel() * each.element_size() for each in state.values()}
    return CompressedNetwork(str(path), len(content), sum(dense.values()), tuple(sizes), before, pruned, tuning.score())


def _file_in(run: str | Path) -> Path:
    folder = run_of(place(run))
    if not isinstance(folder, Path):
        raise ValueError(f"{folder} is a URL; name a file on this machine with out")
    return folder / FILE


def _checked(
    keep: Shares, bits: int | Mapping[str, int], rounds: int, epochs: float, share_epochs: float
) -> tuple[Callable[[float], Shares], Callable[..., int]]:
    """The share of each round, and each parameter's bits. ValueError for numbers out of range."""
    named = keep if isinstance(keep, Mapping) else {"": keep}
    for name, share in named.items():
        if not 0 < share <= 1:
            raise ValueError(f"keep is a share of the weights, above 0 and at most 1, got {_of(name)}{share}")
    for name, width in (bits if isinstance(bits, Mapping) else {"": bits}).items():
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MOST_BITS:
            raise ValueError(f"bits is a whole number from 1 to {MOST_BITS}, got {_of(name)}{width}")
    if rounds < 1:
        raise ValueError(f"rounds is a number of prunings, at least 1, got {rounds}")
    for name, number in (("epochs", epochs), ("share_epochs", share_epochs)):
        if not 0 <= number < float("inf"):
            raise ValueError(f"{name} is a number of epochs, at least 0, got {number}")

    def shares(progress: float) -> Shares:
        found = {name: share**progress for name, share in named.items()}
        return found if isinstance(keep, Mapping) else found[""]

    return shares, partial(of_layer, bits, otherwise=_BITS)


def _of(name: str) -> str:
    return f"{name}=" if name else ""


class _Tuning:
    """A model that keeps a rule while it is trained: some weights are 0, some share values."""

    def __init__(self, job: Job, tensors: Mapping[str, Tensor], data: Data, lr: float | None, seed: int) -> None:
        self._job, self._data, self._lr, self._seed = job, data, lr, seed
        self.model = model_of(job)
        try:
            self.model.load_state_dict(dict(tensors))
        except RuntimeError as error:
            said = f"the checkpoint does not fit job {job.name} ({error}); name the job of the run"
            raise ValueError(said) from error
        self._evaluation = None if data.test is None else Evaluation(job, self.model, data)
        self._masks: dict[str, Tensor] = {}
        if not prunable(self.model):
            raise ValueError(f"job {job.name}: its model has no parameters of two dims or more, so nothing to compress")

    def check_names(self, given: Mapping[str, Any]) -> None:
        """ValueError for a layer that does not exist."""
        names = list(prunable(self.model))
        for option, values in given.items():
            for name in values if isinstance(values, Mapping) else ():
                if not any(name in (each, each.rpartition(".")[0]) for each in names):
                    raise ValueError(f"{option}: there is no layer {name!r} to compress; there are {', '.join(names)}")

    def score(self) -> Score | None:
        """The present weights on the test set."""
        return None if self._evaluation is None else self._evaluation.score(tensors_of(self.model))

    def prune(self, keep: Shares, epochs: float) -> None:
        """Set weights to 0, and train on without them."""
        self._masks = masks_of(prunable(self.model), keep)
        self._train(epochs, self._masked_)

    def share(self, bits: Callable[..., int], epochs: float) -> dict[str, KeptElements]:
        """Let the weights that are left share values, and train these."""
        found: dict[str, KeptElements] = {}
        for name, parameter in prunable(self.model).items():
            places = self._masks[name].reshape(-1).nonzero().view(-1)
            values = parameter.detach().reshape(-1)[places]
            found[name] = KeptElements(places, shared_values(values, 1 << bits(name=name)))

        self._train(epochs, partial(self._shared_, found))
        return {name: self._now(name, kept) for name, kept in found.items()}

    def _now(self, name: str, kept: KeptElements) -> KeptElements:
        """The clusters with the present values of their members, which are equal."""
        values = self.model.get_parameter(name).detach().reshape(-1)[kept.places]
        members = kept.shared.members
        centroids = kept.shared.centroids.clone()
        centroids[members] = values
        return KeptElements(kept.places, SharedValues(centroids, members))

    @torch.no_grad()
    def _masked_(self, model: nn.Module) -> None:
        for name, mask in self._masks.items():
            model.get_parameter(name).mul_(mask)

    @torch.no_grad()
    def _shared_(self, found: Mapping[str, KeptElements], model: nn.Module) -> None:
        self._masked_(model)
        for name, (places, (centroids, members)) in found.items():
            flat = model.get_parameter(name).view(-1)
            flat[places] = means(flat[places], members, len(centroids)).to(flat.dtype)[members]

    @torch.no_grad()
    def _without_pruned_(self, model: nn.Module) -> None:
        """Pruned weights have no gradient, so norms of gradients do not count them."""
        for name, mask in self._masks.items():
            if (gradient := model.get_parameter(name).grad) is not None:
                gradient.mul_(mask)

    def _train(self, epochs: float, hold_: Callable[[nn.Module], None]) -> None:
        """The job's training for so many epochs, with `hold_` before the first step and after each."""
        trial = Trial(self._job, self._data, batch=self._job.batch_size, lr=self._lr, seed=self._seed)
        trial.model.load_state_dict(self.model.state_dict())
        hold_(trial.model)
        trial.optimizer.register_step_pre_hook(lambda *_: self._without_pruned_(trial.model))
        trial.optimizer.register_step_post_hook(lambda *_: hold_(trial.model))
        trial.train(round(epochs * len(self._data.train)))  # type: ignore[arg-type]
        if trial.diverged:
            advice = "so fine-tuning diverged; give a smaller lr"
            raise NotFinite("", None, trial.losses[-1].loss, "the loss", step=trial.steps - 1, advice=advice)
        self._seed += 1
        self.model.load_state_dict(trial.model.state_dict())
