"""The thesis' grid: its data, its cells, what is kept, and what is shown."""

import csv
import gzip
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.errors import DivergedError, FileFormatError, UsageError
from reproductions import tasks, thesis
from reproductions.thesis import (
    MNIST,
    STAND_IN,
    ThesisCell,
    ThesisSettings,
    published,
    read_mnist,
    run_grid,
    stand_in,
)
from reproductions.thesis_page import WARNING, lines_of, ordering, render, tables_of

TINY = (784, 8, 10)


def a_grid(tmp_path, **fields):
    given = {
        "workers": (1, 3), "windows": (2,), "epochs": 1, "samples": 600, "seeds": 1, "sizes": TINY,
    }  # fmt: skip
    return ThesisSettings(tmp_path / "out", **{**given, **fields})


def test_the_thesis_figures_are_all_there():
    found = published()
    assert len(found) == 2 * 7 * 7
    first, last = found["agn", 10, 10], found["aeasgd", 40, 40]
    assert (first.seconds, last.seconds) == (1066.08, 250.74)
    shares = [first.training, first.validation, last.training, last.validation]
    assert shares == pytest.approx([1.0, 0.9843, 0.9665, 0.9745])
    assert all(0.9 < cell.validation < cell.training + 0.02 for cell in found.values())


def test_the_stand_in_is_the_same_at_every_call_and_no_picture_is_of_two_sets():
    one, more = stand_in(300, 100), stand_in(500, 100)
    assert one.name == STAND_IN and one.inputs.shape == (300, 784)
    assert one.digest() == stand_in(300, 100).digest() != more.digest()
    assert np.array_equal(one.test_inputs, more.test_inputs)
    assert one.inputs.min() >= 0 and one.inputs.max() <= 1
    assert set(one.test_labels.tolist()) == set(range(10))


