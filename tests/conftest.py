import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Tests measure for themselves and leave the user's cache alone."""
    os.environ["DOVETAIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
