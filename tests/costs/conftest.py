import pytest

from dovetail.costs import measured


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Whether cores are quiet changes how well is measured, and nothing that is tested here."""
    monkeypatch.setattr(measured, "_PATIENCE_SECONDS", 1.0)
