"""What can be run of `benchmarks/stages/gpu.py` without a GPU."""

import pytest
import torch

from dovetail.executors.stages.cuda import StageClock
from tests.support.benchmark_scripts import benchmark_scripts
from tests.support.fake_cuda import FakeCuda


@pytest.fixture(scope="module")
def script():
    with benchmark_scripts("stages", "gpu") as scripts:
        yield scripts.gpu


def test_every_scheduler_gives_streams_that_run(script, monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        script, "StageClock", lambda placed, streams: StageClock(placed, streams=streams, cuda=cuda)
    )
    captured = script.resolve_model("zoo:squeezenet_1_1?size=64&batch=1", "")
    kernels = script.fuse(captured.graph)
    inputs, _ = script.example_values(captured)
    placed = script.place(script.prepare(captured, kernels, channels_last=True), inputs, "cpu")
    arguments = script.parse(["--out", "a.json", "--streams", "2"])
    found, effort = script.schedules(
        placed, script.signatures_of(captured.graph, kernels), arguments
    )
    assert list(found) == ["sequential", "greedy", "dos", "ios", "dataflow"]
    assert effort["ios"]["timed"] >= effort["greedy"]["timed"] > 0
    expected = None
    for streams in found.values():
        result = script.CudaNetwork(placed, streams, cuda=cuda)(*inputs)
        expected = result if expected is None else expected
        torch.testing.assert_close(result, expected)
