"""What a new version of torch may change is in one file."""

import ast
from pathlib import Path

import pytest

import dovetail
from dovetail.runtime import torch_versions

SRC = Path(dovetail.__file__).parent
PRIVATE_BY_NAME = ("torch.__version__", "torch.__file__")


def dotted(node):
    """ "torch._C.Graph" of an attribute's node; "" of what does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return ""


def private_names(text):
    """The parts of torch that a module names and that begin with an underscore."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [dotted(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            if name.startswith("torch.") and "._" in name and "ops.aten" not in name:
                yield name


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_private_parts_of_torch_are_named_in_one_file(path):
    if path.samefile(torch_versions.__file__):
        return
    names = [name for name in private_names(path.read_text()) if name not in PRIVATE_BY_NAME]
    assert not names, "import it from dovetail.runtime.torch_versions"


def test_every_way_to_name_a_private_part_is_seen():
    for text in (
        "import torch._C",
        "import torch.utils._pytree as pytree",
        "from torch._ops import OpOverload",
        "from torch import _dynamo",
        "def f():\n    return torch._C.ScriptList([])",
    ):
        assert list(private_names(text)), text
    assert not list(private_names("from torch import nn\ntorch.nn.Module"))


def test_all_that_is_offered_is_there():
    assert all(hasattr(torch_versions, name) for name in torch_versions.__all__)
