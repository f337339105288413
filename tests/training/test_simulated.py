"""The simulated backend: virtual time by hand, replay, deaths, joins, and the caller's watcher."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import DivergedError, NoWorkersError, ProcessError, UsageError
from dovetail.training.backends import load_backend
from dovetail.training.backends.contract import Assignment, FailurePolicy, Storage, Watcher
from dovetail.training.backends.simulated import run
from dovetail.training.learner import Gradient
from dovetail.training.records import Job
from dovetail.training.rules import make_rule
from dovetail.training.step_times import StepTimes

EXPONENTIAL, JITTER = StepTimes("exponential"), StepTimes("jitter")


class Regression:
    """Least squares in five dimensions, plain descent."""

    def __init__(self, rate=0.05):
        rng = np.random.default_rng(7)
        self.inputs = rng.normal(size=(60, 5)).astype(np.float32)
        self.targets = self.inputs @ np.arange(5, dtype=np.float32)
        self.learning_rate = rate

    def gradient(self, theta, indices, epoch):
        x = self.inputs[indices]
        error = x @ theta - self.targets[indices]
        return Gradient(x.T @ error / len(x), float(error @ error) / len(x), len(x))

    def update(self, theta, gradient, epoch):
        return np.float32(-self.learning_rate) * gradient

    def rate(self, epoch):
        return self.learning_rate


class Tally(Regression):
    """Adds one to a sample's own element: the center counts how often each was committed."""

    def gradient(self, theta, indices, epoch):
        vector = np.zeros_like(theta)
        vector[indices] = 1
        return Gradient(vector, 0.0, len(indices))

    def update(self, theta, gradient, epoch):
        return gradient.copy()


class Shrinking(Tally):
    """The gradient of x is x, at rate 1/2."""

    def gradient(self, theta, indices, epoch):
        return Gradient(theta.copy(), 0.0, len(indices))

    def update(self, theta, gradient, epoch):
        return np.float32(-0.5) * gradient


def assigned(rule="downpour", learner=Regression, size=5, order=None, policy=None, **job):
    settings = {"samples": 60, "epochs": 2, "batch": 4, "window": 2, "workers": 3, "seed": 1} | job
    return Assignment(
        Job(run="r", size=size, **settings),
        make_rule(rule),
        np.zeros(size, np.float32),
        lambda worker: learner(),
        order=order,
        policy=policy or FailurePolicy(),
    )


def counted(policy=None, **job):
    return assigned("downpour", Tally, 60, policy=policy, **job)


def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_seed_another():
    first, again, other = (
        run(assigned(seed=seed), Watcher(), times=EXPONENTIAL, apply_seconds=0.1)
        for seed in (1, 1, 2)
    )
    assert first.theta.tobytes() == again.theta.tobytes() != other.theta.tobytes()
    assert repr(first.rows) == repr(again.rows)  # as text: there are nans
    assert first.events == again.events
    assert first.meta["order"] == again.meta["order"] != other.meta["order"]


def test_the_order_of_turns_makes_a_run_with_other_times_give_the_same_bits():
    free = run(assigned("dynsgd"), Watcher(), times=EXPONENTIAL)
    forced = run(assigned("dynsgd", order=free.meta["order"]), Watcher(), slow={0: 5.0})
    unforced = run(assigned("dynsgd"), Watcher(), slow={0: 5.0})
    assert forced.theta.tobytes() == free.theta.tobytes() != unforced.theta.tobytes()
    assert forced.meta["order"] == free.meta["order"]
    assert [row.staleness for row in forced.rows] == [row.staleness for row in free.rows]


def test_virtual_time_is_as_drawn():
    #      0    1    2    3    4    5    6    7    8    9   10   11   12   13
    # w0   pull----|step---------|up--------|                                   2 + 4 + 2 + 1
    # w1   pull----|step---------|up--------|wait|
    # server                                |w0  |w1  |
    # answers arrive after 2: at 11 and at 12; the second window likewise, w1's commit at 19
    theta_bytes = 5 * 4
    outcome = run(
        assigned(samples=16, epochs=1, batch=4, window=1, workers=2),
        Watcher(),
        times=StepTimes("constant", 4.0),
        latency_seconds=1.0,
        bandwidth_bytes_per_second=theta_bytes,  # a vector takes 1 s more
        apply_seconds=1.0,
    )
    spans = [(row.worker, row.begin_seconds, row.end_seconds, row.seconds) for row in outcome.rows]
    # The first turn carries no vector up: 1 there, 2 back.
    assert spans == [
        (0, 3.0, 7.0, 10.0),
        (1, 3.0, 7.0, 11.0),
        (0, 12.0, 16.0, 19.0),
        (1, 13.0, 17.0, 20.0),
    ]
    assert outcome.seconds == 20.0
    assert outcome.meta["order"] == (0, 1, 0, 1, 0, 1)


