"""What is learned: handwritten digits, and a binary task of tabular data.

    digits     scikit-learn's 1,797 digits of 8 x 8, MLP 64-64-10
    cancer     scikit-learn's breast cancer data, 569 x 30, MLP 30-32-2: a stand-in for Higgs
    mnist      from a folder of idx files of the user's, MLP 784-256-10
    higgs      from a CSV file of the user's: the label (0 or 1) first, then the features

A fifth is kept for validation, the same for every seed. Features are scaled by what is left.
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from mlp import Floats, Task

from dovetail.errors import FileFormatError, MissingLibraryError
from reproductions.thesis import read_mnist

HELD_OUT = 0.2


def digits() -> Task:
    data = _load("load_digits")
    return _split("digits", data.data / 16, data.target, (64,))


def cancer() -> Task:
    data = _load("load_breast_cancer")
    return _standardised(_split("cancer", data.data, data.target, (32,)))


def mnist(folder: Path, hidden: tuple[int, ...] = (256,)) -> Task:
    """The four idx files, gzipped or not, under their usual names."""
    data = read_mnist(folder)
    return Task("mnist", data.inputs, data.labels, data.test_inputs, data.test_labels, hidden)


def higgs(path: Path, rows: int | None = 200_000, hidden: tuple[int, ...] = (128,)) -> Task:
    """The first `rows` rows, gzipped or not; None: all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty file is refused below
            data = np.loadtxt(path, delimiter=",", dtype=np.float32, max_rows=rows, ndmin=2)
    except (OSError, ValueError) as error:
        raise FileFormatError(str(path), str(error)) from error
    if data.shape[1] < 2 or not np.isin(data[:, 0], (0, 1)).all():
        raise FileFormatError(str(path), "its first column is not a label, 0 or 1")
    return _standardised(_split("higgs", data[:, 1:], data[:, 0], hidden))


def _load(name: str):
    try:
        import sklearn.datasets
    except ImportError as error:
        raise MissingLibraryError("scikit-learn", "pip install 'dovetail[bench]'") from error
    return getattr(sklearn.datasets, name)()


def _split(name: str, inputs: np.ndarray, labels: np.ndarray, hidden: tuple[int, ...]) -> Task:
    order = np.random.default_rng(0).permutation(len(labels))
    inputs, labels = inputs[order].astype(np.float32), labels[order].astype(np.int64)
    held = round(HELD_OUT * len(labels))
    return Task(name, inputs[held:], labels[held:], inputs[:held], labels[:held], hidden)


def _standardised(task: Task) -> Task:
    mean, spread = task.inputs.mean(axis=0), task.inputs.std(axis=0)
    spread[spread == 0] = 1

    def scaled(inputs: Floats) -> Floats:
        return ((inputs - mean) / spread).astype(np.float32)

    return Task(
        task.name,
        scaled(task.inputs),
        task.labels,
        scaled(task.test_inputs),
        task.test_labels,
        task.hidden,
    )
