"""Reads batches by index from any kind of data set: arrays, map-style, or iterable.

    arrays      TensorDataset, or a tuple of tensors and numpy arrays of one length (tuples within
                it may nest): a batch is one slice of each
    map-style   `__getitem__` and `__len__`: items are fetched one by one, or at once by
                `__getitems__` where there is one, and collated
    iterable    `__iter__` alone: index p is the p-th item of all epochs, one after the other, in
                the stream's own order. Each iteration must yield the same

An iterable is costly to read. A run hands samples out by position, so that other workers can train
those of a dead worker. Each worker therefore runs through the whole stream and skips the samples of
others, and with n workers each item is produced n times. A data set that has the method
`iterate_from(position)` avoids this. If it has `set_epoch(epoch)`, that is called at the start of
each epoch, as torch's samplers have it.

An item, and so a batch, is (input, target, ...): a tuple or list whose first element is the model's
input, and whose other elements are the loss' targets. Anything else is input as a whole.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dovetail.errors import UsageError
from dovetail.runtime.torch_versions import pytree
from dovetail.runtime.user_code import UserCode, at

Collate = Callable[[list[Any]], Any]
"""Makes one batch of a list of items."""


class SampleSource(Protocol):
    """A data set that is read by index.

    samples   their number; None for a stream, whose end is not known before it is reached
    """

    samples: int | None

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Any, int]:
        """Returns the batch of these samples, and their number. The number is smaller than asked
        for if a stream ends among them. It is (None, 0) if the stream ended before them."""
        ...


def open_dataset(dataset: Any, collate: Collate | None = None, epochs: int = 1) -> SampleSource:
    """Returns the data set as a `SampleSource`; one that is a source already is returned as it is.

    collate   makes a batch of items; None: torch's `default_collate`
    epochs    passes over a stream

    Raises `UsageError` if the data set cannot be read, or is empty.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError("dataset", "is a DataLoader; give its data set, and `batch` and `collate`")
    source: SampleSource
    with UserCode("opening the data set", dataset):
        # A subclass of TensorDataset may change its items, so only the class itself is sliced.
        arrays = tuple(dataset.tensors) if type(dataset) is TensorDataset else dataset
        arrays = (arrays,) if isinstance(arrays, Tensor | np.ndarray) else arrays
        if isinstance(dataset, ArraySource | MapSource | StreamSource | ArrangedSource):
            source = dataset
        elif isinstance(arrays, tuple):
            if collate is not None:
                raise UsageError("collate", "is of no use with arrays, which are sliced")
            source = ArraySource(arrays)
        elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            source = MapSource(dataset, collate or default_collate)
        # An iterator can be read only once, but every epoch and every step back starts anew.
        elif hasattr(dataset, "__iter__") and not isinstance(dataset, Iterator):
            source = StreamSource(dataset, collate or default_collate, epochs)
        else:
            is_iterator = hasattr(dataset, "__iter__")
            detail = "can be gone through only once" if is_iterator else "cannot be read"
            raise UsageError(
                "dataset",
                f"{type(dataset).__name__} {detail}; give a tuple of arrays, a map-style data set, "
                f"or an iterable that can be started anew{at(dataset)}",
            )
    if source.samples == 0:
        raise UsageError("dataset", f"is empty{at(dataset)}")
    return source


class ArraySource:
    """Arrays of one length, sliced by row."""

    def __init__(self, arrays: tuple[Any, ...]) -> None:
        self.arrays = _as_tensors(arrays)
        lengths = {len(tensor) for tensor in pytree.tree_leaves(self.arrays)}
        if len(lengths) != 1:
            raise UsageError("dataset", f"its arrays have {sorted(lengths)} rows; they must agree")
        self.samples: int | None = lengths.pop()

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Any, int]:
        """Rows `indices` of each array."""
        return _take(self.arrays, torch.from_numpy(np.ascontiguousarray(indices))), len(indices)


