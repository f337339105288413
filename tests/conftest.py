import gc
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Threads of OpenMP that wait sleep, and there is one of them: several tests run side by side, and
# threads that spin on a core that another test needs make both a hundred times as slow. It is read
# when torch is imported, which no line above this one may do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What takes longest begins first, so that no worker is left with it at the end. A capture that is
# refused looks through all objects of Python several times (`frontends.leftovers`), so that tests
# of refusals come before others have kept many more of them.
LONGEST = (
    "training/ray_cluster",
    "contract/test_defaults.py",
    "training/processes/test_processes_faults.py",
    "frontends/test_checks.py",
    "frontends/test_known_numbers.py",
    "frontends/test_capture",
    "executors/test_random_modules.py",
    "frontends/test_onnx_exports.py",
    "reproductions/test_learning.py",
    "executors/test_transparency.py",
    "test_documents.py",
    "costs/test_measured.py",
    "pipeline",
    "runtime/test_processes.py",
    "placers/learned",
    "placers",
    "executors",
    "reproductions",
)
TOGETHER = ("training/ray_cluster",)
"""Folders all of whose tests one worker runs, since they share something costly, a cluster."""
TESTS = Path(__file__).parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of one file, or of a folder in `TOGETHER`, go to one worker, in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            folders = [folder for folder in TOGETHER if file.startswith(f"tests/{folder}/")]
            return folders[0] if folders else file

    config.option.loadscopereorder = False
    return FilesTogether(config, log)


def pytest_collection_modifyitems(items):
    def rank(item):
        name = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        ranks = [number for number, start in enumerate(LONGEST) if name.startswith(start)]
        return min(ranks, default=len(LONGEST))

    items.sort(key=rank)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (why := reason_without_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why))


def reason_without_gpu():
    """Why tests of GPUs cannot run here; "" where they can."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here"
    return ""


# No example fails for being slow: how long it takes is the machine's business.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Tests measure for themselves and leave the user's cache alone. Only the C++ runner, which
    takes half a minute to build, stays there from run to run.

    Inductor has one folder for all tests, also for those with a cache of their own: in an empty one
    it compiles several programs to find out which vector instructions the compiler knows. That its
    folder is in our cache where nobody names one is shown by security/test_caches.py and
    executors/test_local_steps.py."""
    from dovetail.runtime.files import cache_folder
    from dovetail.runtime.native import SWITCH

    os.environ.setdefault(SWITCH, str(cache_folder() / "native"))
    os.environ["DOVETAIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in there
        shared = shared.parent
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(shared / "inductor")


@pytest.fixture(autouse=True, scope="session")
def _undisturbed():
    """What else this machine does is no matter of the tests: measured costs are kept all the same,
    and nobody waits long for cores that are quiet. That changes how well is measured, and nothing
    that is tested. Those that are about neighbours bring their own."""
    from dovetail.costs import measured
    from dovetail.runtime import neighbours

    neighbours.BUSY_CORES, measured._PATIENCE_SECONDS = float("inf"), 1.0


@pytest.fixture(scope="module")
def forked_workers():
    """Processes are forked by a server that has imported torch, as those of commands are. By itself
    each would import it, for seconds. Not for modules that share processes with others, as the
    fixture `workers` of executors/ does: what it has forked ends with the server."""
    from tests.support.forked import workers_forked

    # The first optimizer of a process imports the second.
    with workers_forked("torch", "torch._dynamo", "dovetail.executors.worker"):
        yield


@pytest.fixture
def played_gpus(request):
    """The CPU plays the GPUs of machines, but for tests of GPUs that are here."""
    from tests.support.played_cuda import played

    with nullcontext() if request.node.get_closest_marker("gpu") else played():
        yield


@pytest.fixture(autouse=True)
def _placed_only(request, monkeypatch):
    """Plans are not compared with what runs without them, which takes seconds a plan. Tests marked
    with `compares_ways` are about that."""
    monkeypatch.setenv("DOVETAIL_COMPILE_BUDGET", "0s")
    if request.node.get_closest_marker("compares_ways"):
        return
    monkeypatch.setattr("dovetail.pipeline.planning._measured", lambda *given: given[3])


@pytest.fixture(autouse=True)
def _own_objects_alone(request, monkeypatch):
    """What a refused capture has left is looked for among what the tests of a module have made, and
    not in all that was imported, which takes a second or two a refusal. Tests marked with
    `searches_all_objects` are about that."""
    if not request.node.get_closest_marker("searches_all_objects"):
        monkeypatch.setattr("dovetail.frontends.leftovers._nothing_frozen", nullcontext)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Leaves what earlier modules have kept, such as captured graphs, out of garbage collections:
    going through all of it takes seconds. What torch remembers of each call on fake tensors, of
    each shape anew, is forgotten before."""
    if "torch._subclasses.fake_tensor" in sys.modules:
        sys.modules["torch._subclasses.fake_tensor"].FakeTensorMode.cache_clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A shell that starts the suite in the background lets it ignore SIGINT; tests send some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
