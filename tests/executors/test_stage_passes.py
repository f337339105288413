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


def test_every_kernel_is_timed_in_every_pass(ready):
    kernels, told = len(ready.block), []
    found = seconds_in_passes(ready.functions, kernels, 1, told.append)
    assert len(found) == kernels
    for seconds in found:
        assert len(seconds) == measuring._MOST_TIMED_PASSES
        assert min(seconds) > 0
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_passes_leave_the_example_and_the_callers_threads(ready):
    before = {t: value.tolist() for t, value in ready.functions.example.items()}
    torch.set_num_threads(3)
    seconds_in_passes(ready.functions, len(ready.block), 1)
    assert torch.get_num_threads() == 3
    assert {t: value.tolist() for t, value in ready.functions.example.items()} == before


def test_long_steps_take_fewer_passes(ready, monkeypatch):
    ticking = iter(float(i) for i in range(100_000))
    monkeypatch.setattr(measuring, "clock", lambda: next(ticking))
    found = seconds_in_passes(ready.functions, len(ready.block), 1)
    assert set(map(len, found)) == {measuring._LEAST_PASSES}


def test_a_kernel_takes_as_long_as_its_calls(ready):
    class Slow(torch.nn.Module):
        def forward(self, given):
            return given.sin(), given.mm(given)

    slow = Ready(Slow(), [torch.ones(400, 400)])
    sine, product = seconds_in_passes(slow.functions, 2, 1)
    quick = seconds_in_passes(ready.functions, len(ready.block), 1)
    assert min(sine) > 1e-5 and min(product) > 1e-5
    assert min(map(min, quick)) < min(product)
