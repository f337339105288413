import pytest

from dovetail.cli import FORKING
from tests.support.forked import forked_workers


@pytest.fixture(scope="module")
def forks():
    """Worker processes are forked, as those of `dovetail train` are."""
    with forked_workers(*FORKING["train"]):
        yield
