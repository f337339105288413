"""Step times: their distributions, their streams, and traces of measured steps."""

import numpy as np
import pytest

from dovetail.errors import FileFormatError, UsageError
from dovetail.training.step_times import StepTimes, read_trace


def drawn(kind, count=40_000, **settings):
    return StepTimes(kind, 2.0, **settings).draw(np.random.default_rng(0), count)


def test_each_kind_has_the_mean_and_the_spread_it_promises():
    assert (drawn("constant") == 2.0).all()
    jitter = drawn("jitter", spread=0.2)
    assert 1.6 <= jitter.min() < 1.61 < 2.39 < jitter.max() < 2.4
    assert jitter.mean() == pytest.approx(2.0, rel=0.01)
    exponential = drawn("exponential")
    assert (exponential.mean(), exponential.std()) == pytest.approx((2.0, 2.0), rel=0.02)
    lognormal = drawn("lognormal", spread=0.5)
    assert (lognormal.mean(), lognormal.std()) == pytest.approx((2.0, 1.0), rel=0.03)


def test_a_trace_gives_its_own_steps_and_its_own_mean():
    times = StepTimes("trace", trace=(1.0, 2.0, 6.0))
    assert times.mean_seconds == 3.0
    assert set(times.draw(np.random.default_rng(0), 100)) == {1.0, 2.0, 6.0}


def test_a_stream_depends_on_its_seed_and_worker_alone_and_is_slowed_by_its_factor():
    def first(seed, worker, slow=1.0):
        stream = StepTimes("exponential").stream(seed, worker, slow)
        return [stream() for _ in range(600)]

    assert first(0, 1) == first(0, 1)
    assert len({tuple(first(seed, worker)) for seed in (0, 1) for worker in (0, 1)}) == 4
    assert first(0, 1, 3.0) == [3.0 * seconds for seconds in first(0, 1)]


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"kind": "normal"}, "times"),
        ({"kind": "trace"}, "trace"),
        ({"trace": (1.0,)}, "trace"),
        ({"mean_seconds": 0.0}, "mean_seconds"),
        ({"mean_seconds": float("nan")}, "mean_seconds"),
        ({"kind": "trace", "trace": (1.0, -1.0, 3.0)}, "mean_seconds"),
        ({"kind": "jitter", "spread": 1.5}, "spread"),
    ],
)
def test_times_that_cannot_be_are_refused(settings, option):
    with pytest.raises(UsageError) as caught:
        StepTimes(**settings)
    assert caught.value.option == option


@pytest.mark.parametrize(
    "text", ["worker,seconds\n0,0.5\n1,1.5\n", "seconds\n0.5\n1.5\n", "0.5\n1.5\n"]
)
def test_a_trace_is_read_from_the_column_of_seconds_or_the_only_one(tmp_path, text):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    assert read_trace(path).trace == (0.5, 1.5)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "seconds\nsoon\n", "seconds\n-1\n", "a\n"])
def test_a_file_without_step_times_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError) as caught:
        read_trace(path)
    assert caught.value.path == str(path)
