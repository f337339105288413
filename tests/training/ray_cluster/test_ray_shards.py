"""The center spread over actors of its own."""

from dataclasses import replace

import pytest

from dovetail.errors import DovetailError, UnwritableError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Storage, Watcher
from dovetail.training.backends.ray import transport
from tests.support.doors import Doors
from tests.support.ray_runs import (
    SMALL,
    assign,
    assign_counts,
    each_sample_once_an_epoch,
    held_until,
    in_turn,
    kill,
    kinds,
    once,
)

run = load_backend("ray", **SMALL)
simulate = load_backend("simulated")
pytestmark = pytest.mark.usefixtures("cluster")


def test_shards_of_the_center_give_the_simulated_bits():
    plain = assign("adag", run="shards", size=11, shards=3)
    forced = replace(plain, order=in_turn(plain))
    assert run(forced, Watcher()).theta.tobytes() == simulate(forced, Watcher()).theta.tobytes()


def test_a_shard_that_is_killed_goes_on_where_the_others_are(tmp_path):
    """Commits travel to it in half the bytes, before and after."""
    storage = Storage(tmp_path / "run", snapshot_commits=5)
    doors = Doors(tmp_path)

    def kill_it():
        kill("shard", "shard-1")
        doors.open("killed")

    hold = held_until(doors, "killed", rows=8)
    assignment = assign_counts("shard", hold=hold, shards=2, storage=storage, wire="float16")
    outcome = run(assignment, once(8, kill_it))
    assert "server_restarted" in kinds(outcome)
    assert each_sample_once_an_epoch(outcome)


def test_a_ledger_that_dies_sends_its_shards_what_they_have_missed(tmp_path, dying):
    """Its first life ends after a commit's record, its second within a snapshot."""
    storage = Storage(tmp_path / "run", snapshot_commits=5)
    dying(("journalled", 2), ("snapshot-half", 2))
    outcome = run(assign_counts("ledger", shards=2, storage=storage), Watcher())
    assert kinds(outcome).count("server_restarted") >= 2
    assert each_sample_once_an_epoch(outcome)


@pytest.mark.parametrize("method", ["stage", "execute"])
def test_a_shard_whose_disk_is_full_ends_the_run_with_its_traceback(method, monkeypatch):
    def full(shard, *arguments):
        raise UnwritableError("/full/log", "no space left on device")

    class FullShard(transport.Shard):
        pass

    setattr(FullShard, method, full)
    monkeypatch.setattr(transport, "Shard", FullShard)
    with pytest.raises(DovetailError, match="no space left on device") as caught:
        run(assign_counts(f"full-{method}", shards=2, workers=1), Watcher())
    assert "in full" in str(caught.value) + getattr(caught.value, "traceback", "")
