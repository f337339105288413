"""Computes the grid of a thesis: workers x windows, for four update rules, on one perceptron.

    data, grid ──► a cell for each (rule, n, lambda, seed) ──► OUT/rows/CELL.json, as it ends
                   784-1000-2000-1000-10, Adam, shares of the data, virtual time

J. Hermans, "On Scalable Deep Learning and Parallelizing Gradient Descent", 2017, chapter
"Accumulated Gradient Normalization", whose last table (`table:agn_experiments_summary`) has the
time, training and validation accuracy of AGN and AEASGD for n and lambda from 10 to 40. The figures
are those of the thesis' source, https://github.com/JoeriHermans/master-thesis, commit 9ed20ff; so
are the settings, in `experiments/agn_experiments.py` and `easgd_experiments.py`: MNIST, batches of
128, 40 epochs, Adam at Keras' defaults, AEASGD with rho 5 at a rate of .01, ADAG with 1e-4.

Differences: time is virtual, and a step takes one unit within 20 %, so that only accuracies are set
beside the thesis'. Its training accuracy is the workers' on their last batches; ours is the
center's on the training data, of which at most `MOST_TRAINING` samples. ADAG and DOWNPOUR stand in
no table of that kind in the thesis; DOWNPOUR here has the same epochs as the others, where the
thesis gives it 5. MNIST is never downloaded. Without it there is a stand-in, which is drawn.
"""

import gzip
import hashlib
import math
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dovetail.errors import DivergedError, FileFormatError, UsageError
from dovetail.training import StepTimes, TrainRequest, make_rule, predicting, train
from reproductions.store import TRAINED, Kept, Store, fingerprint
from reproductions.tasks import BenchTask, run_missing

RULES = {"agn": "AGN", "adag": "ADAG", "aeasgd": "AEASGD", "downpour": "DOWNPOUR"}
"""The rules of the grid, by their names in `training.rules`, with the thesis' names."""
SIZES = (784, 1000, 2000, 1000, 10)
"""The perceptron's layers: thesis, appendix `appendix:mnist_model`."""
GRID = (10, 15, 20, 25, 30, 35, 40)
"""The thesis' numbers of workers, and its windows."""
BATCH, RATE, EPOCHS = 128, 1e-3, 40
JITTER = 0.2
"""A step takes one unit of virtual time, evenly drawn within this share of it."""
MOST_TRAINING = 10_000
"""The accuracy on training data is that of at most so many of them, the first ones."""
CROWD = 15
"""A cell of more workers than this needs gigabytes (130 MB a worker), and runs alone."""

