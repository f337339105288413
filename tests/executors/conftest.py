import pytest
import torch

from dovetail.executors import Workers
from tests.support.forked import workers_forked
from tests.support.placing import two_devices


@pytest.fixture(scope="session")
def workers():
    """The processes of two CPU devices, lent to one plan after the other."""
    with Workers(two_devices()) as started:
        yield started


@pytest.fixture(scope="module")
def forked_compilers():
    """As `forked_workers`, for modules that compile: the server has imported Inductor as well."""
    with pytest.MonkeyPatch.context() as patch:
        # Else Inductor may start threads when it is imported, and nothing could be forked.
        patch.setenv("TORCH_WARM_POOL", "0")
        modules = ("torch._inductor.compile_fx", "dovetail.executors.compiling")
        with workers_forked(*modules, "dovetail.executors.worker"):
            yield


@pytest.fixture
def one_thread():
    """This process computes as a worker of one core does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
