"""A run's folder of unknown origin: what is kept there goes nowhere else."""

import base64
import json
import os
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from torch import ones

from dovetail.errors import FileFormatError, UsageError
from dovetail.executors import rank_checkpoints
from dovetail.placers.learned.log import LogEntry, LogReaders
from dovetail.runtime import files
from dovetail.training.trainer import Trainer
from reproductions import __main__ as benching
from reproductions.store import Store
from tests.placers.learned.test_learning import learn_table
from tests.support.training_models import SGD, cross_entropy, perceptron, table


def fit(folder, **options):
    options = {"rule": "sync", "workers": 1, "epochs": 2, "backend": "simulated"} | options
    trainer = Trainer(perceptron(), cross_entropy, SGD, batch=8, folder=folder, **options)
    return trainer.fit(table(), table(8))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The names of a run's files, and their contents."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    fit(folder)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def test_a_run_is_not_resumed_through_links(kept, tmp_path):
    names = sorted(kept)
    logs = [name for name in names if name.name.startswith(("log-", "snapshot-"))]
    assert {"trainer.json", "evaluations.json", "best.npy", "lock"} <= {n.name for n in names}
    assert len(logs) == 2
    for number, link in enumerate((*names, Path("center/.snapshot.tmp"))):
        folder, outside = tmp_path / str(number), tmp_path / f"outside-{number}"
        for name, content in kept.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        outside.write_bytes(content := kept.get(link, b"of somebody's"))
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(outside)
        with pytest.raises(FileFormatError, match="a link") as caught:
            fit(folder, resume=True)
        assert caught.value.path == str(folder / link)
        assert outside.read_bytes() == content


def test_a_run_is_not_begun_through_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "center").symlink_to(outside)
    with pytest.raises(FileFormatError, match="a link"):
        fit(tmp_path / "run")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["best.npy", "evaluations.json", "center"])
def test_a_run_is_not_begun_over_files_of_its_names(name, tmp_path):
    (tmp_path / name).write_text("of years")
    with pytest.raises(UsageError, match=f"{name} is there, and of no run"):
        fit(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "of years"


def test_a_learning_is_not_begun_over_logs_that_are_there(tmp_path):
    (tmp_path / "controllers").mkdir()
    with pytest.raises(UsageError, match="controllers is there, and of no run"):
        learn_table(folder=tmp_path, trials=16)
    assert [path.name for path in tmp_path.iterdir()] == ["controllers"]


def test_kept_results_of_reproductions_are_not_written_through_links_and_others_stay(tmp_path):
    store = Store(tmp_path / "rows", pytest.fail)
    store.put("ours", "f", 1)
    store.path("theirs").write_text('{"of": "years"}')
    store.drop("ours")
    store.drop("theirs")
    store.drop("nobody's")
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["theirs.json"]
    store.path("linked").symlink_to(tmp_path / "outside")
    with pytest.raises(FileFormatError, match="a link"):
        Store(tmp_path / "rows", pytest.fail)


@pytest.mark.parametrize("name", [benching.PAGE, benching.CSV, benching.TRAININGS])
def test_pages_of_reproductions_are_not_written_through_links(name, tmp_path):
    (tmp_path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(FileFormatError, match="a link"):
        benching._folder(benching.Paper.RL17, tmp_path)


def test_a_pipe_among_a_runs_files_is_not_waited_for(kept, tmp_path):
    os.mkfifo(tmp_path / "trainer.json")
    with pytest.raises(FileFormatError, match="no file"):
        fit(tmp_path, resume=True)


def test_a_runs_folder_may_itself_be_a_link_and_hold_more(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "data").symlink_to(tmp_path)
    assert fit(tmp_path / "run").outcome.samples == 80


def test_the_json_of_a_runs_folder_is_bounded(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 2**10)
    (tmp_path / "trainer.json").write_bytes(b" " * 2**11)
    with pytest.raises(FileFormatError, match="holds more than"):
        fit(tmp_path, resume=True)


def keep(folder, step):
    rank_checkpoints.save_part(folder, step, "model-00001-of-00001.safetensors", {"a": ones(2)})
    rank_checkpoints.save_index(folder, step, {"model-00001-of-00001.safetensors": ["a"]}, "run")


@pytest.mark.parametrize(
    "link",
    [
        "latest",
        "step-2",
        "step-4",
        f"step-2/{rank_checkpoints.INDEX}",
        "step-2/model-00001-of-00001.safetensors",
        "step-2/more",
    ],
)
def test_a_checkpoint_is_not_read_written_or_removed_through_links(link, tmp_path):
    folder, outside = tmp_path / "kept", tmp_path / "outside"
    keep(folder, 2)
    path = folder / link
    if path.exists():
        path.rename(outside)
    elif link == "step-4":
        outside.mkdir()
    else:
        outside.write_text("of somebody's")
    path.symlink_to(outside)
    before = contents(outside)
    with pytest.raises(FileFormatError, match="a link") as caught:
        rank_checkpoints.check_own(folder, "run")
    assert caught.value.path == str(path)
    if link != "step-4":
        with pytest.raises(FileFormatError, match="a link"):
            rank_checkpoints.latest_in(folder)
    with pytest.raises(FileFormatError, match="a link"):
        keep(folder, 4 if link == "step-4" else 2)
    # What lies behind a link is not removed, either.
    for step in (5, 6, 7):
        with suppress(FileFormatError):
            keep(folder, step)
    assert contents(outside) == before


def contents(path):
    return {p: p.read_bytes() for p in (path, *path.rglob("*")) if p.is_file()}


def test_learning_writes_through_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("of somebody's\n")
    log = tmp_path / "run" / "controllers" / "0"
    log.mkdir(parents=True)
    (log / "updates.jsonl").symlink_to(outside)
    with pytest.raises(FileFormatError, match="a link"):
        learn_table(folder=tmp_path / "run", trials=16)
    assert outside.read_text() == "of somebody's\n"


def test_a_line_of_a_log_unpacks_to_little_and_a_strange_one_is_passed_over(tmp_path):
    learn_table(folder=tmp_path, trials=16)
    (path,) = tmp_path.glob("controllers/*/updates.jsonl")
    lines = path.read_text().splitlines()
    fields = json.loads(lines[0])
    fields["placement"] = base64.b64encode(zlib.compress(bytes(2**26))).decode()
    entry = LogEntry.parse(json.dumps(fields))
    assert entry is not None and entry.placement is not None
    assert entry.placement.nbytes == 2**24
    path.write_text("\n".join(["[" * 100_000, '{"first": 1}', "[]", *lines, ""]))
    assert len(list(LogReaders(tmp_path).news())) == len(lines)
