import os
import sys

import pytest

from dovetail import cli


@pytest.fixture
def dovetail(monkeypatch, capsys):
    """dovetail(*arguments) -> (exit status, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dovetail", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def here():
    return f"here/{min(2, len(os.sched_getaffinity(0)))}"
