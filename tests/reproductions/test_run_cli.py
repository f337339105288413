"""`python -m reproductions`, in process but for its worker."""

import csv
import json

import pytest

from reproductions import cases, tasks
from reproductions.methods import METHODS, PLAIN
from tests.support.tiny_tables import CASES

GDP = ("gdp", "--out", "benchmarks/gdp")


@pytest.fixture
def bench(bench, monkeypatch):
    """The command, with tiny rows in GDP's table."""
    monkeypatch.setitem(cases.CASES, "gdp", CASES)
    return bench


def test_bench_writes_page_and_csv_prints_one_object_and_continues_what_is_kept(bench, tmp_path):
    one_row = (*GDP, "--rows", "tiny-2gpu", "--budget", "20e", "--jobs", 1, "--learn", "")
    status, out, err = bench(*one_row, "--json")
    assert status == 0, err
    printed = json.loads(out)
    folder = tmp_path / "benchmarks" / "gdp"
    assert "Tiny, 2 GPUs" in (folder / "index.html").read_text()
    lines = list(csv.DictReader((folder / "rows.csv").open()))
    assert {line["method"] for line in lines} >= set(METHODS[PLAIN])
    assert printed["missing"] == ["tiny-4gpu"]
    assert printed["failures"] == {}
    (row,) = printed["rows"]
    found = row["columns"][PLAIN]
    assert list(row["columns"]) == [PLAIN]
    assert list(found["methods"]) == list(METHODS[PLAIN])
    assert found["value"] == found["methods"][found["best"]] >= found["lower_bound"] > 0
    status, out, _ = bench(*one_row)
    assert status == 0
    assert "Tiny, 2 GPUs" in out
    status, out, _ = bench(*one_row, "--json")
    assert json.loads(out)["tasks"] == 0


def test_a_row_that_fails_is_told_of_and_ends_with_status_1(bench, monkeypatch):
    monkeypatch.setattr(tasks, "work_off", lambda *_: {"tiny-2gpu plain": "a traceback"})
    status, out, err = bench(*GDP, "--json")
    assert status == 1
    assert "a traceback" in err
    assert json.loads(out)["missing"] == ["tiny-2gpu", "tiny-4gpu"]


def test_an_interrupt_ends_with_status_130(bench, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "work_off", interrupted)
    status, _, err = bench(*GDP)
    assert status == 130
    assert "interrupted" in err
    assert not (tmp_path / "benchmarks" / "gdp" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gdp", "--rows", "huge-*"), "matches none of tiny-2gpu, tiny-4gpu"),
        (("gdp", "--budget", "soon"), "is not a budget"),
        (("gdp", "--learn", "20s"), "is no number of placements"),
        (("gdp", "--learn", "9e,hdp=many"), "is no number of placements"),
        (("gdp", "--learn", "9e,seq2seq=9e"), "'seq2seq' is not one of gdp, auto@gdp, gdp-paper"),
        (("gdp", "--seeds", "0"), "--seeds"),
        (("gdp", "--seed", "-1"), "seed"),
        (("gdp", "--jobs", "0"), "--jobs"),
        (("alphago",), "alphago"),
        (("gdp", "--out", "file"), "is a file"),
        (("gdp",), "name the folder"),
    ],
)
def test_wrong_input_ends_with_status_2_before_the_long_work(
    bench, monkeypatch, tmp_path, arguments, said
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tasks, "work_off", None)
    status, _, err = bench(*arguments)
    assert status == 2
    assert said in err
