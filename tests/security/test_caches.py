"""Caches that others have written to: their code does not run."""

import os
import sqlite3

import pytest

from dovetail.costs.cache import CostCache, MeasuredCost
from dovetail.errors import FileFormatError
from dovetail.executors import compiling
from dovetail.executors.compiling import CompileTarget, load_code
from dovetail.runtime import native
from dovetail.runtime.files import is_own, own_cache


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A file of compiled code that tells when it runs; (its path, whether it ran)."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    ran, target = tmp_path / "ran", CompileTarget(1)
    compiling._write(compiling._path("k", target, "py"), f"open({str(ran)!r}, 'w')")
    compiling._write(compiling._path("k", target, "json"), '{"metas": []}')
    return compiling._path("k", target, "py"), ran


def test_code_in_a_folder_of_ones_own_runs(code):
    assert load_code("k", CompileTarget(1)) is None  # it has no `call`
    assert code[1].exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_code_in_a_folder_that_others_can_write_does_not_run(code, mode):
    path, ran = code
    path.parent.chmod(mode)
    assert load_code("k", CompileTarget(1)) is None
    assert not ran.exists()


@pytest.mark.parametrize("which", ["file", "folder"])
def test_code_of_another_user_does_not_run(code, monkeypatch, which):
    path, ran = code
    us, (of, other) = os.getuid(), (path, path.parent) if which == "file" else (path.parent, path)
    if us == 0:
        os.chown(of, 12345, -1)
    else:
        # Nobody but root may give files away: then it is we who are somebody else.
        monkeypatch.setattr(os, "getuid", lambda: us + 1)
    assert not is_own(path)
    assert load_code("k", CompileTarget(1)) is None
    assert not ran.exists()
    assert us or other.stat().st_uid == us


def test_a_runner_that_others_can_write_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv(native.SWITCH, str(tmp_path))
    path = native._path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    path.chmod(0o600)
    loaded = []
    monkeypatch.setattr(native, "_loaded", loaded.append)
    for folder, file in ((0o777, 0o600), (0o700, 0o620), (0o700, 0o602)):
        path.parent.chmod(folder)
        path.chmod(file)
        assert native.native_runner() is None
    assert loaded == []
    path.chmod(0o600)
    native.native_runner()
    assert loaded == [path]


def test_torch_compile_keeps_its_code_in_the_cache_and_not_in_tmp(tmp_path, monkeypatch):
    """Its own folder, /tmp/torchinductor_USER, can be made by anybody."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    # What torch itself sets as soon as dynamo is imported.
    monkeypatch.setenv(name, default_cache_dir())
    with own_cache():
        assert os.environ[name] == str(tmp_path / "compiled" / "inductor")
    # The caller's own compilations stay where they were.
    assert os.environ[name] == default_cache_dir()
    monkeypatch.delenv(name)
    with own_cache():
        assert os.environ[name] == str(tmp_path / "compiled" / "inductor")
    assert name not in os.environ
    monkeypatch.setenv(name, "/of/the/users")
    with own_cache():
        assert os.environ[name] == "/of/the/users"


STRANGE = {
    "an endless view": """
        DROP TABLE costs;
        CREATE VIEW costs AS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)
        SELECT 'd' AS device, i AS signature, 1.0 AS seconds, 0.0 AS spread FROM n WHERE i < 0;""",
    "a trigger": """
        CREATE TRIGGER t AFTER INSERT ON costs BEGIN DELETE FROM probes; END;""",
    "a column that is computed": """
        DROP TABLE paces;
        CREATE TABLE paces (core TEXT PRIMARY KEY, measured_at REAL,
                            seconds REAL AS (length(hex(zeroblob(400000000)))));""",
    "a virtual table": "CREATE VIRTUAL TABLE t USING fts5(a);",
}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_more_than_tables_of_ours_is_no_cost_cache(strange, tmp_path):
    path = tmp_path / "costs.sqlite"
    CostCache(path).add_costs("d", {"mm": MeasuredCost(1.0, 0.1)})
    assert CostCache(path).costs("d", ["mm"])
    db = sqlite3.connect(path)
    try:
        db.executescript(STRANGE[strange])
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite makes none: {error}")
    finally:
        db.close()
    with pytest.raises(FileFormatError, match="other tables, views or triggers"):
        CostCache(path)
