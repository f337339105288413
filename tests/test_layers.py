"""Data flows one way: a package may import only from the lines above its own."""

import ast

import pytest

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
    {"frontends", "integrations"},
    {"transforms"},
    {"plans"},
    {"costs"},
    {"simulator", "instances"},
    {"placers", "schedulers"},
    {"executors"},
    {"reports", "exports"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(text, package=("dovetail",)):
    """Names right below `dovetail` that a module imports; "" for the package as a whole."""
    names = imported_names(ast.parse(text), package, typing=True)
    parts = [name.split(".") for name in names]
    return {(*name, "")[1] for name in parts if name[0] == "dovetail"}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path):
    inside = path.relative_to(SRC)
    here = inside.parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for there in imports(path.read_text(), ("dovetail", *inside.parent.parts)):
        assert there in LEVEL, f"{here} imports {there or 'the package'}, which has no layer"
        assert there == here or LEVEL[there] < LEVEL[here], f"{here} imports {there}"


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
