import pytest
import torch

from dovetail.executors.stages import measuring
from dovetail.executors.stages.measuring import seconds_in_passes
from tests.support.cpu_steps import Branches, Ready


@pytest.fixture
def ready():
    before = torch.get_num_threads()
    yield Ready(Branches(), [torch.ones(2, 4)])
    torch.set_num_threads(before)


def values_of(ready):
    values = ready.functions.values()
    for tensor, value in ready.functions.example.items():
        values[tensor] = value
    return values


def test_every_kernel_is_timed_in_every_pass(ready):
    values, kernels, told = values_of(ready), len(ready.block), []
    found = seconds_in_passes(ready.functions, values, kernels, 1, told.append)
    assert len(found) == kernels
    for seconds in found:
        assert len(seconds) == measuring._MOST_TIMED_PASSES
        assert min(seconds) > 0
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_passes_leave_the_values_of_a_step(ready):
    values = values_of(ready)
    seconds_in_passes(ready.functions, values, len(ready.block), 1)
    assert {t: values[t].tolist() for t in ready.functions.example} == {
        t: value.tolist() for t, value in ready.functions.example.items()
    }


def test_long_steps_take_fewer_passes(ready, monkeypatch):
    ticking = iter(float(i) for i in range(100_000))
    monkeypatch.setattr(measuring, "clock", lambda: next(ticking))
    found = seconds_in_passes(ready.functions, values_of(ready), len(ready.block), 1)
    assert set(map(len, found)) == {measuring._LEAST_PASSES}


def test_what_a_call_takes_is_taken_off(ready, monkeypatch):
    def ticks():
        now = 0.0
        yield now
        while True:
            for seconds in [5.0] * len(ready.block) + [2.0]:  # the call that does nothing
                yield now
                now += seconds
                yield now
            yield now

    monkeypatch.setattr(measuring, "clock", ticks().__next__)
    found = seconds_in_passes(ready.functions, values_of(ready), len(ready.block), 1)
    assert {taken for seconds in found for taken in seconds} == {3.0}
