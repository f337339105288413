import os
import sys

import pytest

from dovetail import cli
from dovetail.costs import measured
from dovetail.runtime.forking import SWITCH


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Whether cores are quiet changes how well is measured, and nothing that is tested here."""
    monkeypatch.setattr(measured, "_PATIENCE_SECONDS", 1.0)


@pytest.fixture
def dovetail(monkeypatch, capsys):
    """dovetail(*arguments) -> (exit status, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dovetail", *map(str, arguments)])
        # A fork server of the command's would serve the tests behind this module, too.
        monkeypatch.setenv(SWITCH, "0")
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(autouse=True, scope="module")
def _forked(forked_workers):
    """No process that a plan starts imports by itself."""


@pytest.fixture(scope="module")
def here():
    return f"here/{min(2, len(os.sched_getaffinity(0)))}"
