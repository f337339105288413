"""What the documents show works as shown, and what they name is there."""

import os
import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.support import forked

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = sorted({*GUIDES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*/*.md")})

# The demo runs plans on this machine, and what it prints depends on that.
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.name != "demo.py")

QUICKLY = """\
from dovetail.pipeline import planning
assert planning._measured
planning._measured = lambda *given: given[3]
"""
"""What a program begins with here. As in all tests that do not say otherwise, plans are not
compared with what runs without them, and nothing is compiled, which would take a minute. That the
default flow does both is shown by `contract/test_defaults.py`."""


def _name(path):
    return str(path.relative_to(ROOT))


def _python_blocks(document):
    """The Python blocks of a document, each with the text block that follows it as its output."""
    pattern = r"^```python\n(.*?)^```(?:\n+[^\n]+\n*\n```text\n(.*?)^```)?"
    return re.findall(pattern, document.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def _printed(*words, folder):
    """What `python WORDS` prints. The program is forked, as are the processes that it starts, so
    that none imports by itself."""
    process = forked.start(words, cwd=folder, env=dict(os.environ), forks=True)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out


def _commands(document):
    """The command lines of `dovetail` and `reproductions` that stand in indented blocks."""
    lines = r"^ {4}((?:dovetail|python -m reproductions) \S.*)$"
    return re.findall(lines, document.read_text("utf-8"), re.MULTILINE)


def test_there_are_examples_to_run():
    assert EXAMPLES


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_prints_what_stands_beside_it(script):
    assert _printed(script, folder=ROOT) == script.with_suffix(".txt").read_text()


def test_the_readme_has_python_with_its_output():
    ((code, output),) = _python_blocks(README)
    assert code and output


@pytest.mark.parametrize(
    "document", [path for path in GUIDES if _python_blocks(path)], ids=lambda p: p.stem
)
def test_the_python_of_a_document_runs_and_prints_what_stands_below_it(document, tmp_path):
    for code, output in _python_blocks(document):
        printed = _printed("-c", QUICKLY + code, folder=tmp_path)
        if output:
            assert printed == output


def test_the_readme_has_at_most_120_lines():
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_every_command_in_the_guides_has_the_options_it_is_shown_with():
    from dovetail.cli import COMMANDS, make_app
    from reproductions.__main__ import app_of_papers

    app, papers = map(typer.main.get_command, (make_app(*COMMANDS), app_of_papers()))
    checked = 0
    for document in [*GUIDES, *(ROOT / "benchmarks").glob("*/README.md")]:
        for line in _commands(document):
            words, command = shlex.split(line, comments=True)[1:], app
            if line.startswith("python"):
                words, command = words[2:], papers
            while words and hasattr(command, "commands"):
                assert words[0] in command.commands, f"{_name(document)}: {line}"
                command = command.commands[words.pop(0)]
            options = {
                name
                for parameter in command.params
                for name in (*parameter.opts, *parameter.secondary_opts, "--help")
            }
            for word in words:
                if word.startswith("--"):
                    assert word in options, f"{_name(document)}: {line}"
            checked += 1
    assert checked


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_what_a_document_links_to_is_there(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            path = document.parent / target.partition("#")[0]
            assert path.exists(), f"{_name(document)} links to {target}"


@pytest.mark.parametrize("name", ["design.md", "papers.md"])
def test_every_path_that_a_document_names_is_in_the_tree(name):
    # A path ends in a suffix of ours, or is a folder with its slash: `placers/exact.py`, `costs/`.
    # It stands in backquotes or at the beginning of a line of a block.
    text = (ROOT / "docs" / name).read_text("utf-8")
    path = r"((?:[\w.-]+/)*[\w-]+\.(?:py|json|md)|(?:[\w.-]+/)+)"
    named = {
        *re.findall(rf"`{path}`", text),
        *re.findall(rf"^ *{path}(?:\s|$)", text, re.MULTILINE),
    }
    assert named
    for each in sorted(named):
        places = [ROOT / each, ROOT / "src" / "dovetail" / each]
        assert any(place.exists() for place in places), f"{name} names {each}"


def test_every_document_that_the_source_names_is_there():
    for source in sorted((ROOT / "src").rglob("*.py")):
        for document in re.findall(r"\bdocs/[\w-]+\.md", source.read_text("utf-8")):
            assert (ROOT / document).exists(), f"{_name(source)} names {document}"


def test_every_term_of_an_error_is_in_the_tree_on_top():
    from dovetail import errors

    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.DovetailError)
    ]
    for name in classes:
        assert name in (errors.__doc__ or ""), f"{name} is not in the tree of errors"


def test_the_glossary_is_sorted_and_has_each_word_once():
    words = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text("utf-8"), re.M)
    assert words == sorted(set(words))
