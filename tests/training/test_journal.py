"""The folder of a run: what was torn is cut off, what was changed is named; it has one owner."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from dovetail.errors import JournalError, RunMismatchError, UnwritableError, UsageError
from dovetail.training.backends.contract import Storage
from dovetail.training.checks import checksum
from dovetail.training.journal import Journal, stored_identity
from dovetail.training.rules import make_rule
from tests.support.serving import job

RULE = "adag"
VECTOR = np.random.default_rng(1).standard_normal(5).astype(np.float32)


def opened(folder, *, resume=True, of=None, rule=None, **options):
    storage = Storage(folder, **options)
    return Journal(storage, of or job(), rule or make_rule(RULE), resume=resume)


def append(journal, number):
    vector = VECTOR * number if number % 2 else None
    header = {"kind": "turn", "number": number}
    journal.append(header, vector, 0 if vector is None else checksum(vector))


def written(folder, records=4, first=0):
    """A folder with a snapshot and a log of some records."""
    journal = opened(folder)
    journal.snapshot({"first": first}, {"theta": VECTOR, "slot a": VECTOR[:2].astype(np.float64)})
    for number in range(records):
        append(journal, number)
    journal.close()
    return folder


def read(folder):
    """(state, vectors, records) as they come back."""
    journal = opened(folder)
    try:
        state, vectors = journal.load()
        return state, vectors, list(journal.records())
    finally:
        journal.close()


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def check_records(records, count):
    assert [record.header["number"] for record in records] == list(range(count))
    for number, record in enumerate(records):
        if number % 2:
            np.testing.assert_array_equal(record.vector, VECTOR * number)
        else:
            assert record.vector is None


def test_what_was_written_comes_back(tmp_path):
    state, vectors, records = read(written(tmp_path))
    assert state == {"first": 0}
    np.testing.assert_array_equal(vectors["theta"], VECTOR)
    assert vectors["slot a"].dtype == np.float64
    check_records(records, 4)


@pytest.mark.parametrize("sync", [False, True])
def test_the_log_goes_on_where_it_ended(sync, tmp_path):
    written(tmp_path, records=3)
    journal = opened(tmp_path, sync=sync)
    journal.load()
    assert len(list(journal.records())) == 3
    append(journal, 3)
    journal.close()
    check_records(read(tmp_path)[2], 4)


def test_a_new_snapshot_replaces_the_old_one_and_its_log(tmp_path):
    journal = opened(tmp_path, resume=False)
    for snapshot in range(3):
        journal.snapshot({"at": snapshot}, {"theta": VECTOR * snapshot})
        append(journal, 2 * snapshot)
        append(journal, 2 * snapshot + 1)
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lock",
        "log-000000000004",
        "run.json",
        "snapshot-000000000004",
    ]
    state, _, records = read(tmp_path)
    assert state == {"at": 2}
    assert [record.header["number"] for record in records] == [4, 5]


def test_a_log_torn_at_any_length_ends_with_its_last_whole_record(tmp_path):
    path = only(written(tmp_path), "log-*")
    whole = path.read_bytes()
    starts = [place for place in range(len(whole)) if whole.startswith(b"rec\n", place)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        journal = opened(tmp_path)
        journal.load()
        records = list(journal.records())
        count = max(sum(start <= length for start in starts) - 1, 0)
        check_records(records, count)
        append(journal, count)  # what comes next follows on what was kept
        journal.close()
        check_records(read(tmp_path)[2], count + 1)


@pytest.mark.parametrize("pattern", ["log-*", "snapshot-*", "run.json"])
def test_any_flipped_byte_is_named(pattern, tmp_path):
    path = only(written(tmp_path), pattern)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises((JournalError, RunMismatchError)) as caught:
            read(tmp_path)
        if pattern != "run.json":
            assert caught.value.path == str(path)
            assert "byte" in caught.value.detail
    path.write_bytes(whole)
    check_records(read(tmp_path)[2], 4)


@pytest.mark.parametrize("cut", [slice(0, 1), slice(1, 2), slice(1, 3)])
def test_a_record_that_is_missing_or_out_of_place_is_named(cut, tmp_path):
    path = only(written(tmp_path), "log-*")
    whole = path.read_bytes()
    starts = [place for place in range(len(whole)) if whole.startswith(b"rec\n", place)]
    assert len(starts) == 4
    path.write_bytes(whole[: starts[cut.start]] + whole[starts[cut.stop] :])
    with pytest.raises(JournalError, match="should follow"):
        read(tmp_path)


def test_bytes_behind_a_snapshot_are_named(tmp_path):
    path = only(written(tmp_path), "snapshot-*")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(JournalError, match="goes on"):
        read(tmp_path)


@pytest.mark.parametrize("pattern", ["log-*", "snapshot-*"])
def test_a_file_of_the_format_before_is_refused_by_its_version(pattern, tmp_path):
    path = only(written(tmp_path), pattern)
    content = path.read_bytes()
    path.write_bytes(content[:6] + b"1" + content[7:])
    with pytest.raises(JournalError, match="of format 1, written by another version") as caught:
        read(tmp_path)
    assert caught.value.path == str(path)


def test_a_folder_belongs_to_one_run(tmp_path):
    written(tmp_path)
    kept = stored_identity(tmp_path)
    fields = {"run": job().run} | job().facts()
    assert {name: kept[name] for name in fields} == fields
    assert stored_identity(tmp_path / "none") is None
    for field, others in {
        "run": {"of": job(run="s")},
        "batch": {"of": job(batch=2)},
        "rule": {"rule": make_rule("adag-agn")},
        "option gamma": {"rule": make_rule(RULE, gamma=1.0)},
    }.items():
        with pytest.raises(RunMismatchError) as caught:
            opened(tmp_path, **others)
        assert caught.value.field == field
        assert caught.value.folder == str(tmp_path)
        assert caught.value.expected != caught.value.found
    with pytest.raises(RunMismatchError):
        opened(tmp_path, rule=make_rule("downpour"))


def test_another_runs_log_is_not_read_in_its_place(tmp_path):
    ours, theirs = written(tmp_path / "ours"), tmp_path / "theirs"
    journal = opened(theirs, of=job(run="s"))
    journal.snapshot({}, {"theta": VECTOR})
    append(journal, 0)
    journal.close()
    os.replace(only(theirs, "log-*"), only(ours, "log-*"))
    with pytest.raises(JournalError, match="no record of this run"):
        read(ours)


def test_a_run_is_not_started_over_by_mistake(tmp_path):
    written(tmp_path)
    with pytest.raises(UsageError, match="resume"):
        opened(tmp_path, resume=False)


def test_two_servers_never_write_to_one_folder(tmp_path):
    first = opened(tmp_path)
    with pytest.raises(UsageError, match="another server"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    journal = opened(tmp_path)
    journal.snapshot({}, {"theta": VECTOR})
    append(journal, 0)
    writev = os.writev

    def full(descriptor, pieces):
        writev(descriptor, [pieces[0][:10]])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(UnwritableError, match="No space left"):
        append(journal, 1)
    monkeypatch.setattr(os, "writev", lambda d, pieces: writev(d, [pieces[0][:7]]))  # short writes
    append(journal, 1)
    journal.close()
    monkeypatch.undo()
    check_records(read(tmp_path)[2], 2)


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    written(tmp_path)
    journal = opened(tmp_path)
    journal.load()
    assert len(list(journal.records())) == 4

    def full(descriptor, pieces):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        with pytest.raises(UnwritableError):
            journal.snapshot({"first": 1}, {"theta": VECTOR})
    append(journal, 4)
    journal.close()
    state, _, records = read(tmp_path)
    assert state == {"first": 0}
    check_records(records, 5)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableError):
        opened(tmp_path / "file" / "run")


def test_a_long_log_asks_for_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail.training.journal.LEAST_LOG_BYTES", 1000)
    journal = opened(tmp_path)
    journal.snapshot({}, {"theta": VECTOR})
    size_bytes = only(tmp_path, "snapshot-*").stat().st_size
    while not journal.long:
        append(journal, journal.number)
    grown = only(tmp_path, "log-*").stat().st_size
    assert max(1000, 16 * size_bytes) < grown < 16 * size_bytes + 1000
    journal.snapshot({}, {"theta": VECTOR})
    assert not journal.long
    journal.close()


def test_options_are_compared_as_they_are_kept(tmp_path):
    rule = replace(make_rule(RULE), options={"pair": (1, 2)})
    opened(tmp_path, rule=rule).close()
    opened(tmp_path, rule=rule).close()  # the same run
    other = replace(rule, options={"pair": (1, 3)})
    with pytest.raises(RunMismatchError, match="pair"):
        opened(tmp_path, rule=other)
