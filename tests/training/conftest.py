import pytest

from dovetail.cli import FORKING
from tests.support.forked import workers_forked


@pytest.fixture(scope="module")
def forks():
    """Worker processes are forked, as those of `dovetail train` are."""
    with workers_forked(*FORKING["train"]):
        yield