_PUBLISHED = """
10 10 1066.08 100.00 98.43 953.61 99.22 98.64
10 15 864.01 99.53 98.54 846.86 99.38 98.69
10 20 886.34 99.38 98.61 804.07 98.91 98.67
10 25 855.51 98.75 98.52 784.46 98.91 98.74
10 30 886.01 99.22 98.50 930.73 98.91 98.64
10 35 850.87 98.44 98.42 798.74 99.22 98.62
10 40 845.21 98.75 98.43 791.04 97.66 98.58
15 10 979.72 99.67 98.61 813.32 99.11 98.67
15 15 638.13 99.89 98.58 721.47 98.66 98.65
15 20 562.72 99.89 98.49 564.92 99.00 98.60
15 25 580.71 98.77 98.50 542.28 98.33 98.62
15 30 544.97 98.44 98.44 660.58 98.55 98.58
15 35 562.93 98.66 98.45 573.54 98.33 98.45
15 40 561.17 99.22 98.42 566.00 98.88 98.52
20 10 839.94 99.26 98.36 821.12 97.90 98.52
20 15 571.17 100.00 98.45 610.88 98.52 98.49
20 20 432.93 99.38 98.47 510.72 97.78 98.39
20 25 479.72 99.63 98.45 421.50 97.86 98.34
20 30 433.36 99.42 98.49 429.16 98.36 98.33
20 35 418.83 98.52 98.44 409.86 98.19 98.33
20 40 434.86 98.44 98.34 420.46 97.66 98.28
25 10 768.45 98.62 97.87 753.27 98.26 98.40
25 15 524.85 99.76 98.57 540.20 98.32 98.32
25 20 455.92 99.70 98.52 401.17 97.66 98.23
25 25 351.30 99.10 98.44 372.74 98.44 98.26
25 30 365.58 98.56 98.48 364.29 98.20 98.14
25 35 364.04 98.32 98.46 371.01 97.54 98.02
25 40 373.22 98.05 98.35 346.99 97.72 98.04
30 10 778.42 97.92 97.25 764.59 99.17 98.28
30 15 507.43 99.72 98.51 527.42 98.12 98.13
30 20 428.09 99.74 98.48 461.58 97.92 98.03
30 25 341.44 99.01 98.48 334.52 98.59 97.96
30 30 318.41 99.17 98.39 310.19 97.66 97.77
30 35 312.96 99.17 98.35 305.48 98.28 97.86
30 40 316.68 98.65 98.30 343.07 98.28 97.73
35 10 691.38 96.65 96.74 785.00 98.09 97.96
35 15 511.17 99.01 98.18 515.88 97.91 98.06
35 20 390.05 99.61 98.51 405.90 97.77 98.01
35 25 314.71 99.52 98.37 324.66 97.82 97.81
35 30 273.62 98.67 98.43 379.93 97.63 97.82
35 35 276.11 99.29 98.13 357.71 97.50 97.84
35 40 284.50 98.69 98.17 543.86 97.79 97.59
40 10 748.94 94.17 95.55 1256.09 96.57 97.99
40 15 506.25 95.99 97.25 534.42 96.88 97.89
40 20 383.51 99.24 98.40 412.37 96.65 97.83
40 25 308.15 98.86 98.39 347.50 96.65 97.67
40 30 351.54 98.66 98.45 305.50 96.47 97.67
40 35 279.30 98.73 98.32 252.70 96.32 97.60
40 40 257.62 97.88 98.18 250.74 96.65 97.45
"""
"""n, lambda; AGN's seconds, training and validation accuracy in %; the same of AEASGD."""


@dataclass(frozen=True)
class PublishedCell:
    """What the thesis prints of one rule: accuracies as shares."""

    seconds: float
    training: float
    validation: float


@cache
def published() -> dict[tuple[str, int, int], PublishedCell]:
    """(rule, workers, window) -> the thesis' figures."""
    found = {}
    for line in _PUBLISHED.strip().splitlines():
        workers, window, *values = line.split()
        numbers = [float(value) for value in values]
        for rule, (seconds, training, validation) in (
            ("agn", numbers[:3]),
            ("aeasgd", numbers[3:]),
        ):
            key = rule, int(workers), int(window)
            found[key] = PublishedCell(seconds, training / 100, validation / 100)
    return found


# ---- Data ----

STAND_IN, MNIST = "stand-in", "MNIST"
SIDE, CLASSES, PROTOTYPES = 28, 10, 4
STAND_IN_TRAINING, STAND_IN_TEST = 6000, 1000
_NOISE, _SHIFT, _COARSE = 0.3, 3, 7
"""Of the stand-in: the noise of a pixel, the pixels that a picture is moved by at most, and the
side of the coarse picture that a prototype is drawn as."""


