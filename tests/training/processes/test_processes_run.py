import itertools
import subprocess
import sys

import numpy as np
import pytest

from dovetail.errors import RunMismatchError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Storage, Watcher
from dovetail.training.backends.processes import run
from dovetail.training.backends.simulated import run as simulate
from dovetail.training.records import Turn
from dovetail.training.server import Server
from tests.support.doors import Doors
from tests.support.process_learners import Counting, assign, count

pytestmark = pytest.mark.usefixtures("forks")


def numbers(outcome):
    """The rows, but for their times."""
    return [
        (r.clock, r.worker, r.sequence, r.staleness, r.steps, r.samples, r.loss, r.norm)
        for r in outcome.rows
    ]


@pytest.mark.parametrize(
    ("rule", "wire"),
    [("adag-agn", "topk:0.5"), ("aeasgd", "none"), ("dc-asgd-adaptive", "none"), ("sync", "none")],
)
def test_processes_and_simulation_agree_bit_for_bit_on_a_forced_order(rule, wire):
    simulated = simulate(assign(rule, wire=wire), Watcher())
    forced = assign(rule, wire=wire, order=simulated.meta["order"])
    outcome = run(forced, Watcher())
    assert outcome.theta.tobytes() == simulated.theta.tobytes()
    assert numbers(outcome) == numbers(simulated)
    assert outcome.clock == simulated.clock > 0


def test_lock_free_workers_train_the_shared_center():
    """Each adds to coordinates of its own samples only, so that no two writes meet."""
    assignment = assign(
        "hogwild", learner=lambda worker: Counting(40, 0.002), samples=40, size=40, epochs=1
    )
    outcome = run(assignment, Watcher())
    assert (outcome.theta == 1).all()
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 40


def test_rows_events_and_evaluations_are_told_and_the_watcher_may_stop():
    seen, happened, calls = [], [], []

    def evaluate(theta, clock, samples, seconds):
        calls.append(samples)
        return {"trained": float(theta.sum())}

    watcher = Watcher(
        every_samples=40,
        evaluate=evaluate,
        should_stop=lambda figures: len(figures) == 3,
        rows=seen.extend,
        event=happened.append,
    )
    outcome = run(count(60, epochs=10**6), watcher)
    assert outcome.stopped
    assert tuple(seen) == outcome.rows
    assert tuple(happened) == outcome.events
    assert [e.samples for e in outcome.evaluations] == calls
    assert all(e.figures == {"trained": e.samples} for e in outcome.evaluations)
    assert all(after // 40 > before // 40 for before, after in itertools.pairwise([0, *calls]))
    assert outcome.theta.sum() == outcome.samples >= calls[-1]
    seconds = [row.seconds for row in outcome.rows]
    assert seconds == sorted(seconds)
    assert all(0 < r.begin_seconds <= r.end_seconds <= r.seconds for r in outcome.rows)


def test_late_workers_join_a_run_that_goes_on():
    backend = load_backend("processes", late=(8, 8), threads=1, cores=((0,),))
    seen = set()
    watcher = Watcher(
        every_samples=8,
        evaluate=lambda *_: {},
        should_stop=lambda _: seen == {0, 1, 2},
        rows=lambda rows: seen.update(row.worker for row in rows),
    )
    outcome = backend(count(40, seconds=0.01, workers=1, epochs=10**6), watcher)
    assert {row.worker for row in outcome.rows} == {0, 1, 2}
    assert outcome.theta.sum() == outcome.samples


def test_a_run_is_continued_from_its_folder(tmp_path):
    """The first part is stopped after some commits, beyond which it does not come; the second ends
    the epochs."""
    doors = Doors(tmp_path)

    def hold(worker, committed):
        if committed >= 40:
            doors.wait("second")

    stop = Watcher(every_samples=30, evaluate=lambda *_: {}, should_stop=lambda _: True)
    first = run(count(storage=Storage(tmp_path / "run"), hold=hold), stop)
    doors.open("second")
    assert 0 < first.samples < 120
    assert first.stopped
    resumed = Storage(tmp_path / "run", resume=True)
    second = run(count(storage=resumed), Watcher())
    assert (second.theta == 2).all()
    assert repr(second.rows[: len(first.rows)]) == repr(first.rows)  # nan is nan
    assert second.seconds > first.seconds
    assert min(r.seconds for r in second.rows[len(first.rows) :]) > first.rows[-1].seconds
    with pytest.raises(RunMismatchError) as raised:
        run(count(60, storage=resumed, batch=5), Watcher())
    assert (raised.value.field, raised.value.expected, raised.value.found) == ("batch", 5, 4)


def test_a_continued_run_gives_a_late_workers_samples_to_others(tmp_path):
    """All of the first part was killed when worker 1, a late one, had committed nothing yet."""
    job = {"workers": 1, "epochs": 3}
    first = count(40, **job)
    storage = Storage(tmp_path)
    with Server(first.job, first.rule, first.theta, storage=storage, clock=lambda: 0.0) as server:
        for worker in (0, 1):
            server.join(worker)
            assert server.take(Turn(worker, lease=True))[0].reply.lease is not None
    second = run(count(40, storage=Storage(tmp_path, resume=True), **job), Watcher())
    assert (second.theta == 3).all()


def test_data_travel_once_and_a_learner_may_write_to_its_own():
    data = np.ones((50, 4000), np.float32)

    def make(worker):
        learner = Counting(40)
        data[:] += worker  # writable, and no other worker's
        assert (data == 1 + worker).all()
        return learner

    outcome = run(assign(learner=make, samples=40, size=40), Watcher())
    assert (outcome.theta == 2).all()
    assert (data == 1).all()


def test_the_server_process_imports_no_torch():
    code = (
        "import sys, dovetail.training.backends.processes.server, dovetail.training.checks;"
        "assert not {'torch', 'cloudpickle', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
