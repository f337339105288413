"""What can be run of `benchmarks/stages/gpu.py` without a GPU."""

import statistics

import pytest
import torch

from dovetail.executors.stages.cuda import StageClock
from tests.support.benchmark_scripts import benchmark_scripts
from tests.support.fake_cuda import FakeCuda


@pytest.fixture(scope="module")
def script():
    with benchmark_scripts("stages", "gpu") as scripts:
        yield scripts.gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script, capsys):
    with pytest.raises(SystemExit) as left:
        script.parse(["--out", "a.json"])
    assert left.value.code == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


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


def test_contenders_take_turns(script, monkeypatch):
    said = []
    monkeypatch.setattr(script, "event_seconds", lambda call, samples, warm_up: (call(),) * samples)
    calls = {"a": lambda: said.append("a") or 1.0, "b": lambda: said.append("b") or 2.0}
    seconds = script.take_turns(calls, 3, 2)
    assert said == ["a", "b", "b", "a", "a", "b"]
    assert statistics.median(seconds["b"]) == 2.0 and len(seconds["a"]) == 6
