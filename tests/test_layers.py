"""Data flows one way: a package may import only from the lines above its own."""

import ast
from importlib import import_module

import pytest

from dovetail import training
from tests.support.source_files import (
    SRC,
    circles,
    classes_defined_twice,
    imported_names,
    imports_of_files,
)

LAYERS = [
    {"units"},
    {"errors", "interrupts", "methods"},
    {"runtime", "request_fields"},
    {"graph", "machine", "timeline", "training", "networks"},
    {"frontends"},
    {"transforms"},
    {"plans"},
    {"costs"},
    {"simulator", "instances"},
    {"placers", "schedulers"},
    {"executors"},
    {"reports", "exports"},
    {"pipeline"},
    {"cli", "integrations"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(text, package=("dovetail",)):
    """Names right below `dovetail` that a module imports; "" for the package as a whole."""
    names = imported_names(ast.parse(text), package, typing=True)
    parts = [name.split(".") for name in names]
    return {(*name, "")[1] for name in parts if name[0] == "dovetail"}


def test_imports_point_down():
    wrong = []
    for path in SRC.rglob("*.py"):
        inside = path.relative_to(SRC)
        here = inside.parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for there in imports(path.read_text(), ("dovetail", *inside.parent.parts)):
            if there != here and LEVEL.get(there, len(LAYERS)) >= LEVEL[here]:
                wrong.append(f"{inside} imports {there or 'the package'}")
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "import dovetail.pipeline",
        "import numpy, dovetail.pipeline as flow",
        "from dovetail.pipeline import plan",
        "from dovetail import pipeline",
        "from .. import pipeline",
        "from ..pipeline import plan",
        "def f():\n    from dovetail import pipeline",
    ],
)
def test_every_way_to_import_is_seen(text):
    assert imports(text, ("dovetail", "graph")) == {"pipeline"}


def test_the_package_as_a_whole_and_siblings_are_told_apart():
    assert imports("import dovetail", ("dovetail", "graph")) == {""}
    assert imports("from . import files", ("dovetail", "graph")) == {"graph"}
    assert imports("import numpy.typing\nfrom numpy import nan") == set()


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions count; those for type checkers alone do not."""
    assert circles(imports_of_files()) == []


def test_a_circle_of_imports_is_found_wherever_they_stand(tmp_path):
    root = tmp_path / "dovetail"
    texts = {
        "__init__.py": "",
        "a/__init__.py": "from dovetail.a.first import run",
        "a/first.py": "def run():\n    from dovetail.b import second",
        "b/__init__.py": "",
        "b/second.py": "from .. import a\nfrom . import third",
        "b/third.py": "if TYPE_CHECKING:\n    from dovetail.b.second import Second",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert circles(imports_of_files(root)) == [["a/__init__.py", "a/first.py", "b/second.py"]]


def test_no_class_name_is_defined_twice_in_the_package():
    assert classes_defined_twice() == {}


def imported_from_training(path, package=("dovetail",)):
    """(module, name) of what a file imports from within `dovetail.training`."""
    for full_name in imported_names(ast.parse(path.read_text()), package, typing=True):
        if full_name.startswith("dovetail.training."):
            module, _, name = full_name.rpartition(".")
            yield module, name


def test_other_packages_import_only_the_public_names_of_training():
    for path in SRC.rglob("*.py"):
        inside = path.relative_to(SRC)
        if inside.parts[0] != "training":
            for module, name in imported_from_training(path, ("dovetail", *inside.parent.parts)):
                says = f"{inside} imports {module}.{name}"
                assert module == "dovetail.training" and name in training.__all__, says


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "reproductions"])
def test_what_is_public_in_training_is_imported_from_it(folder):
    """Benchmarks that measure or break a part import what is not public from the part's file."""
    for path in (SRC.parents[1] / folder).rglob("*.py"):
        for module, name in imported_from_training(path, ()):
            is_public = name in training.__all__ and module != "dovetail.training"
            assert not is_public, f"{path.name} imports {module}.{name}"


def test_names_of_training_are_listed_alike_for_python_and_for_type_checkers():
    tree = ast.parse((SRC / "training" / "__init__.py").read_text())
    listed = set(imported_names(tree, ("dovetail", "training"), typing=True))
    listed -= {"importlib.import_module", "typing.TYPE_CHECKING"}
    for full_name in listed:
        module, _, name = full_name.rpartition(".")
        assert getattr(training, name) is getattr(import_module(module), name)
    assert {full_name.rpartition(".")[2] for full_name in listed} == set(training.__all__)
