import gzip
import json
import zlib
from dataclasses import fields

import numpy as np
import pytest

from dovetail.errors import FileFormatError, GraphError, InvalidSizeError, UnwritableError
from dovetail.graph import load_graph, save_graph
from dovetail.runtime import files
from tests.graph.test_records import training_graph
from tests.support.builders import Op, graph_of, source


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_a_saved_graph_loads_equal(tmp_path, name):
    graph = training_graph()
    save_graph(graph, tmp_path / name)
    loaded = load_graph(tmp_path / name)
    assert loaded.fingerprint == graph.fingerprint
    for field in fields(graph):
        np.testing.assert_array_equal(getattr(loaded, field.name), getattr(graph, field.name))


def saved(tmp_path, change):
    path = tmp_path / "g.json"
    save_graph(graph_of(source("w"), Op("a", ("w",))), path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3, -(10**400)])
def test_a_size_that_is_not_finite_names_its_op(tmp_path, value):
    path = saved(tmp_path, lambda raw: raw["ops"]["flops"].__setitem__(1, value))
    with pytest.raises(InvalidSizeError) as raised:
        load_graph(path)
    assert (raised.value.op, raised.value.field) == ("a", "flops")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.pop("outputs"), "outputs: Field required"),
        (lambda raw: raw["ops"].update(flops="many"), "ops.flops"),
        (lambda raw: raw["ops"]["kinds"]["index"].__setitem__(0, 9), "outside its values"),
        (lambda raw: raw["ops"]["colocation"].__setitem__(0, 2**40), "int"),
        (lambda raw: raw["ops"]["flops"].__setitem__(1, 10**400), "int"),
        (lambda raw: raw.update(surprise=1), "surprise"),
        (lambda raw: raw.update(version=2), "version"),
        (lambda raw: raw.update(version=True), "version: Input should be a number"),
        (lambda raw: raw["ops"]["flops"].__setitem__(1, True), "ops.flops: .* not true or false"),
        (lambda raw: raw["ops"]["kinds"]["index"].__setitem__(0, True), "ops.kinds.index: "),
        (lambda raw: raw["tensors"]["shapes"]["values"].append([True]), "tensors.shapes.values"),
        (lambda raw: raw["ops"]["phases"].__setitem__(0, 4), "ops.phases.0"),
        (lambda raw: raw.update(control=[[False, True]]), "control.0.0: .* not true or false"),
    ],
)
def test_a_file_of_the_wrong_shape_says_where(tmp_path, change, complaint):
    with pytest.raises(FileFormatError, match=complaint):
        load_graph(saved(tmp_path, change))


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"1" * 5000])
def test_what_is_not_json_is_refused(tmp_path, data):
    (tmp_path / "g.json").write_bytes(data)
    with pytest.raises(FileFormatError):
        load_graph(tmp_path / "g.json")


@pytest.mark.parametrize("data", [b"not gzip", gzip.compress(b"x" * 999, mtime=0)[:-9]])
def test_what_is_not_gzip_is_refused(tmp_path, data):
    (tmp_path / "g.json.gz").write_bytes(data)
    with pytest.raises(FileFormatError):
        load_graph(tmp_path / "g.json.gz")


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_a_file_that_holds_more_than_the_limit_is_refused(tmp_path, monkeypatch, name):
    save_graph(training_graph(), tmp_path / name)
    monkeypatch.setattr(files, "MOST_BYTES", 256)
    with pytest.raises(FileFormatError, match=r"more than 256 B"):
        load_graph(tmp_path / name)


@pytest.mark.parametrize("limit", ["MOST_VALUES", "MOST_CONTAINERS"])
def test_json_of_more_values_than_the_limit_is_not_parsed(tmp_path, monkeypatch, limit):
    save_graph(training_graph(), tmp_path / "g.json")
    monkeypatch.setattr(files, limit, 8)
    monkeypatch.setattr(files.json, "loads", None)
    with pytest.raises(FileFormatError, match="holds more than"):
        load_graph(tmp_path / "g.json")


def test_a_small_file_that_unpacks_to_more_than_the_limit_is_refused_at_once(tmp_path):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(300)) + packer.flush()
    (tmp_path / "g.json.gz").write_bytes(bomb)
    assert len(bomb) < 2**19
    with pytest.raises(FileFormatError, match="holds more than 256 MiB of JSON"):
        load_graph(tmp_path / "g.json.gz")


def test_a_storage_beyond_all_tensors_is_refused_before_room_is_made_for_it(tmp_path):
    path = saved(tmp_path, lambda raw: raw["tensors"]["storages"].__setitem__(1, 2**31 - 1))
    with pytest.raises(GraphError, match="tensor 1 has storage 2147483647"):
        load_graph(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        load_graph(tmp_path / "nothing.json")


def test_an_unwritable_path_is_named(tmp_path):
    with pytest.raises(UnwritableError, match="nowhere"):
        save_graph(training_graph(), tmp_path / "nowhere" / "g.json")
