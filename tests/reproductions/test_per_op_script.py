"""benchmarks/learned/per_op.py on a network of a few dozen ops."""

import pytest

from dovetail.errors import UsageError
from tests.support.benchmark_scripts import benchmark_scripts

MODEL = "zoo:rnnlm?layers=1&hidden=16&batch=3&vocabulary=50&steps=2"
QUICK = ("--model", MODEL, "--trials", "16", "--updates", "1", "--groups", "5", "--budget", "50e")


@pytest.fixture(scope="module")
def script():
    with benchmark_scripts("learned", "per_op") as modules:
        yield modules.per_op


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("per-op")


@pytest.fixture
def measured(script, monkeypatch):
    """(row, seed) of everything that is measured, in this process."""
    done = []

    def measure(task, name, seed, options):
        done.append((name, seed))
        return script.measure(task, name, seed, options)

    monkeypatch.setattr(script, "measure_apart", measure)
    return done


def test_every_row_places_the_same_ops_and_is_kept(script, folder, measured, capsys):
    script.main([*QUICK, "--out", str(folder)])
    text = capsys.readouterr().out
    lines = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in _rows(text)}
    assert len(lines) == len(script.ROWS) == len(measured)
    groups = {name: line[1] for name, line in lines.items()}
    tuned = groups.pop("shipped policy, 1 updates of fine-tuning")
    assert len(set(groups.values())) == 1  # what colocation leaves, for all others
    assert int(tuned) < int(groups["expert"])
    assert lines["expert"][7].startswith("1.000")
    drawn = {name: line[2] for name, line in lines.items() if line[2] != "-"}
    assert drawn["`gdp-paper`, a short training from nothing"] == "16"
    assert drawn["shipped policy, its likeliest placement"] == "1"
    measured.clear()
    script.main([*QUICK, "--out", str(folder), "--rows", "auto,one-gpu", "--seeds", "2"])
    assert measured == [("auto", 1)]  # the rest is kept, and one GPU has no seed


def test_a_library_that_is_not_there_is_a_reason_and_tried_again(
    script, folder, measured, monkeypatch, capsys
):
    def missing(task, seed, options):
        raise UsageError("metis", "pymetis is not installed")

    monkeypatch.setitem(script.ROWS, "metis", script.Row("METIS", missing))
    for _ in range(2):
        script.main([*QUICK, "--out", str(folder / "missing"), "--rows", "metis"])
        assert "pymetis is not installed" in _rows(capsys.readouterr().out)[0]
    assert [name for name, _ in measured] == ["expert", "metis", "metis"]


def test_a_row_has_medians_and_the_spread_of_seeds(script):
    def run(seconds, wall):
        reason = "" if seconds else "OOM: p100:0 needs more"
        return script.Measured(7, None, wall, wall, 2**30, seconds, reason)

    line = script.line_of("x", [run(3.0, 1.0), run(1.0, 5.0), run(2.0, 2.0)], 4.0)
    assert line == (
        "x",
        "7",
        "-",
        "2.0 s",
        "2.0 s",
        "1.00 GiB",
        "2.000 s (1.000 to 3.000)",
        "0.500",
    )
    assert script.line_of("x", [run(3.0, 1.0), run(None, 1.0)], 4.0)[6:] == (
        "OOM: p100:0 needs more", "-",
    )  # fmt: skip


def _rows(text):
    return text.split("---: |\n")[1].strip().splitlines()
