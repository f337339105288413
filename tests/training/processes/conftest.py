import pytest

from tests.support.forked import workers_forked


@pytest.fixture(scope="module")
def forks():
    """Workers are forked, and import no torch: their learners do without."""
    backend = "dovetail.training.backends.processes"
    with workers_forked(f"{backend}.server", f"{backend}.worker", "tests.support.process_learners"):
        yield
