"""`benchmarks/stages/cpu.py` and `additivity.py` on tiny networks."""

import importlib
import json
import signal
import time
from math import comb
from pathlib import Path

import pytest
import torch

from tests.support.benchmark_scripts import BENCHMARKS, benchmark_scripts

TINY = "zoo:squeezenet_1_1?batch=1&size=64&classes=10"
OURS = ["sequential", "greedy", "merge", "dos", "ios", "dataflow"]


@pytest.fixture(scope="module")
def scripts():
    with benchmark_scripts(
        "stages", "cpu", "additivity", "cpu_peers", "children", "harness"
    ) as modules:
        yield modules


def test_a_network_is_measured_once_and_kept(scripts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "cpu.json"
    given = ["--networks", TINY, "--rounds", "2", "--peers", "eager", "--out", str(out)]
    scripts.cpu.main(given)
    record = json.loads(out.read_text())[TINY]
    assert record["absent"] == {}  # eager has our weights
    assert record["peers"]["eager"]["difference"] < 1e-4
    threads = record["settings"]["threads"]
    names = [*OURS, *(["one thread"] if threads > 1 else []), "eager"]
    assert {name: len(of) for name, of in record["seconds"].items()} == dict.fromkeys(names, 2)
    assert record["chosen"] in names
    text = capsys.readouterr().out
    assert text.count(f"| {TINY} | ") == 3

    monkeypatch.setattr(scripts.children, "_in_child", lambda _command: None)
    scripts.cpu.main(given)  # needs no child
    assert capsys.readouterr().out == text
    for changed in (["--seed", "1"], ["--again"]):
        kept = out.read_text()
        if changed == ["--again"]:
            scripts.cpu.main([*given, *changed])  # its child failed: what was there remains
        else:
            with pytest.raises(SystemExit, match="1"):
                scripts.cpu.main([*given, *changed])
        assert out.read_text() == kept


def test_random_schedules_are_predicted_and_run(scripts):
    given = ["--schedules", "5", "--rounds", "2", "--groups", "4", "--out", "unused"]
    record = scripts.additivity.one(TINY, scripts.additivity.parse(given))
    assert len(record["predicted"]) == len(record["seconds"]) == len(record["stages"]) == 5
    assert all(len(of_one) == 2 and min(of_one) > 0 for of_one in record["seconds"])
    assert min(record["predicted"]) > 0
    assert scripts.additivity.tables({TINY: record}).count(f"| {TINY} | 5 | ") == 1


def test_figures_of_predictions(scripts):
    rounds = [[1.0, 1.0, 1.1, 1.1], [2.0, 2.1, 2.0, 2.1], [2.02, 2.02, 2.02, 2.02], [4.0] * 4]
    record = {"predicted": [1.05, 1.0, 2.0, 8.0], "seconds": rounds, "stages": [1] * 4}
    own = scripts.additivity.figures(record)
    halves = [0.0, 2.1 / 2.0 - 1, 0.0, 0.0]
    assert own["noise"] == pytest.approx(sorted(halves)[2] + 0.85 * max(halves))
    # medians 1.05, 2.05, 2.02, 4: all but the second and the third are further apart
    assert own["compared"] == pytest.approx(5 / 6)
    assert own["right"] == pytest.approx(4 / 5)  # not the first two
    assert own["right_of_all"] == pytest.approx(4 / 6)
    assert own["error"] == pytest.approx((0 + 1.05 / 2.05 + 0.02 / 2.02 + 1) / 4, abs=1e-6)
    assert (own["fastest"], own["slowest"]) == pytest.approx((1050, 4000))


@pytest.mark.parametrize("size", [1, 5, 6, 9, 25, 60])
def test_intervals_hold_the_median_as_often_as_they_say(scripts, size):
    low, high = scripts.cpu.interval([float(value) for value in range(size)])
    assert low + high == size - 1
    outside = 2 * sum(comb(size, k) for k in range(int(low) + 1)) / 2**size
    assert outside <= 0.05 or low == 0
    assert outside + 2 * comb(size, int(low) + 1) / 2**size > 0.05  # none is narrower


def test_ratios_are_of_the_same_round(scripts):
    seconds = {"sequential": [1.0, 2.0, 4.0], "ios": [0.5, 1.0, 2.0], "one thread": [0.9, 1.0, 5.0]}
    record = {"seconds": seconds}
    assert scripts.cpu.ratio(record, "ios") == "0.500 (0.500 to 0.500)"
    assert scripts.cpu.best_plain(record) == "one thread"
    assert scripts.cpu.ratio(record, "ios", "one thread") == "0.556 (0.400 to 1.000)"


def fails(_given):
    raise ValueError("first line\nsecond line")


def is_slow(_given):
    try:
        time.sleep(60)
    except Exception:
        return lambda: None
    return lambda: None


def is_missing(_given):
    return importlib.import_module("no_such_peer")


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (fails, "ValueError: first line"),
        (is_slow, "not ready after 1 s"),
        (is_missing, "no_such_peer is not installed"),
        (lambda given: lambda: [given.inputs[0] + 0.01], "its outputs differ by 0.01 of the larg"),
        (lambda given: lambda: [given.inputs[0] * torch.nan], "its outputs differ by inf"),
        (lambda given: lambda: [given.inputs[0][:1]], "its outputs differ by inf"),
        (lambda given: lambda: list(given.inputs) * 2, "ValueError"),
    ],
)
def test_peers_that_cannot_be_had_are_absent(scripts, monkeypatch, peer, reason):
    monkeypatch.setitem(scripts.cpu_peers.PEERS, "tried", peer)
    inputs = (torch.ones(3),)
    before = signal.getsignal(signal.SIGALRM)
    given = scripts.cpu_peers.Given(torch.nn.Identity(), inputs, torch.get_num_threads(), Path())
    found = scripts.cpu_peers.prepared("tried", given, list(inputs), 1.0)
    assert found.run is None
    assert found.reason.startswith(reason)
    assert signal.getsignal(signal.SIGALRM) == before
    assert scripts.cpu_peers.prepared("eager", given, list(inputs), 1.0).run() is inputs[0]


def test_the_tables_have_their_places(scripts, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text((BENCHMARKS / "stages" / "README.md").read_text("utf-8"))
    for name in ("cpu.py", "additivity.py"):
        scripts.harness.fill(readme, f"table of {name}", f"figures of {name}")
        assert f"figures of {name}" in readme.read_text()
