import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Threads of OpenMP that wait sleep, and there is one of them: several tests run side by side, and
# threads that spin on a core that another test needs make both a hundred times as slow. It is read
# when torch is imported, which no line above this one may do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

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


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Leaves what earlier modules have kept, such as captured graphs, out of garbage collections:
    going through all of it takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A shell that starts the suite in the background lets it ignore SIGINT; tests send some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
