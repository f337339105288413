"""Data flows one way: a package may import only from the lines above its own."""

import ast
from pathlib import Path

import pytest

LAYERS = [
    {"units"},
    {"errors"},
    {"runtime"},
    {"graph", "machine", "timeline", "training", "networks"},
    {"frontends", "plans"},
    {"costs"},
    {"simulator"},
    {"placers", "schedulers"},
    {"executors"},
    {"reports"},
    {"pipeline"},
    {"bench"},
    {"cli"},
]
# Names on one level do not import each other, but for this: a Captured carries its plan's Source.
SIDEWAYS = {("frontends", "plans")}
SRC = Path(__file__).parents[1] / "src" / "dovetail"
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dovetail."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("dovetail."))


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path):
    here = path.relative_to(SRC).parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for there in imports(path):
        below = LEVEL[there] < LEVEL[here]
        assert below or there == here or (here, there) in SIDEWAYS, f"{here} imports {there}"
