import pytest
import torch

from dovetail.executors import Workers
from tests.support.placing import two_devices


@pytest.fixture(scope="session")
def workers():
    """The processes of two CPU devices, lent to one plan after the other."""
    with Workers(two_devices()) as started:
        yield started


@pytest.fixture
def one_thread():
    """This process computes as a worker of one core does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