def test_another_worker_changes_nobodys_step_times():
    def windows(workers):
        rows = run(assigned(workers=workers, epochs=6), Watcher(), times=EXPONENTIAL).rows
        of_0 = [row.end_seconds - row.begin_seconds for row in rows if row.worker == 0]
        return of_0[:4]

    assert windows(3) == pytest.approx(windows(4), rel=1e-12)
    assert len(set(windows(3))) == 4


def test_a_straggler_holds_up_synchronous_workers_but_not_asynchronous_ones():
    def slowdown(rule):
        job = assigned(rule, window=1, workers=4, epochs=8)
        equal = run(job, Watcher(), times=StepTimes("jitter"))
        return (
            run(job, Watcher(), times=StepTimes("jitter"), slow={0: 10.0}).seconds / equal.seconds
        )

    assert slowdown("sync") > 8
    # Three quarters of the work are left for three workers: 4/3 of the time, and one last step.
    assert slowdown("downpour") < 1.7


def test_a_slow_worker_trains_less_and_its_commits_are_staler():
    rows = run(assigned(epochs=8, window=1), Watcher(), slow={0: 5.0}).rows
    commits = Counter(row.worker for row in rows)
    assert 4 * commits[0] <= commits[1] <= commits[2] + 1
    assert max(row.staleness for row in rows if row.worker == 0) == 10
    assert max(row.staleness for row in rows if row.worker != 0) <= 2


@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.0, 7.3])
def test_a_dead_workers_samples_are_trained_by_others_exactly_once(seconds):
    policy = FailurePolicy(worker_restarts=0, worker_losses=1)
    outcome = run(counted(policy), Watcher(), times=EXPONENTIAL, deaths={1: seconds})
    assert (outcome.theta == 2).all()
    assert outcome.samples == sum(row.samples for row in outcome.rows) == 120
    assert [(e.kind, e.seconds) for e in outcome.events if e.worker == 1][1:] == [("lost", seconds)]
    assert all(row.end_seconds <= seconds for row in outcome.rows if row.worker == 1)


def test_a_killed_worker_is_started_anew_and_goes_on():
    outcome = run(counted(), Watcher(), deaths={1: 3.5}, restart_seconds=2.0)
    assert (outcome.theta == 2).all()
    kinds = [(event.kind, event.seconds) for event in outcome.events if event.worker == 1]
    assert kinds[:3] == [("joined", 0.0), ("lost", 3.5), ("restarted", 5.5)]
    sequences = [row.sequence for row in outcome.rows if row.worker == 1]
    assert sequences == list(range(1, len(sequences) + 1))


def test_a_round_does_not_wait_for_the_dead():
    policy = FailurePolicy(worker_restarts=0, worker_losses=1)
    outcome = run(assigned("sync", policy=policy), Watcher(), deaths={2: 2.5})
    assert outcome.samples == 120


def test_a_late_worker_joins_and_every_sample_counts_once():
    outcome = run(counted(epochs=4), Watcher(), joins={3: 6.5})
    assert (outcome.theta == 4).all()
    late = [row for row in outcome.rows if row.worker == 3]
    assert late[0].begin_seconds == 6.5
    assert late[0].staleness <= 3


def test_deaths_beyond_the_policy_end_the_run():
    with pytest.raises(NoWorkersError) as caught:
        run(counted(FailurePolicy(worker_restarts=0)), Watcher(), deaths={0: 1.0})
    assert caught.value.lost == 1
    with pytest.raises(NoWorkersError):
        policy = FailurePolicy(worker_restarts=0, worker_losses=9)
        run(counted(policy, workers=1), Watcher(), deaths={0: 1.0})


def test_a_hung_worker_loses_its_lease_and_its_late_commit_is_refused():
    policy = FailurePolicy(lease_seconds=3.0)
    outcome = run(counted(policy, epochs=4), Watcher(), slow={2: 20.0})
    assert (outcome.theta == 4).all()
    assert ("lost", 3.0) in [(e.kind, e.seconds) for e in outcome.events if e.worker == 2]
    assert "refused" in [event.kind for event in outcome.events if event.worker == 2]
    assert not [row for row in outcome.rows if row.worker == 2]


def test_a_run_whose_workers_are_all_hung_ends():
    with pytest.raises(NoWorkersError) as caught:
        run(counted(FailurePolicy(lease_seconds=3.0)), Watcher(), times=StepTimes(mean_seconds=4.0))
    assert caught.value.lost == 3


