"""Policies in files: what comes back, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from dovetail.errors import PolicyFileError, PolicyMismatchError, UnwritableError
from dovetail.placers.learned.features import look
from dovetail.placers.learned.files import load_policy, read_card, save_policy, shipped
from dovetail.placers.learned.gdp import Gdp
from dovetail.placers.learned.hdp import Hdp
from dovetail.placers.learned.seq2seq import Seq2Seq
from tests.support.learned_problems import random_problem

CARD = {"trained_on": ["nmt"], "seed": 3, "updates": 7, "trials": 112, "seconds": 1.5}


@pytest.fixture(scope="module")
def view():
    return look(random_problem(1, groups=6, devices=2))


@pytest.fixture(scope="module")
def gdp(view):
    return Gdp.for_view(view, seed=4, hidden=8, heads=2)


@pytest.fixture
def path(tmp_path, gdp):
    save_policy(tmp_path / "gdp.safetensors", gdp, CARD)
    return tmp_path / "gdp.safetensors"


def rewritten(path, *, metadata=None, **tensors):
    """The file with another card, or other tensors; None drops one."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    card = json.loads(data[8 : 8 + size])["__metadata__"]["card"]
    arrays = {k: v for k, v in (load(data) | tensors).items() if v is not None}
    path.write_bytes(save(arrays, metadata={"card": card} if metadata is None else metadata))


def with_card(path, **changes):
    card = {k: v for k, v in (read_card(path) | changes).items() if v is not ...}
    rewritten(path, metadata={"card": json.dumps(card)})


@pytest.mark.parametrize("cls", [Seq2Seq, Hdp, Gdp])
def test_a_policy_comes_back_as_it_was_saved(cls, view, tmp_path):
    policy = cls.for_view(view, seed=4, hidden=8)
    save_policy(tmp_path / "p", policy, CARD)
    loaded, card = load_policy(tmp_path / "p", policy.name)
    assert type(loaded) is cls
    assert loaded.config == policy.config
    assert card["method"] == policy.name
    assert {name: card[name] for name in CARD} == CARD
    draws = [p.draw(view, 5, torch.Generator().manual_seed(0)) for p in (policy, loaded)]
    assert torch.equal(draws[0].log_probs, draws[1].log_probs)
    assert np.array_equal(draws[0].placements, draws[1].placements)


def test_equal_policies_and_cards_make_equal_files_and_leave_random_numbers_alone(
    gdp, path, tmp_path
):
    save_policy(tmp_path / "again", gdp, CARD)
    assert path.read_bytes() == (tmp_path / "again").read_bytes()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load_policy(path)
    assert torch.equal(torch.rand(3), expected)


def test_the_cards_own_entries_are_kept_and_the_policys_cannot_be_forged(gdp, tmp_path):
    save_policy(tmp_path / "p", gdp, CARD | {"method": "hdp", "curves": [[1, 2.5]]})
    _, card = load_policy(tmp_path / "p")
    assert card["method"] == "gdp"
    assert card["curves"] == [[1, 2.5]]


def test_a_policy_that_is_not_finite_is_not_written(view, tmp_path):
    policy = Gdp.for_view(view, hidden=8, heads=2)
    with torch.no_grad():
        next(policy.parameters()).view(-1)[3] = torch.nan
    with pytest.raises(UnwritableError, match="not finite"):
        save_policy(tmp_path / "p", policy, {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_off_anywhere_is_refused(path):
    data = path.read_bytes()
    for size in {0, 7, 8, 100, *range(200, len(data), len(data) // 23), len(data) - 1}:
        path.write_bytes(data[:size])
        with pytest.raises(PolicyFileError, match=r"gdp\.safetensors") as caught:
            load_policy(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95junk that a pickle could begin with",
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (22).to_bytes(8, "little") + b'{"__metadata__": null}',
        save({"a": np.zeros(3, np.float32)}),
        save({"a": np.zeros(3, np.float32)}, metadata={"card": "[]"}),
        save({"a": np.zeros(3, np.float32)}, metadata={"card": "{"}),
        save({"a": np.zeros(3, np.float32)}, metadata={"card": "[" * 100_000}),
    ],
)
def test_what_is_no_policy_is_refused(content, tmp_path):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(PolicyFileError):
        load_policy(tmp_path / "p")
    with pytest.raises(PolicyFileError):
        read_card(tmp_path / "p")


def test_what_is_not_there_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(PolicyFileError):
            load_policy(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"seed": True}, "seed: .* not true or false"),
        ({"seconds": True}, "seconds: .* not true or false"),
        ({"format": "other"}, "format"),
        ({"features": 10**6}, "features"),
        ({"method": "os.system"}, "not one of"),
        ({"method": ...}, "method"),
        ({"config": ...}, "config"),
        ({"config": {"hidden": "8"}}, "config"),
        ({"config": {"hidden": {"a": 1}}}, "config"),
        ({"config": {"hidden": 8, "heads": 2, "surprise": 1}}, "surprise"),
        ({"config": {"hidden": 2**40}}, "out of bounds"),
        ({"config": {"hidden": 60_000, "heads": 2}}, "tensor"),
        ({"config": {"hidden": 8, "heads": 2, "layers": 60_000}}, "out of bounds"),
        ({"config": {"hidden": -8, "heads": 2}}, "out of bounds"),
        ({"config": {"hidden": 8, "heads": 0}}, "out of bounds"),
        ({"config": {"hidden": 9, "heads": 2}}, "gdp"),
        ({"config": {"hidden": 8, "heads": 2, "share": 5.0}}, "share"),
        ({"config": {"hidden": 8, "heads": 2, "share": None}}, "config"),
        ({"updates": -1}, "updates"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(changes, message, path):
    with_card(path, **changes)
    with pytest.raises(PolicyFileError, match=message):
        load_policy(path)


def test_tensors_that_do_not_fit_the_config_are_refused(gdp, path):
    name, tensor = next(iter(gdp.state_dict().items()))
    array, whole = tensor.numpy(), path.read_bytes()
    odd = {
        "missing": {name: None},
        "too many": {"another": array},
        "is ": {name: array[:1]},
        "float64": {name: array.astype(np.float64)},
        "not finite": {name: np.full_like(array, np.inf)},
    }
    for message, tensors in odd.items():
        path.write_bytes(whole)
        rewritten(path, **tensors)
        with pytest.raises(PolicyFileError, match=message):
            load_policy(path)


def test_another_method_than_expected_is_a_mismatch(path):
    with pytest.raises(PolicyMismatchError, match="gdp, not hdp") as caught:
        load_policy(path, "hdp")
    assert caught.value.policy == str(path)


def test_a_broken_write_leaves_the_old_file(path, gdp, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(UnwritableError, match="No space"):
        save_policy(path, gdp, CARD | {"seed": 9})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_card_of_a_policy_for_other_features_can_still_be_read(path):
    with_card(path, features=99)
    assert read_card(path)["features"] == 99


def test_a_lost_pretrained_policy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("dovetail.placers.learned.files.SHIPPED", tmp_path / "gdp.safetensors")
    with pytest.raises(PolicyFileError, match="not in this installation"):
        shipped()