def mnist_files(folder, training=40, test=20):
    """Pictures of random pixels as MNIST's four idx files, some gzipped, and as one .npz file."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    arrays = {}
    for part, letter, count in (("train", "train", training), ("t10k", "test", test)):
        pictures = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        arrays |= {f"x_{letter}": pictures, f"y_{letter}": labels}
        for kind, array in (("images-idx3", pictures), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            path = folder / f"{part}-{kind}-ubyte"
            if part == "train":
                path.write_bytes(head + array.tobytes())
            else:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(head + array.tobytes()))
    np.savez(folder / "mnist.npz", **arrays)
    return folder


def test_mnist_is_read_from_idx_files_or_from_an_npz_file(tmp_path):
    folder = mnist_files(tmp_path / "files")
    one, other = read_mnist(folder), read_mnist(folder / "mnist.npz")
    assert one.name == MNIST and one.digest() == other.digest()
    assert one.inputs.shape == (40, 784) and one.inputs.dtype == np.float32
    assert 0.99 < one.inputs.max() <= 1
    assert one.first(7).labels.tolist() == list(range(7))
    assert one.first(99) is one is one.first(None)


@pytest.mark.parametrize("content", [b"", b"no file", b"\0\0\x08\3\0\0", b"\0\0\x0d\1\0\0\0\0"])
def test_files_that_are_not_mnist_are_refused_by_name(tmp_path, content):
    folder = mnist_files(tmp_path / "files")
    for name in ("train-images-idx3-ubyte", "mnist.npz"):
        (folder / name).write_bytes(content)
    for path in (folder, folder / "mnist.npz", tmp_path / "none.npz", tmp_path / "none"):
        with pytest.raises(FileFormatError, match=r"files|none"):
            read_mnist(path)
    np.savez(folder / "mnist.npz", **dict.fromkeys(thesis._NPZ_PARTS, np.zeros((3, 28, 28))))
    with pytest.raises(FileFormatError, match="no pictures of 28 x 28"):
        read_mnist(folder / "mnist.npz")


def test_the_perceptron_is_the_thesis_with_keras_first_values():
    model = thesis.perceptron(thesis.SIZES, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 4_798_010
    before = torch.get_rng_state()
    small, again, other = (thesis.perceptron(TINY, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(small[0].weight, again[0].weight)
    assert not torch.equal(small[0].weight, other[0].weight)
    limit = (6 / (784 + 8)) ** 0.5
    assert 0.9 * limit < float(small[0].weight.detach().abs().max()) <= limit
    assert not small[0].bias.any()


def test_a_grid_is_computed_once_and_equal_settings_give_equal_results(tmp_path, monkeypatch):
    settings, told = a_grid(tmp_path), []
    results, failures = run_grid(settings, jobs=0, tell=lambda text, share: told.append(share))
    assert not failures and told[-1] == 1.0
    assert list(results) == settings.cells and len(results) == 8
    # One worker has 5 steps, and commits after 2, 4 and 5; a share of 200 is 2 steps, one commit.
    for workers, staleness in ((1, 0.0), (3, None)):
        result = results[ThesisCell("agn", workers, 2, 0)]
        assert (result.commits, result.staleness) == (3, staleness)
    other = run_grid(replace(settings, out=tmp_path / "other"), jobs=0)[0]
    timeless = [replace(result, wall_seconds=0.0) for result in results.values()]
    assert timeless == [replace(result, wall_seconds=0.0) for result in other.values()]

    def refuse(*_arguments):
        raise AssertionError("nothing is computed again")

    with monkeypatch.context() as patch:
        patch.setattr(thesis, "train", refuse)
        assert run_grid(settings, jobs=0)[0] == results
        more = run_grid(replace(settings, seeds=2), jobs=0)
        assert more[0] == results and len(more[1]) == 8
        assert len(run_grid(replace(settings, epochs=2), jobs=0)[1]) == 8
        assert len(run_grid(settings, jobs=0, fresh=True)[1]) == 8


def test_a_cell_that_learns_long_enough_is_right(tmp_path):
    settings = a_grid(tmp_path, workers=(1,), epochs=40, rules=("downpour",), sizes=(784, 32, 10))
    (result,) = run_grid(settings, jobs=0)[0].values()
    assert result.training > 0.9
    assert result.validation > 0.3  # three times as often as by chance


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch):
    def diverge(*_arguments):
        raise DivergedError("downpour", "101 commits were refused, the last one as not finite")

    monkeypatch.setattr(thesis, "train", diverge)
    settings = a_grid(tmp_path, workers=(1,), rules=("downpour",), seeds=2)
    results, failures = run_grid(settings, jobs=0)
    assert not failures
    assert [r.validation for r in results.values()] == [None, None]
    assert tables_of(settings, results)[0].cells == [("1", "2", "0.00 ± 0.00 (2 of 2 diverged)")]


def test_the_workers_of_a_grid_must_have_samples(tmp_path):
    with pytest.raises(UsageError, match="40 workers have no sample each of 30"):
        run_grid(a_grid(tmp_path, workers=(1, 40), samples=30), jobs=0)


def made_up(settings):
    """Results whose validation accuracy tells n, lambda and rule."""
    values = {"agn": 0.9, "adag": 0.8, "aeasgd": 0.7, "downpour": 0.1}
    return {
        cell: thesis.ThesisResult(
            values[cell.rule] + cell.seed / 100 - (cell.workers == 15 and cell.rule == "agn") / 2,
            0.5, 10.0, 1.5, 3, "", 0.25,
        )
        for cell in settings.cells
    }  # fmt: skip


def test_ours_stand_beside_the_thesis_figures(tmp_path):
    settings = a_grid(tmp_path, workers=(10, 15, 7), windows=(10,), seeds=2)
    validation, training = tables_of(settings, made_up(settings))
    assert validation.head[2:] == (
        "AGN", "ADAG", "AEASGD", "DOWNPOUR", "AGN, thesis", "AEASGD, thesis"
    )  # fmt: skip
    assert validation.cells[0][2:] == (
        "90.50 ± 0.50", "80.50 ± 0.50", "70.50 ± 0.50", "10.50 ± 0.50", "98.43", "98.64",
    )  # fmt: skip
    assert validation.cells[2][-2:] == ("-", "-")  # the thesis has no 7 workers
    assert training.cells[0][-2:] == ("100.00", "99.22")
    assert "stand-in" in validation.title
    assert ordering(settings, made_up(settings)) == (
        "AGN's validation accuracy is above AEASGD's in 2 of 3 settings; in the thesis in 0 of the "
        "2 that it has"
    )


def test_the_page_and_the_file_say_which_data_they_are_of(tmp_path):
    folder = mnist_files(tmp_path / "files")
    for data, warns in (("", True), (str(folder), False)):
        settings = a_grid(tmp_path, data=data, samples=30, windows=(2, 3))
        page = render(settings, made_up(settings), facts=[("command", "made <here>")])
        assert (WARNING.split(":")[0] in page) == warns
        assert ("(stand-in data)" in page) == warns
        assert "made &lt;here&gt;" in page and "<script" not in page
        assert page.count("<svg") == 2
        text = lines_of(settings, made_up(settings)).csv_text().decode()
        lines = list(csv.DictReader(io.StringIO(text)))
        assert len(lines) == 16
        assert {line["data"] for line in lines} == {STAND_IN if warns else MNIST}
        assert {line["training_samples"] for line in lines} == {"30"}


@pytest.fixture
def bench(bench, monkeypatch):
    """The command, with a tiny network."""
    whole, work_off = thesis.perceptron, tasks.work_off
    monkeypatch.setattr(thesis, "perceptron", lambda _sizes, seed: whole(TINY, seed))
    monkeypatch.setattr(tasks, "work_off", lambda given, _, *more: work_off(given, 0, *more))
    return bench


SMALL = ("--workers", "1,2", "--windows", "2", "--epochs", 1, "--samples", 256, "--seeds", 1)


def test_the_command_prints_the_grid_and_marks_the_stand_in_everywhere(bench, tmp_path):
    status, out, err = bench("thesis", *SMALL, "--out", "grid")
    assert status == 0, err
    assert "AGN" in out and "DOWNPOUR" in out and "stand-in" in out
    assert "not MNIST" in err and "AGN's validation accuracy" in err
    page = (tmp_path / "grid" / "index.html").read_text()
    assert "stand-in" in page and "python -m reproductions thesis --workers 1,2 --windows 2" in page
    status, out, _ = bench("thesis", *SMALL, "--out", "grid", "--json")
    printed = json.loads(out)
    assert status == 0 and printed["data"] == STAND_IN and len(printed["cells"]) == 8
    assert len(list((tmp_path / "grid" / "rows").iterdir())) == 8


def test_the_command_takes_mnist_from_files(bench, tmp_path):
    folder = mnist_files(tmp_path / "files")
    status, out, err = bench("thesis", *SMALL, "--out", "grid", "--data", folder, "--json")
    assert status == 0 and json.loads(out)["data"] == MNIST
    assert "stand-in" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("thesis",), "--out: name the folder of the table, such as benchmarks/thesis"),
        (("thesis", "--out", "x", "--budget", "5s"), "--budget: does not go with thesis"),
        (("gdp", "--out", "x", "--workers", "2"), "--workers: does not go with gdp"),
        (("thesis", "--out", "x", "--workers", "1,0"), "'1,0' is not a list of numbers"),
        (("thesis", "--out", "x", "--windows", "all"), "'all' is not a list of numbers"),
        (("thesis", "--out", "x", "--data", "none"), "none"),
        (("thesis", "--out", "x", "--samples", "5"), "40 workers have no sample each of 5"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(bench, arguments, words):
    status, _, err = bench(*arguments)
    assert status == 2 and words in err and "Traceback" not in err