@dataclass(frozen=True, eq=False)
class ThesisData:
    """Pictures [samples, 784] in [0, 1] and their classes [samples].

    name   `MNIST`, or `STAND_IN` for data that are not MNIST
    """

    name: str
    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_inputs: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    def first(self, samples: int | None) -> "ThesisData":
        """The data with the first training samples alone; None: all."""
        if samples is None or samples >= len(self.labels):
            return self
        return replace(self, inputs=self.inputs[:samples], labels=self.labels[:samples])

    def digest(self) -> str:
        """16 hex digits over all values."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.labels, self.test_inputs, self.test_labels):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def stand_in(training: int = STAND_IN_TRAINING, test: int = STAND_IN_TEST) -> ThesisData:
    """Pictures that are drawn: the same at every call. They are not handwriting.

    A class has `PROTOTYPES` of 7 x 7 squares, each black or white. A picture is one of them, moved
    by up to 3 pixels each way, with noise.
    """
    # The seed is the number of the paper.
    rng = np.random.default_rng(1710_02368)
    step = SIDE // _COARSE
    coarse = rng.uniform(0, 1, (CLASSES, PROTOTYPES, _COARSE, _COARSE)) > 0.6
    prototypes = np.kron(coarse, np.ones((step, step))).astype(np.float32)

    def draw(samples: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        labels = rng.integers(0, CLASSES, samples)
        pictures = prototypes[labels, rng.integers(0, PROTOTYPES, samples)]
        moves = rng.integers(-_SHIFT, _SHIFT + 1, (samples, 2))
        moved = np.stack(
            [np.roll(p, tuple(m), (0, 1)) for p, m in zip(pictures, moves, strict=True)]
        )
        noisy = moved + rng.normal(0, _NOISE, moved.shape)
        inputs = np.clip(noisy, 0, 1).astype(np.float32).reshape(samples, -1)
        return inputs, labels.astype(np.int64)

    # The test data come first, so that they are the same for any number of training samples.
    test_inputs, test_labels = draw(test)
    return ThesisData(STAND_IN, *draw(training), test_inputs, test_labels)


_IDX_PARTS = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]
_NPZ_PARTS = ("x_train", "y_train", "x_test", "y_test")
_IDX_UNSIGNED_BYTE = 8


def read_mnist(path: Path) -> ThesisData:
    """MNIST from a folder of its four idx files, gzipped or not, or from an .npz file with the
    arrays x_train, y_train, x_test and y_test, as Keras keeps it. Raises `FileFormatError`."""
    is_folder = path.is_dir()
    parts = [_read_idx(path / name) for name in _IDX_PARTS] if is_folder else _read_npz(path)
    for pictures, labels in (parts[:2], parts[2:]):
        if pictures.shape[1:] != (SIDE, SIDE) or labels.shape != (len(pictures),):
            shapes = f"{pictures.shape} and {labels.shape}"
            raise FileFormatError(str(path), f"{shapes} are no pictures of 28 x 28 and labels")
        if not len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
            raise FileFormatError(str(path), "its labels are not 0 to 9")
    scaled = [
        (pictures.reshape(len(pictures), -1).astype(np.float32) / np.float32(255)).copy()
        for pictures in parts[::2]
    ]
    labels, test_labels = (each.astype(np.int64) for each in parts[1::2])
    return ThesisData(MNIST, scaled[0], labels, scaled[1], test_labels)


def _read_npz(path: Path) -> list[NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as found:
            return [found[name] for name in _NPZ_PARTS]
    except OSError as error:
        raise FileFormatError(str(path), error.strerror or str(error)) from None
    except (ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        detail = f"it is no .npz file with {', '.join(_NPZ_PARTS)}: {error}"
        raise FileFormatError(str(path), detail) from None


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """[...] unsigned bytes of an idx file: two zero bytes, type, axes, a big-endian size each."""
    try:
        if path.exists():
            content = path.read_bytes()
        else:
            with gzip.open(path.with_name(f"{path.name}.gz")) as file:
                content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(str(path), "neither it nor its .gz can be read") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, _IDX_UNSIGNED_BYTE]):
        raise FileFormatError(str(path), "it is not an idx file of unsigned bytes")
    axes = content[3]
    if len(content) < 4 + 4 * axes:
        raise FileFormatError(str(path), "it ends within its head")
    shape = np.frombuffer(content, ">u4", axes, 4).astype(np.int64)
    values = np.frombuffer(content, np.uint8, -1, 4 + 4 * axes)
    if values.size != shape.prod():
        raise FileFormatError(str(path), f"it holds {values.size} bytes, not {shape.prod()}")
    return values.reshape(shape)


@cache
def _load(path: str, samples: int | None) -> ThesisData:
    if not path:
        return stand_in(samples or STAND_IN_TRAINING)
    return read_mnist(Path(path)).first(samples)


# ---- Cells ----


@dataclass(frozen=True)
class ThesisSettings:
    """The grid that is asked for.

    data      MNIST's folder or .npz file; "": the stand-in
    samples   training samples; None: all of MNIST, or `STAND_IN_TRAINING`
    seeds     runs of each cell, with seeds from `seed` on. A seed decides the initial parameters,
              the shares, the order of samples and the times of steps
    sizes     the perceptron's layers
    """

    out: Path
    workers: tuple[int, ...] = GRID
    windows: tuple[int, ...] = GRID
    rules: tuple[str, ...] = tuple(RULES)
    epochs: int = EPOCHS
    data: str = ""
    samples: int | None = None
    seeds: int = 3
    seed: int = 0
    sizes: tuple[int, ...] = SIZES

    def load(self) -> ThesisData:
        """The data; read or drawn once in a process."""
        return _load(self.data, self.samples)

    @property
    def grid(self) -> list[tuple[int, int]]:
        """Every (workers, window), by workers."""
        return list(product(self.workers, self.windows))

    @property
    def cells(self) -> list["ThesisCell"]:
        """Every cell of the grid: by seed, then by workers, window and rule."""
        return [
            ThesisCell(rule, workers, window, seed)
            for seed in range(self.seed, self.seed + self.seeds)
            for (workers, window), rule in product(self.grid, self.rules)
        ]


@dataclass(frozen=True)
class ThesisCell:
    """One run of the grid."""

    rule: str
    workers: int
    window: int
    seed: int

    @property
    def name(self) -> str:
        return f"thesis.{self.rule}.n{self.workers}.lambda{self.window}.seed{self.seed}"


@dataclass(frozen=True)
class ThesisResult:
    """What came out of a cell.

    validation, training   the center's accuracy at the end, as a share; None: the run diverged
    seconds        virtual time, in steps of one worker
    staleness      mean over the commits but the first n; None: there are no others
    diverged       why, or ""
    wall_seconds   real time that the run took
    """

    validation: float | None
    training: float | None
    seconds: float
    staleness: float | None
    commits: int
    diverged: str
    wall_seconds: float


def perceptron(sizes: Sequence[int], seed: int) -> nn.Sequential:
    """The network, with Keras' initial values: Glorot's uniform weights, and biases of 0."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        # Made without values, so that torch's own generator is left alone.
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)  # type: ignore[no-untyped-call]
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def run_cell(
    settings: ThesisSettings,
    cell: ThesisCell,
    tell: Callable[[str], None],
    complain: Callable[[str], None],
) -> list[str]:
    """Run a cell and keep its result. Returns no failures: a run that diverges is a result."""
    tell(f"{RULES[cell.rule]}, {cell.workers} workers, window {cell.window}, seed {cell.seed}")
    seconds, commits, diverged = 0.0, 0, ""
    staleness: float | None = None
    figures: dict[str, float | None] = {"validation": None, "training": None}
    data = settings.load()
    request = TrainRequest(
        perceptron(settings.sizes, cell.seed),
        nn.functional.cross_entropy,
        partial(torch.optim.Adam, lr=RATE),
        make_rule(cell.rule),
        cell.workers,
        "simulated",
        epochs=settings.epochs,
        batch=BATCH,
        window=cell.window,
        partition="fixed",
        seed=cell.seed,
        backend_options={"times": StepTimes("jitter", spread=JITTER)},
    )
    threads, began = torch.get_num_threads(), time.perf_counter()
    # Sums over several threads would differ in their last bits.
    torch.set_num_threads(1)
    try:
        history = train(request, (torch.from_numpy(data.inputs), torch.from_numpy(data.labels)))
    except DivergedError as error:
        diverged = error.detail
    else:
        seconds, commits = history.outcome.seconds, len(history)
        mean = history.staleness.mean
        staleness = mean if math.isfinite(mean) else None
        judged = replace(request, metrics=("accuracy",), batch=1024)
        parts = {
            "validation": (data.test_inputs, data.test_labels),
            "training": (data.inputs[:MOST_TRAINING], data.labels[:MOST_TRAINING]),
        }
        figures = {
            name: predicting.evaluate(judged, part)["accuracy"] for name, part in parts.items()
        }
    finally:
        torch.set_num_threads(threads)
    result = ThesisResult(
        **figures,
        seconds=seconds,
        staleness=staleness,
        commits=commits,
        diverged=diverged,
        wall_seconds=time.perf_counter() - began,
    )
    kept_result(settings, Store(settings.out / "rows", complain), cell).put(asdict(result))
    return []


