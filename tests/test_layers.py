"""Data flows one way: a package may import only from the lines above its own."""

import ast
from pathlib import Path

import pytest

LAYERS = [
    {"units"},
    {"errors", "methods"},
    {"runtime"},
    {"graph", "machine", "timeline", "training", "networks"},
    {"frontends", "plans"},
    {"costs"},
    {"simulator", "instances"},
    {"placers", "schedulers"},
    {"executors"},
    {"reports", "exports"},
    {"pipeline"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
# Names on one level do not import each other, but for this: a Captured carries its plan's Source.
SIDEWAYS = {("frontends", "plans")}
SRC = Path(__file__).parents[1] / "src" / "dovetail"
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(text, package):
    """Full names of what a module in `package` imports, wherever in the text it does."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - (node.level - 1)] if node.level else ()
            base = ".".join((*around, *filter(None, [node.module])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports(text, package=("dovetail",)):
    """Names right below `dovetail` that a module imports; "" for the package as a whole."""
    parts = [name.split(".") for name in imported(text, package)]
    return {(*name, "")[1] for name in parts if name[0] == "dovetail"}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path):
    inside = path.relative_to(SRC)
    here = inside.parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for there in imports(path.read_text(), ("dovetail", *inside.parent.parts)):
        assert there in LEVEL, f"{here} imports {there or 'the package'}, which has no layer"
        below = LEVEL[there] < LEVEL[here]
        assert below or there == here or (here, there) in SIDEWAYS, f"{here} imports {there}"


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
