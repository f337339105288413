import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# No example fails for being slow: how long it takes is the machine's business.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Tests measure for themselves and leave the user's cache alone."""
    os.environ["DOVETAIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _undisturbed():
    """What else this machine does is no matter of the tests: measured costs are kept all the same.
    Those that are about neighbours bring their own."""
    from dovetail.runtime import neighbours

    quiet, neighbours.BUSY_CORES = neighbours.BUSY_CORES, float("inf")
    yield
    neighbours.BUSY_CORES = quiet


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A shell that starts the suite in the background lets it ignore SIGINT; tests send some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
