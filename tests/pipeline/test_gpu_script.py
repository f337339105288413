"""benchmarks/gpu/run.py: it goes on after a failure, resumes, and writes the page of docs."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.benchmark_scripts import benchmark_scripts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    with benchmark_scripts("gpu", "run") as scripts:
        yield scripts.run


@pytest.fixture
def parts(script, monkeypatch):
    """Three parts that need no GPU: one writes its results, one fails, one takes too long."""
    writes = "import sys; open(sys.argv[1], 'w').write('{}')"
    made = {
        "writes": script.Part("it writes", ("-c", writes, "{out}"), 1),
        "fails": script.Part("it fails", ("-c", "import sys; print('why'); sys.exit(3)"), 1),
        "hangs": script.Part("it hangs", ("-c", "import time; time.sleep(60)"), 1 / 60),
    }
    monkeypatch.setattr(script, "PARTS", made)
    monkeypatch.setattr(script, "card", lambda: {"gpu": "G", "torch": "2", "date": "today"})
    return made


def run_script(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    script.main()


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(script, parts, tmp_path, monkeypatch):
    run_script(script, monkeypatch, "--out", tmp_path, "--minutes", "1")
    status = json.loads((tmp_path / "status.json").read_text())
    ends = {name: part["ended"] for name, part in status["parts"].items()}
    assert ends == {"writes": "done", "fails": "exit status 3", "hangs": "ended after 1 s"}
    assert (tmp_path / "writes.json").read_text() == "{}"
    assert "why" in (tmp_path / "fails.txt").read_text()


def test_what_is_done_is_not_run_again(script, parts, tmp_path, monkeypatch, capsys):
    for _ in range(2):
        run_script(script, monkeypatch, "--out", tmp_path, "--only", "writes")
        (tmp_path / "writes.json").unlink(missing_ok=True)
    assert "writes: done before" in capsys.readouterr().out
    assert not (tmp_path / "writes.json").exists()


def test_without_time_nothing_is_begun(script, parts, tmp_path, monkeypatch, capsys):
    run_script(script, monkeypatch, "--out", tmp_path, "--minutes", "0")
    assert capsys.readouterr().out.count("no time left") == 3


def test_an_unknown_part_is_named(script, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_script(script, monkeypatch, "--out", tmp_path, "--only", "magic")
    assert "there is no part magic" in capsys.readouterr().err


def test_the_page_in_docs_is_that_of_the_results(script):
    assert (ROOT / "docs/gpus.md").read_text() == script.page(ROOT / "benchmarks/gpu/results")


def test_the_page_says_what_ran_and_on_which_card(script, parts, tmp_path, monkeypatch):
    run_script(script, monkeypatch, "--out", tmp_path, "--only", "writes,fails")
    page = script.page(tmp_path)
    assert "G, torch 2, today." in page
    assert "| writes | it writes | done in" in page
    assert "| fails | it fails | exit status 3 in" in page
    assert "| hangs | it hangs | not run |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="sees no GPU here"):
        run_script(script, monkeypatch, "--out", tmp_path)


def test_every_part_names_a_script_that_is_there(script):
    for part in script.PARTS.values():
        if part.command[0] != "-m":
            assert (ROOT / part.command[0]).exists()
