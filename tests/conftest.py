import os
import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Tests measure for themselves and leave the user's cache alone."""
    os.environ["DOVETAIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A shell that starts the suite in the background lets it ignore SIGINT; tests send some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
