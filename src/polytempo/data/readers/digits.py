"""The digits that come with Polytempo: 1,797 handwritten digits of 8 x 8 pixels, ten classes.

The test part of *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998; CC BY 4.0), as scikit-learn's `load_digits` hands it out.
"""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import TensorDataset

from polytempo.data.plan import permutation
from polytempo.data.readers.idx import pixel_statistics, read_idx, scaled
from polytempo.data.readers.train_test import Split

FOLDER = Path(__file__).parents[1] / "digits_idx"
NUM_TEST = 360


def digits() -> Split:
    """1,437 digits to train on and 360 to test with, always the same ones.

    Images: float32 (N, 64), less the mean of the training pixels, over their standard deviation.
    Labels: int64 (N,).
    """
    images = read_idx(FOLDER / "images-idx3-ubyte.gz").flatten(1)
    labels = read_idx(FOLDER / "labels-idx1-ubyte.gz").long()
    order = permutation(len(images), 0, 0)
    train, test = order[:-NUM_TEST], order[-NUM_TEST:]
    mean, deviation = pixel_statistics(images[train])
    return Split(
        TensorDataset(scaled(images[train], mean, deviation), labels[train]),
        TensorDataset(scaled(images[test], mean, deviation), labels[test]),
    )
