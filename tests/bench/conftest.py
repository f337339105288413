"""What tests of the command `dovetail bench` share."""

import sys

import pytest

from dovetail import cli


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """bench(*arguments) -> (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dovetail", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call
