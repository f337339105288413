import pytest

from tests.contract.shell import Shell
from tests.support.forked import workers_forked


@pytest.fixture(autouse=True)
def _placed_only():
    """Plans are compared with what runs without them, as for users: the suite's own fixture of this
    name, which leaves that out, is put aside."""


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def forks():
    """What this process runs is run by processes that are forked, as those of a command are."""
    with workers_forked("torch", "dovetail.executors.worker", "dovetail.costs.measured"):
        yield
