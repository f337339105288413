"""benchmarks/data_parallel: its network, its readers of a user's files, and runs that go on."""

import gzip
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from dovetail.errors import FileFormatError
from tests.support.benchmark_scripts import benchmark_scripts


@pytest.fixture(scope="module")
def benchmark():
    with benchmark_scripts("data_parallel", "mlp", "tasks", "cells") as modules:
        yield modules


def test_its_network_has_the_gradient_and_the_steps_of_torch(benchmark):
    mlp = benchmark.mlp
    rng = np.random.default_rng(3)
    inputs, labels = rng.random((40, 6), dtype=np.float32), rng.integers(0, 4, 40)
    task = mlp.Task("t", inputs, labels, inputs, labels, (8, 5))
    learner, theta = mlp.MlpLearner(task, "adam", 0.01), mlp.start(task.sizes, 0)
    sizes = task.sizes
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    for layer, (weight, bias) in zip(layers, mlp.views(theta, sizes), strict=True):
        layer.weight.data = torch.from_numpy(weight.T.copy())
        layer.bias.data = torch.from_numpy(bias.copy())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(20):
        indices = rng.choice(40, 16, replace=False)
        gradient = learner.gradient(theta, indices, 0)
        optimizer.zero_grad()
        x, y = torch.from_numpy(inputs[indices]), torch.from_numpy(labels[indices])
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        assert gradient.loss == pytest.approx(loss.item(), rel=1e-5)
        if step == 0:
            parts = mlp.views(gradient.vector, sizes)
            for layer, (weight, bias) in zip(layers, parts, strict=True):
                np.testing.assert_allclose(weight.T, layer.weight.grad, rtol=1e-4, atol=1e-7)
                np.testing.assert_allclose(bias, layer.bias.grad, rtol=1e-4, atol=1e-7)
        theta = theta + learner.update(theta, gradient.vector, 0.0)
        optimizer.step()
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs)).numpy()
    np.testing.assert_allclose(mlp.logits(theta, sizes, inputs), expected, rtol=1e-3, atol=1e-4)
    figures = mlp.figures(theta, sizes, inputs, labels)
    assert figures["accuracy"] == (expected.argmax(axis=1) == labels).mean()


def idx(values):
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def mnist_folder(folder):
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("t10k", 3)):
        images = idx(rng.integers(0, 256, (count, 28, 28)))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        labels = idx(np.arange(count) % 10)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return folder


def test_mnist_is_read_from_a_folder_of_idx_files_gzipped_or_not(benchmark, tmp_path):
    tasks = benchmark.tasks
    task = tasks.mnist(mnist_folder(tmp_path), (5,))
    assert (task.inputs.shape, task.test_inputs.shape) == ((6, 784), (3, 784))
    assert task.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert 0 <= task.inputs.min() < 0.1 < 0.9 < task.inputs.max() <= 1
    assert task.sizes == (784, 5, 6)


@pytest.mark.parametrize(
    "content", [b"", b"not an idx file", idx(np.zeros((6, 28, 28)))[:-1], b"\0\0\x0d\1\0\0\0\0"]
)
def test_a_file_that_is_no_idx_file_is_refused_by_name(benchmark, tmp_path, content):
    tasks = benchmark.tasks
    broken = mnist_folder(tmp_path) / "train-images-idx3-ubyte"
    broken.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        tasks.mnist(tmp_path)
    assert caught.value.path == str(broken)


def test_higgs_is_read_from_a_csv_file_whose_label_comes_first(benchmark, tmp_path):
    tasks = benchmark.tasks
    path = tmp_path / "higgs.csv"
    path.write_text("".join(f"{i % 2}.0,{i},{-i / 3:.2f},7\n" for i in range(20)))
    task = tasks.higgs(path, rows=10)
    assert (task.inputs.shape, task.test_inputs.shape) == ((8, 3), (2, 3))
    np.testing.assert_allclose(task.inputs.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(task.inputs.std(axis=0), [1, 1, 0], atol=1e-6)
    for text in ("", "2,1,1\n", "1\n0\n", "a,b\n"):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            tasks.higgs(path)


def test_a_killed_series_of_runs_goes_on_where_it_was(benchmark, tmp_path):
    cells = benchmark.cells
    store = cells.Store(tmp_path / "rows.csv")
    first = cells.Cell("t", "digits", "agn", 10, 20, rate=1e-3)
    result = cells.Result(0.9, 0.95, 0.3, 100.0, math.nan, 19.0, 22.0, 500, 1.5)
    store.add(first, result)
    second = replace(first, seed=1, slow=4.0)
    store.add(second, result)
    with store.path.open("a") as file:
        file.write("t,digits,agn,10")  # killed while it was written
    found = cells.Store(store.path)
    assert list(found.rows) == [first, second]
    assert repr(found.rows[second]) == repr(result)
    found.add(replace(first, seed=2), result)
    assert list(cells.Store(store.path).rows) == [first, second, replace(first, seed=2)]