def test_evaluations_come_at_exact_moments_of_virtual_time():
    seen = []

    def evaluate(theta, clock, samples, seconds):
        seen.append((seconds, samples))
        return {"loss": float(theta.sum())}

    watcher = Watcher(every_seconds=2.5, evaluate=evaluate)
    outcome = run(counted(workers=2, window=1), watcher)
    # Two workers commit four samples each at 1, 2, ...; what happens at a moment is counted.
    assert seen == [(2.5, 16), (5.0, 40), (7.5, 56), (10.0, 80), (12.5, 96)]
    assert [e.figures["loss"] for e in outcome.evaluations] == [16, 40, 56, 80, 96]


def test_evaluations_come_whenever_the_center_has_seen_so_many_samples_more():
    watcher = Watcher(every_samples=50, evaluate=lambda *_: {})
    outcome = run(counted(), watcher)
    assert [evaluation.samples for evaluation in outcome.evaluations] == [52, 100]


def test_the_caller_stops_a_run_and_is_told_of_every_row_and_event():
    rows, events = [], []
    watcher = Watcher(
        every_samples=20,
        evaluate=lambda theta, clock, samples, seconds: {"samples": samples},
        should_stop=lambda figures: figures[-1]["samples"] >= 60,
        rows=rows.extend,
        event=events.append,
    )
    outcome = run(counted(epochs=50), watcher)
    assert outcome.stopped
    assert 60 <= outcome.samples < 80
    assert tuple(rows) == outcome.rows
    assert tuple(events) == outcome.events
    assert "stopped" in [event.kind for event in events]


class Failing(Tally):
    """Its third gradient fails."""

    def __init__(self):
        super().__init__()
        self.left = 3

    def gradient(self, theta, indices, epoch):
        self.left -= 1
        if not self.left:
            raise ArithmeticError("the third gradient")
        return super().gradient(theta, indices, epoch)


def test_an_exception_in_a_worker_ends_the_run_with_its_traceback():
    with pytest.raises(ProcessError) as caught:
        run(assigned("downpour", Failing, 60), Watcher())
    assert caught.value.process == "worker 0"
    assert "ArithmeticError: the third gradient" in caught.value.traceback
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_an_exception_counts_as_a_death_where_the_policy_says_so():
    made = []

    def learner(worker):
        made.append(worker)
        return Failing() if len(made) == 1 else Tally()

    job = counted(FailurePolicy(worker_errors=1))
    outcome = run(Assignment(job.job, job.rule, job.theta, learner, policy=job.policy), Watcher())
    assert made == [0, 1, 2, 0]
    assert (outcome.theta == 2).all()


class Diverging(Tally):
    def update(self, theta, gradient, epoch):
        return gradient * np.float32(np.nan)


def test_refused_commits_end_the_run_once_there_are_too_many_and_change_nothing():
    seen = []
    watcher = Watcher(event=seen.append)
    with pytest.raises(DivergedError) as caught:
        run(assigned("agn", Diverging, 60, policy=FailurePolicy(refusals=5)), watcher)
    assert caught.value.rule == "agn"
    assert "not finite" in caught.value.detail


def test_without_locks_a_step_reads_at_its_beginning_and_writes_at_its_end():
    #  time      0     1     2         x = 1, U = -x/2
    #  worker 0  |1    |1/2..|         reads 1, writes -1/2 at 1;  reads 1/2, writes at 2
    #  worker 1  |1    |0..  |         reads 1, writes -1/2 at 1, after worker 0;  reads 0
    job = assigned("hogwild", Shrinking, 1, samples=4, epochs=1, batch=1, window=2, workers=2)
    start = Assignment(job.job, job.rule, np.ones(1, np.float32), job.learner)
    outcome = run(start, Watcher())
    assert outcome.theta.tolist() == [1 - 0.5 - 0.5 - 0.25 - 0.0]
    assert start.theta.tolist() == [1.0]
    assert (outcome.samples, outcome.seconds) == (4, 2.0)


class Stream(Tally):
    """Ends after 37 samples."""

    def gradient(self, theta, indices, epoch):
        return super().gradient(theta, indices[indices < 37], epoch)


def test_a_stream_ends_where_its_workers_find_the_end():
    outcome = run(assigned("downpour", Stream, 60, samples=None, epochs=1), Watcher())
    assert outcome.theta.tolist() == [1.0] * 37 + [0.0] * 23
    assert outcome.samples == 37


@pytest.mark.parametrize("length", [0, 36, 37, 40])
def test_a_stream_ends_without_locks_too(length):
    class Short(Tally):
        def gradient(self, theta, indices, epoch):
            return super().gradient(theta, indices[indices < length], epoch)

    outcome = run(assigned("hogwild", Short, 60, samples=None, epochs=1), Watcher())
    assert outcome.theta.tolist() == [1.0] * length + [0.0] * (60 - length)
    assert outcome.samples == sum(row.samples for row in outcome.rows) == length


