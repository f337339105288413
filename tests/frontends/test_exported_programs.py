"""Programs that torch.export.save wrote, and what is not opened."""

import json
import logging
import zipfile

import pytest
import torch
from torch import nn

from dovetail.errors import FileFormatError
from dovetail.frontends.models import load_exported


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.constant = torch.arange(4.0)

    def forward(self, x, *, shift=None):
        y = self.layers(x) * self.scale + self.constant
        return {"y": y if shift is None else y + shift, "first": x[0]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    module, path = Small().eval(), tmp_path_factory.mktemp("pt2") / "small.pt2"
    exported = torch.export.export(module, (torch.randn(3, 4),), {"shift": torch.ones(4)})
    torch.export.save(exported, path)
    return module, path


def rewritten(path, to, change=None, extra=()):
    """The archive with `change(program)` made in its program and more files added."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if change is not None and name.endswith("models/model.json"):
                program = json.loads(content)
                change(program)
                content = json.dumps(program).encode()
            if name.partition("/")[2] not in dict(extra):
                new.writestr(name, content)
        for name, content in extra:
            new.writestr(f"{old.namelist()[0].partition('/')[0]}/{name}", content)
    return str(to)


def test_an_exported_program_computes_what_its_module_did(saved):
    module, path = saved
    loaded, args, kwargs = load_exported(str(path))
    found, expected = loaded(*args, **kwargs), module(*args, **kwargs)
    assert list(found) == ["y", "first"]
    torch.testing.assert_close(found["y"], expected["y"], rtol=0, atol=0)
    assert {name for name, _ in loaded.named_parameters()} == dict(module.named_parameters()).keys()


def test_an_argument_may_have_the_name_of_a_field(tmp_path):
    class Compared(nn.Module):
        def forward(self, x, target):
            return (x - target).abs()

    exported = torch.export.export(Compared(), (torch.ones(3), torch.zeros(3)))
    torch.export.save(exported, tmp_path / "compared.pt2")
    module, args, _ = load_exported(str(tmp_path / "compared.pt2"))
    assert torch.equal(module(*args), torch.ones(3))


def test_a_rewritten_archive_that_says_the_same_is_loaded(saved, tmp_path):
    assert load_exported(rewritten(saved[1], tmp_path / "same.pt2", lambda program: None))


def test_example_inputs_that_need_unpickling_are_not_opened(saved, tmp_path):
    ran = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return ran.write_text, ("it ran",)

    content = tmp_path / "pickle"
    torch.save(((Malicious(),), {}), content)
    path = rewritten(
        saved[1], tmp_path / "a.pt2", extra=[("data/sample_inputs/model.pt", content.read_bytes())]
    )
    with pytest.raises(FileFormatError, match="more than plain tensors"):
        load_exported(path)
    assert not ran.exists()


def first_node(program):
    return program["graph_module"]["graph"]["nodes"][0]


def call(target):
    return lambda program: first_node(program).update(target=target)


def guard(program):
    program["guards_code"] = ["print(1)"]


def dynamic(program):
    sizes = next(iter(program["graph_module"]["graph"]["tensor_values"].values()))["sizes"]
    sizes[0] = {"as_expr": {"expr_str": "__import__('os')", "hint": None}}


def structure(context):
    def change(program):
        spec = [1, {"type": "builtins.dict", "context": context, "children_spec": []}]
        graph = program["graph_module"]["module_call_graph"]
        graph[0]["signature"]["in_spec"] = json.dumps(spec)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (call("torch.os.system"), "'torch.os.system', which is no operator"),
        (call("torch.ops.load_library"), "'torch.ops.load_library', which is no operator"),
        (call("torch.ops.aten.__class__.mro"), "no operator"),
        (call("torch.ops.aten.from_file.default"), "no operator"),
        (call("torch.ops.aten.save.default"), "no operator"),
        (call("#extension"), "no operator"),
        (call({"name": "torch.os.system"}), "torch.export cannot load it"),
        (call(["torch.os.system"]), "no operator"),
        (guard, "has guards"),
        (dynamic, "has dynamic shapes"),
        (structure('{"__enum__": true, "fqn": "antigravity:x", "name": "y"}'), "in_spec names a"),
        (structure('{"\\u005f_enum__": true}'), "in_spec names a module"),
        (structure('"{\\"default_factory_module\\": \\"antigravity\\"}"'), "in_spec names a"),
    ],
)
def test_a_program_that_would_run_more_than_operators_is_refused(
    saved, tmp_path, change, complaint
):
    path = rewritten(saved[1], tmp_path / "changed.pt2", change)
    with pytest.raises(FileFormatError, match=complaint) as raised:
        load_exported(path)
    assert "\n" not in str(raised.value)


def test_compiled_libraries_and_objects_are_not_opened(saved, tmp_path):
    for name in ("data/aotinductor/model/model.so", "data/constants/custom_obj_0"):
        path = rewritten(saved[1], tmp_path / "more.pt2", extra=[(name, b"x")])
        with pytest.raises(FileFormatError, match="could run code and is not opened"):
            load_exported(path)


def test_pickled_weights_are_not_opened(saved, tmp_path):
    name = "data/weights/model_weights_config.json"
    with zipfile.ZipFile(saved[1]) as archive:
        found = next(n for n in archive.namelist() if n.endswith(name))
        config = json.loads(archive.read(found))
    config["config"]["layers.0.weight"]["use_pickle"] = True
    path = rewritten(saved[1], tmp_path / "w.pt2", extra=[(name, json.dumps(config))])
    with pytest.raises(FileFormatError, match=r"'layers.0.weight' .* is pickled"):
        load_exported(path)


def test_a_program_with_dynamic_shapes_says_how_to_export_it(tmp_path):
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(
        Small().eval(), (torch.randn(3, 4),), dynamic_shapes={"x": {0: batch}}
    )
    torch.export.save(exported, tmp_path / "dynamic.pt2")
    with pytest.raises(FileFormatError, match="export it without dynamic_shapes"):
        load_exported(str(tmp_path / "dynamic.pt2"))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + 18 * b"\0"])
def test_what_is_no_archive_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "broken.pt2"
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as raised:
        load_exported(str(path))
    assert "\n" not in str(raised.value)


def test_torchs_own_log_of_a_damaged_program_is_not_shown(saved, tmp_path, caplog):
    def damage(program):
        program["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = {
            "as_tensor": {"name": "of no node"}
        }

    path = rewritten(saved[1], tmp_path / "damaged.pt2", damage)
    with pytest.raises(FileFormatError, match="Failed deserializing node") as raised:
        load_exported(path)
    assert "\n" not in str(raised.value)
    assert caplog.records == []
    assert not logging.getLogger("torch.export").filters


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        load_exported(str(tmp_path / "absent.pt2"))
