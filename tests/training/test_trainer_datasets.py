"""Data sets as sources of batches: arrays, map-style, iterable; what is none."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dovetail.errors import UsageError
from dovetail.training.datasets import open_dataset, split_batch
from tests.support.training_models import Numbers, table


class Items(Dataset):
    def __init__(self, count=7):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return {"x": float(row)}, row


class Many(Items):
    """Fetches a batch at once, and in no other way."""

    def __getitem__(self, row):
        raise AssertionError

    def __getitems__(self, rows):
        return [({"x": float(row)}, row) for row in rows]


class Counter:
    """A stream of numbers that begin with 100 times the epoch."""

    def __init__(self, count):
        self.count, self.epoch, self.made = count, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.count):
            self.made += 1
            yield 100 * self.epoch + number


class Jumping(Counter):
    def iterate_from(self, position):
        for number in range(position, self.count):
            self.made += 1
            yield 100 * self.epoch + number


def take(source, *indices):
    found, samples = source.batch(np.array(indices), 0)
    return (None if found is None else found.tolist()), samples


@pytest.mark.parametrize("kind", [tuple, lambda pair: TensorDataset(*pair)])
def test_arrays_are_sliced_by_row(kind):
    features, labels = table(rows=5)
    source = open_dataset(kind((features, labels)))
    (x, y), samples = source.batch(np.array([3, 0]), 0)
    assert source.samples == 5 and samples == 2
    assert torch.equal(x, features[[3, 0]]) and torch.equal(y, labels[[3, 0]])


def test_arrays_may_be_numpy_nested_and_read_only():
    a, b, labels = np.arange(4.0), np.arange(8).reshape(4, 2), np.arange(4)
    a.flags.writeable = False
    ((x, y), z), _ = open_dataset(((a, b), labels)).batch(np.array([2]), 0)
    assert (x.tolist(), y.tolist(), z.tolist()) == ([2.0], [[4, 5]], [2])


@pytest.mark.parametrize("kind", [Items, Many])
def test_items_are_collated(kind):
    (inputs, targets), samples = open_dataset(kind()).batch(np.array([6, 2]), 0)
    assert inputs["x"].tolist() == [6.0, 2.0] and targets.tolist() == [6, 2] and samples == 2


def test_a_collate_function_of_ones_own_is_used():
    source = open_dataset(Items(), collate=lambda items: [row for _, row in items])
    assert source.batch(np.array([4, 5]), 0) == ([4, 5], 2)


def test_a_list_of_pairs_is_a_data_set():
    pairs = [(torch.tensor([float(row)]), row) for row in range(3)]
    (x, y), _ = open_dataset(pairs).batch(np.array([1, 2]), 0)
    assert x.tolist() == [[1.0], [2.0]] and y.tolist() == [1, 2]


def test_a_stream_is_read_by_position_over_all_epochs():
    source = open_dataset(Counter(3), epochs=3)
    assert source.samples is None
    assert take(source, 0, 1) == ([0, 1], 2)
    assert take(source, 2, 3) == ([2, 100], 2)
    assert take(source, 7, 8) == ([201, 202], 2)
    assert take(source, 8, 9) == ([202], 1)
    assert take(source, 9, 10) == (None, 0)
    assert take(source, 4, 5) == ([101, 102], 2)  # back to an epoch that it has met


def test_a_stream_is_skipped_through_once_unless_it_goes_back():
    stream = Counter(10)
    source = open_dataset(stream)
    assert take(source, 2, 3) == ([2, 3], 2)
    assert take(source, 6, 7) == ([6, 7], 2)
    assert stream.made == 8
    assert take(source, 4) == ([4], 1)
    assert stream.made == 8 + 5


def test_a_stream_that_can_start_anywhere_makes_only_what_is_asked_for():
    stream = Jumping(10)
    source = open_dataset(stream, epochs=2)
    assert take(source, 8, 9) == ([8, 9], 2)
    assert stream.made == 2
    assert take(source, 12, 13) == ([102, 103], 2)
    assert take(source, 8) == ([8], 1)


def test_a_streams_progress_is_in_epochs_by_its_length_if_it_has_one():
    plain, long = open_dataset(Counter(4), epochs=2), open_dataset(Sized(4), epochs=2)
    for source in (plain, long):
        take(source, 0, 1, 2, 3, 4)
    assert (plain.passed, long.passed) == (1.0, 1.25)


class Sized(Counter):
    def __len__(self):
        return self.count


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (3, "int cannot be read"),
        ((x for x in range(3)), "generator can be gone through only once"),
        (DataLoader(Items()), "is a DataLoader; give its data set"),
        ((torch.zeros(3), torch.zeros(4)), r"its arrays have \[3, 4\] rows"),
        ((torch.zeros(3), torch.tensor(1)), "a single number"),
        ((torch.zeros(3), "abc"), "str|a single number"),
        ((torch.zeros(0),), "is empty"),
        (Items(0), "is empty"),
    ],
)
def test_what_is_no_data_set_is_an_error(dataset, says):
    with pytest.raises(UsageError, match=says) as caught:
        open_dataset(dataset)
    assert caught.value.option == "dataset"


def test_arrays_are_not_collated():
    with pytest.raises(UsageError, match="of no use with arrays"):
        open_dataset(table(), collate=list)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((1, 2), ((1,), {}, (2,))),
        ([1, 2, 3], ((1,), {}, (2, 3))),
        (((1, 2), 3), ((1, 2), {}, (3,))),
        (({"a": 1}, 2), ((), {"a": 1}, (2,))),
        (5, ((5,), {}, ())),
        ({"a": 1, "labels": 2}, ((), {"a": 1, "labels": 2}, ())),
    ],
)
def test_a_batch_is_the_models_input_and_the_losss_targets(batch, expected):
    assert split_batch(batch) == expected


def test_an_iterable_torch_data_set_is_a_stream():
    features, labels = table(rows=5)
    (x, y), samples = open_dataset(Numbers(features, labels)).batch(np.arange(3, 7), 0)
    assert torch.equal(x, features[3:]) and torch.equal(y, labels[3:]) and samples == 2
