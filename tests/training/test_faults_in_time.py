"""Faults in virtual time: what the runs promise, and that broken promises are found."""

import dataclasses
import errno
import os

import pytest

from dovetail.training import journal, ledger, server
from dovetail.training.records import Verdict
from tests.support.benchmark_scripts import benchmark_scripts

RUNS = 150
LOOKED_AT = 400
"""A planted bug is found within so many runs."""


@pytest.fixture(scope="module")
def virtual():
    with benchmark_scripts("faults", "virtual") as scripts:
        yield scripts.virtual


def first_failure(virtual, folder, plans):
    for plan in plans:
        if found := virtual.failure_of(plan, folder):
            return plan, found
    return None, ""


def plans(virtual, **changes):
    return (dataclasses.replace(virtual.plan_of(seed), **changes) for seed in range(LOOKED_AT))


def test_runs_keep_their_promises_under_faults(virtual, tmp_path):
    found = virtual.run_many(0, RUNS, str(tmp_path))
    assert found["failures"] == []
    assert set(found["faults"]) >= {
        "lost", "doubled", "late", "garbled", "server", "power", "worker", "pause", "link", "clock",
    }  # fmt: skip
    for what in ("restarts", "lost_records", "refused", "unwritable"):
        assert found["shown"][what] > RUNS / 10


def test_the_same_plan_is_the_same_run(virtual, tmp_path):
    tallies = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        tallies.append(virtual.PlayedRun(virtual.plan_of(3), folder).run())
    assert tallies[0] == tallies[1]


def test_a_commit_that_counts_twice_is_found(virtual, tmp_path, monkeypatch):
    check = ledger.Ledger.check

    def never_a_duplicate(self, commit):
        found = check(self, commit)
        if found is Verdict.DUPLICATE:
            self._members[commit.worker].lease = self._leases.take()
            return None
        return found

    monkeypatch.setattr(ledger.Ledger, "check", never_a_duplicate)
    assert first_failure(virtual, tmp_path, plans(virtual))[1]


def test_samples_that_nobody_gets_back_are_found(virtual, tmp_path, monkeypatch):
    monkeypatch.setattr(
        ledger.Leases, "give_back", lambda self, lease: self._held.pop(lease.number)
    )
    _, found = first_failure(virtual, tmp_path, plans(virtual))
    assert "samples" in found


def test_an_input_that_is_not_logged_is_found(virtual, tmp_path, monkeypatch):
    log = server.Server._log

    def forgetful(self, header, payload=server.NO_PAYLOAD):
        kept, journal_ = self._journal, self._journal
        if header["kind"] == "evict":
            self._journal = None
        try:
            return log(self, header, payload)
        finally:
            self._journal = kept and journal_

    monkeypatch.setattr(server.Server, "_log", forgetful)
    _, found = first_failure(virtual, tmp_path, plans(virtual))
    assert "differs from what it was" in found


def test_a_log_that_is_not_synced_is_found(virtual, tmp_path, monkeypatch):
    def claims_to(self, storage, *args, **options):
        original(self, dataclasses.replace(storage, sync=False), *args, **options)

    original = journal.Journal.__init__
    monkeypatch.setattr(journal.Journal, "__init__", claims_to)
    _, found = first_failure(virtual, tmp_path, plans(virtual, sync=True, syncs=(), log=True))
    assert "lost with an honest disk" in found


def test_a_changed_byte_that_is_taken_is_found(virtual, tmp_path, monkeypatch):
    monkeypatch.setattr(journal.zlib, "crc32", lambda *_args: 0)
    monkeypatch.setattr(journal, "checksum", lambda _vector: 0)
    rotten = (p for p in plans(virtual) if any(kind == "rot" for _, kind, _ in p.moments))
    assert first_failure(virtual, tmp_path, rotten)[1]


def test_an_error_without_a_type_is_found_and_shrunk(virtual, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "UnwritableError", lambda _path, text: OSError(errno.EIO, text))
    plan, found = first_failure(virtual, tmp_path, plans(virtual))
    assert found.startswith("OSError")
    small = virtual.shrunk(plan, tmp_path)
    assert small.faults == len(small.writes) == 1 < plan.faults
    assert virtual.failure_of(small, tmp_path).startswith("OSError")


def test_nothing_is_left_behind(virtual, tmp_path):
    virtual.run_many(0, 5, str(tmp_path))
    assert os.listdir(tmp_path) == []
