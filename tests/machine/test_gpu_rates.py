"""What is measured of GPUs for `dovetail machine`, on GPUs that the CPU plays."""

from dataclasses import replace

import pytest
import torch

from dovetail.errors import MachineError
from dovetail.machine import gpu_rates, local_machine
from dovetail.machine.gpu_rates import (
    SHOWN_DTYPES,
    GpuTimer,
    copy_rates,
    matrix_rates,
    measure_gpus,
    reached_peers,
)
from dovetail.runtime.cuda import TorchCuda
from tests.support.played_cuda import PlayedCuda
from tests.support.played_gpus import HOST, cpu, gpu, linked

CPU = torch.device("cpu")


def two_gpus():
    return linked("box", HOST, gpu(0), replace(gpu(1), torch_device="cuda:1"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(PlayedCuda, "matrix_size", 64)
    monkeypatch.setattr(PlayedCuda, "copied_bytes", 2**16)


class SeenCuda(PlayedCuda):
    """A CUDA that the CPU plays, which notes what is asked of it."""

    def __init__(self):
        self.streams, self.timed = 0, 0
        super().__init__()

    def Stream(self, device=None):
        self.streams += 1
        return super().Stream(device)

    def Event(self, enable_timing=False, blocking=False):
        self.timed += enable_timing
        return super().Event(enable_timing, blocking)


def test_each_gpu_has_products_copies_and_peers():
    cuda = SeenCuda()
    first, second = measure_gpus(two_gpus(), cuda)
    assert (first.torch_device, first.devices, first.peers) == ("cuda:0", ("gpu0",), ("cuda:1",))
    assert second.peers == ("cuda:0",)
    for rates in (first, second):
        assert (rates.model, rates.memory_bytes) == ("test", 1 << 33)
        assert set(rates.flops_per_second) == set(SHOWN_DTYPES)
        ends = {(way, memory) for way in ("to", "from") for memory in ("pinned", "pageable")}
        assert set(rates.copies) == ends
        assert all(rate > 0 for rate in (*rates.flops_per_second.values(), *rates.copies.values()))
    # One stream of each GPU beside that which a CUDA has; every work is between two events.
    assert cuda.streams == 1 + 2
    works = 2 * (len(SHOWN_DTYPES) + 4) * (gpu_rates._WARM_UPS + gpu_rates._SAMPLES)
    assert cuda.timed == 2 * works


def test_devices_that_share_a_gpu_are_measured_as_one():
    (rates,) = measure_gpus(linked("box", HOST, gpu(0), gpu(1)), PlayedCuda())
    assert rates.devices == ("gpu0", "gpu1")
    assert rates.memory_bytes == 1 << 33
    assert rates.peers == ()


def test_a_machine_without_gpus_of_its_own_has_nothing_to_measure():
    preset = replace(gpu(0), torch_device="")
    assert measure_gpus(linked("box", cpu(0), preset)) == ()


def test_a_median_is_of_what_runs_after_warming_up(monkeypatch):
    timer, seconds = GpuTimer(PlayedCuda(), CPU), iter([9.0, 8.0, 7.0, *([2.0, 1.0, 3.0, 2.0] * 5)])
    monkeypatch.setattr(timer, "seconds_of", lambda _work: next(seconds))
    assert timer.median_seconds(lambda: None) == 2.0


def test_works_of_seconds_are_repeated_a_few_times_only(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(gpu_rates, "clock", lambda: next(now))
    timer, runs = GpuTimer(PlayedCuda(), CPU), []
    timer.median_seconds(lambda: runs.append(1))
    assert len(runs) == gpu_rates._WARM_UPS + gpu_rates._LEAST_SAMPLES


def test_rates_are_work_by_seconds(monkeypatch):
    timer = GpuTimer(PlayedCuda(), CPU)
    monkeypatch.setattr(timer, "median_seconds", lambda work: (work(), 0.5)[1])
    assert matrix_rates(timer, ["float32"]) == {"float32": 4 * 64**3}
    assert set(copy_rates(timer).values()) == {2**17}


def test_a_dtype_without_arithmetic_is_left_out_and_a_full_memory_is_an_error(monkeypatch):
    timer, errors = GpuTimer(PlayedCuda(), CPU), [RuntimeError("not implemented for 'Half'")]

    def median_seconds(work):
        raise errors[-1]

    monkeypatch.setattr(timer, "median_seconds", median_seconds)
    assert matrix_rates(timer, ["float64"]) == {}
    errors.append(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        matrix_rates(timer, ["float64"])
    monkeypatch.setattr(gpu_rates, "matrix_rates", lambda _timer, _dtypes: median_seconds(None))
    with pytest.raises(MachineError, match="'gpu0' cannot be measured: CUDA out of memory"):
        measure_gpus(two_gpus(), PlayedCuda())


class HardwareCuda(TorchCuda):
    """What `torch.cuda` says of two GPUs of which the first reaches the second alone."""

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def mem_get_info(self, device):
        return 1 << 30, (1 << 34) + device.index

    def get_device_name(self, device):
        return f"NVIDIA {device.index}"

    def can_device_access_peer(self, device, peer_device):
        return (device.index, peer_device.index) == (0, 1)


def test_torch_is_asked_for_peers():
    cuda, names = HardwareCuda(), ["cuda:0", "cuda:1"]
    assert reached_peers(cuda, "cuda:0", names) == ("cuda:1",)
    assert reached_peers(cuda, "cuda:1", names) == ()


def test_another_gpu_than_the_machine_says_is_named():
    real = linked("box", HOST, replace(gpu(0), model="NVIDIA 7"))
    with pytest.raises(MachineError, match="'gpu0' is 'NVIDIA 7', but cuda:0 here is 'NVIDIA 0'"):
        measure_gpus(real, HardwareCuda())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_named():
    with pytest.raises(MachineError, match="torch sees no GPU here"):
        measure_gpus(linked("box", HOST, gpu(0)))


@pytest.mark.gpu
def test_the_gpus_that_are_here_are_measured():
    found = measure_gpus(local_machine("here/gpu"))
    assert len(found) == torch.cuda.device_count()
    for rates in found:
        assert rates.flops_per_second["float32"] > 1e11
        assert rates.copies["to", "pinned"] > 1e9
        assert rates.copies["from", "pageable"] > 1e8
