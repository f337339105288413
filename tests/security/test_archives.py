"""Data and weights for `predict`, and exported programs: nothing runs, and nothing unpacks without
end."""

import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from dovetail.cli.predicting import _read_arrays, _read_csv
from dovetail.cli.weights import load_weights
from dovetail.errors import FileFormatError
from dovetail.frontends.models import load_exported
from dovetail.runtime import files


class Marks:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.path.write_text, ("it ran",)


def npy(header, data=b""):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def packed(path, content, kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def refused(read, *arguments):
    with pytest.raises(FileFormatError) as caught:
        read(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_objects_in_data_are_not_unpickled(tmp_path):
    ran = tmp_path / "ran"
    array = np.array([Marks(ran)], dtype=object)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "a.npz", array, allow_pickle=True)
    (tmp_path / "p.npy").write_bytes(pickle.dumps(Marks(ran)))
    for name in ("a.npy", "a.npz", "p.npy"):
        assert "it holds no arrays" in refused(_read_arrays, tmp_path / name)
    assert not ran.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_are_not_unpickled(zipped, tmp_path):
    ran, path, model = tmp_path / "ran", tmp_path / "w.pt", torch.nn.Linear(2, 2)
    weights = {**model.state_dict(), "bias": Marks(ran)}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    refused(load_weights, model, path)
    assert not ran.exists()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
        "(((",
        "  x\n y\n",
        "{" * 200,
    ],
)
def test_a_header_of_no_array_is_refused(header, tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(npy(header, bytes(64)))
    refused(_read_arrays, path)
    refused(_read_arrays, packed(tmp_path / "a.npz", {"a.npy": npy(header, bytes(64))}))


def test_what_is_no_array_in_an_archive_is_refused(tmp_path):
    assert "no array" in refused(_read_arrays, packed(tmp_path / "a.npz", {"a.txt": b"text"}))


def test_a_csv_holds_numbers_alone(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,__import__('os')\n")
    assert "is not 2 numbers" in refused(_read_csv, path)


def damaged(data, rng):
    """Copies of an archive, each with a byte of one of its files changed and its checksum right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    for name, kept in content.items():
        for at in rng.choice(len(kept), min(len(kept), 25), replace=False).tolist():
            changed = bytearray(kept)
            changed[at] ^= int(rng.integers(1, 256))
            yield content | {name: bytes(changed)}


def test_damaged_weights_and_data_are_read_or_refused(tmp_path):
    rng, model = np.random.default_rng(0), torch.nn.Linear(3, 2)
    weights, data = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), weights)
    np.savez(data, x=np.ones((4, 3), np.float32), y=np.arange(4))
    outcomes = set()
    for content in damaged(weights.getvalue(), rng):
        outcomes.add(_outcome(load_weights, model, packed(tmp_path / "w.pt", content)))
    for content in damaged(data.getvalue(), rng):
        outcomes.add(_outcome(_read_arrays, packed(tmp_path / "a.npz", content)))
    assert outcomes == {"read", "refused"}


def _outcome(read, *arguments):
    try:
        read(*arguments)
    except FileFormatError:
        return "refused"
    return "read"


def test_a_weight_larger_than_its_bytes_is_refused(tmp_path):
    """Its size stands in the pickle, its bytes in another file of the archive."""
    model, path = torch.nn.Linear(4, 1, bias=False), tmp_path / "w.pt"
    torch.save(model.state_dict(), path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in content if name.endswith("data.pkl"))
    # BININT1 4, the storage's elements, becomes BININT 2**20.
    larger = content[name].replace(b"K\x04t", b"J\x00\x00\x10\x00t")
    assert larger != content[name]
    before = model.weight.detach().clone()
    outcome = _outcome(load_weights, model, packed(path, content | {name: larger}))
    assert outcome == "refused" or torch.equal(model.weight, before)


@pytest.fixture
def bomb(monkeypatch):
    """32 MiB in 32 KiB, where no more than 1 MiB may be unpacked."""
    monkeypatch.setattr(files, "MOST_UNPACKED_BYTES", 2**20)
    return bytes(2**25)


def test_an_archive_that_unpacks_without_end_is_refused(bomb, tmp_path):
    kind = zipfile.ZIP_DEFLATED
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (8388608,)}"
    data = packed(tmp_path / "a.npz", {"a.npy": npy(header, bomb)}, kind)
    model, weights = torch.nn.Linear(2, 2), tmp_path / "w.pt"
    torch.save(model.state_dict(), weights)
    with zipfile.ZipFile(weights, "a", kind) as archive:
        archive.writestr("w/data/9", bomb)
    assert "unpack to 32 MiB" in refused(_read_arrays, data)
    assert "unpack to 32 MiB" in refused(load_weights, model, weights)


def test_an_archive_that_says_the_same_bytes_often_is_refused(bomb, tmp_path):
    """The files of an archive may overlap."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("a.npy", bomb[: 2**20])
        archive.filelist = archive.filelist * 40
    path = tmp_path / "a.npz"
    path.write_bytes(whole.getvalue())
    assert "unpack to 40 MiB" in refused(_read_arrays, path)


def test_an_exported_program_that_unpacks_without_end_is_refused(bomb, tmp_path):
    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    torch.export.save(exported, tmp_path / "p.pt2")
    with zipfile.ZipFile(tmp_path / "p.pt2") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in content if name.endswith("data/sample_inputs/model.pt"))
    within = io.BytesIO(content[name])
    with zipfile.ZipFile(within, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("examples/data/9", bomb)
    content[name] = within.getvalue()
    # Within the examples, an archive of their own, and beside them.
    for more, kind in (({}, zipfile.ZIP_STORED), ({"p/extra/a": bomb}, zipfile.ZIP_DEFLATED)):
        path = packed(tmp_path / "bomb.pt2", content | more, kind)
        assert "unpack to 32 MiB" in refused(load_exported, str(path))


def test_an_archive_of_much_that_packs_well_is_read(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", np.zeros((2**20, 4), np.float32))
    assert _read_arrays(tmp_path / "a.npz")[0].shape == (2**20, 4)
