import os

import pytest

from dovetail.errors import UnwritableError
from dovetail.runtime.files import check_writable, write_atomically


def test_text_and_bytes_are_written_and_nothing_else_is_left(tmp_path):
    write_atomically(tmp_path / "a.json", "ä\n")
    write_atomically(str(tmp_path / "b.gz"), b"\x1f\x8b")
    assert (tmp_path / "a.json").read_bytes() == "ä\n".encode()
    assert (tmp_path / "b.gz").read_bytes() == b"\x1f\x8b"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.gz"]


def test_an_existing_file_is_replaced_and_keeps_its_mode(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old and longer")
    path.chmod(0o640)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_keeps_pointing_at_the_file_it_named(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("name", ["missing/plan.json", "nul\0name", "x" * 300])
def test_an_unwritable_path_is_named_in_the_error(tmp_path, name):
    path = str(tmp_path / name)
    with pytest.raises(UnwritableError) as caught:
        write_atomically(path, "text")
    assert caught.value.path == path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(UnwritableError):
        write_atomically(tmp_path, "text")


@pytest.mark.parametrize("write", [check_writable, lambda path: write_atomically(path, "text")])
def test_a_link_that_leads_back_to_itself_is_refused_by_its_name(tmp_path, write):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnwritableError, match=r"loop: .*link"):
        write(tmp_path / "loop")


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UnwritableError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_device_file_is_written_to_directly():
    write_atomically("/dev/null", "text")
    assert not os.path.isfile("/dev/null")
