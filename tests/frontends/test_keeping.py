"""Steps that are kept in the cache as data."""

import gzip
import json
import math
from dataclasses import astuple, fields, replace

import pytest
import torch
from torch import nn

from dovetail.frontends import (
    Captured,
    capture,
    example_values,
    initial_values,
    keeping,
    models,
    parse_optimizer,
    resolve,
    run_step,
)
from dovetail.networks import NETWORKS
from dovetail.transforms import Form, Parts, applied


def small(name):
    """The MODEL text of a network at its small size."""
    options = (f"{key}={value}" for key, value in NETWORKS[name].small.items())
    return f"zoo:{name}?{'&'.join(options)}"


MOE = small("moe")
CODE = keeping._code.__wrapped__
STEPS = [
    (MOE, "adam", None),
    (small("randwire"), "", Form(channels_last=True)),
    (small("rnnlm"), "sgd:lr=0.1", Form(recurrent_chunks=1)),
    (small("vit"), "", None),
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "cache_folder", lambda: tmp_path)
    # Who tries these tests may have just written to our code.
    monkeypatch.setattr(keeping, "_code", lambda: "this")
    return tmp_path / "captures"


def opened(text, train="", form=None):
    step = resolve(text, train=parse_optimizer(train) if train else None)
    return applied(step, [form]) if form else step


def never(*_arguments, **_options):
    raise AssertionError("captured again")


@pytest.mark.parametrize(("text", "train", "form"), STEPS)
def test_a_step_that_was_kept_is_the_captured_one_and_nothing_is_built_for_it(
    text, train, form, monkeypatch
):
    step = opened(text, train, form)
    monkeypatch.setattr("dovetail.frontends.capturing.capture_call", never)
    monkeypatch.setattr(models, "capture", never)
    built = []
    monkeypatch.setattr(models, "dynamo_later", lambda: built.append(1))
    kept = opened(text, train, form)
    assert not built
    assert kept.kept_under == step.kept_under != ""
    assert kept.graph.fingerprint == step.graph.fingerprint
    for field in fields(step.program):
        assert getattr(kept.program, field.name) == getattr(step.program, field.name)
    for field in fields(step.signature):
        if field.name not in ("inputs", "targets"):
            assert getattr(kept.signature, field.name) == getattr(step.signature, field.name)
    for one, other in zip(kept.inputs + kept.targets, step.inputs + step.targets, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert astuple(kept.plain) == astuple(step.plain)
    for name in ("source", "notes", "fused_steps", "transforms"):
        assert getattr(kept, name) == getattr(step, name)


@pytest.mark.parametrize(("text", "train", "form"), STEPS[:3])
def test_several_steps_of_it_compute_the_same_bits(text, train, form):
    found = []
    for _ in range(2):
        step = opened(text, train, form)
        values, (inputs, targets) = initial_values(step), example_values(step)
        done = [run_step(step, values, inputs, targets, step=number) for number in range(3)]
        found.append(torch.utils._pytree.tree_leaves((done, values)))
    assert all(map(torch.equal, *found))


def test_its_module_is_built_when_it_is_asked_for_and_can_be_captured_in_another_form():
    opened(small("randwire"))
    kept = opened(small("randwire"))
    assert isinstance(kept.module, nn.Module)
    assert kept.module is kept.module is replace(kept, notes=()).module
    last = applied(kept, [Form(channels_last=True)])
    assert last.graph.fingerprint != kept.graph.fingerprint


@pytest.mark.parametrize("change", ["code", "dtype", "autocast", "options", "optimizer"])
def test_what_a_capture_follows_from_is_in_its_key(change, folder, monkeypatch):
    text, train = MOE, "adam"
    first = opened(text, train)
    if change == "code":
        monkeypatch.setattr(keeping, "_code", lambda: "another")
        other = opened(text, train)
    elif change == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            other = opened(text, train)
        finally:
            torch.set_default_dtype(torch.float32)
    elif change == "autocast":
        text, train = small("rnnlm"), ""
        first = opened(text)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other = opened(text)
        assert other.plain.autocast == torch.bfloat16
    elif change == "options":
        other = opened(f"{text}&batch=3", train)
    else:
        other = opened(text, "adam:lr=0.5")
    assert other.kept_under != first.kept_under
    assert len(list(folder.iterdir())) == 2 + (change == "autocast")


def _cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def _flipped(path):
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 3, len(data), 7):
        data[place] ^= 255
    path.write_bytes(data)


def _another_target(path):
    record = json.loads(gzip.decompress(path.read_bytes()))
    record["calls"] = [call and ["dovetail.runtime.child:main", *call[1:]]
                       for call in record["calls"]]  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(record).encode()))


def _without_graph(path):
    path.write_bytes(gzip.compress(b'{"calls": []}'))


def _writable(path):
    path.chmod(0o666)


@pytest.mark.parametrize("spoil", [_cut, _flipped, _another_target, _without_graph, _writable])
def test_a_record_that_is_damaged_or_not_ones_own_is_captured_anew(spoil, folder):
    first = opened(MOE)
    (path,) = folder.iterdir()
    spoil(path)
    again = opened(MOE)
    assert again.program.calls == first.program.calls
    assert keeping.reopened(first.kept_under, never, first.plain, None, None) is not None


def test_parts_of_a_batch_are_kept_each_by_itself():
    text = small("moe").replace("batch=2", "batch=8")
    found = {}
    for order in ((2, 4), (4, 2)):
        step = opened(text, "adam")
        for count in order:
            part = applied(step, [Parts(count)])
            assert part.inputs[0].shape[0] == step.inputs[0].shape[0] // count
            found.setdefault(count, part.graph.fingerprint)
            assert part.graph.fingerprint == found[count]
            applied(part, [Form(channels_last=True), Parts(count)])
    assert found[2] != found[4]


def test_code_that_may_have_changed_since_it_was_imported_has_no_key(monkeypatch):
    monkeypatch.setattr(keeping, "_BEFORE", 0.0)
    assert CODE() == ""
    monkeypatch.setattr(keeping, "_BEFORE", math.inf)
    assert len(CODE()) == 64
    monkeypatch.setattr(keeping, "_code", lambda: "")
    assert opened(MOE).kept_under == ""


class Constant(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0, 2.0])


def test_a_step_that_cannot_be_said_as_data_is_not_kept(folder):
    step = capture(Constant(), torch.ones(2))
    assert isinstance(step, Captured)
    assert keeping.keep(step, "key").kept_under == ""
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_loses_no_step(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(keeping, "cache_folder", lambda: tmp_path / "file")
    assert opened(MOE).kept_under == ""