def kept_result(settings: ThesisSettings, store: Store, cell: ThesisCell) -> Kept:
    """The place of a cell's result in the store."""
    return Kept(
        store,
        cell.name,
        fingerprint(
            TRAINED,
            cell=asdict(cell),
            options=dict(make_rule(cell.rule).options),
            data=_digest(settings.data, settings.samples),
            epochs=settings.epochs,
            sizes=list(settings.sizes),
        ),
    )


@cache
def _digest(path: str, samples: int | None) -> str:
    return _load(path, samples).digest()


def run_grid(
    settings: ThesisSettings,
    *,
    jobs: int = 2,
    fresh: bool = False,
    tell: Callable[[str, float], None] = lambda _text, _fraction: None,
    complain: Callable[[str], None] = lambda _text: None,
) -> tuple[dict[ThesisCell, ThesisResult], dict[str, str]]:
    """Compute the cells that are not kept yet, and return (the results, cell -> traceback of those
    that failed).

    jobs    number of worker processes; 0: everything runs in this process
    fresh   forget first what is kept of these cells
    tell    is called with (what is being done, share of the cells that are done)

    Raises `UsageError` for a grid that the data are too small for.
    """
    samples, most = len(settings.load().labels), max(settings.workers)
    if samples < most:
        raise UsageError("--workers", f"{most} workers have no sample each of {samples}")
    store = Store(settings.out / "rows", complain)
    kept = {cell: kept_result(settings, store, cell) for cell in settings.cells}
    for result in kept.values() if fresh else ():
        result.drop()
    tasks = [
        BenchTask(
            cell.name, "reproductions.thesis:run_cell", (settings, cell), alone=cell.workers > CROWD
        )
        for cell, result in kept.items()
        if result.get() is None
    ]
    failures = run_missing(
        tasks, len(kept), jobs, lambda _, text, share: tell(text, share), complain
    )
    values = ((cell, result.get()) for cell, result in kept.items())
    return {cell: ThesisResult(**value) for cell, value in values if value is not None}, failures


def by_setting(
    results: Mapping[ThesisCell, ThesisResult],
) -> dict[tuple[str, int, int], list[ThesisResult]]:
    """(rule, workers, window) -> the results of its seeds, in the order of the cells."""
    found: dict[tuple[str, int, int], list[ThesisResult]] = {}
    for cell, result in results.items():
        found.setdefault((cell.rule, cell.workers, cell.window), []).append(result)
    return found


def mean_and_spread(values: Iterable[float | None]) -> tuple[float, float] | None:
    """The mean of accuracies, and half the way from the lowest to the highest. A run that diverged
    counts as 0; None without any run."""
    known = [value or 0.0 for value in values]
    if not known:
        return None
    return sum(known) / len(known), (max(known) - min(known)) / 2
