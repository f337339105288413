"""Policies that compute on GPUs, and placements that GPUs judge."""

import pytest
import torch

from dovetail.errors import UsageError
from dovetail.pipeline import learn, resolve_model
from dovetail.placers.learned.policy import Policy
from tests.pipeline.test_gpu_machines import MODEL, machine
from tests.support.played_gpus import cpu, gpu

SETTINGS = {"trials": 4}
CARD = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]


def step():
    return resolve_model("tests.support.small_models:trained", "adam")


@pytest.mark.parametrize("device", CARD)
@pytest.mark.parametrize("controllers", [1, 2])
def test_a_policy_learns_on_a_device_and_comes_back(device, controllers):
    result = learn(
        step(), "2 x p100 + haswell", method="gdp", trials=16, settings=SETTINGS, device=device,
        controllers=controllers,
    )  # fmt: skip
    assert result.learned.updates == 4
    assert {p.device.type for p in result.policy.parameters()} == {"cpu"}


@pytest.mark.parametrize("backend", ["simulated", "threads"])
def test_each_controllers_policy_goes_to_its_gpu(monkeypatch, backend):
    moved = []

    def to(self, device):
        moved.append(str(device))
        return self

    monkeypatch.setattr(Policy, "to", to)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    learn(
        step(), "2 x p100 + haswell", method="gdp", trials=24, settings=SETTINGS, device="cuda",
        controllers=3, backend=backend,
    )  # fmt: skip
    assert sorted(name for name in moved if name != "cpu") == ["cuda:0", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device": "gpu"}, "cuda:NUMBER"),
        ({"device": "cuda", "method": "hdp"}, "on the CPU"),
        ({"device": "cuda", "backend": "ray"}, "ray"),
        ({"device": "cuda:900"}, "is not here"),
    ],
)
def test_a_device_that_cannot_be_is_refused(options, told):
    with pytest.raises(UsageError, match=told):
        learn(step(), "2 x p100 + haswell", **{"method": "gdp", "trials": 16} | options)


@pytest.mark.usefixtures("forked_workers", "played_gpus")
def test_gpus_judge_placements(monkeypatch, tmp_path):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    box = machine(cpu(0), gpu(0))
    result = learn(
        resolve_model(MODEL), box, trials=8, settings=SETTINGS, measured=True
    )  # fmt: skip
    assert result.measured and not result.failures
    assert result.learned.trials == 8