def _as_tensors(tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return tuple(_as_tensors(inner) for inner in tree)
    if isinstance(tree, Tensor):
        tensor = tree.detach()
    else:
        try:
            array = np.asarray(tree)
            with warnings.catch_warnings():
                # The tensor shares the array's memory, also if that is a mapped file. torch warns
                # that writing to such a tensor is undefined. Rows are only copied out of it.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                tensor = torch.as_tensor(array)
        except (TypeError, ValueError) as error:
            raise UsageError("dataset", f"{type(tree).__name__} is no array: {error}") from None
    if tensor.ndim == 0:
        raise UsageError("dataset", "an array of it has no rows: it is a single number")
    return tensor


def _take(tree: Any, rows: Tensor) -> Any:
    if isinstance(tree, tuple):
        return tuple(_take(inner, rows) for inner in tree)
    return tree.index_select(0, rows)


class MapSource:
    """Items by index, collated."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate
        self.samples: int | None = len(dataset)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Any, int]:
        """The items `indices`, collated."""
        # Plain ints, because not every `__getitem__` takes numpy's integers.
        rows = indices.tolist()
        many = getattr(self._dataset, "__getitems__", None)
        items: list[Any] = []
        if many is not None:
            which = "item {}" if len(rows) == 1 else "items {} to {}"
            with UserCode(
                lambda: f"{which.format(rows[0], rows[-1])} of the data set", self._dataset
            ):
                items = list(many(rows))
        else:
            with UserCode(lambda: f"item {rows[len(items)]} of the data set", self._dataset):
                for row in rows:
                    items.append(self._dataset[row])
        if len(items) != len(rows):
            says = f"__getitems__ returns {len(items)} items for {len(rows)} indices"
            raise UsageError("dataset", f"{says}{at(many)}")
        return _collated(self._collate, items, self._dataset), len(rows)


def _collated(collate: Collate, items: list[Any], dataset: Any) -> Any:
    """One batch of the items."""
    owner = dataset if collate is default_collate else collate
    with UserCode(f"making a batch of {len(items)} items of the data set", owner):
        return collate(items)


class StreamSource:
    """Items by position in a stream. The stream is started anew at each epoch, and whenever a
    position before the present one is asked for.

    length   `len` of the data set, if it has one; only `passed` uses it
    """

    samples: int | None = None

    def __init__(self, dataset: Any, collate: Collate, epochs: int = 1) -> None:
        self._dataset, self._collate, self._epochs = dataset, collate, epochs
        self._items: Iterator[Any] | None = None
        self._epoch, self._position = 0, 0
        # The position at which each epoch starts, of the epochs that were reached so far.
        self._starts = [0]
        try:
            self.length: int | None = len(dataset)
        except TypeError:
            self.length = None

    @property
    def passed(self) -> float:
        """Epochs that were read so far, with the fraction of the present one if the length is
        known."""
        inside = self._position - self._starts[self._epoch]
        return self._epoch + min(inside / self.length, 1.0) if self.length else float(self._epoch)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Any, int]:
        """The items at the ascending positions `indices`; fewer items at the stream's end."""
        items: list[Any] = []
        with UserCode(lambda: f"item {self._position} of the data set", self._dataset):
            for position in indices.tolist():
                item = self._item(position)
                if item is _END:
                    break
                items.append(item)
        if not items:
            return None, 0
        return _collated(self._collate, items, self._dataset), len(items)

    def _item(self, position: int) -> Any:
        if self._items is None or position < self._position:
            epoch = max(e for e, start in enumerate(self._starts) if start <= position)
            self._start(epoch, position)
        item: Any = _END
        while self._position <= position:
            assert self._items is not None
            item = next(self._items, _END)
            if item is not _END:
                self._position += 1
                continue
            # After an epoch without items the stream has ended, since all later ones would be
            # empty.
            is_empty = self._position == self._starts[self._epoch]
            if self._epoch + 1 >= self._epochs or is_empty:
                break
            if self._epoch + 1 == len(self._starts):
                self._starts.append(self._position)
            self._start(self._epoch + 1, self._position)
        return item

    def _start(self, epoch: int, position: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        start = self._starts[epoch]
        if hasattr(self._dataset, "iterate_from"):
            self._items = iter(self._dataset.iterate_from(position - start))
            self._position = position
        else:
            self._items, self._position = iter(self._dataset), start
        self._epoch = epoch


class ArrangedSource:
    """A data set whose samples have another order: sample i is `order[i]` of `source`."""

    def __init__(self, source: SampleSource, order: NDArray[np.int64]) -> None:
        self._source, self._order = source, order
        self.samples = source.samples

    def batch(self, indices: NDArray[np.int64], epoch: int) -> tuple[Any, int]:
        """The samples `indices` of the arranged data set."""
        return self._source.batch(self._order[indices], epoch)


def labels_of(source: SampleSource) -> NDArray[np.generic]:
    """The label [samples] of each sample: its first target, one number, or one of several classes
    as a row of probabilities (one-hot). Of a map-style data set all items are read once.

    Raises `UsageError` for a stream, and for targets that are no labels.
    """
    if source.samples is None:
        raise UsageError("partition", "a stream is not sorted by label; give fixed arrays or items")
    if isinstance(source, ArraySource):
        parts = [_labels(source.arrays)]
    else:
        rows = np.arange(source.samples, dtype=np.int64)
        chunks = np.array_split(rows, -(-source.samples // _LABELS_READ))
        parts = [_labels(source.batch(chunk, 0)[0]) for chunk in chunks]
    return np.concatenate(parts)


_LABELS_READ = 256
"""The items of a map-style data set that are collated at once when its labels are read."""


def _labels(batch: Any) -> NDArray[np.generic]:
    """The labels [samples] of a batch."""
    targets = split_batch(batch)[2]
    if not targets:
        raise UsageError("partition", "by-label needs labels, and the data set has no target")
    labels = np.asarray(targets[0])
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and (labels >= 0).all() and np.allclose(labels.sum(1), 1):
        labels = labels.argmax(1)
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        raise UsageError(
            "partition",
            f"by-label sorts by the first target, which must be one number a sample; it is of "
            f"shape {labels.shape} and type {labels.dtype}",
        )
    return labels


# `next` returns this at a stream's end. None cannot mark the end, because an item may be None.
_END = object()


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Splits a batch into the model's arguments, its keyword arguments, and the loss' targets."""
    first, targets = (
        (batch[0], tuple(batch[1:])) if isinstance(batch, tuple | list) and batch else (batch, ())
    )
    if isinstance(first, dict):
        return (), first, targets
    return tuple(first) if isinstance(first, tuple | list) else (first,), {}, targets