def test_an_interrupted_run_is_continued_from_its_folder_and_no_sample_counts_twice(tmp_path):
    def interrupt(theta, clock, samples, seconds):
        raise KeyboardInterrupt

    job = counted(epochs=4)
    with pytest.raises(KeyboardInterrupt):
        first = replace(job, storage=Storage(tmp_path / "run"))
        run(first, Watcher(every_samples=100, evaluate=interrupt), deaths={1: 2.5})
    seen = []
    watcher = Watcher(every_samples=100, evaluate=lambda *_: {}, rows=seen.extend)
    second = replace(job, storage=Storage(tmp_path / "run", resume=True))
    outcome = run(second, watcher, deaths={1: 2.5})
    assert (outcome.theta == 4).all()
    assert sum(row.samples for row in outcome.rows) == 240
    seconds = [row.seconds for row in outcome.rows]
    assert seconds == sorted(seconds)
    assert [evaluation.samples for evaluation in outcome.evaluations] == [204]
    assert tuple(seen) == outcome.rows[-len(seen) :] != outcome.rows
    assert Counter(event.kind for event in outcome.events)["lost"] == 1


def test_commits_on_a_narrow_wire_travel_faster_and_are_rounded():
    def ran(wire):
        job = replace(assigned(window=1, epochs=8), wire=wire)
        return run(job, Watcher(), bandwidth_bytes_per_second=20.0)

    plain, half, largest = ran("none"), ran("float16"), ran("topk:0.2")
    # A step and a pull of 20 bytes take 1 s each; a commit 1, 1/2, or 8 of 20 bytes.
    assert plain.seconds == pytest.approx(40 * 3.0)
    assert half.seconds == pytest.approx(40 * 2.5)
    assert largest.seconds == pytest.approx(40 * 2.4)
    np.testing.assert_allclose(half.theta, plain.theta, rtol=1e-2)
    assert half.theta.tobytes() != plain.theta.tobytes()
    np.testing.assert_allclose(largest.theta, np.arange(5), atol=0.5)


WORKERS = st.integers(1, 4)  # worker 0 is spared, so that one is always left
MOMENTS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7, 6.0, 9.9, 15.0])


@settings(max_examples=40, deadline=None)
@given(
    rule=st.sampled_from(["downpour", "ssp", "sync", "averaging", "aeasgd"]),
    job=st.fixed_dictionaries(
        {
            "workers": st.integers(1, 4),
            "window": st.integers(1, 5),
            "batch": st.integers(1, 17),
            "epochs": st.integers(1, 3),
            "seed": st.integers(0, 5),
        }
    ),
    restarts=st.sampled_from([0, 1, 4]),
    lease_seconds=st.sampled_from([1.5, 60.0]),
    world=st.fixed_dictionaries(
        {
            "times": st.sampled_from([StepTimes(), JITTER]),
            "slow": st.dictionaries(WORKERS, st.sampled_from([0.5, 2.0, 7.0]), max_size=2),
            "deaths": st.dictionaries(WORKERS, MOMENTS, max_size=3),
            "joins": st.dictionaries(st.integers(1, 5), MOMENTS, max_size=2),
            "latency_seconds": st.sampled_from([0.0, 0.5]),
            "apply_seconds": st.sampled_from([0.0, 0.25]),
            "restart_seconds": st.sampled_from([0.0, 4.0]),
        }
    ),
)
def test_every_sample_counts_once_an_epoch_whatever_befalls_the_workers(
    rule, job, restarts, lease_seconds, world
):
    policy = FailurePolicy(worker_restarts=restarts, worker_losses=4, lease_seconds=lease_seconds)
    job = assigned(rule, Tally, 60, policy=policy, **job)
    outcome = run(job, Watcher(), **world)
    assert outcome.samples == 60 * job.job.epochs
    assert sum(row.samples for row in outcome.rows) == outcome.samples
    if rule not in ("downpour", "ssp"):
        return
    assert (outcome.theta == job.job.epochs).all()
    assert [row.clock for row in outcome.rows] == list(range(1, len(outcome.rows) + 1))


def test_an_option_that_the_backend_has_not_is_an_error():
    with pytest.raises(UsageError) as caught:
        load_backend("simulated", latency=1.0)(counted(), Watcher())
    assert caught.value.option == "latency"
    for options in ({"apply_seconds": -1.0}, {"slow": {0: 0.0}}, {"bandwidth_bytes_per_second": 0},
                    {"apply_seconds": "1 s"}, {"slow": 4}, {"deaths": {0: "soon"}},
                    {"times": "jitter"}, {"bandwidth_bytes_per_second": None}):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            run(counted(), Watcher(), **options)
        assert caught.value.option == next(iter(options))


def test_nothing_of_it_imports_torch():
    code = (
        "import sys, dovetail.training.backends.simulated, dovetail.training.analysis\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
