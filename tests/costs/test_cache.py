import math
import sqlite3
import subprocess
import sys
import time

import pytest

from dovetail.costs.cache import PACE_LASTS_SECONDS, CostCache, MeasuredCost
from dovetail.errors import FileFormatError, UnwritableError


def test_what_is_added_is_found_by_device_and_signature(tmp_path):
    cache = CostCache(tmp_path / "new" / "costs.sqlite")
    cache.add_costs("cpu", {"mm": MeasuredCost(1.0, 0.1), "add": MeasuredCost(2.0, 0.2)})
    assert cache.costs("cpu", ["mm", "tanh"]) == {"mm": MeasuredCost(1.0, 0.1)}
    assert cache.costs("gpu", ["mm"]) == {}
    cache.add_costs("cpu", {"mm": MeasuredCost(3.0, 0.1)})
    assert cache.costs("cpu", ["mm"])["mm"].seconds == 3.0


def test_probes_are_kept(tmp_path):
    cache = CostCache(tmp_path / "costs.sqlite")
    assert cache.probe("cpu") is None
    cache.add_probe("cpu", {"link": {"latency_seconds": 1e-6}})
    assert CostCache(tmp_path / "costs.sqlite").probe("cpu") == {"link": {"latency_seconds": 1e-6}}


def test_the_best_pace_is_kept_until_it_is_old(tmp_path, monkeypatch):
    cache = CostCache(tmp_path / "costs.sqlite")
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    assert cache.pace("core") == math.inf
    for seconds, best in ((3.0, 3.0), (2.0, 2.0), (2.5, 2.0)):
        cache.add_pace("core", seconds)
        assert cache.pace("core") == best
    assert cache.pace("another") == math.inf
    now += PACE_LASTS_SECONDS
    assert cache.pace("core") == math.inf
    cache.add_pace("core", 2.5)
    assert cache.pace("core") == 2.5


def test_several_processes_write_one_cache(tmp_path):
    path = tmp_path / "costs.sqlite"
    script = (
        "import sys; from pathlib import Path\n"
        "from dovetail.costs.cache import PACE_LASTS_SECONDS, CostCache, Measured\n"
        "cache = CostCache(Path(sys.argv[1]))\n"
        "for i in range(50): cache.add_costs(sys.argv[2], {str(i): Measured(float(i), 0.0)})\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in ("a", "b")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    for name in ("a", "b"):
        assert len(CostCache(path).costs(name, map(str, range(50)))) == 50


def test_a_file_that_is_no_cache_is_named(tmp_path):
    path = tmp_path / "costs.sqlite"
    path.write_text("not a database, but long enough to be read as a page of one" * 99)
    with pytest.raises(FileFormatError, match="remove the file"):
        CostCache(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableError):
        CostCache(tmp_path / "file" / "costs.sqlite")


def test_rows_survive_a_reader_that_dies_in_a_transaction(tmp_path):
    path = tmp_path / "costs.sqlite"
    cache = CostCache(path)
    cache.add_costs("cpu", {"mm": MeasuredCost(1.0, 0.0)})
    open_transaction = sqlite3.connect(path)
    open_transaction.execute("BEGIN")
    open_transaction.execute("SELECT * FROM costs").fetchall()
    open_transaction.close()
    assert cache.costs("cpu", ["mm"])
