"""What tests of the command `python -m reproductions` share."""

import sys

import pytest

from reproductions.__main__ import main
from tests.support.forked import workers_forked


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """bench(*arguments) -> (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["reproductions", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def forks():
    """Workers of tables are forked, as those of commands are."""
    with workers_forked("reproductions.tasks"):
        yield
