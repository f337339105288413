"""The limits that CONTRIBUTING promises, where no linter holds them."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "dovetail"
PATHS = sorted(SRC.rglob("*.py"))
MODULE_LINES, BODY_LINES, LEVELS = 400, 60, 4
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def body_lines(function):
    """Lines of a function without its signature and its docstring."""
    first = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - first[0].lineno + 1 if first else 0


def levels(node):
    """Blocks within blocks; `elif` is on the level of its `if`, and functions begin anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            continue
        is_elif = (
            isinstance(node, ast.If)
            and isinstance(child, ast.If)
            and node.orelse == [child]
            and child.col_offset == node.col_offset
        )
        deeper = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, deeper + levels(child))
    return deepest


def test_there_are_modules_to_look_at():
    assert len(PATHS) > 50


@pytest.mark.parametrize("path", PATHS, ids=lambda p: str(p.relative_to(SRC)))
def test_modules_bodies_and_nesting_stay_within_the_limits(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES
    for function in functions(ast.parse(text)):
        assert body_lines(function) <= BODY_LINES, function.name
        assert levels(function) <= LEVELS, function.name


SAMPLE = '''
def outer():
    """Docstring.

    Not counted.
    """
    for a in b:
        if a:
            pass
        elif b:
            while True:
                pass

        def inner():
            return 1
'''


def test_what_is_measured_is_the_body_and_its_blocks():
    outer, inner = functions(ast.parse(SAMPLE))
    assert (body_lines(outer), levels(outer)) == (9, 3)
    assert (body_lines(inner), levels(inner)) == (1, 0)
