import pytest

from tests.contract.shell import Shell


@pytest.fixture(autouse=True)
def _placed_only():
    """Plans are compared with what runs without them, as for users: the suite's own fixture of this
    name, which leaves that out, is put aside."""


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)
